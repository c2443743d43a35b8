"""Reward functions as other systems call them: known by the names of their parameters, answered with what calls them.

Input: the names of a function and of its parameters.  Output: whose it is, and the line that makes a reward function of
ours of it, "" for one that can be called as ours; docs/coming_from.md has the table, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PAGE = "docs/coming_from.md, Reward functions"


@dataclass(frozen=True, slots=True)
class Foreign:
    """How one system calls a reward function."""

    system: str
    named: tuple[str, ...]  # parameters by which it is known
    ours: str  # parameters of the function here that calls it, "": it cannot be called
    arguments: Mapping[str, str] = field(default_factory=dict)  # its parameters, and what they are here
    note: str = ""


_VERIFIERS = {
    "prompt": 'record["prompt"]',
    "completion": "completion",
    "answer": 'record["answer"]',
    "info": 'record.get("info", {})',
    "task": 'record.get("task", "default")',
    "state": "{}",
    "parser": "parser",
}
_TEXT = "a completion is a text here, never a list of messages"

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "verl, in batches",
        ("solution_strs", "ground_truths"),
        "completions, records",
        {
            "data_sources": '[each["data_source"] for each in records]',
            "solution_strs": "completions",
            "ground_truths": '[each["reward_model"]["ground_truth"] for each in records]',
            "extra_infos": '[each.get("extra_info") for each in records]',
        },
    ),
    Foreign(
        "verl",
        ("solution_str", "ground_truth"),
        "completion, record",
        {
            "data_source": 'record["data_source"]',
            "solution_str": "completion",
            "ground_truth": 'record["reward_model"]["ground_truth"]',
            "extra_info": 'record.get("extra_info")',
        },
    ),
    Foreign(
        "prime-rl",
        ("completion", "verification_info"),
        "completion, record",
        {"completion": "completion", "verification_info": 'record["verification_info"]'},
        "json.loads(…) of the field where it is a text",
    ),
    *(
        Foreign("prime-rl's verifiers", ("completion", name), "completion, record", _VERIFIERS, _TEXT)
        for name in ("state", "parser", "info", "prompt")
    ),
    Foreign(
        "AReaL",
        ("prompt", "completions", "prompt_ids"),
        "completion, record",
        {
            "prompt": 'record["prompt"]',
            "completions": "completion",
            "prompt_ids": "None",
            "completion_ids": "None",
            "answer": 'record["answer"]',
        },
    ),
    *(
        Foreign(
            "TRL",
            ("completions", name),
            "",
            note=f"completions, prompts, and fields of the record by their names, without {name}: rewards are of texts",
        )
        for name in ("completion_ids", "trainer_state")
    ),
    Foreign(
        "OpenRLHF",
        ("queries", "prompts", "labels"),
        "completions, records",
        {
            "queries": '[each["prompt"] + text for each, text in zip(records, completions)]',
            "prompts": '[each["prompt"] for each in records]',
            "labels": '[each["answer"] for each in records]',
        },
    ),
    Foreign(
        "slime",
        ("args", "sample"),
        "",
        note="f(completion, reference): sample.response is the first, sample.label the second",
    ),
)
_BY_NAME = ("verification_info", "sample")  # a second parameter that is no reference
_ASKED = ("prompt", "question", "query")  # a first parameter that is no completion, nor a reference
_COMPLETIONS = ("completion", "response", "solution_str", "model_output", "generation", "prediction")
_REFERENCES = ("reference", "ground_truth", "gold", "target", "label", "expected")


def foreign_reward(name: str, required: Sequence[str], names: Sequence[str]) -> str:
    """Return what to say of a reward function that cannot be called as ours, "" if it can, or is not known.

    required: its parameters without a default, names: all that may be given by position.
    """
    if "completions" not in names and len(required) <= 2 <= len(names) and {*required} <= {*names}:
        first, second = names[:2]
        if first in _REFERENCES and second in _COMPLETIONS:
            turned = f"def judge(completion, reference): return {name}({first}=reference, {second}=completion)"
            return f"it takes {first!r} first, and is called with the completion first; legal: {turned} ({PAGE})"
        if first not in _ASKED and second not in _BY_NAME:
            return ""
    if known := next((each for each in FOREIGN if {*each.named} <= {*required}), None):
        named = tuple(dict.fromkeys((*names, *required)))
        legal = _legal(name, known, named)
        return f"it has the parameters of {known.system} ({', '.join(named)}); legal: {legal} ({PAGE})"
    if len(required) == len(names) == 1 and names[0] != "completions":
        return f"it has one parameter; legal: def judge(completion, reference): return {name}(completion) ({PAGE})"
    return ""


def wrapper(name: str, foreign: Foreign, names: Sequence[str]) -> str:
    """Return the function of ours that calls theirs with these parameters, as source on one line."""
    values = ", ".join(f"{each}={foreign.arguments[each]}" for each in names if each in foreign.arguments)
    return f"def judge({foreign.ours}): return {name}({values})"


def _legal(name: str, foreign: Foreign, names: Sequence[str]) -> str:
    if not foreign.ours:
        return foreign.note
    whole = ', with data.reference_field = "*"' if "record" in foreign.ours else ""
    return f"{wrapper(name, foreign, names)}{whole}{f'; {foreign.note}' if foreign.note else ''}"
