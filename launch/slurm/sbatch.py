"""Submit a script without losing the job: if sbatch's answer is lost, the job is found by a tag in its comment.

Input: a script and options of sbatch.  Output: a job id.  Guarantees: sbatch is repeated only if nothing was submitted;
Ctrl-C does not interrupt it, a job submitted meanwhile is cancelled; if the result is unknown, the error says so.
"""

from __future__ import annotations

import re
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from launch.common.text import say_or_lose
from launch.slurm.commands import NoAnswer, SlurmError, is_away, slurm
from launch.slurm.queue import cancel
from rlhpc.base.patience import Deadline

ANSWER_S = 50.0  # of sbatch; a job that starts at once waits RECORDED_S for its record (launch/supervisor)
LOOK_AGAIN_S = 4.0  # slurmctld may accept a request some time after failing to answer
REPEAT_S = 5.0  # between two tries of sbatch while slurmctld is down
LOOK_PATIENCE_S = 20.0
# Messages of sbatch when its request was sent and the answer lost; slurmctld may have accepted the job.
_LOST = ("timed out", "Zero Bytes were transmitted", "send failure", "receive failure", "shutdown failure",
         "Connection reset", "Broken pipe", "Unexpected message", "authentication error")  # fmt: skip
_OWN_COMMENT = re.compile(r"^#SBATCH\s.*--com[a-z]*(?![\w-])", re.MULTILINE)  # sbatch accepts abbreviations
_NUMBER = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;.*| on cluster .*)?$", re.MULTILINE)


class MayBeQueued(SlurmError):
    """sbatch's answer was lost and squeue does not answer either; the message says how to find the job."""


def submit_script(
    script: Path,
    options: Sequence[str] = (),
    *,
    record: Callable[[int], object],
    environment: Mapping[str, str] | None = None,
    patience_s: float = 0.0,
    hear: Callable[[str], object] = lambda remarks: None,
) -> int:
    """Submit a script, have the job recorded, and return its id (of a heterogeneous job, its leader's).

    options: of sbatch.  record: called with the id; if it raises, the job is cancelled.  environment: None means this
    process's, without variables of another job.  patience_s: how long sbatch is repeated while slurmctld is down.
    hear: called with sbatch's output on stderr for an accepted job, such as a site's "moved to partition scav".
    Raises SlurmError: refused, or nothing was submitted; MayBeQueued; KeyboardInterrupt with the job's fate.
    """
    tag, deadline = f"rlhpc-{uuid.uuid4().hex[:12]}", Deadline(patience_s)
    with _HeldCtrlC(tag) as ctrl_c:
        while True:
            try:
                job_id = _submit_tagged(script, options, tag, environment, hear)
                break
            except SlurmError as error:
                if ctrl_c.has_come:
                    raise KeyboardInterrupt(str(error)) from error
                if isinstance(error, MayBeQueued) or not is_away(error) or deadline.is_over:
                    raise
            time.sleep(min(REPEAT_S, max(0.1, deadline.left_s)))
        if not ctrl_c.has_come:
            try:
                record(job_id)
            except BaseException:  # nothing is survived, but an unrecorded job must not stay queued
                _cancel(job_id)
                raise
        if ctrl_c.has_come:
            raise KeyboardInterrupt(_cancel(job_id))
    return job_id


def submit_once(script: Path, *options: str) -> str:
    """Submit a script whose job may safely exist twice; returns its id.  options: of sbatch.  Raises SlurmError."""
    return slurm("sbatch", "--parsable", *options, str(script)).strip().split(";")[0]


def try_script(script: Path, patience_s: float) -> None:
    """Have sbatch check a script without submitting it.  Raises SlurmError with sbatch's error."""
    slurm("sbatch", "--test-only", str(script), patience_s=patience_s)


def how_to_look(tag: str) -> str:
    """A command that shows the job of a submission, if there is one."""
    return f"`squeue --me --format='%i %j %k %o' | grep {tag}`"


def _submit_tagged(
    script: Path, options: Sequence[str], tag: str, environment: Mapping[str, str] | None, hear: Callable[[str], object]
) -> int:
    with _tagged(script, options, tag) as words:
        try:
            said = slurm(*words, timeout_s=ANSWER_S, environment=environment, hears_ctrl_c=False, hear=hear)
        except SlurmError as error:
            if not isinstance(error, NoAnswer) and not any(saying in str(error) for saying in _LOST):
                raise
            trouble = str(error)
        else:
            numbers = _NUMBER.findall(said)
            if numbers:
                return int(numbers[-1])  # a site's wrapper of sbatch may print more before it
            trouble = f"sbatch: no job id in {said.strip()!r}"
    found = _look_for(tag, trouble, environment)
    if found is None:
        raise SlurmError(f"{trouble}; no job of this submission is in the queue")
    return found


@contextmanager
def _tagged(script: Path, options: Sequence[str], tag: str) -> Iterator[list[str]]:
    """The sbatch command whose job squeue shows with `tag`.

    The tag is the comment; if the site uses that (some for accounting), it is the name of a directory with a link to
    the script.
    """
    words = ["sbatch", "--parsable", *options]
    try:
        has_comment = _OWN_COMMENT.search(script.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        has_comment = False  # sbatch reports errors of the script
    if not has_comment and not any(word.startswith("--com") for word in options):
        yield [*words, f"--comment={tag}", str(script)]
        return
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch, tag, script.name)
        link.parent.mkdir()
        link.symlink_to(script.absolute())
        yield [*words, str(link)]


def _look_for(tag: str, trouble: str, environment: Mapping[str, str] | None) -> int | None:
    """The job with this tag; None: none, according to two answers.  Raises MayBeQueued: no answer."""
    words = ("squeue", "--me", "--all", "--noheader", "--states=all", "--format=%i|%k|%o")
    for pause_s in (0.0, LOOK_AGAIN_S):
        time.sleep(pause_s)
        try:
            out = slurm(*words, timeout_s=30.0, patience_s=LOOK_PATIENCE_S, environment=environment)
        except SlurmError as error:
            text = f"{trouble}; a job may be queued nevertheless, {how_to_look(tag)} shows it: {error}"
            raise MayBeQueued(text) from error
        for line in out.splitlines():
            number = re.match(r"\s*(\d+)", line)
            if tag in line and number is not None:
                return int(number[1])
    return None


def _cancel(job_id: int) -> str:
    """Cancel a job; returns a message about it."""
    try:
        cancel([job_id], patience_s=LOOK_PATIENCE_S)
    except SlurmError as error:
        return f"job {job_id} was submitted; CANCEL BY HAND, `scancel {job_id}`: {error}"
    return f"job {job_id} was submitted, and has been cancelled"


class _HeldCtrlC:
    """Delays Ctrl-C until a submission is finished; a second Ctrl-C is not delayed."""

    def __init__(self, tag: str) -> None:
        self.has_come = False
        self._tag, self._is_held = tag, False

    def __enter__(self) -> _HeldCtrlC:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_held = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_held:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            raise KeyboardInterrupt(f"a job may be queued: {how_to_look(self._tag)} shows it")
        self.has_come = True
        say_or_lose("rlhpc: waiting for sbatch, to cancel the job it submits; Ctrl-C again does not wait")
