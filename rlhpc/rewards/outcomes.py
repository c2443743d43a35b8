"""Results of judging completions: outcomes, failures and their counts, and the messages that carry them.

In this file: failures; the gate that waits, and then ends a run, when there are too many; functions given the whole
record; conversion of returned values; functions of many completions; frames between a pool and its workers.

A user's reward function may return, besides a RewardOutcome:

    True, False                        reward 1.0 or 0.0
    a number                           the reward; correct from 1.0 on
    {"reward": 0.5, "is_correct": …}   "score" is another name of the reward, "acc" of is_correct, "pred" of answer;
                                       "detail", "answer" and "rewards_at" as in a RewardOutcome; every other number is
                                       a part, other texts and None are left out
    a coroutine (async def)            its result

    Numbers and booleans may be numpy's or torch's, such as results of comparisons of arrays.  as_outcome converts
    returned values to a RewardOutcome, whose numbers the worker checks.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any

import msgspec

from rlhpc.protocol.contracts import Clock, RewardFunction, RewardOutcome
from rlhpc.protocol.errors import ConfigError, RoleFailed, StarvedError
from rlhpc.protocol.types import Verdict

# ------------------------------------------------------------------------------------------------------------- failures
#
# The kinds of verifier failure, by name, and their counts per task.
#
# Input: the outcome of each completion.  Output: counts and seconds by task, as metrics of a heartbeat.

RAISED = "raised"  # an exception
INVALID = "invalid"  # it returned no finite number, or another type
TIMED_OUT = "timed_out"  # its worker was killed
DIED = "died"  # its worker ended
OUT_OF_MEMORY = "out_of_memory"  # MemoryError; its worker was replaced
UNSENT = "unsent"  # the completion cannot be sent to a worker
FAILURES = (RAISED, INVALID, TIMED_OUT, DIED, OUT_OF_MEMORY, UNSENT)
UNANSWERED = "unanswered"  # no reward service has answered; counted by the client
OF_AGENTS = "agent_"  # prefix of an agent's own failures, of which no worker of ours has died
OF_TEACHERS = "teacher_"  # prefix of INVALID, REFUSED and UNANSWERED of a rollout about which its teacher said nothing
REFUSED = "refused"  # a request that it does not serve
KILLS_ITS_WORKER = frozenset({DIED, OUT_OF_MEMORY})

JUDGED = "judged"  # completions, with a verdict or without
BATCH_FAILED = "batch_failed"  # batches without any verdict, whose completions were judged again one by one
FORKED = "forked"  # processes left behind, and killed
SECONDS = "seconds"  # of judging, waiting for a worker not included
WAITING = "waiting"  # completions that are with a worker for LONG_S or more now
LONG_S = 10.0
COSTS = ("judge_requests", "judge_retries", "judge_cached", "judge_prompt_tokens", "judge_completion_tokens", "judge_s")
ROWS = ("rows_branch", "rows_rewritten", "rows_tools")  # that agents have opened, beside the first (agents/rows.py)
FIGURES = (JUDGED, *FAILURES, BATCH_FAILED, FORKED, SECONDS, WAITING, *COSTS, *ROWS)
NO_COSTS: Mapping[str, float] = MappingProxyType({})
PREFIX = "task:"  # of these figures in a heartbeat
TEACHER_PREFIX = "teacher:"  # of those of teachers, by service
# Rollouts that wait for a teacher, and those that it failed; replies, seconds until they came, requests sent again.
TEACHER_FIGURES = ("waiting", "failed", "answered", "seconds", "retries")


class TaskCounts:
    """Counts since the start of a pool."""

    def __init__(self) -> None:
        self._figures: defaultdict[tuple[str, str], float] = defaultdict(float)  # by task and name

    def count(
        self, task: str, seconds: float, failure: str = "", num_forked: int = 0, costs: Mapping[str, float] = NO_COSTS
    ) -> None:
        """Count one completion; failure: one of FAILURES, or "" if it was judged; costs: by names of COSTS or ROWS."""
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
        """Figures for a heartbeat, by "task:NAME:TASK"."""
        return {f"{PREFIX}{name}:{task}": value for (task, name), value in self._figures.items()}


def by_task(metrics: Mapping[str, float], prefix: str = PREFIX) -> dict[str, dict[str, float]]:
    """Undo as_metrics: task → name → figure; other metrics of a heartbeat are left out."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if key.startswith(prefix):
            name, _, task = key.removeprefix(prefix).partition(":")
            found.setdefault(task, {})[name] = value
    return found


