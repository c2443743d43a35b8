"""Rings in virtual time for tests: rates, lengths and shapes that are small and plain."""

from __future__ import annotations

from launch.prediction.lengths import LawfulLengths, LengthLaw
from launch.prediction.rates import Figure, Rates
from launch.prediction.ring import RingShape
from rlhpc.config_admission import SmallestPart
from rlhpc.config_sections import AdmissionConfig
from rlhpc.packing.cost import FlopCost

PER_TOKEN = FlopCost(1e15, 0.0)  # a PFLOP each


def rates(**changes: float) -> Rates:
    """Nothing takes time but what is given; an engine has a step in 0.01 s."""
    values = dict.fromkeys(
        ("engine_sample_s", "prefill_token_s", "judge_s", "trainer_step_s", "trainer_pflop_s", "between_steps_s",
         "publish_s", "live_s", "pause_s", "save_s", "start_s"), 0.0,
    )  # fmt: skip
    return Rates(
        **{name: Figure(value, "given") for name, value in (values | {"engine_step_s": 0.01} | changes).items()}
    )


def lengths(law: str = "geometric", mean_tokens: float = 50, dropped_share: float = 0.0) -> LawfulLengths:
    """Of up to 400 tokens, after prompts of 10."""
    return LawfulLengths(
        LengthLaw.parsed(law), mean_tokens, 400, prompt_tokens=10, dropped_share=dropped_share, source="given"
    )


def shape(
    num_engines: int = 2,
    max_num_seqs: int = 8,
    groups: int = 4,
    group_size: int = 4,
    max_staleness: int = 1,
    window: int = 1,
    part: SmallestPart | None = None,
) -> RingShape:
    """One rank, one micro-batch a step or a part of one; without `part` steps have none."""
    admission = AdmissionConfig(
        groups_per_step=groups, group_size=group_size, max_staleness=max_staleness, window_groups=window
    )
    part = part or SmallestPart(groups)
    return RingShape(admission, part, num_engines, max_num_seqs, 1, 1_000_000, 1, 1, 10_000, PER_TOKEN)
