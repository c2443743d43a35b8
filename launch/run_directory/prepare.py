"""The life cycle of a run directory: created once, resumed on request, never taken over from a live run.

Input: Config.  Output: the directory with settings, keys and one line per attempt.  A run is either processes on this
machine, whose launcher numbers the attempts, or Slurm jobs, whose first job does (begin_attempt.py).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.common.text import counted, quoted, shortened, written_unix_s
from launch.plan.processes import process_names
from launch.run_directory.inputs import Inputs, look_at_inputs, refuse_other_inputs, write_inputs
from launch.run_files.records import name_of_jobs, read_job_records
from launch.run_files.run_state import saved_step
from launch.slurm.queue import look_at_jobs
from rlhpc.base.files import (
    PRIVATE,
    append_lines,
    is_absent,
    keep_others_from_writing,
    matching,
    move_durably,
    openness,
)
from rlhpc.base.ownership import LIVES_ELSEWHERE_S, OWN_FILES, Fence, Launcher, RunOwner, holds_something
from rlhpc.base.patience import briefly
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import EVENTS
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.config.file import SEVERAL, config_hash, read_resolved, write_resolved
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import CheckpointError, RunDirectoryError
from rlhpc.training.checkpoint_directory import CheckpointState, Fate, KnownCheckpoints, set_aside
from rlhpc.transport.service_address import ADDRESS_PATTERN

# ------------------------------------------------------------------------------------------------------- attempt number
#
# The number of the next attempt: each attempt has its own log of events.
#
# Input: attempts.jsonl and the names of files of events.  Changes nothing.


def num_attempts(layout: RunLayout) -> int:
    """Number of attempts that have begun: recorded ones, and ones with a log of events whose line is lost.

    Raises OSError.
    """
    noted = 0 if is_absent(layout.attempts) else len(layout.attempts.read_text().splitlines())
    files = EVENTS.numbered(layout.rollouts)
    return max(noted, files[-1][0] + 1 if files else 0)


# ---------------------------------------------------------------------------------------------------- checkpoint choice
#
# Choose the checkpoint that a resume starts from, and set newer ones aside.
#
# Input: the checkpoints of a run and the user's request.  Output: a step whose checkpoint was read and verified in
# full.  Guarantees: the choice changes nothing; checkpoints newer than the chosen step are renamed before an attempt
# begins, so that a skipped checkpoint is never used later, repaired or not.


Tell = Callable[[str], None]
LOGIN_NODE_BYTES = 100e9  # a few minutes of reading; larger ones are read by the job, which reads everything anyway
ANNOUNCED_BYTES = 4 << 30  # reading this much takes so long that it is announced


class UnreadableCheckpoint(RunDirectoryError):
    """The newest checkpoint cannot be read at the moment; it may be sound."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The user's choice where a resume begins, by default the newest sound checkpoint, and what is sampled again."""

    from_start: bool = False
    step: int | None = None
    no_replay: bool = False  # steps after the checkpoint are not trained again from the journal
    lift_quarantine: bool = False  # quarantined prompts are sampled again


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
    Raises UnreadableCheckpoint: the newest one cannot be read, but may be sound.
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
    """Raise RunDirectoryError if a run with these settings cannot continue from this step; 0: from the beginning."""
    if step > config.run.num_steps:
        raise RunDirectoryError(
            f"run.num_steps={config.run.num_steps}: {layout.root} is already at step {step}; legal: {step} or more, "
            "--step N of an earlier checkpoint, or --from-start"
        )
    if step and config.has_critic and not (layout.checkpoint(step) / "critic").is_dir():
        raise RunDirectoryError(
            f"algorithm.advantage={config.algorithm.advantage!r}: the checkpoint of step {step} has no critic; "
            "legal: an advantage without one, as before; --from-start; or a new run (another run.name)"
        )


