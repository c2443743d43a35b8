"""Score completions one after the other, in a separate process that may be killed at any moment.

Input: Request frames from its standard input.  Output: Reply frames on what was its standard output.  Started by
worker_process.py as `python -m rlhpc.rewards.worker PARENT_PID MEMORY_LIMIT_BYTES TASK…`.  Ends when the pipe closes
or its parent dies.  Whatever a reward function raises becomes a Reply with an error; whatever it prints goes to
standard error.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from types import FrameType
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from rlhpc.contracts import RewardFunction, RewardOutcome
from rlhpc.parent_death import end_with_parent
from rlhpc.rewards.failures import INVALID, OUT_OF_MEMORY, RAISED
from rlhpc.rewards.forks import ForkWatch
from rlhpc.rewards.frames import HEADER_BYTES, Ready, Reply, Request, body_length, encode_frame
from rlhpc.rewards.registry import BUILT_IN, resolve
from rlhpc.rewards.returned import JudgedOutcome, NoReward, as_outcome
from rlhpc.user_code import is_import_path

_LONGEST_DETAIL = 500  # characters


def main(parent_pid: int, memory_limit_bytes: int, tasks: list[str]) -> int:
    """Serve until the pipe closes.  Returns the exit status."""
    _die_with(parent_pid)
    _leave_signals_to_the_service()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory_limit_bytes)
    requests, replies = _take_pipes()
    functions: dict[str, RewardFunction] = {}
    try:
        for task in tasks:
            functions[task] = _function_of(task)
    except Exception as error:  # noqa: BLE001  survives nothing: tells the parent what the user's module raised, leaves
        _send(replies, Ready(error=_describe(error)))
        return 1
    _send(replies, Ready(error=""))
    _serve(requests, replies, functions)
    return 0


def _serve(requests: BinaryIO, replies: BinaryIO, functions: dict[str, RewardFunction]) -> None:
    decoder, forks = msgspec.msgpack.Decoder(Request), ForkWatch()
    while header := requests.read(HEADER_BYTES):
        reply = _judge(decoder.decode(requests.read(body_length(header))), functions)
        if forks.is_copy:  # one that came back out of the function: the answer is its parent's to give
            os._exit(1)
        if num_forked := forks.end_copies():
            reply = replace(reply, num_forked=num_forked)
        _send(replies, reply)


def _function_of(task: str) -> RewardFunction:
    if task in BUILT_IN or is_import_path(task):
        return resolve(task)
    # Imported here because settings take pydantic, for which every new worker would wait.
    from rlhpc.rewards.composite import resolve as resolve_composite

    return resolve_composite(task)


def _judge(request: Request, functions: dict[str, RewardFunction]) -> Reply:
    try:
        _limit_memory(request.memory_limit_bytes)
        function = functions.get(request.task)
        if function is None:
            function = functions[request.task] = _function_of(request.task)
        outcome = as_outcome(function(request.completion, request.reference))
    except NoReward as error:
        return _error(_describe(error), INVALID)
    except MemoryError as error:
        return _error(f"{_describe(error)} of {request.memory_limit_bytes} bytes", OUT_OF_MEMORY)
    except Exception as error:  # noqa: BLE001  survives whatever a reward function raises: it is the verdict
        return replace(_error(_describe(error), RAISED), costs=getattr(error, "costs", {}))
    reply = _checked(outcome, len(request.completion))
    return replace(reply, costs=outcome.costs) if isinstance(outcome, JudgedOutcome) else reply


def _checked(outcome: RewardOutcome, num_characters: int) -> Reply:
    """Turn an outcome into a reply; anything but a finite float for a reward is an error, never a number."""
    rewards_at: object = outcome.rewards_at
    if not isinstance(rewards_at, dict):
        return _error(f"rewards_at must be a dict, not {type(rewards_at).__name__}")
    at_places = {f"rewards_at[{place!r}]": value for place, value in rewards_at.items()}
    for name, value in {"reward": outcome.reward, **outcome.parts, **at_places}.items():
        if not isinstance(value, float) or not math.isfinite(value):
            return _error(f"{name} must be a finite float, not {type(value).__name__} {str(value)[:40]}")
    for place in rewards_at:
        if type(place) is not int or not 1 <= place <= num_characters:
            return _error(f"rewards_at[{place!r}]: the completion has characters 1 to {num_characters}")
    places = {place: float(value) for place, value in rewards_at.items()}
    parts = {str(name): float(value) for name, value in outcome.parts.items()}
    detail = str(outcome.detail)[:_LONGEST_DETAIL]
    answer = str(outcome.answer)[:_LONGEST_DETAIL]
    return Reply(float(outcome.reward), bool(outcome.is_correct), parts, detail, "", answer, places)


def _error(why: str, failure: str = INVALID) -> Reply:
    said = why[:_LONGEST_DETAIL] or "error without a message"
    return Reply(0.0, is_correct=False, parts={}, detail="", error=said, failure=failure)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _send(replies: BinaryIO, message: Ready | Reply) -> None:
    replies.write(encode_frame(message))
    replies.flush()


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux only, elsewhere the pipe closes."""
    end_with_parent()
    if os.getppid() != parent_pid:  # it died before prctl was called
        os._exit(1)


def _leave_signals_to_the_service() -> None:
    """Slurm signals every process of a step, but only the service knows when its workers may go.

    A handler that does nothing, not SIG_IGN: that would be inherited by programs which a reward function starts.
    """

    def stay(_number: int, _frame: FrameType | None) -> None:
        pass

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stay)


def _limit_memory(limit_bytes: int) -> None:
    """Of this process's address space; tasks may have other limits, so that the hard one stays as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    is_above = hard != resource.RLIM_INFINITY and limit_bytes > hard
    wanted = hard if limit_bytes <= 0 or is_above else limit_bytes
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for frames; leave the reward function an empty input and the log as output."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
