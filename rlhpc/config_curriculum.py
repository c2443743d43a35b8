"""The table [curriculum] of a run file, and its rules; see config_sections.py.  Loads without torch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_sections import NonNegative, Positive, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

Ascending = Annotated[tuple[float, ...], Field(strict=False)]  # a run file has lists


class CurriculumConfig(Section):
    """[curriculum]: which prompts are left out when their turn comes, by what the run remembers of them."""

    solved_rest_epochs: NonNegative = 0
    """Epochs for which a solved prompt is skipped before it is sampled again; 0: never skipped."""
    solved_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A prompt is solved if the pass rate of its newest group is at least this."""
    hopeless_rest_epochs: NonNegative = 0
    """Epochs for which a hopeless prompt is skipped before it is sampled again; 0: never skipped."""
    hopeless_at: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A prompt is hopeless if the pass rate of its newest group is at most this."""
    target_pass_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Prompts are sampled less often the farther their pass rate is from this; new prompts always are."""
    min_chance: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a prompt with the pass rate farthest from target_pass_rate is sampled when its turn comes."""
    newest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of a prompt's newest group in its pass rate, by which target_pass_rate and max_group_size go; the groups
    before it share the rest."""
    max_group_size: Positive | Literal["off"] = "off"
    """Maximum rollouts of one prompt: a hard one, by its pass rate, gets more than admission.group_size; a new prompt
    gets admission.group_size."""
    pass_chance: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Enough rollouts that at least one passes with this probability; only with max_group_size."""
    stages: Ascending = ()
    """Ascending bounds of difficulty: at first only prompts up to the first bound are sampled, then those up to the
    second too, …, finally all. Default: no stages."""
    difficulty_field: str = "difficulty"
    """Field of the record that holds its difficulty, a number."""
    stage_pass_rate: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The next stage begins when the mean pass rate of the newest stage_groups groups of a stage has reached this."""
    stage_groups: Positive = 64
    """Minimum number of groups for that."""

    @property
    def leaves_out(self) -> bool:
        """Whether some prompt may be left out: which one is next then depends on what was sampled before."""
        rests = self.solved_rest_epochs or self.hopeless_rest_epochs
        return bool(rests or self.stages or self.target_pass_rate != "off")

    @property
    def goes_by_memory(self) -> bool:
        """Whether the next prompt, or how often it is sampled, depends on what was sampled before."""
        return self.leaves_out or self.max_group_size != "off"


def stages_ascend(config: Config) -> None:
    """Each bound lets more prompts in than the one before."""
    stages = config.curriculum.stages
    if any(after <= before for before, after in pairwise(stages)):
        raise ValueError(f"curriculum.stages={list(stages)} must ascend; each stage adds harder prompts")


def no_prompt_is_solved_and_hopeless(config: Config) -> None:
    """A pass rate is on one side of both bounds, or between them."""
    curriculum = config.curriculum
    if curriculum.hopeless_at >= curriculum.solved_at:
        raise ValueError(
            f"curriculum.hopeless_at={curriculum.hopeless_at:g} is not below curriculum.solved_at="
            f"{curriculum.solved_at:g}"
        )