def put_aside(choice: Choice, tell: Tell) -> list[str]:
    """Rename the checkpoints that were skipped; reports each, and returns the reports.  Raises CheckpointError.

    Newest first: after a kill half-way the remaining ones are still newer than the choice.
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
    """Checkpoints above this step, newest first, to be set aside unread."""
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
    """Announce a long verification, or one that is left to the job."""
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


# -------------------------------------------------------------------------------------------------------- journal aside
#
# Set the journal aside when a resume is not to repeat its steps; their rollouts are sampled again.
#
# A resume trains the steps after its checkpoint again, from the journal.  A user who goes back on purpose, or has
# changed training or sampling, wants different steps; a user who has changed the number, place or speed of processes
# wants the same ones.


FILES = ("journal_*.log", "events_*.log", "partials_*.log")
SHAPES_STEPS = (
    "algorithm.",
    "critic.",
    "trainer.",
    "generation.",
    "environment.",
    "mcp.",
    "curriculum.",
    "admission.",
    "composite.",
    "instructions.",
    "shaping.",
    "lora.",
)  # a repeated step would differ; without the curriculum, the prompts that it left out would be missed
# Keys that change a step only by rounding.
SHAPES_NOTHING = {
    "trainer": (
        "num_ranks", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "chunks_per_stage",
        "context_parallel", "expert_parallel", "distributed_optimizer", "overlap_grad_reduce", "transformer_engine",
        "zero_stage", "optimizer_offload", "parameter_offload", "reference_memory", "ema_memory", "device",
        "token_budget", "recompute_activations",
    ),
    "generation": (
        "num_replicas", "tensor_parallel", "endpoint", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes",
        "gpu_memory_utilization", "enforce_eager", "recompute_kv", "prefix_caching",
    ),
    "admission": ("step_parts", "lease_deadline_s", "max_attempts", "max_zero_variance_groups"),
}  # fmt: skip


def set_journal_aside(
    layout: RunLayout, resume_from: ResumePoint, changed: Sequence[str], attempt: int, tell: Tell
) -> None:
    """Move the journal to lost_attempt_N/ if this resume is not to repeat its steps.  N: the attempt that begins.

    changed: settings that differ from the attempt before, "key: old → new".  Raises RunDirectoryError.
    """
    why = _why_not(resume_from, changed)
    files = [path for pattern in FILES for path in matching(layout.rollouts, pattern)]
    if not why or not files:
        return
    target = layout.rollouts / f"lost_attempt_{attempt}"
    try:
        move_durably(files, target)
    except OSError as error:
        raise RunDirectoryError(f"{layout.rollouts}: its journal cannot be set aside: {error}") from error
    tell(f"{why}: steps after the checkpoint are not repeated, and their rollouts are set aside in {target.name}")


def _why_not(resume_from: ResumePoint, changed: Sequence[str]) -> str:
    """Reason for not repeating steps, in words; "": steps are repeated."""
    if resume_from.from_start:
        return "--from-start"
    if resume_from.step is not None:
        return f"--step {resume_from.step}"
    if resume_from.no_replay:
        return "--no-replay"
    keys = [text.partition(":")[0] for text in changed if text.startswith(SHAPES_STEPS)]
    shaping = [key for key in keys if not _shapes_nothing(key)]
    return f"{', '.join(shaping)} changed" if shaping else ""


def _shapes_nothing(key: str) -> bool:
    section, _, name = key.partition(".")
    return name in SHAPES_NOTHING.get(section, ())


# -------------------------------------------------------------------------------------------------------------- prepare


log = logging.getLogger("rlhpc.run_directory")

# Keys that a checkpoint depends on: prompt order, weights or adapters, and bounds under which its groups were admitted.
FIXED_BY_THE_FIRST_START = ("run.name:", "run.stage:", "run.seed:", "run.deterministic:", "model.", "data.",
    "admission.group_size:", "admission.groups_per_step:", "admission.max_staleness:",
    "admission.window_groups:",
    "lora.rank:", "lora.alpha:", "lora.rslora:", "lora.targets:", "lora.quantization:", "lora.initial:")  # fmt: skip
# Also fixed in supervised fine-tuning, where a batch is a function of its step and these.
OF_BATCHES = ("demonstrations.", "sft.loss:", "sft.batch_size:", "sft.held_out:", "sft.max_tokens:", "sft.too_long:")
MAY_MOVE = (
    "model.path:",
    "data.path:",
    "demonstrations.path:",
)  # to another path with the same content as at the first start


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """A start of a run."""

    index: int
    resume_step: int | None  # None: from the beginning
    owner: str = ""  # who may write to the run directory from now on (rlhpc/base/ownership.py)
    changed: tuple[str, ...] = ()  # settings that differ from the previous attempt: "key: old → new"


def prepare_run_dir(
    config: Config,
    layout: RunLayout,
    *,
    resume: bool,
    fresh: bool,
    resume_from: ResumePoint = NEWEST,
    tell: Tell = log.info,
) -> AttemptStart:
    """Create the directory of a new run, or prepare an existing one for a resume; called by the launcher.

    A resume may change settings except FIXED_BY_THE_FIRST_START; the changes are recorded with old and new value.
    Raises RunDirectoryError: it exists and neither --resume nor --fresh was given; it does not exist and --resume was;
    the run is alive; a setting, the model or the dataset differs that cannot change; no usable checkpoint.
    """
    exists = refuse_taken_directory(layout, resume=resume, fresh=fresh)
    refuse_open_directory(layout, tell)
    if resume:
        renewal = _renewal(config, layout)
        index = num_attempts(layout)
        owner = briefly(
            lambda: Fence.take(layout, index), layout.root
        ).owner  # from here on no earlier attempt can change the files read below
        step, aside = _go_back(config, layout, resume_from, renewal, tell)
        attempt = AttemptStart(index, step, owner, renewal.changed)
        return briefly(lambda: note_attempt(layout, attempt, set_aside=aside), layout.attempts)
    if exists and fresh:
        _delete_contents(layout)
    _found(config, layout)
    first = AttemptStart(0, None, briefly(lambda: Fence.take(layout, 0), layout.root).owner)
    return briefly(lambda: note_attempt(layout, first), layout.attempts)


def prepare_run_dir_for_jobs(
    config: Config,
    layout: RunLayout,
    *,
    resume: bool,
    fresh: bool,
    resume_from: ResumePoint = NEWEST,
    tell: Tell = log.info,
) -> tuple[str, ...]:
    """Prepare a run whose jobs are about to be submitted; returns the settings that differ from before.

    No attempt begins: the controller's job does that.  A directory in which no attempt ever began may be reused without
    options.  Raises RunDirectoryError as prepare_run_dir does, and on resume of a run that is complete.
    """
    is_untouched = layout.is_run and num_attempts(layout) == 0
    refuse_open_directory(layout, tell)
    with RunOwner.take(layout, lambda _: None, may_take_over=resume or fresh or is_untouched):
        exists, renewal = refuse_run_dir_for_jobs(config, layout, resume=resume, fresh=fresh, resume_from=resume_from)
        if renewal is not None:
            _go_back(config, layout, resume_from, renewal, tell, read_up_to_bytes=LOGIN_NODE_BYTES)
            return renewal.changed
        if exists and fresh:
            _delete_contents(layout)
        if exists and not fresh:
            _clear(layout)
        _found(config, layout)
        return ()


def refuse_run_dir_for_jobs(
    config: Config, layout: RunLayout, *, resume: bool, fresh: bool, resume_from: ResumePoint = NEWEST
) -> tuple[bool, _Renewal | None]:
    """Raise what prepare_run_dir_for_jobs would raise, except for damaged checkpoints, and change nothing.

    Returns whether the directory has content, and what a resume records.
    """
    is_untouched = layout.is_run and num_attempts(layout) == 0
    exists = refuse_taken_directory(layout, resume=resume or is_untouched, fresh=fresh, for_jobs=True)
    if not resume:
        return exists, None
    renewal = _renewal(config, layout)
    if not resume_from.from_start and resume_from.step is None:
        _refuse_complete(config, layout)
        refuse_step(config, layout, saved_step(layout))
    return exists, renewal


def refuse_other_lessons(config: Config, layout: RunLayout) -> None:
    """Raise RunDirectoryError if complete supervised fine-tuning has learnt other things, or otherwise, than this."""
    changed = [text for text in _renewal(config, layout).changed if text.startswith(("sft.", "lora."))]
    if changed:
        raise RunDirectoryError(
            f"{layout.root}: complete, with other settings: {'; '.join(changed)}; legal: the old values, --fresh, or "
            "another run.name"
        )


def refuse_open_directory(layout: RunLayout, tell: Tell) -> None:
    """Report if others may read it, and set the umask.  Raises RunDirectoryError if others may change it."""
    keep_others_from_writing()
    rights = openness(layout.root, looks_inside=True)
    if rights.is_writable:
        raise RunDirectoryError(rights.text)
    if rights.text:
        tell(f"warning: {rights.text}")


def mint_keys(config: Config, layout: RunLayout, others: Iterable[str] = ()) -> None:
    """Make new keys for every process of this attempt; those of earlier attempts are no longer accepted.

    others: names of generators and services that were added to the run's plan.
    """
    from rlhpc.transport.security import mint_run_keys  # with zmq, which `status` and `stop` need not wait for

    shutil.rmtree(layout.secrets, ignore_errors=True)
    mint_run_keys(layout.secrets, [*process_names(config), *others])


def note_attempt(layout: RunLayout, attempt: AttemptStart, **more: Any) -> AttemptStart:
    """Append the line of an attempt that begins; `more`: further keys."""
    _touch_what_stays(layout, layout.job_plan if more.get("job_id") else layout.local_plan)
    line = json.dumps(asdict(attempt) | more | {"host": socket.gethostname(), "unix_time_s": time.time()})
    append_lines(layout.attempts, f"{line}\n".encode())
    return attempt


def _touch_what_stays(layout: RunLayout, plan: Path) -> None:
    """Renew the times of files that are written once: a site's purge deletes files unchanged for some weeks."""
    once = (layout.config, layout.inputs, layout.site, plan, layout.lost_leases, layout.guard)
    for path in (*once, *layout.scripts.glob("*"), *layout.jobs.glob("*.json")):
        with suppress(OSError):  # missing, or made by another user
            os.utime(path)