# ----------------------------------------------------------------------------------------------------------- error gate
#
# Wait while verifiers fail too often, and stop the run if that lasts: a broken verifier looks like a worse policy.
#
# Input: verdicts, and groups that are refused because their prompt is quarantined.  Output: whether leases may be
# granted; StarvedError or RoleFailed.  Counts the last `window` verdicts; the limit is a share of the whole window, so
# that one early error does not stop a run, while a verifier that always fails is found after max_share · window.
# Errors are counted by cause: the kind of failure, QUARANTINED, LEASES_LOST.
#
#     open ── too many errors ──▶ waiting: a lease now and then ── a verdict, or patience_s are over ──▶ trying
#      ▲                             ▲                                                                     │
#      │                             └── too many errors, patience_s since the first are not over ─────────┤
#      └── few errors for half of patience_s, or a whole window without too many ──────────────────────────┴─▶ raises
#
# A generator on which all agents fail while others have verdicts (its node lacks their requirements) fails fast, and
# would get most leases: after consecutive errors it gets none for a while, longer each time.

log = logging.getLogger("rlhpc.rewards")

QUARANTINED = "quarantined"  # cause: the prompt was not sampled, because of earlier deaths
LEASES_LOST = "leases_lost"  # cause: a sample lost all its leases
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # between two leases while it waits
MOST_IN_A_ROW = 8  # consecutive errors of one generator, during as many verdicts of others
LONGEST_PAUSE_OF_ONE_S = 60.0  # for a generator
_UNNAMED = "verifier_error"
_SHOWN_DETAILS = 3


@dataclass(slots=True)
class _Row:
    """Errors of one generator since its last verdict."""

    num_verdicts_before: int  # of all generators, when the row began
    num_errors: int = 0
    pause_s: float = 0.0
    free_at_s: float = -math.inf  # it gets no lease before


