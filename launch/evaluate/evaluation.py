"""Evaluations on this machine: everything checked, samples drawn, figures written.

Input: targets and a request.  Output: Reports, and the files of each evaluation's directory.  Evaluations of adapters
on one model are drawn together, by engines that load the model once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from launch.checks.model_files import refuse_made_up_tensors
from launch.checks.preflight import preflight_sampling
from launch.common.text import aligned, counted, span, without_dots
from launch.doctor.gpus import gpus_here
from launch.evaluate.request import Request, Target, evaluation_config, of_run_file, target_of, with_adapter
from launch.plan.gpu_map import VARIABLE, GpuMap, map_gpus
from launch.run_directory.inputs import look_at_data
from launch.run_files.records import last_error_in
from launch.run_files.run_state import read_progress
from launch.supervisor.local_run import private_temporary_directory
from launch.supervisor.role_task import caches_below
from rlhpc.base.files import PRIVATE, leave_deleted_directory, write_atomically
from rlhpc.base.ownership import DirectoryLock, LockHeld
from rlhpc.base.processes import die_with
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config, with_values
from rlhpc.config.tables import DataConfig
from rlhpc.data.validation import DatasetSummary
from rlhpc.metrics.evaluations import (
    NAME,
    SUMMARY,
    Estimate,
    EvaluatedSample,
    EvaluationSettings,
    JudgedSample,
    estimates,
    read_samples,
    read_settings,
)
from rlhpc.models.adapter import base_digest, base_name
from rlhpc.protocol.errors import ConfigError, DataError, RlhpcError, RoleFailed, RunDirectoryError
from rlhpc.protocol.types import FinishReason, Verdict

# ------------------------------------------------------------------------------------------------------------ directory
#
# The directory of an evaluation: one command at a time, one kind of samples.
#
# Input: settings, and files of an earlier command.  Output: the directory, locked, ready to be continued.


LOCK = RunLayout(Path()).lock.name
_SILENT_S = 120.0  # a run whose controller has written no status for so long does not live
_ADVICE = "--out DIRECTORY keeps both; --fresh deletes these samples"
LONGEST_VALUE = 80  # characters of a value in a message


class DirectoryInUse(RunDirectoryError):
    """Another command is using the directory."""


@contextmanager
def evaluation_directory(
    directory: Path, settings: EvaluationSettings, *, is_fresh: bool, tell: Callable[[str], None]
) -> Iterator[DirectoryLock]:
    """Own the directory while the block runs, with these settings written to it.

    is_fresh: delete its content first.  Raises DirectoryInUse; RunDirectoryError: it holds other files, or samples of
    other settings; ConfigError: settings that cannot be read.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    unfinished = f".{NAME}."  # prefix of a file that a command was writing when it was killed
    names = {path.name for path in directory.iterdir() if not path.name.startswith(unfinished)}
    if names - {LOCK} and NAME not in names:
        raise RunDirectoryError(f"{directory}: not empty, and not an evaluation; choose another directory with --out")
    try:
        lock = DirectoryLock.take(RunLayout(directory))
    except LockHeld:
        raise DirectoryInUse(f"{directory}: another `rlhpc evaluate` is running there") from None
    try:
        if not is_fresh or not _is_ours(directory):
            _refuse_other_samples(directory, settings)
        elif (directory / NAME).exists():
            tell(f"{directory} is deleted, and the evaluation starts over")
            _clear(directory)
        settings.write(directory)
        yield lock
    finally:
        lock.release()


def _is_ours(directory: Path) -> bool:
    """Whether a directory holds the settings of an evaluation, of any version of rlhpc, or none."""
    try:
        document = json.loads((directory / NAME).read_bytes())
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(document, dict) and {"config", "samples_per_prompt"} <= document.keys()


def unlike_samples(directory: Path, settings: EvaluationSettings) -> set[str]:
    """Names of settings in which existing samples differ from these.  Raises ConfigError."""
    before = read_settings(directory)
    return set() if before is None else _unlike(before, settings)


def _unlike(before: EvaluationSettings, now: EvaluationSettings) -> set[str]:
    old, new = before.identity, now.identity
    return {key for key in {*old, *new} if old.get(key) != new.get(key)}