def clear_rendezvous(layout: RunLayout, *, keeps_services: bool = False) -> None:
    """Delete the rendezvous files of earlier attempts and create missing directories.

    keeps_services: not the addresses of services, whose processes may outlive an attempt and publish theirs once.
    """
    services = set(matching(layout.rendezvous, ADDRESS_PATTERN)) if keeps_services else set()
    for path in set(matching(layout.rendezvous, "*")) - services:
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(layout.weights, ignore_errors=True)
    layout.status.unlink(missing_ok=True)
    _make(layout)


def refuse_taken_directory(layout: RunLayout, *, resume: bool, fresh: bool, for_jobs: bool = False) -> bool:
    """Return whether the directory has content.  Raises RunDirectoryError if it must not be taken over."""
    if layout.root.is_symlink() and not layout.root.exists():
        raise RunDirectoryError(
            f"{layout.root} is a link to {layout.root.resolve()}, which does not exist: create it first"
        )
    if not holds_something(layout.root):
        return False
    Launcher.refuse(layout)
    _refuse_living_jobs(layout, must_know=for_jobs)
    if not layout.is_run and layout.being_deleted.exists():
        if not fresh:
            raise RunDirectoryError(
                f"{layout.root}: a start with --fresh was ended while it deleted the run in it; --fresh deletes the "
                "rest and starts over, or choose another run.name"
            )
    elif not layout.is_run and (layout.attempts.exists() or not resume):
        lost = f"; or, if it was one, restore {layout.config.name}" if layout.attempts.exists() else ""
        raise RunDirectoryError(f"{layout.root} exists and is not a run directory; choose another run.directory{lost}")
    if not resume and not fresh:
        raise RunDirectoryError(
            f"{layout.root} exists already; use --resume to continue it, --fresh to delete it and start over, "
            "or choose another run.name"
        )
    if fresh and layout.root.is_symlink():
        raise RunDirectoryError(
            f"{layout.root} is a link to {layout.root.resolve()}: --fresh deletes nothing through a link; delete that "
            "directory's content by hand, or choose another run.name"
        )
    owner = layout.root.stat().st_uid
    if fresh and owner != os.geteuid():  # group write permission suffices to delete, and root may delete everything
        raise RunDirectoryError(
            f"{layout.root} belongs to uid {owner}: --fresh deletes only your own runs; choose another run.name"
        )
    return True


