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
    """A solved prompt is left out in so many epochs, and then asked again; 0: never left out."""
    solved_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Solved is a prompt whose pass rate is at least this."""
    hopeless_rest_epochs: NonNegative = 0
    """A hopeless prompt is left out in so many epochs, and then asked again; 0: never left out."""
    hopeless_at: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Hopeless is a prompt whose pass rate is at most this."""
    target_pass_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Prompts are asked the less often the farther their pass rate is from this; one never asked is always asked."""
    min_chance: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Chance, when its turn comes, of a prompt whose pass rate is as far from target_pass_rate as can be."""
    newest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of a prompt's newest group in its pass rate; the groups before it have the rest."""
    max_group_size: Positive | Literal["off"] = "off"
    """Most rollouts of one prompt: a hard one, by its pass rate, gets more than admission.group_size; a prompt that was
    never asked gets admission.group_size."""
    pass_chance: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """So many that one of them passes with this chance; only with max_group_size."""
    stages: Ascending = ()
    """Bounds of difficulty, ascending: at first only prompts up to the first bound are asked, then those up to the
    second too, …, at last all.  Default: no stages."""
    difficulty_field: str = "difficulty"
    """Field of the record that holds its difficulty, a number."""
    stage_pass_rate: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The next stage begins when the mean pass rate of the newest stage_groups groups of a stage has reached this."""
    stage_groups: Positive = 64
    """How many groups that takes at least."""

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
        raise ValueError(f"curriculum.stages={list(stages)} do not ascend; each stage lets harder prompts in")


def no_prompt_is_solved_and_hopeless(config: Config) -> None:
    """A pass rate is on one side of both bounds, or between them."""
    curriculum = config.curriculum
    if curriculum.hopeless_at >= curriculum.solved_at:
        raise ValueError(
            f"curriculum.hopeless_at={curriculum.hopeless_at:g} is not below curriculum.solved_at="
            f"{curriculum.solved_at:g}"
        )