def _refuse_other_samples(directory: Path, now: EvaluationSettings) -> None:
    try:
        before = read_settings(directory)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{_ADVICE}" if _is_ours(directory) else str(error)) from error
    if before is None:
        return
    old, new = before.identity, now.identity
    lines = [
        f"  {key}: {_shown(new.get(key))}, of the samples {_shown(old.get(key))}"
        for key in sorted(_unlike(before, now))
    ]
    if lines:
        head = f"{directory}: holds samples of another evaluation:"
        raise RunDirectoryError("\n".join([head, *lines, _ADVICE]))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _clear(directory: Path) -> None:
    """Delete all but the lock; the settings last, so that a partly cleared directory is still known as ours."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


# -------------------------------------------------------------------------------------------------------------- preview
#
# The [[evaluation]] tables of a run file, checked before a run starts.
#
# Input: Config.  Output: lines for people; a ConfigError for settings with which an evaluation would fail.


def preview_evaluations(config: Config, *, roles_run_here: bool = True, has_gpus: bool = True) -> list[str]:
    """Return a line for each table.  Raises ConfigError, whose text names the table.

    roles_run_here: False if engines run in another environment than this process.  has_gpus: whether they have GPUs.
    """
    target = target_of(config)
    said = []
    for request in of_run_file(config):
        data, found = _look(target, request, roles_run_here, has_gpus)
        said.append(f"evaluation  {request.name}: {counted(found.num_records, 'record')}")
        said += [f"warning     [evaluation] {request.name}: {each}" for each in _doubts(config, request, data, found)]
    return said


def _doubts(config: Config, request: Request, data: DataConfig, found: DatasetSummary) -> Iterator[str]:
    """Yield reasons why the figures of an evaluation would mean less than they seem to."""
    if request.prompts is not None and request.prompts > found.num_records:
        yield f"prompts={request.prompts}, and the dataset has {counted(found.num_records, 'record')}: all are taken"
    for trained in config.data:
        if data.path and trained.path and data.path.resolve() == trained.path.resolve() and data.split == trained.split:
            yield f"path={str(data.path)!r} is what data.path trains on: its figures say how well that was remembered"


def _look(target: Target, request: Request, roles_run_here: bool, has_gpus: bool) -> tuple[DataConfig, DatasetSummary]:
    try:
        settings = evaluation_config(target, request.data, request.words, has_gpus=has_gpus)
        return settings.data[0], preflight_sampling(settings, roles_run_here=roles_run_here).datasets[0]
    except ConfigError as error:
        raise ConfigError(f"[evaluation] {request.name}: {error}") from error


# ------------------------------------------------------------------------------------------------------------ processes
#
# The processes of an evaluation: started, watched, ended.
#
# Input: the directory of an evaluation, GPUs.  Output: logs and samples in the directory.  A process that fails ends
# the others; all end with this one.


BLOCK_BYTES = 1 << 20
LOOK_S = 0.2
FIRST_WORD_S, WORD_S = 10.0, 30.0  # between two lines about progress: at first, and later
END_S = 10.0  # for a process that was asked to end; then it is killed


@contextmanager
def caches_on_this_node() -> Iterator[None]:
    """Keep caches on this node in a Slurm job: engines compile once, and not into a home on a network.

    As for a run (role_task.py).  Caches that the user's environment sets are left as they are.
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    directory = private_temporary_directory()
    places = {variable: place for variable, place in caches_below(directory).items() if variable not in os.environ}
    os.environ.update(places)
    try:
        yield
    finally:
        for variable in places:
            os.environ.pop(variable, None)
        shutil.rmtree(directory, ignore_errors=True)