def _found(config: Config, layout: RunLayout) -> None:
    layout.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    commit, inputs = _commit(), look_at_inputs(config)
    # First: config.json is what makes this a run directory.
    briefly(lambda: write_resolved(config, layout, commit), layout.config)
    briefly(lambda: write_inputs(layout, inputs), layout.inputs)
    briefly(lambda: _make(layout), layout.root)


def _refuse_living_jobs(layout: RunLayout, *, must_know: bool) -> None:
    """Raise for live jobs; must_know: False if Slurm may be missing; then a run without recent status has ended."""
    look = look_at_jobs((record.job_id for record in read_job_records(layout)), run_name=name_of_jobs(layout))
    living = sorted({row.job_id for row in look.rows if row.state.is_alive})
    if living:
        raise RunDirectoryError(
            f"{layout.root}: jobs of this run are queued or running: {', '.join(map(str, living))}; "
            f"`rlhpc stop {quoted(layout.root)}` stops them"
        )
    silent_s = time.time() - written_unix_s(layout.status)  # half a century without a status
    if look.trouble and (must_know or silent_s < LIVES_ELSEWHERE_S):
        raise RunDirectoryError(f"{layout.root}: jobs of this run may be queued or running: {look.trouble}")


def _refuse_complete(config: Config, layout: RunLayout) -> None:
    if layout.summary.exists() and config.run.num_steps <= read_resolved(layout)[0].run.num_steps:
        raise RunDirectoryError(
            f"{layout.root}: complete, {config.run.num_steps} steps; to continue, set "
            + ("sft.epochs or sft.num_steps" if config.is_supervised else "run.num_steps=M with a larger M")
        )


