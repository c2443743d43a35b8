"""What settings do to the statistics of a run without being wrong: said by `rlhpc check`, with what was measured.

Input: Config.  Output: lines for people.  docs/algorithms.md has the tables; a test compares.
"""

from __future__ import annotations

from rlhpc.config import Config
from rlhpc.config_effects import as_toml

OVERSAMPLING = (
    "what is trained is 1–16 % shorter than what is sampled with 0.125, 1–26 % with 0.25, 2–36 % with 0.5, and the "
    "more so the more lengths differ from prompt to prompt"
)


def biases(config: Config) -> list[str]:
    """One line for each setting that biases what is learnt from."""
    admission = config.admission
    if not admission.oversample:
        return []
    return [
        f"warning     admission.oversample={as_toml(admission.oversample)} drops up to {admission.most_cut} stragglers "
        f"a batch: {OVERSAMPLING} (docs/algorithms.md, Over-sampling)"
    ]
