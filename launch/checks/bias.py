"""Settings that are legal but bias the statistics of a run: `rlhpc check` says so, with measured effects.

Input: Config.  Output: lines for people.  docs/algorithms.md has the tables; a test compares.
"""

from __future__ import annotations

from rlhpc.config import Config
from rlhpc.config_effects import as_toml

OVERSAMPLING = (
    "what is trained is 1–16 % shorter than what is sampled with 0.125, 1–26 % with 0.25, 2–36 % with 0.5; the more "
    "lengths differ from prompt to prompt, the larger the difference"
)


def biases(config: Config) -> list[str]:
    """One line for each setting that biases what is learnt from."""
    admission, most, aggregation = config.admission, config.curriculum.max_group_size, config.algorithm.aggregation
    found = []
    if admission.oversample:
        found.append(
            f"warning     admission.oversample={as_toml(admission.oversample)} drops up to {admission.most_cut} "
            f"stragglers a batch: {OVERSAMPLING} (docs/algorithms.md, Over-sampling)"
        )
    if most != "off" and aggregation != "prompt":
        found.append(
            f"warning     curriculum.max_group_size={most} with algorithm.aggregation={aggregation!r}: a prompt weighs "
            f"by its rollouts, a hard one up to {most / admission.group_size:g} times as much as others; with 'prompt' "
            "all weigh the same (docs/algorithms.md, Curriculum)"
        )
    return found
