"""Which checkpoint a resume starts from, and what happens to newer ones.

Input: the checkpoints of a run and the user's request.  Output: a step whose checkpoint was read and verified in full.
Guarantees: looking changes nothing; checkpoints newer than the chosen step are renamed before an attempt begins, so
that a checkpoint that was skipped is never used later, repaired or not.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.common.paths import quoted
from rlhpc.config import Config
from rlhpc.errors import CheckpointError, RunDirectoryError
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import CheckpointState, Fate, KnownCheckpoints, set_aside

Tell = Callable[[str], None]
LOGIN_NODE_BYTES = 100e9  # a few minutes of reading; larger ones are read by the job, which reads everything anyway
ANNOUNCED_BYTES = 4 << 30  # reading this much takes so long that it is announced


class UnreadableCheckpoint(RunDirectoryError):
    """The newest checkpoint cannot be read at the moment; it may be sound."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resume begins: by default at the newest sound checkpoint.  And whether it samples all prompts again."""

    from_start: bool = False
    step: int | None = None
    no_replay: bool = False  # steps after the checkpoint are not trained again from the journal (journal_aside.py)
    lift_quarantine: bool = False  # prompts that were given up are sampled again


NEWEST = ResumePoint()


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to resume from."""

    step: int | None  # None: from the beginning
    passed_over: tuple[CheckpointState, ...] = ()  # newer ones, newest first


def choose(layout: RunLayout, wanted: ResumePoint, tell: Tell, *, read_up_to_bytes: float = math.inf) -> Choice:
    """Find the checkpoint to resume from; changes nothing.

    read_up_to_bytes: of larger checkpoints only file sizes are compared; for callers that do not resume themselves.
    Raises RunDirectoryError: no usable checkpoint; the requested one does not exist or is damaged.
    Raises UnreadableCheckpoint: the newest one cannot be read, which says nothing about its content.
    """
    known = KnownCheckpoints(layout.checkpoints, read_up_to_bytes=read_up_to_bytes)
    _announce(known, wanted, tell, read_up_to_bytes)
    if wanted.from_start:
        return Choice(None, _newer_unread(known, -1, "--from-start undoes it"))
    if wanted.step is not None:
        return _by_name(layout, known, wanted.step)
    passed_over = list[CheckpointState]()
    for state in known.newest_first():
        if state.fate is Fate.SOUND:
            return Choice(state.step, tuple(passed_over))
        if state.fate is Fate.UNREADABLE:
            raise UnreadableCheckpoint(
                f"{state.problem}; the checkpoint may be sound: make it readable, or choose an older one with --step N"
            ) from OSError(errno.EIO, "a file of it cannot be read")
        passed_over.append(state)
    if passed_over:
        raise RunDirectoryError(_none_is_sound(layout, passed_over))
    return Choice(None)


def refuse_step(config: Config, layout: RunLayout, step: int) -> None:
    """Raise RunDirectoryError if a run with these settings cannot go on from this step; 0: from the beginning."""
    if step > config.run.num_steps:
        raise RunDirectoryError(f"run.num_steps={config.run.num_steps}: {layout.root} is already at step {step}")
    if step and config.has_critic and not (layout.checkpoint(step) / "critic").is_dir():
        raise RunDirectoryError(
            f"algorithm.advantage={config.algorithm.advantage!r}: the checkpoint of step {step} has no critic; "
            "legal: an advantage without one, as before; --from-start; or a new run (another run.name)"
        )


def put_aside(choice: Choice, tell: Tell) -> list[str]:
    """Rename the checkpoints that were skipped; reports each, and returns the reports.  Raises CheckpointError.

    Newest first: if it is killed half-way, a resume still finds the others newer than its choice.
    """
    told = []
    for state in choice.passed_over:
        try:
            target = set_aside(state.path, state.fate)
        except FileNotFoundError:  # its writer has deleted it
            continue
        except OSError as error:
            raise CheckpointError(f"{state.path}: cannot be set aside: {error.strerror or error}") from error
        told.append(f"{state.path.name} is set aside as {target.name}: {state.problem}")
        tell(told[-1])
    return told


def _by_name(layout: RunLayout, known: KnownCheckpoints, step: int) -> Choice:
    there = [number for number, _ in known.steps()]
    if step not in there:
        raise RunDirectoryError(
            f"--step {step}: {layout.checkpoints} has no checkpoint of this step; available: "
            f"{', '.join(map(str, there)) or 'none'}"
        )
    state = next(state for state in known.newest_first(lambda number: number == step))
    if state.fate is not Fate.SOUND:
        raise RunDirectoryError(f"--step {step}: {state.problem}")
    return Choice(step, _newer_unread(known, step, f"--step {step} undoes it"))


def _newer_unread(known: KnownCheckpoints, step: float, why: str) -> tuple[CheckpointState, ...]:
    """All above this step, newest first, to be set aside whatever they contain."""
    newer = [CheckpointState(number, path, why, Fate.UNDONE) for number, path in known.steps() if number > step]
    return tuple(newer[::-1])


def _none_is_sound(layout: RunLayout, states: Sequence[CheckpointState]) -> str:
    lines = [
        f"{layout.checkpoints}: no checkpoint can be resumed from ({len(states)} tried):",
        *(f"  {state.problem}" for state in states),
        "restore one of them from a backup and resume again; or start at step 0 with `--resume --from-start` "
        f"(`rlhpc resume {quoted(layout.root)} --from-start` for jobs), which sets these "
        f"checkpoints and all rollouts aside",
    ]
    return "\n".join(lines)


def _announce(known: KnownCheckpoints, wanted: ResumePoint, tell: Tell, read_up_to_bytes: float) -> None:
    """Announce a verification that takes a while, or one that is left to the job."""
    candidates = [path for step, path in known.steps() if wanted.step in (None, step)]
    if wanted.from_start or not candidates:
        return
    num_bytes = sum(file.stat().st_size for file in candidates[-1].rglob("*") if file.is_file())
    if num_bytes > read_up_to_bytes:
        tell(
            f"{candidates[-1].name} has {num_bytes / 1e9:.0f} GB: file sizes are checked now, contents when the job "
            "starts"
        )
    elif num_bytes >= ANNOUNCED_BYTES:
        tell(f"verifying {num_bytes / 1e9:.0f} GB of {candidates[-1].name} before resuming from it")
