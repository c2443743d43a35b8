"""The kinds of verifier failure, by name, and their counts per task.

Input: the outcome of each completion.  Output: counts and seconds by task, as metrics of a heartbeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

RAISED = "raised"  # an exception
INVALID = "invalid"  # it returned no finite number, or nothing that could be a reward
TIMED_OUT = "timed_out"  # its worker was killed
DIED = "died"  # its worker ended
OUT_OF_MEMORY = "out_of_memory"  # MemoryError; its worker was replaced
UNSENT = "unsent"  # the completion cannot be sent to a worker
FAILURES = (RAISED, INVALID, TIMED_OUT, DIED, OUT_OF_MEMORY, UNSENT)
UNANSWERED = "unanswered"  # no reward service has answered; counted by who has asked
OF_AGENTS = "agent_"  # before the kind of an agent's own failure, which no worker of ours has died of
KILLS_ITS_WORKER = frozenset({DIED, OUT_OF_MEMORY})

JUDGED = "judged"  # completions, with a verdict or without
BATCH_FAILED = "batch_failed"  # batches without any verdict, whose completions were judged again, each alone
FORKED = "forked"  # processes that were left behind, and killed
SECONDS = "seconds"  # of judging, waiting for a worker not included
COSTS = ("judge_requests", "judge_retries", "judge_cached", "judge_prompt_tokens", "judge_completion_tokens", "judge_s")
FIGURES = (JUDGED, *FAILURES, BATCH_FAILED, FORKED, SECONDS, *COSTS)
NO_COSTS: Mapping[str, float] = MappingProxyType({})
PREFIX = "task:"  # of these figures in a heartbeat


class TaskCounts:
    """Counts since the start of a pool."""

    def __init__(self) -> None:
        self._figures: defaultdict[tuple[str, str], float] = defaultdict(float)  # by task and name

    def count(
        self, task: str, seconds: float, failure: str = "", num_forked: int = 0, costs: Mapping[str, float] = NO_COSTS
    ) -> None:
        """One completion; failure: one of FAILURES, or "" for one that was judged; costs: by names of COSTS."""
        self._figures[task, JUDGED] += 1
        self._figures[task, SECONDS] += seconds
        for name, amount in costs.items():
            self._figures[task, name] += amount
        if failure:
            self._figures[task, failure] += 1
        if num_forked:
            self._figures[task, FORKED] += num_forked

    def count_failed_batch(self, task: str, seconds: float) -> None:
        """Count a failed batch of two completions or more."""
        self._figures[task, BATCH_FAILED] += 1
        self._figures[task, SECONDS] += seconds

    def of(self, task: str, name: str) -> float:
        """A figure of a task; 0 before there is any."""
        return self._figures.get((task, name), 0.0)

    def as_metrics(self) -> dict[str, float]:
        """For a heartbeat: "task:NAME:TASK", of what has happened."""
        return {f"{PREFIX}{name}:{task}": value for (task, name), value in self._figures.items()}


def by_task(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Undo as_metrics: task → name → figure; other metrics of a heartbeat are left out."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if key.startswith(PREFIX):
            name, _, task = key.removeprefix(PREFIX).partition(":")
            found.setdefault(task, {})[name] = value
    return found