def sample_all(
    evaluations: Mapping[Path, EvaluationSettings],
    gpus: GpuMap,
    descriptors: Sequence[int],
    tell: Callable[[str], None],
) -> None:
    """Draw the missing samples of directories with generation.num_replicas processes.

    descriptors: of the directories' locks, kept by the processes.  Raises RoleFailed; KeyboardInterrupt, also for
    SIGTERM.
    """
    directories = [*evaluations]
    num_shares = evaluations[directories[0]].config.generation.num_replicas
    count = _SampleCount(directories)
    progress = _Progress(sum(each.num_samples for each in evaluations.values()), count.look(), tell)
    with ExitStack() as stack:
        temporary = private_temporary_directory()
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        stack.enter_context(_sigterm_interrupts())
        running: dict[int, subprocess.Popen[bytes]] = {}
        stack.callback(lambda: end_all(running.values(), END_S))
        for index in range(num_shares):
            running[index] = _start(directories, index, num_shares, gpus, descriptors, temporary)
        while running:
            time.sleep(LOOK_S)
            progress.show(count.look())
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode != 0:
                    raise RoleFailed(_why(directories[0], index, process.returncode))


def _log(directory: Path, index: int) -> Path:
    return directory / f"evaluator-{index}.log"


def _start(
    directories: Sequence[Path],
    index: int,
    num_shares: int,
    gpus: GpuMap,
    descriptors: Sequence[int],
    temporary: Path,
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if (devices := gpus.variable(f"generator-{index}")) is not None:
        environment[VARIABLE] = devices
    places = map(str, directories)
    words = [sys.executable, "-P", "-m", "rlhpc.roles.evaluator", *places, "--share", f"{index}/{num_shares}"]
    leave_deleted_directory(directories[0])
    with _log(directories[0], index).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then asks the others
            pass_fds=descriptors,
            preexec_fn=partial(die_with, os.getpid()),  # this process has one thread
        )