class ErrorGate:
    """Counts errors among the last verdicts."""

    def __init__(
        self, max_share: float, window: int = 200, *, patience_s: float = 0.0, clock: Clock = time.monotonic
    ) -> None:
        """max_share: highest tolerated share of errors, 0–1 (rewards.max_error_share).

        patience_s: how long it waits, from the first excess on (rewards.error_patience_s).
        """
        self._max_share, self._window = max_share, window
        self._patience_s, self._clock = patience_s, clock
        self._last: deque[str] = deque(maxlen=window)  # causes since the last wait; "": a verdict
        self._recent: deque[bool] = deque(maxlen=window)  # True for an error, across waits; for people
        self._details: dict[str, None] = {}  # distinct errors since the last wait, in order of last occurrence
        self._num_since_verdict = 0  # errors
        self._began_s: float | None = None  # when there were too many for the first time
        self._ended_s = 0.0  # end of the last wait
        self._waits = False  # for the first verdict
        self._pause_s = self._next_lease_s = 0.0
        self._rows: dict[str, _Row] = {}  # by generator
        self._num_verdicts = 0
        self.causes: Counter[str] = Counter()  # errors since the start of the attempt
        self.latest = ""  # the last error, in words

    def count(self, verdict: Verdict, detail: str = "", failure: str = "", holder: str = "") -> None:
        """Record one verdict; `detail`: shown if the gate closes; failure: its kind; holder: its generator."""
        is_error = verdict is Verdict.VERIFIER_ERROR
        if is_error:
            self._slow_down(holder, detail)
        else:
            self._num_verdicts += 1
            self._rows.pop(holder, None)
        self._count((failure or _UNNAMED) if is_error else "", detail)

    def _slow_down(self, holder: str, detail: str) -> None:
        """Count an error of a generator; after many, while others have verdicts, let it pause."""
        row, now_s = self._rows.setdefault(holder, _Row(self._num_verdicts)), self._clock()
        row.num_errors += 1
        is_alone = self._num_verdicts - row.num_verdicts_before >= MOST_IN_A_ROW
        if is_alone and row.num_errors >= MOST_IN_A_ROW and now_s >= row.free_at_s:
            row.pause_s = min(LONGEST_PAUSE_OF_ONE_S, 2 * row.pause_s or FIRST_PAUSE_S)
            row.free_at_s = now_s + row.pause_s
            said = holder, row.num_errors, row.pause_s, detail
            log.warning("%s: %d errors in a row while others have verdicts: no lease for %.0f s; the latest: %s", *said)

    def count_refused(self, cause: str, why: str) -> None:
        """Record a group that was dropped without a verdict; cause: QUARANTINED or LEASES_LOST."""
        self._count(cause, why)

    def _count(self, cause: str, detail: str) -> None:
        self._recent.append(bool(cause))
        if cause:
            self.causes[cause] += 1
            self._details.pop(detail, None)
            self._details[detail] = None
            if len(self._details) > _SHOWN_DETAILS:
                del self._details[next(iter(self._details))]
            self.latest = detail
        if cause and self.is_waiting:
            return  # sampled before the wait, or as a trial
        if self._waits and not cause:
            self._waits, self._ended_s = False, self._clock()
            log.warning("there are verdicts again, after %.0f s", self._waited_s)
        self._last.append(cause)
        self._num_since_verdict = self._num_since_verdict + 1 if cause else 0

    @property
    def error_share(self) -> float:
        """Share of errors among the verdicts in the window; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def is_waiting(self) -> bool:
        """True while the gate waits for a failing verifier."""
        return self._waits and self._waited_s < self._patience_s

    def may_lease(self, holder: str) -> bool:
        """True if a generator may get a lease now: while the gate waits, one lease in all now and then."""
        if self.is_waiting:
            return self._clock() >= self._next_lease_s
        row = self._rows.get(holder)
        return row is None or self._clock() >= row.free_at_s

    def lease_granted(self) -> None:
        """Record a lease: while the gate waits, the pause before the next one grows."""
        if self.is_waiting:
            self._next_lease_s = self._clock() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def document(self) -> dict[str, Any]:
        """JSON for status.json: the attempt's errors by cause, the last error, time waited, pausing generators."""
        more: dict[str, Any] = {}
        if self._waits:  # also once patience is over: there is no verdict yet
            more |= {"waited_s": round(self._waited_s), "patience_s": self._patience_s}
        if paused := sorted(name for name, row in self._rows.items() if row.pause_s):
            more["paused"] = paused
        return {"causes": dict(self.causes), "latest": self.latest, **more}

    def check(self, most_in_a_row: int = 0) -> None:
        """Wait if more than max_share · window of the last verdicts are errors; raise if that has lasted too long.

        most_in_a_row: consecutive errors that are too many whatever max_share is; 0: any number.  Raises RoleFailed;
        StarvedError if another attempt would not help: most errors are refusals, there is no verdict, or it has already
        waited.  It does not wait if all errors are "invalid": a function that returns no reward would not change.
        """
        num_errors = len(self._last) - self._last.count("")
        is_closed = num_errors > self._max_share * self._window
        is_starved = 0 < most_in_a_row <= self._num_since_verdict
        if not (is_closed or is_starved):
            if self._is_over(num_errors):
                self._began_s = None
            return
        is_refused = self._last.count(QUARANTINED) * 2 > num_errors
        is_invalid = {*self._last} == {INVALID}
        if not (is_refused or is_invalid) and self._may_wait():
            self._wait(self._too_many(num_errors) if is_closed else self._in_a_row())
            return
        waited = f", {self._waited_s:.0f} s after the first" if self._began_s is not None else ""
        if is_closed:
            kind = StarvedError if is_refused or is_invalid or waited else RoleFailed
            raise kind(f"{self._too_many(num_errors)}{waited}, so rewards say nothing about the policy; {self._said()}")
        raise StarvedError(f"{self._in_a_row()}{waited}: no batch can be filled; {self._said()}")

    def _is_over(self, num_errors: int) -> bool:
        """True if verifiers have worked for so long again that a new failure may be waited for."""
        size = len(self._last)
        if num_errors == size or self._waits:
            return False
        is_sound = size >= self._max_share * self._window and 2 * num_errors <= self._max_share * size
        return size == self._window or (is_sound and self._clock() - self._ended_s >= self._patience_s / 2)

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def _may_wait(self) -> bool:
        if self._began_s is None and self._patience_s > 0:
            self._began_s = self._clock()
        return self._waited_s < self._patience_s

    def _wait(self, why: str) -> None:
        left_s = self._patience_s - self._waited_s
        log.warning("%s: waiting for up to %.0f s (rewards.error_patience_s); %s", why, left_s, self._said())
        self._last.clear()
        self._details.clear()
        self._num_since_verdict, self._waits = 0, True
        self._pause_s, self._next_lease_s = 2 * FIRST_PAUSE_S, self._clock() + FIRST_PAUSE_S

    def _too_many(self, num_errors: int) -> str:
        return (
            f"rewards.max_error_share={self._max_share:g}: {num_errors} of the last {len(self._last)} verdicts are "
            f"verifier errors (window {self._window}; {_counted(Counter(self._last))})"
        )

    def _in_a_row(self) -> str:
        return (
            f"{self._num_since_verdict} errors in a row and no verdict between them (of the attempt: "
            f"{_counted(self.causes)})"
        )

    def _said(self) -> str:
        remedy = ""  # at the beginning, since a long message may be cut
        if QUARANTINED in self._last:
            remedy = "quarantined prompts are listed by `rlhpc status`, and sampled again after a resume with "
            remedy += "--lift-quarantine; "
        return f"{remedy}the latest: {'; '.join(self._details)}"


