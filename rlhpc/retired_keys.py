"""Removed keys of run files: they needed no choice, or had only one legal value.

Input: a run file, or the settings of a run directory, as parsed.  Output: the same without such keys, and a line for
each whose value differs from the fixed one.  Only keys that do not change results are listed here, so that a run that
began with another value can be continued without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config import Config
from rlhpc.toml_text import shown


@dataclass(frozen=True, slots=True)
class RetiredKey:
    """A key that a run file may still have, with its fixed value."""

    value: object
    """Its former default."""
    reason: str
    """What holds now."""


_WHOLE_DISTRIBUTION = (
    "samples are drawn from the whole distribution, because the sampler's log-probabilities are renormalised over the "
    "tokens that are kept, the trainer's are not, and every importance ratio would be too small by the mass that was "
    "kept"
)

_EVERY_TENTH = "two completions and the histograms are written to TensorBoard every 10 steps; segments hold everything"

RETIRED = {
    "generation.top_p": RetiredKey(1.0, _WHOLE_DISTRIBUTION),
    "generation.top_k": RetiredKey(0, _WHOLE_DISTRIBUTION),
    "trainer.logprob_chunk_tokens": RetiredKey(
        1024, "1024 rows of logits are in memory at once; fewer save next to nothing beside the head's gradient"
    ),
    "trainer.max_skipped_steps": RetiredKey(5, "a run stops after 5 consecutive non-finite steps"),
    "buffer.segment_s": RetiredKey(60.0, "a segment is sealed a minute after its first group at the latest"),
    "buffer.compression": RetiredKey("gzip", "segments are compressed with gzip, which HDF5 readers undo unasked"),
    "transport.max_message_bytes": RetiredKey(1 << 30, "a message of more than 1 GiB closes the connection"),
    "transport.heartbeat_s": RetiredKey(
        1.0, "heartbeats are sent every second, and 15 times in transport.dead_after_s where that is shorter"
    ),
    "metrics.samples_every_steps": RetiredKey(10, _EVERY_TENTH),
    "metrics.num_samples": RetiredKey(2, _EVERY_TENTH),
    "metrics.histograms_every_steps": RetiredKey(10, _EVERY_TENTH),
}


def without_retired_keys(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the document without retired keys, and one line for each that had another value."""
    left, faults = dict(document), []
    for name, retired in RETIRED.items():
        section, _, key = name.partition(".")
        table = left.get(section)
        if table == {} and section not in Config.model_fields:  # all its keys were left out, as was asked
            del left[section]
        if not isinstance(table, dict) or key not in table:
            continue
        value = table[key]
        left[section] = {other: table[other] for other in table if other != key}
        if value != retired.value or isinstance(value, bool):  # True == 1
            faults.append(f"{name}={shown(value)}: this key was removed: {retired.reason}; legal: leave it out")
        if not left[section] and section not in Config.model_fields:
            del left[section]
    return left, faults