def end_all(processes: Collection[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Ask processes to end; kill each that has not after patience_s."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _why(directory: Path, index: int, status: int) -> str:
    log = _log(directory, index)
    words = last_error_in(log)
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"evaluator-{index} ended with {how}: {words or 'its log says no more'}; see {log}"


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM, from Slurm or `kill`, into KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _SampleCount:
    """Counts the samples that all processes have written, without reading a line twice."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._read: dict[Path, int] = {}  # bytes read of each file
        self._num_lines = 0

    def look(self) -> int:
        """Count whole lines of all files.  Raises OSError."""
        for path in (path for directory in self._directories for path in directory.glob("samples-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while block := file.read(BLOCK_BYTES):
                    self._num_lines += block.count(b"\n")
                self._read[path] = file.tell()
        return self._num_lines


class _Progress:
    """Reports progress from time to time."""

    def __init__(self, num_samples: int, num_done: int, tell: Callable[[str], None]) -> None:
        self._num_samples, self._first, self._tell = num_samples, num_done, tell
        self._told_s, self._pause_s = time.monotonic(), FIRST_WORD_S
        self._began: tuple[float, int] | None = None  # time and number of samples when the first new one was written

    def show(self, num_done: int) -> None:
        now = time.monotonic()
        if self._began is None and num_done > self._first:
            self._began = now, num_done
        if now - self._told_s < self._pause_s:
            return
        self._told_s, self._pause_s = now, WORD_S
        left = "" if self._began is not None else ", engines are starting"
        if self._began is not None and num_done > self._began[1]:
            rate = (num_done - self._began[1]) / (now - self._began[0])
            left = f", {span(int((self._num_samples - num_done) / rate))} left"
        self._tell(f"{num_done} of {self._num_samples} samples{left}")


# --------------------------------------------------------------------------------------------------------------- report
#
# The figures of an evaluation: a table for people, and summary.json.
#
# Input: settings and samples.  Output: text and a document.


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of an evaluation."""

    title: str
    temperature: float
    samples_per_prompt: int
    num_prompts: int
    figures: dict[str, Estimate]
    mean_tokens: float  # of a completion
    truncated_share: float  # of completions
    num_not_judged: int  # samples with a verifier error

    def as_json(self) -> dict[str, Any]:
        """Content of summary.json."""
        return asdict(self)

    def as_text(self) -> str:
        """Table with a line for each figure, with its 95 % interval."""
        how = "the most likely tokens" if self.temperature == 0 else f"temperature {self.temperature:g}"
        lines = [
            f"{self.title}: {counted(self.num_prompts, 'prompt')} × {counted(self.samples_per_prompt, 'sample')}, {how}"
        ]
        rows = [
            (f"  {name}", f"{each.value:.3f}", f"[{each.low:.3f}, {each.high:.3f}]", self._of_prompts(each))
            for name, each in self.figures.items()
        ]
        lines += aligned(rows)
        lines.append(f"  {self.mean_tokens:.0f} tokens on average, {100 * self.truncated_share:.1f} % cut off")
        if self.num_not_judged:
            lines.append(f"  left out: {counted(self.num_not_judged, 'sample')} that no verifier could judge")
        return "\n".join(lines)

    def _of_prompts(self, estimate: Estimate) -> str:
        return "" if estimate.num_prompts == self.num_prompts else f"of {estimate.num_prompts} prompts"


def wanted_samples(settings: EvaluationSettings, samples: Iterable[EvaluatedSample]) -> list[EvaluatedSample]:
    """Samples that the settings require, each once; an earlier command may have drawn more.

    Returned without their texts, which take most of the memory and are in no figure.
    """
    found = {
        (each.prompt, each.sample): replace(each, completion="", detail="", parts={})
        for each in samples
        if each.prompt < settings.num_prompts and each.sample < settings.samples_per_prompt
    }
    return [*found.values()]


def report_of(settings: EvaluationSettings, samples: Iterable[EvaluatedSample]) -> Report | None:
    """Compute the figures; None if required samples are missing."""
    found = wanted_samples(settings, samples)
    if len(found) < settings.num_samples:
        return None
    judged: defaultdict[int, list[JudgedSample]] = defaultdict(list)
    for each in found:
        if each.verdict != Verdict.VERIFIER_ERROR.value:
            is_correct = each.verdict == Verdict.CORRECT.value
            judged[each.prompt].append(JudgedSample(is_correct, each.answer, each.reward))
    return Report(
        title=settings.title,
        temperature=settings.temperature,
        samples_per_prompt=settings.samples_per_prompt,
        num_prompts=settings.num_prompts,
        figures=estimates([judged[prompt] for prompt in range(settings.num_prompts)], settings.samples_per_prompt),
        mean_tokens=float(np.mean([each.num_tokens for each in found])),
        truncated_share=float(np.mean([each.finish_reason == FinishReason.LENGTH.value for each in found])),
        num_not_judged=len(found) - sum(map(len, judged.values())),
    )


# ----------------------------------------------------------------------------------------------------------- evaluation


MODEL = "model"  # in the directory, while samples are drawn: HF checkpoint with the weights of a run's checkpoint
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: target, request, settings, and the directory of its samples."""

    target: Target
    request: Request
    settings: EvaluationSettings
    directory: Path

    def report(
        self,
        tell: Tell,
        *,
        is_fresh: bool = False,
        done: Done = lambda *_: None,
        remind: Callable[[], None] = lambda: None,
    ) -> Report:
        """Draw missing samples and return the figures.

        Raises CheckpointError, RunDirectoryError, RoleFailed and as report_together.
        """
        (outcome,) = report_together([self], tell, fresh=[self.directory] if is_fresh else [], done=done)
        if not isinstance(outcome, Report):
            raise outcome
        return outcome

    def shares_engines(self, other: Evaluation) -> bool:
        """Return whether both evaluate adapters that one engine can hold together."""
        one, two = (with_values(each.settings.config, {**_SCALE, "lora.initial": None}) for each in (self, other))
        is_alike = one == two and self.settings.inputs.get("base") == other.settings.inputs.get("base")
        return one.lora.rank > 0 and is_alike

    def begin(self) -> EvaluationSettings:
        """Write the settings, and the model for engines to load.  Raises CheckpointError, ConfigError, OSError."""
        model, config = self.directory / MODEL, self.settings.config
        shutil.rmtree(model, ignore_errors=True)  # of a command that was killed
        is_adapter = config.lora.rank > 0
        key = "lora.initial" if is_adapter else "model.path"
        values = {key: self.target.weights(model, as_adapter=is_adapter)}
        settings = replace(self.settings, config=with_values(config, values))
        settings.write(self.directory)
        return settings

    def drawn(self, settings: EvaluationSettings, done: Done, failure: Exception | None) -> Report:
        """Return the figures if all samples are there.  Raises `failure`, or RoleFailed, or an exception of `done`."""
        report = report_of(settings, read_samples(self.directory))
        if report is None:
            words = "its processes were asked to end; the same command draws the other samples"
            raise failure or RoleFailed(f"{self.directory}: {words}")
        done(self, report, settings.config.lora.initial or settings.config.model.path)
        return report

    def finish(self, report: Report, tell: Tell) -> Report:
        """Write the figures.  Raises OSError."""
        attempt = self.target.attempt
        document = report.as_json() | ({} if attempt is None else {"attempt": attempt})
        write_atomically(self.directory / SUMMARY, json.dumps(document, indent=1).encode())
        tell(f"all samples are in {self.directory}")
        return report

    def how_far(self) -> str:
        """Describe the progress after an interruption; faults in the samples are ignored."""
        try:
            number = sum(1 for _ in read_samples(self.directory))
        except (DataError, OSError):
            return f"{self.directory}: its samples cannot be counted"
        where = f"{number} of {self.settings.num_samples} samples are in {self.directory}"
        return f"{where}; the same command draws the others"


Done = Callable[[Evaluation, Report, Path], None]
_SCALE = {"lora.alpha": 1.0, "lora.rslora": False}  # keys in which adapters of one engine may differ


def side_by_side(evaluations: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Group evaluations that can be drawn by the same engines."""
    groups = list[list[Evaluation]]()
    for each in evaluations:
        group = next((group for group in groups if each.shares_engines(group[0])), None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    return groups


def report_together(
    evaluations: Sequence[Evaluation],
    tell: Tell,
    *,
    fresh: Collection[Path] = (),
    done: Done = lambda *_: None,
    remind: Callable[[], None] = lambda: None,
) -> list[Report | Exception]:
    """Draw missing samples of evaluations by the same engines; return the figures of each, or its exception.

    A failing evaluation does not stop the others.  fresh: directories whose content is deleted first.
    done: called with new figures and the model, an HF checkpoint or PEFT adapter, which it may move away.
    remind: called twice a minute while samples are drawn, and then alone; it may raise.
    Raises ConfigError; KeyboardInterrupt that describes the progress.
    """
    outcomes = dict[int, Report | Exception]()
    drawn = dict[int, EvaluationSettings]()
    descriptors = list[int]()

    def tell_in_time(line: str) -> None:
        remind()
        tell(line)

    with ExitStack() as stack:
        for place, each in enumerate(evaluations):
            try:
                is_fresh = each.directory in fresh
                owned = evaluation_directory(each.directory, each.settings, is_fresh=is_fresh, tell=tell)
                descriptors.append(stack.enter_context(owned).descriptor)
                report = report_of(each.settings, read_samples(each.directory))
                if report is not None and (each.directory / SUMMARY).exists():
                    outcomes[place] = each.finish(report, tell)
                else:  # samples are missing, or `done` was interrupted
                    stack.callback(shutil.rmtree, each.directory / MODEL, ignore_errors=True)
                    drawn[place] = each.begin()
            except (RlhpcError, OSError) as error:
                outcomes[place] = error
        try:
            failure = _failure_of(partial(_sample, evaluations, drawn, descriptors, tell_in_time))
            for place, settings in drawn.items():
                try:
                    report = evaluations[place].drawn(settings, done, failure)
                    outcomes[place] = evaluations[place].finish(report, tell)
                except (RlhpcError, OSError) as error:
                    outcomes[place] = error
        except KeyboardInterrupt:
            raise KeyboardInterrupt("\n".join(evaluations[place].how_far() for place in drawn)) from None
    return [outcomes[place] for place in range(len(evaluations))]


def _sample(
    evaluations: Sequence[Evaluation],
    drawn: Mapping[int, EvaluationSettings],
    descriptors: Sequence[int],
    tell: Tell,
) -> None:
    if drawn:
        gpus = map_gpus(evaluations[0].settings.config, gpus_here(os.environ))
        sample_all({evaluations[place].directory: each for place, each in drawn.items()}, gpus, descriptors, tell)


def _failure_of(draw: Callable[[], None]) -> Exception | None:
    """Draw, and return the failure: evaluations that are complete have figures all the same."""
    try:
        draw()
    except (RlhpcError, OSError) as error:
        return error
    return None


def plan_evaluation(target: Target, request: Request, *, runs_here: bool = True) -> Evaluation:
    """Check a request and plan its evaluation; writes nothing.  Raises ConfigError, DataError.

    runs_here: False if its processes run on another machine.
    """
    target = with_adapter(replace(target, is_average=request.is_average))
    gpus = gpus_here(os.environ) if runs_here else None
    config = evaluation_config(target, request.data, request.words, has_gpus=gpus is None or bool(gpus.words))
    if gpus is not None:
        map_gpus(config, gpus)
    findings = preflight_sampling(config, roles_run_here=runs_here)
    refuse_made_up_tensors(config.model.path, findings.model)
    num_records = findings.datasets[0].num_records
    settings = EvaluationSettings(
        config=config,
        title=f"{target.title} on {request.name}",
        samples_per_prompt=request.samples,
        num_prompts=min(num_records, request.prompts or num_records),
        temperature=request.temperature,
        inputs={
            "model": target.digest,
            "data": [entry.digest for entry in look_at_data(request.data, config.data[0].split).values()],
            **_base(config),
            **_corpus(config),
            **_judge_template(config),
        },
        rendezvous=_rendezvous_of_services(target, config),
    )
    directory = request.out or target.home / f"{target.title}-{request.name}"
    return Evaluation(target, request, settings, without_dots(directory))


def _rendezvous_of_services(target: Target, config: Config) -> str:
    """Directory with addresses of the run's services that the task asks; "" if it asks none.

    Raises ConfigError if the run does not live.
    """
    asked = [each for task in config.data_tasks for each in config.services_asked_by(task) if each.path is not None]
    if not asked:
        return ""
    layout = RunLayout(_directory_of(target))
    progress = read_progress(layout)
    if progress is None or progress.is_over or progress.age_s > _SILENT_S:
        words = f'service=[{{ name = "{asked[0].name}", kind = "{asked[0].kind}", url = "http://HOST:PORT/v1" }}]'
        raise ConfigError(
            f"data.task={config.data[0].task!r} asks service {asked[0].name!r}, which lives as long as its run, and "
            f"the run does not; legal: the address of a server with this model, {words}, or another data.task"
        )
    return str(layout.rendezvous)


def _directory_of(target: Target) -> Path:
    """Directory of the run whose settings a target has; it may have been moved since."""
    if target.checkpoint is not None:
        return target.checkpoint.parent.parent
    if target.run is not None and RunLayout(target.run).is_run:
        return target.run
    return target.home if target.settings is None else target.settings.run_directory


def delete_exports(evaluations: Path) -> None:
    """Delete weights that killed commands have left below this directory; those of running commands stay."""
    for model in evaluations.glob(f"*/{MODEL}"):
        if (model.parent / NAME).exists():
            with suppress(LockHeld):
                lock = DirectoryLock.take(RunLayout(model.parent))
                shutil.rmtree(model, ignore_errors=True)
                lock.release()


def _base(config: Config) -> dict[str, str]:
    """Name of the base if adapters are evaluated, not merged weights."""
    return {"base": base_name(config.lora, base_digest(config.model.path))} if config.lora.rank else {}


def _corpus(config: Config) -> dict[str, list[str]]:
    """Digest of the corpus that environments search, if there is one."""
    corpus = config.environment.corpus
    return {} if corpus is None else {"corpus": [entry.digest for entry in look_at_data(corpus).values()]}


def _judge_template(config: Config) -> dict[str, str]:
    """Digest of the file with the judge's prompt, if there is one.  Raises ConfigError."""
    file = config.judge.template_file
    if not file or not any("llm_judge" in config.parts_of(task) for task in config.data_tasks):
        return {}
    try:
        return {"judge.template_file": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
    except OSError as error:
        raise ConfigError(f"judge.template_file={file!r} cannot be read: {error.strerror}") from error