def _counted(causes: Counter[str]) -> str:
    return ", ".join(f"{cause.replace('_', ' ')} {number}" for cause, number in causes.most_common() if cause)


# --------------------------------------------------------------------------------------------------------- whole record
#
# Reward functions that are given the whole record in place of a reference.
#
#     def judge(completion, record):   # the second parameter has this name
#         return verl_score(record["data_source"], completion, record["reward_model"]["ground_truth"])  # noqa: ERA001
#
# The run file has data.reference_field = "*": the reference is the record as JSON.

PARAMETER = "record"  # name of the parameter that gets the record
PLACE = 1  # after the completion


def given_its_record(function: Callable[..., object], names: Sequence[str]) -> RewardFunction:
    """The function, wrapped to parse the record from the reference if it has that parameter; names: its parameters.

    The wrapper raises ValueError for a reference that is no JSON object.
    """
    if tuple(names[PLACE : PLACE + 1]) != (PARAMETER,):
        return function

    def judge(completion: str, reference: str) -> object:
        return function(completion, record_of(reference))

    return judge


def record_of(reference: str) -> dict[str, Any]:
    """Parse a reference that is a whole record.  Raises ValueError if it is no JSON object."""
    try:
        record: dict[str, Any] = dict(json.loads(reference))
    except (TypeError, ValueError) as error:  # of json, or because it is a list or a number
        raise ValueError(
            f'the function asks for the record, and the reference is {reference[:60]!r}; set data.reference_field = "*"'
        ) from error
    return record


