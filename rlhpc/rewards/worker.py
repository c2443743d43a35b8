"""Score completions one after the other, in a separate process that may be killed at any moment.

Input: JudgeRequest and DialogueRequest frames from its standard input.  Output: Replies and Turn frames on its original
standard output.  Started by pool.py as `python -m rlhpc.rewards.worker PARENT_PID MEMORY_LIMIT_BYTES TASK…`.  Ends when
the pipe closes or its parent dies.  Exceptions of a reward function or an environment become Replies or a Turn with an
error; their output goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from msgspec.structs import replace

from rlhpc.base.processes import die_with, keep_pipes, own_children, stay_at
from rlhpc.base.user_code import is_import_path, line_of
from rlhpc.protocol.contracts import RewardFunction, RewardOutcome
from rlhpc.rewards.environments import VARIABLE as ENVIRONMENTS
from rlhpc.rewards.outcomes import (
    HEADER_BYTES,
    INVALID,
    OUT_OF_MEMORY,
    RAISED,
    BatchedFunction,
    DialogueRequest,
    JudgedOutcome,
    JudgeRequest,
    NoReward,
    NoVerdict,
    Ready,
    Replies,
    Reply,
    Turn,
    as_outcome,
    body_length,
    encode_frame,
    fault_of,
    sendable,
)
from rlhpc.rewards.registry import BUILT_IN, resolve

if TYPE_CHECKING:
    from rlhpc.rewards.environments import EnvironmentHost


# ---------------------------------------------------------------------------------------------------------------- forks
#
# Processes that a reward function has forked and left behind: found after the completion, and ended.
#
# Only copies of this process (os.fork, multiprocessing) count: a program that a function starts and keeps, such as the
# sandbox's server, is another program.  Free if nothing is forked.  Linux only; elsewhere none is found.


class ForkWatch:
    """Finds forks of this process."""

    def __init__(self) -> None:
        self._own_pid, self._has_forked = os.getpid(), False
        os.register_at_fork(after_in_parent=self._note)

    @property
    def is_copy(self) -> bool:
        """True in a fork of the watched process."""
        return os.getpid() != self._own_pid

    def end_copies(self) -> int:
        """End forks since the last call that still run, wait for them, return their number."""
        if not self._has_forked:
            return 0
        self._has_forked, ended = False, 0
        for pid in own_children():
            if _is_copy(pid):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                ended += 1
        return ended

    def _note(self) -> None:
        self._has_forked = True


def _is_copy(pid: int) -> bool:
    """True for a process with the same command line as this one, and for one that has ended (its command is unknown).

    A process in exec has no command line for a moment.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        has_ended = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
        return has_ended or words == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------------------- worker

_LONGEST_DETAIL = 500  # characters
_LONGEST_TRACEBACK = 8000  # characters, the last ones
_Question = JudgeRequest | DialogueRequest


