"""Tables of the run file for tasks that have settings of their own (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

from typing import Literal

from rlhpc.config_sections import Section


class InstructionsConfig(Section):
    """[instructions]: what the task instruction_following rewards."""

    accuracy: Literal["strict", "loose"] = "strict"
    """What counts as followed: the completion as it is, or also without its first line, its last line or asterisks."""
    reward: Literal["all", "fraction"] = "all"
    """1.0 when all instructions of a prompt are followed, or their fraction."""


class TaskSettings(Section):
    """What a reward worker is given of the run file."""

    instructions: InstructionsConfig = InstructionsConfig()