# ------------------------------------------------------------------------------------------------------------- returned  # noqa: ERA001

CORRECT_FROM = 1.0
LARGEST = 1e30  # reward: float32, the type of stored rewards, can hold it, and the sum of any batch of it
_REWARD, _IS_CORRECT = ("reward", "score"), ("is_correct", "acc")
_KEPT = {"detail": "detail", "pred": "answer", "answer": "answer", "rewards_at": "rewards_at"}


@dataclass(frozen=True, slots=True)
class JudgedOutcome(RewardOutcome):
    """An outcome with its costs, by names of failures.COSTS."""

    costs: dict[str, float] = field(default_factory=dict)


class NoReward(TypeError):
    """A returned value of none of these types."""


class NoVerdict(Exception):
    """A task of ours cannot judge a completion; one of many completions returns it in place of that one's outcome."""

    def __init__(self, why: str, costs: Mapping[str, float]) -> None:
        """costs: spent nevertheless, by names of COSTS."""
        super().__init__(why)
        self.costs = dict(costs)


def as_outcome(returned: object) -> RewardOutcome:
    """Convert a returned value.

    Raises NoReward for other types, naming the value; a NoVerdict that was returned; errors of a coroutine.
    """
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    match returned := _plain(returned):
        case RewardOutcome():
            return returned
        case NoVerdict():
            raise returned
        case Real():
            return RewardOutcome(_as_float(returned), _is_true(returned))
        case Mapping():
            return _of_mapping(returned)
    raise NoReward(
        f"a reward function returns a RewardOutcome, a number, True or False, or a dict with a reward, "
        f"not {type(returned).__name__}"
    )


def fault_of(name: str, value: object) -> str:
    """Fault of a reward or a part of one; "": none."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not -math.inf < value < math.inf:
        return f"{name} must be a finite number, not {type(value).__name__} {str(value)[:40]}"
    shown = f"{value:g}" if abs(value) <= sys.float_info.max else "a number beyond 1.8e308"
    return f"{name} must lie within ±{LARGEST:g}, not {shown}" if abs(value) > LARGEST else ""


def sendable(text: str) -> str:
    """The text with lone surrogates, which JSON can spell but no message can hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _of_mapping(returned: Mapping[Any, Any]) -> RewardOutcome:
    named = [key for key in _REWARD if key in returned]
    if len(named) != 1:
        raise NoReward(
            f"a dict that a reward function returns has 'reward' or 'score', not {sorted(map(str, returned))}"
        )
    reward = _plain(returned[named[0]])
    outcome = as_outcome(reward) if isinstance(reward, Real) else RewardOutcome(reward, is_correct=False)
    is_correct = next((_is_true(returned[key]) for key in _IS_CORRECT if key in returned), outcome.is_correct)
    others = {str(key): _plain(value) for key, value in returned.items() if key not in (*_REWARD, *_IS_CORRECT, *_KEPT)}
    parts = {key: _number(value) for key, value in others.items() if not isinstance(value, str | None)}
    kept = {field: returned[key] for key, field in _KEPT.items() if returned.get(key) is not None}
    return RewardOutcome(outcome.reward, is_correct, parts, **kept)