def main(parent_pid: int, memory_limit_bytes: int, tasks: list[str]) -> int:
    """Serve until the pipe closes.  Returns the exit status."""
    die_with(parent_pid)
    stay_at((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory_limit_bytes)
    inbox, outbox = keep_pipes()
    requests, replies = os.fdopen(inbox, "rb"), os.fdopen(outbox, "wb")
    functions: dict[str, RewardFunction] = {}
    try:
        for task in tasks:
            functions[task] = _function_of(task)
        host = _host(functions) if ENVIRONMENTS in os.environ else None
    except (Exception, SystemExit) as error:  # noqa: BLE001  survives nothing: tells what the user's module raised
        _send(replies, Ready(error=_describe(error, _places(*tasks))))
        return 1
    batched = tuple(task for task, function in functions.items() if isinstance(function, BatchedFunction))
    _send(replies, Ready(error="", batched=batched, tools=host.tools if host is not None else {}))
    _serve(requests, replies, functions, host)
    return 0


def _serve(
    requests: BinaryIO, replies: BinaryIO, functions: dict[str, RewardFunction], host: EnvironmentHost | None
) -> None:
    decoder: msgspec.msgpack.Decoder[_Question] = msgspec.msgpack.Decoder(_Question)
    forks = ForkWatch()
    while header := requests.read(HEADER_BYTES):
        request = decoder.decode(requests.read(body_length(header)))
        if host is None and isinstance(request, DialogueRequest):
            host = _host(functions)
        reply = _answer(request, functions, host)
        if forks.is_copy:  # a fork that returned from the function: its parent answers
            os._exit(1)
        if num_forked := forks.end_copies():
            reply = replace(reply, num_forked=num_forked)
        _send(replies, reply)
    if host is not None:
        host.close()


def _host(functions: dict[str, RewardFunction]) -> EnvironmentHost:
    """The host of this run's environments, imported.  Raises ConfigError."""
    # Imported here because settings need pydantic, for which every new worker would wait.
    from rlhpc.rewards.environments import EnvironmentHost, environments_here

    settings, names = environments_here()
    host = EnvironmentHost(settings, lambda task, *asked: as_outcome(_function(task, functions)(*asked)))
    for name in names:
        host.preload(name)
    return host


def _function(task: str, functions: dict[str, RewardFunction]) -> RewardFunction:
    if task not in functions:
        functions[task] = _function_of(task)
    return functions[task]


def _function_of(task: str) -> RewardFunction:
    if task in BUILT_IN or is_import_path(task):
        return resolve(task)
    # Imported here for the same reason.
    from rlhpc.rewards.registry import resolve_composite

    return resolve_composite(task)


def _answer(request: _Question, functions: dict[str, RewardFunction], host: EnvironmentHost | None) -> Replies | Turn:
    kind: type[Replies | Turn] = Turn if isinstance(request, DialogueRequest) else Replies
    names = (request.environment, request.task) if isinstance(request, DialogueRequest) else (request.task,)
    try:
        _limit_memory(request.memory_limit_bytes)
        if isinstance(request, JudgeRequest):
            return _judge(request, functions)
        assert host is not None
        return _turn(request, host)
    except NoReward as error:
        return kind(_said(_describe(error)), INVALID)
    except MemoryError as error:
        return kind(_said(f"{_describe(error)} of {request.memory_limit_bytes} bytes"), OUT_OF_MEMORY)
    except (Exception, SystemExit) as error:  # noqa: BLE001  survives whatever is not our code: it is the verdict
        costs = getattr(error, "costs", {})
        return kind(_said(_describe(error, _places(*names))), RAISED, costs=costs, traceback=_traceback_of(error))


def _judge(request: JudgeRequest, functions: dict[str, RewardFunction]) -> Replies:
    """Judge completions; a value that is no reward fails only its own completion."""
    function = _function(request.task, functions)
    returned: Iterable[object] = (
        function.judge_all(request.completions, request.references)
        if isinstance(function, BatchedFunction)
        else map(function, request.completions, request.references)
    )
    replies: list[Reply] = []
    for completion, value in zip(request.completions, returned, strict=True):
        try:
            outcome = as_outcome(value)
            costs = outcome.costs if isinstance(outcome, JudgedOutcome) else {}
            replies.append(replace(_checked(outcome, len(completion)), costs=costs))
        except NoReward as error:
            replies.append(_error(_describe(error)))
        except NoVerdict as error:
            replies.append(Reply(error=_said(_describe(error)), failure=RAISED, costs=error.costs))
    return Replies(replies=replies)


def _turn(dialogue: DialogueRequest, host: EnvironmentHost) -> Turn:
    turn = host.answer(dialogue)
    for name, value in (("reward", turn.reward), *turn.parts.items()):  # a part may also be called reward
        if why := fault_of(name, value):
            return Turn(_said(why), INVALID, costs=turn.costs)
    parts = {str(name): float(value) for name, value in turn.parts.items()}
    detail, is_correct = str(turn.detail)[:_LONGEST_DETAIL], bool(turn.is_correct)
    return replace(turn, reward=float(turn.reward), is_correct=is_correct, parts=parts, detail=detail)


def _checked(outcome: RewardOutcome, num_characters: int) -> Reply:
    """Turn an outcome into a reply; a reward that is not a finite number is an error."""
    rewards_at: object = outcome.rewards_at
    if not isinstance(rewards_at, dict):
        return _error(f"rewards_at must be a dict, not {type(rewards_at).__name__}")
    at_places = [(f"rewards_at[{place!r}]", value) for place, value in rewards_at.items()]
    for name, value in (("reward", outcome.reward), *outcome.parts.items(), *at_places):
        if why := fault_of(name, value):
            return _error(why)
    for place in rewards_at:
        if type(place) is not int or not 1 <= place <= num_characters:
            return _error(f"rewards_at[{place!r}]: the completion has characters 1 to {num_characters}")
    places = {place: float(value) for place, value in rewards_at.items()}
    parts = {str(name): float(value) for name, value in outcome.parts.items()}
    detail = str(outcome.detail)[:_LONGEST_DETAIL]
    answer = str(outcome.answer)[:_LONGEST_DETAIL]
    return Reply(float(outcome.reward), bool(outcome.is_correct), parts, detail, answer, places)


def _error(why: str) -> Reply:
    return Reply(error=_said(why), failure=INVALID)


def _said(why: str) -> str:
    return why[:_LONGEST_DETAIL] or "error without a message"


def _places(*names: str) -> tuple[str, ...]:
    """Return the import paths of tasks and environments, for lines of user code in messages."""
    # Imported here for the same reason.
    from rlhpc.rewards.task_settings import task_settings

    composites = task_settings().composite
    return tuple(
        part for name in names for part in (composites[name].tasks.values() if name in composites else (name,))
    )


def _describe(error: BaseException, paths: Sequence[str] = ()) -> str:
    """Return the exception's text, and " (FILE:LINE)" in the code of one of these paths; both fit into a detail."""
    line = next(filter(None, (line_of(path, error) for path in paths)), "")
    return f"{type(error).__name__}: {error}"[: max(0, _LONGEST_DETAIL - len(line))] + line


def _traceback_of(error: BaseException) -> str:
    """Return the traceback from the first frame on that is not of this package."""
    found = traceback.TracebackException.from_exception(error)
    package = str(Path(__file__).parents[1])
    theirs = [not frame.filename.startswith(package) for frame in found.stack]
    found.stack[:] = found.stack[theirs.index(True) if any(theirs) else 0 :]
    return "".join(found.format())[-_LONGEST_TRACEBACK:].rstrip()


def _send(replies: BinaryIO, message: Ready | Replies | Turn) -> None:
    """Send a message; lone surrogates, which JSON and programs of the policy can spell, are sent as escapes."""
    try:
        frame = encode_frame(message)
    except UnicodeEncodeError:
        frame = encode_frame(msgspec.convert(_spelt_out(msgspec.to_builtins(message)), type(message)))
    replies.write(frame)
    replies.flush()


def _spelt_out(value: Any) -> Any:
    """Copy lists, dicts and texts, with lone surrogates as escapes."""
    match value:
        case str():
            return sendable(value)
        case list() | tuple():
            return [_spelt_out(each) for each in value]
        case dict():
            return {_spelt_out(key): _spelt_out(each) for key, each in value.items()}
    return value


def _limit_memory(limit_bytes: int) -> None:
    """Set the soft limit of this process's address space; the hard limit is kept, since tasks may have other limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    is_above = hard != resource.RLIM_INFINITY and limit_bytes > hard
    wanted = hard if limit_bytes <= 0 or is_above else limit_bytes
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