def _delete_contents(layout: RunLayout) -> None:
    """Delete a run, except the files that show that its launcher is alive, and a stop of this start.

    If it is interrupted, the rest counts as no run, and another --fresh deletes it.
    """
    if layout.config.exists():
        layout.config.rename(layout.being_deleted)
    for path in layout.root.iterdir():
        if path.name in OWN_FILES or path == layout.being_deleted or _is_stop_of_this_start(layout, path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    layout.being_deleted.unlink(missing_ok=True)


def _is_stop_of_this_start(layout: RunLayout, path: Path) -> bool:
    """True for a request of `rlhpc stop` made after this launcher had registered."""
    if path not in (layout.stop_request, layout.abort_request):
        return False
    try:
        return path.stat().st_mtime_ns >= layout.launcher.stat().st_mtime_ns
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class _Renewal:
    """Changes that a resume records."""

    changed: tuple[str, ...]
    inputs: Inputs


def _renewal(config: Config, layout: RunLayout) -> _Renewal:
    """Compare settings, model and data with those of the run; changes nothing.  Raises RunDirectoryError."""
    if not layout.is_run:
        raise RunDirectoryError(f"{layout.root}: no run to resume; start it without --resume")
    old, old_hash = read_resolved(layout)
    changed = _difference(old, config) if config_hash(config) != old_hash else ()
    may_move = MAY_MOVE if layout.inputs.exists() else ()
    settled = FIXED_BY_THE_FIRST_START if not config.is_supervised else (*OF_BATCHES, *FIXED_BY_THE_FIRST_START)
    fixed = [text for text in changed if text.startswith(settled) and not _is_of(text, may_move)]
    if fixed:
        raise RunDirectoryError(
            f"{layout.root}: these settings cannot change on resume: {'; '.join(fixed)}; legal: the old values, or "
            + (
                f"a new run (another run.name), also from the trained model (`rlhpc export {quoted(layout.root)} OUT`, "
                "model.path=OUT)"
                if saved_step(layout)
                else "--fresh, by which the run starts over: it has no checkpoint"
            )
        )
    return _Renewal(changed, refuse_other_inputs(config, layout))


def _go_back(
    config: Config,
    layout: RunLayout,
    resume_from: ResumePoint,
    renewal: _Renewal,
    tell: Tell,
    *,
    read_up_to_bytes: float = math.inf,
) -> tuple[int | None, list[str]]:
    """Record a resume, and set newer files than its checkpoint aside; returns its step, and descriptions of these."""
    choice = choose(layout, resume_from, tell, read_up_to_bytes=read_up_to_bytes)
    refuse_step(config, layout, choice.step or 0)
    write_inputs(layout, renewal.inputs)
    if renewal.changed:
        write_resolved(config, layout, _commit())
    _clear(layout)
    aside = put_aside(choice, tell)
    set_journal_aside(layout, resume_from, renewal.changed, num_attempts(layout), tell)
    _tell_of_quarantine(layout, config.admission.max_attempts, tell, is_lifted=resume_from.lift_quarantine)
    return choice.step, aside


def _tell_of_quarantine(layout: RunLayout, max_attempts: int, tell: Tell, *, is_lifted: bool) -> None:
    """Report quarantined prompts, and why; is_lifted: clear all suspicions."""
    file = LostLeaseFile(layout.lost_leases)
    try:
        book = LostLeases(file.read())
    except OSError as error:
        raise RunDirectoryError(f"{layout.lost_leases}: cannot be read: {error.strerror or error}") from error
    quarantined = [each for each in book.all if each.is_quarantined(max_attempts)]
    num, last = counted(len(quarantined), "prompt"), f" ({shortened(quarantined[-1].text)})" if quarantined else ""
    if not is_lifted:
        if quarantined:
            tell(f"{num} of earlier attempts stay quarantined{last}; --lift-quarantine samples them again")
        return
    book.lift()
    file.append(book)
    if book.unwritten:
        raise RunDirectoryError(f"{layout.lost_leases}: cannot be written, so --lift-quarantine would have no effect")
    tell(f"the quarantine of {num} is lifted{last}" if quarantined else "no prompt is quarantined")


def _clear(layout: RunLayout) -> None:
    """Delete files of earlier attempts, none of which is alive."""
    clear_rendezvous(layout)
    for stale in (layout.summary, layout.attempt, layout.stop_request, layout.abort_request):
        if not _is_stop_of_this_start(layout, stale):
            stale.unlink(missing_ok=True)
    for pattern in ("*.yield", "left_away.json"):  # Slurm may use their ids again
        for said in matching(layout.jobs, pattern):
            said.unlink(missing_ok=True)
    layout.failures.unlink(missing_ok=True)  # the user has decided to try again


def _make(layout: RunLayout) -> None:
    layout.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    for directory in (layout.rollouts, layout.checkpoints, layout.tensorboard, layout.logs):
        directory.mkdir(exist_ok=True)
    for directory in (layout.rendezvous, layout.weights):
        directory.mkdir(exist_ok=True, mode=0o700)


def _is_of(text: str, keys: tuple[str, ...]) -> bool:
    """True if a difference concerns one of these keys, in any dataset."""
    return re.sub(r"^(data|demonstrations)\.\d+\.", r"\1.", text).startswith(keys)


def _difference(old: Config, new: Config) -> tuple[str, ...]:
    """Lines "key: old → new"; for added or removed tables only their names."""
    several = [name for name in SEVERAL if len(getattr(old, name)) != len(getattr(new, name))]
    stay = {each.title for each in old.evaluation} & {each.title for each in new.evaluation}
    before, after = (_flatten(each.model_dump(mode="json", exclude=set(several))) for each in (old, new))
    for name in several:
        for flat, config in ((before, old), (after, new)):
            flat[f"{name}.name"] = ", ".join(getattr(each, "title", str(each.path)) for each in getattr(config, name))
            if name == "evaluation":
                tables = {each.title: each.model_dump(mode="json") for each in config.evaluation if each.title in stay}
                flat |= _flatten(tables, "evaluation.")
    return tuple(f"{key}: {before.get(key)!r} → {value!r}" for key, value in after.items() if before.get(key) != value)


def _flatten(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):  # several tables, or the only one
            value = value[0] if len(value) == 1 else {str(place): table for place, table in enumerate(value)}
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _commit() -> str:
    """Commit of the running code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