def _plain(value: object) -> Any:
    """Convert a number or boolean of numpy or torch to Python's; other values are unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_true(value: object) -> bool:
    """Convert to bool.  Raises NoReward for other types: "no" would count as true."""
    match value := _plain(value):
        case bool() | None:
            return bool(value)
        case Real():
            return _as_float(value) >= CORRECT_FROM
    raise NoReward(f"is_correct must be True, False or a number, not {type(value).__name__} {value!r:.40}")


def _number(value: object) -> Any:
    """Convert to float; other values are unchanged, so that the worker names them."""
    return _as_float(value) if isinstance(value, Real) else value


def _as_float(value: Real) -> float:
    """Convert to float.  Raises NoReward for an integer of hundreds of digits, which floats cannot hold."""
    try:
        return float(value)
    except OverflowError as error:
        raise NoReward("a reward function returns finite numbers, not one above 1.8e308") from error


# -------------------------------------------------------------------------------------------------------------- batched
#
# Reward functions of many completions at once: those with a parameter called `completions`.
#
#    def judge(completions, references)                lists of texts
#    def judge(completions, records)                   the whole records of the dataset, with data.reference_field = "*"
#    def judge(prompts, completions, answer, **kwargs)   as TRL calls its functions: fields of the records, by name
#
# Each parameter is passed by name, and is a list as long as the batch.  `prompts` is the field prompt; a parameter with
# a default keeps it if a record lacks the field; **kwargs gets every other field that all records have.  The function
# returns a list of values as for one completion, in the same order; async def is allowed.

COMPLETIONS, REFERENCES, RECORDS = "completions", "references", "records"
OF_BATCHES = (COMPLETIONS, REFERENCES, RECORDS)  # parameters that are never fields
_OTHER_NAMES = {"prompts": "prompt"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_batched(names: Iterable[str]) -> bool:
    """True if a function with these parameters takes many completions at once."""
    return COMPLETIONS in names


def asks_for_fields(names: Sequence[str]) -> bool:
    """True if a batched function with these parameters needs fields of the records besides references."""
    return any(name not in (COMPLETIONS, REFERENCES) for name in names)


class BatchedFunction:
    """A RewardFunction that can also judge many completions at once."""

    def __init__(
        self, key: str, function: Callable[..., object], arguments: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Raises ConfigError for positional-only parameters.

        arguments: passed by name with every batch; they hide fields of the records.
        """
        self._function, self._constant = function, dict(arguments)
        signature = inspect.signature(function).parameters
        self._parameters = {name: each for name, each in signature.items() if name not in arguments}
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        for name, each in self._parameters.items():
            if each.kind not in (*_BY_NAME, each.VAR_KEYWORD):
                raise ConfigError(
                    f"{key}: a function with a parameter {COMPLETIONS!r} is batched and called by names, and {name!r} "
                    "cannot be given by name; legal: without / and *"
                )

    def __call__(self, completion: str, reference: str) -> object:
        """Judge a batch of one."""
        (only,) = self.judge_all([completion], [reference])
        return only

    def judge_all(self, completions: Sequence[str], references: Sequence[str]) -> list[object]:
        """Returned values, one per completion.  Raises NoReward unless it is such a list; errors of the function."""
        returned = self._function(**self._arguments(completions, references), **self._constant)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        listed: object = returned.tolist() if hasattr(returned, "tolist") else returned  # an array, a tensor
        if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
            raise NoReward(
                f"a function with a parameter {COMPLETIONS!r} is batched and returns a list with a reward for each, "
                f"not {type(returned).__name__}"
            )
        rewards = list(listed)
        if len(rewards) != len(completions):
            raise NoReward(
                f"a function with a parameter {COMPLETIONS!r} is batched and returns a reward for each of its "
                f"{len(completions)} completions, not {len(rewards)}"
            )
        return rewards

    def _arguments(self, completions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        arguments: dict[str, Any] = {COMPLETIONS: list(completions)}
        if REFERENCES in self._parameters:
            arguments[REFERENCES] = list(references)
        needs_records = asks_for_fields([name for name, each in self._parameters.items() if each.kind in _BY_NAME])
        if not needs_records and not self._takes_rest:
            return arguments
        try:
            records = [record_of(reference) for reference in references]
        except ValueError:
            if needs_records:
                raise
            return arguments  # references are no records: **kwargs stays empty
        if RECORDS in self._parameters:
            arguments[RECORDS] = records
        for name, parameter in self._parameters.items():
            if name not in arguments and parameter.kind in _BY_NAME:
                arguments |= self._column(name, records, is_needed=parameter.default is parameter.empty)
        if self._takes_rest:
            known = {*arguments, *self._constant, *(_OTHER_NAMES.get(name, name) for name in arguments)}
            common = set.intersection(*(set(record) for record in records)) - known
            arguments |= {name: [record[name] for record in records] for name in sorted(common)}
        return arguments

    @staticmethod
    def _column(name: str, records: Sequence[Mapping[str, Any]], *, is_needed: bool) -> dict[str, list[Any]]:
        """{name: values}; {} if a record lacks the field and it is not needed.  Raises ValueError if it is needed."""
        field = _OTHER_NAMES.get(name, name)
        lacking = next((record for record in records if field not in record), None)
        if lacking is None:
            return {name: [record[field] for record in records]}
        if is_needed:
            raise ValueError(
                f"the function has a parameter {name!r}, and a record has no field {field!r}; it has "
                f"{', '.join(map(repr, lacking)) or 'none'}"
            )
        return {}


# --------------------------------------------------------------------------------------------------------------- frames
#
# Messages between a reward pool and its worker processes, over a pair of pipes.
#
# A frame is a length (4 bytes, little-endian) and a msgspec message.  The worker sends Ready once; after that one
# Replies answers one JudgeRequest, and one Turn one DialogueRequest, strictly in turn.  No pickle: neither side can run
# code of the other.


HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a longer one is a damaged header


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The worker has imported its reward functions, or has failed to and exits."""

    error: str
    batched: tuple[str, ...] = ()  # its tasks whose function takes many completions at once
    tools: dict[str, tuple[str, ...]] = {}  # by environment: names of those that it offers


class JudgeRequest(msgspec.Struct, array_like=True, frozen=True, tag="judge"):
    """Judge completions: several only if the task's function is batched."""

    task: str
    completions: list[str]
    references: list[str]
    memory_limit_bytes: int = 0  # address space of the worker meanwhile; 0: no limit


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of one completion; if `error` is not empty the rest is meaningless."""

    reward: float = 0.0
    is_correct: bool = False
    parts: dict[str, float] = {}
    detail: str = ""
    answer: str = ""
    rewards_at: dict[int, float] = {}
    costs: dict[str, float] = {}  # names of outcomes.COSTS
    error: str = ""
    failure: str = ""  # with an error: one of outcomes.FAILURES


class Answered(msgspec.Struct, array_like=True, frozen=True):
    """Common fields of all answers; if `error` is not empty the rest of the answer is meaningless."""

    error: str = ""
    failure: str = ""  # as of a Reply, costs too
    num_forked: int = 0  # processes that were left behind, and killed
    costs: dict[str, float] = {}
    traceback: str = ""  # of what was raised, for the log


class Replies(Answered, array_like=True, frozen=True, tag="judged"):
    """One reply for each completion."""

    replies: list[Reply] = []


class DialogueRequest(msgspec.Struct, array_like=True, frozen=True, tag="dialogue"):
    """Take the last of these turns, or begin: an environment's part of a rollout."""

    key: str  # of the rollout
    environment: str
    record: str  # JSON
    turns: list[str]  # of the policy, all so far
    task: str  # whose reward function judges the last turn
    answer: str  # the last turn, as passed to that function
    reference: str
    is_last: bool  # there will be no other turn, whether the environment is done or not
    memory_limit_bytes: int = 0  # as of a JudgeRequest
    tools: str = ""  # digest of the tools of servers of which the prompt tells


class Turn(Answered, array_like=True, frozen=True, tag="turn"):
    """An environment's answer."""

    messages: tuple[dict[str, str], ...] = ()
    reward: float = 0.0  # of all turns so far
    is_correct: bool = False
    parts: dict[str, float] = {}
    detail: str = ""
    is_done: bool = False  # the environment is done
    is_over: bool = False  # the rewards are final


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return header and message.  Raises ValueError if it is too long or its text is not valid Unicode."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes; the longest is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    """Return the length that a header announces.  Raises ValueError if it is absurd."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes; the longest is {MAX_FRAME_BYTES}")
    return length
