"""The site file: where runs run.  Partitions, GPUs, time limits, accounts, and the software to load on a node.

Input: TOML.  Output: Site.  Unknown keys are refused.  slurm/sites/example.toml explains every key; slurm/README.md
lists all.  Keys mean the same as in Slurm; how much a run requests is derived from its run file (jobs.py).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from rlhpc.config.file import OF_RUN_FILES, OF_SITE_FILES, fault_lines, sections, unknown_key
from rlhpc.config.setting import LoosePath, NonNegative, Positive, PositiveFloat, Section
from rlhpc.config.tables_services import Name
from rlhpc.config.toml import beyond_64_bits, read_toml, shown
from rlhpc.protocol.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------- site values
#
# Types of site-file values that are copied into a job script unchanged: words, times, directives, shell names.
#
# Each type refuses what would break a script, or what Slurm would interpret differently from what it seems to say.

T = TypeVar("T")

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
LONGEST_S = 366 * DAY_S  # nobody means more, and Slurm counts minutes in 32 bits
_TIME_FORMS = 'minutes (240), "H:MM:SS", "D-HH", "D-HH:MM" or "D-HH:MM:SS"'
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")

# Directives that the plan writes itself, and the key that sets each.
OWN_DIRECTIVES = {
    name: key
    for key, names in {
        "partition": "partition p", "time": "time t", "account": "account A", "qos": "qos q",
        "constraint": "constraint C", "reservation": "reservation", "exclusive": "exclusive", "nodes": "nodes N",
        "gres, or for GPUs gpus_per_node, gres_type and gpu_request": "gres",
        "gpus_per_node and gpu_request": "gpus G gpus-per-node gpus-per-task gpus-per-socket",
        "cpus_per_gpu": "cpus-per-gpu", "cpus_per_task or cpus_per_gpu": "cpus-per-task c",
        "memory_gib_per_task or memory_gib_per_gpu": "mem",
        "cluster.mail": "mail-user", "cluster.mail_events": "mail-type", "cluster.warn_s": "signal",
        "RLHPC_SLURM_CLUSTER=NAME in the environment of every command": "clusters cluster M",
    }.items()
    for name in names.split()
}  # fmt: skip
# Directives that would break the plan; no key sets them.
FOREIGN_DIRECTIVES = {
    "ntasks", "n", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "tres-per-task",
    "array", "a", "output", "o", "error", "e", "open-mode", "job-name", "J", "requeue", "no-requeue", "dependency", "d",
    "chdir", "D", "no-kill", "k", "wrap", "hold", "H", "mem-per-cpu", "mem-per-gpu", "export", "export-file", "wait",
    "W", "test-only", "parsable", "hetjob", "het-group", "uid", "gid", "quiet", "Q", "help",
    "h", "usage", "u", "version", "V",
}  # fmt: skip
_LONG_OPTIONS = sorted(name for name in {*OWN_DIRECTIVES, *FOREIGN_DIRECTIVES} if len(name) > 1)
_NO_VALUE = "HkOsQvWhuV"  # short options that others may follow in one word


def walltime_s(value: object) -> int:
    """Seconds of a time limit.  Raises ValueError: not one of the forms, a form that reads two ways, zero, or years."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    seconds = _seconds_of_text(value)
    if seconds <= 0:
        raise ValueError(f"must be longer than 0; legal: {_TIME_FORMS}")
    if seconds > LONGEST_S:
        raise ValueError(f"longer than a year; legal: up to {LONGEST_S // DAY_S} days, {_TIME_FORMS}")
    return seconds


def _seconds_of_text(value: object) -> int:
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"not a time limit; legal: {_TIME_FORMS}")
    days, first, second, third = (match[name] for name in ("days", "first", "second", "third"))
    if days is None and second is None:
        return int(first) * MINUTE_S  # as Slurm reads it
    if days is None and third is None:
        raise ValueError(f'Slurm reads this as minutes and seconds; legal: "{first}:{second}:00" for hours, "{first}"')
    if int(second or 0) > 59 or int(third or 0) > 59 or (days is not None and int(first) > 23):
        raise ValueError(f"not a time of day; legal: {_TIME_FORMS}")
    return int(days or 0) * DAY_S + int(first) * HOUR_S + int(second or 0) * MINUTE_S + int(third or 0)


def slurm_time(seconds: int) -> str:
    """Write a time limit as Slurm does: "4:00:00", "2-12:00:00"."""
    days, rest = divmod(seconds, DAY_S)
    hours, minutes, seconds = rest // HOUR_S, rest // MINUTE_S % 60, rest % 60
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"


def _directive(value: str) -> str:
    """One directive without the "#SBATCH ", as it will stand in the script."""
    wrong = ValueError('not a directive; legal: the part after #SBATCH, such as "--licenses=matlab:1"')
    if not re.fullmatch(r"--[a-z][a-z0-9-]*([= ].*)?|-[A-Za-z].*", value) or not value.isprintable():
        raise wrong
    try:
        words = shlex.split(value)
    except ValueError:
        raise wrong from None
    for word in words:  # sbatch reads several options of one line
        for name in _options_of(word):
            _refuse_option(name)
    return value


def _options_of(word: str) -> list[str]:
    """Option names in one word: "--time=1", "-t1", "-Wt1" (W takes no value); none in a separate value."""
    if word.startswith("--"):
        return [word[2:].partition("=")[0]]
    letters = word[1:] if word.startswith("-") else ""
    bare = len(letters) - len(letters.lstrip(_NO_VALUE))
    return list(letters[: bare + 1])


def _refuse_option(name: str) -> None:
    known = name in OWN_DIRECTIVES or name in FOREIGN_DIRECTIVES
    # sbatch takes abbreviations.  No option of its own is the beginning of one of these without being one of these.
    full = name if known or len(name) < 2 else next((o for o in _LONG_OPTIONS if o.startswith(name)), name)
    said = "" if full == name else f"sbatch may read it as --{full}: "
    if full in OWN_DIRECTIVES:
        raise ValueError(f"{said}set by a separate key; legal: {OWN_DIRECTIVES[full]}")
    if full in FOREIGN_DIRECTIVES:
        raise ValueError(f"{said}the plan relies on its own value of this directive")


def _shell_line(value: str) -> str:
    if not value.strip() or "\n" in value:
        raise ValueError("not a single line of shell")
    if value.endswith("\\"):
        raise ValueError("a line that ends in a backslash would join the next one, which checks its exit status")
    return value


Several = Annotated[tuple[T, ...], Field(strict=False)]  # TOML has lists; a frozen site has tuples
# A word of a directive.  No space, quote, backslash or #: these have a special meaning to sbatch.
_WORD = r"^[^\s\"'\\#-][^\s\"'\\#]*$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Not NCCL's "^lo" or "=eth0": gloo takes names alone.
_INTERFACE = r"^[A-Za-z0-9][A-Za-z0-9._@-]*(,[A-Za-z0-9][A-Za-z0-9._@-]*)*$"
_BIND = r"^/[^\s,]*$"
IN_WORDS = {
    _WORD: "one word without spaces, quotes, backslashes and #, that does not begin with -",
    _VARIABLE: "letters, digits and _, no digit first",
    _INTERFACE: "the name of a network interface, or several with commas",
    _BIND: "an absolute path without spaces and commas",
}
Word = Annotated[str, StringConstraints(pattern=_WORD)]
Walltime = Annotated[int, BeforeValidator(walltime_s), WithJsonSchema({"type": ["integer", "string"]})]
Directive = Annotated[str, AfterValidator(_directive)]
ShellLine = Annotated[str, AfterValidator(_shell_line)]
VariableName = Annotated[str, StringConstraints(pattern=_VARIABLE)]
Interface = Annotated[str, StringConstraints(pattern=_INTERFACE)]
Bind = Annotated[str, StringConstraints(pattern=_BIND)]


# ------------------------------------------------------------------------------------------------------------ site file


# GiB that CUDA reports as the whole of a GPU, rounded down: less than the name says, which counts in GB.
GPU_MEMORY_GIB = {
    "a100-40": 39.3, "a100-80": 79.1, "h100": 79.1, "h100-94": 93.0, "h200": 139.7, "b200": 178.0, "gh200": 94.5,
    "l4": 22.0, "l40s": 44.3, "a40": 44.3, "a6000": 47.4, "rtx4090": 23.5, "v100-16": 15.7, "v100-32": 31.7,
}  # fmt: skip

GpuRequest = Literal["gres", "gpus-per-node", "gpus-per-task"]
Placement = Literal["hetjob", "jobs"]
Continuation = Literal["requeue", "successor"]
MailEvent = Literal["BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT_90", "ALL"]


def _refuse_without(section: Section, key: str, other: str) -> None:
    """Raise ValueError if `key` is given without `other`, without which it has no effect."""
    value = getattr(section, key)
    if value != type(section).model_fields[key].default:
        raise ValueError(f"{key}={value!r}: has no effect without {other}; legal: both, or neither")


class ClusterConfig(Section):
    """[cluster]: settings of the whole run."""

    name: Word = "cluster"
    """Name of the cluster; appears in plans and scripts."""
    shared_directory: LoosePath
    """Absolute path shared by login and compute nodes; run directories must lie in it."""
    placement: Placement = "hetjob"
    """hetjob: one heterogeneous job, all or nothing.  jobs: one job per role and service, replicas an array, in any
    order."""
    mail: Word | None = None
    """Address that Slurm writes to."""
    mail_events: Several[MailEvent] = ("END", "FAIL")
    """Events that Slurm reports by mail; none without `mail`."""
    warn_s: Positive = 600
    """Seconds before the time limit at which Slurm signals the batch step; at most a quarter of the limit, and no
    signal in a job shorter than five minutes."""
    continuation: Continuation = "requeue"
    """requeue: a job is requeued before its time limit.  successor: the next job is submitted ahead, to begin when this
    one ends, for sites that forbid requeue."""
    max_retries: NonNegative = 5
    """Consecutive failed attempts before the run is given up; a new checkpoint resets the count."""
    meet_s: Positive = 1800
    """Seconds that a role waits for the other roles, before it reports which are missing and exits."""
    stall_s: Positive = 3600
    """Seconds without an optimiser step after which a run reports the cause and frees its nodes."""

    @model_validator(mode="after")
    def _path_is_absolute(self) -> Self:
        if not self.shared_directory.is_absolute():
            raise ValueError(f"shared_directory={str(self.shared_directory)!r}: legal: an absolute path")
        return self

    @model_validator(mode="after")
    def _mail_has_an_address(self) -> Self:
        if self.mail is None:
            _refuse_without(self, "mail_events", "mail")
        return self


class CommonConfig(Section):
    """[common]: keys that apply to every component whose own section does not set them."""

    partition: Word | None = None
    """Partition, or several with commas; none: the cluster's default."""
    time: Walltime | None = None
    """Time limit: minutes, or text such as "4:00:00" or "2-12:00:00".  A plan needs it."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that nodes must have, in Slurm's syntax: "ib&nvme"."""
    reservation: Word | None = None
    """Reservation to run in."""
    gres: Word | None = None
    """More generic resources than the plan's GPUs, in Slurm's syntax: "lscratch:200"; of a component that uses no GPU
    also "gpu:1", for partitions that take no job without one."""
    exclusive: bool = False
    """Whole nodes for this component alone."""
    extra: Several[Directive] = ()
    """More directives, verbatim: "--licenses=x:1".  Directives that a key or the plan sets are refused."""


class ControllerConfig(CommonConfig):
    """[controller]: one task without a GPU, on the node where the batch step runs."""

    cpus_per_task: Positive | None = None
    """CPU cores of one task; none: from the run file."""
    memory_gib_per_task: NonNegative | None = None
    """GiB (2^30 bytes) of host memory of one task; 0: all of the node; none: what the partition gives."""


class RewardsSection(ControllerConfig):
    """[rewards]: reward services, without GPUs.  Without this section they run beside the controller."""

    nodes: Positive | None = None
    """Nodes; none: one."""


class GpuConfig(CommonConfig):
    """[trainer], [generation], [service.NAME], [evaluation]: the processes that compute.

    A task is a trainer rank, or a replica of an engine; one node and one task for all engines of an evaluation.
    Services and evaluations without a section have [generation]'s.
    """

    gpu: str | None = None
    """Name of the GPU; GPU_MEMORY_GIB lists those whose memory is known."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB (2^30 bytes), as torch.cuda.get_device_properties reports it; none: from the name."""
    gpus_per_node: Positive | None = None
    """GPUs of one node; none: no GPU is asked for."""
    gpu_request: GpuRequest = "gres"
    """How GPUs are requested at this site: --gres=gpu:TYPE:N, --gpus-per-node or --gpus-per-task."""
    gres_type: Word | None = None
    """TYPE alone, as `sinfo -o %G` shows it between the colons of gpu:TYPE:N; none: any GPU of the partition."""
    nodes: Positive | None = None
    """Nodes; none: as few as the tasks need."""
    cpus_per_gpu: Positive | None = None
    """CPU cores for each GPU of a task, at least for one; none: 4."""
    memory_gib_per_gpu: NonNegative | None = None
    """GiB of host memory for each GPU, at least for one; 0: all of the node; none: the partition's default."""

    @property
    def memory_gib(self) -> float | None:
        """Memory of one GPU, as given or by its name; None: the section has neither."""
        return self.gpu_memory_gib or (None if self.gpu is None else GPU_MEMORY_GIB[self.gpu])

    @model_validator(mode="after")
    def _memory_is_known(self) -> Self:
        if self.gpu_memory_gib is None and self.gpu is not None and self.gpu not in GPU_MEMORY_GIB:
            raise ValueError(
                f"gpu={self.gpu!r}: its memory is unknown; set gpu_memory_gib, or use one of "
                f"{', '.join(sorted(GPU_MEMORY_GIB))}"
            )
        return self

    @model_validator(mode="after")
    def _type_is_the_word_between_the_colons(self) -> Self:
        if self.gres_type is not None and ":" in self.gres_type:
            raise ValueError(f"gres_type={self.gres_type!r}: legal: the TYPE in gpu:TYPE:N alone, without a colon")
        return self

    @model_validator(mode="after")
    def _request_has_a_number(self) -> Self:
        if self.gpus_per_node is None:
            _refuse_without(self, "gres_type", "gpus_per_node")
            _refuse_without(self, "gpu_request", "gpus_per_node")
        return self


class PrologueConfig(Section):
    """[prologue]: what a node needs before a process of the run starts.  One of venv, conda and image, or none."""

    modules: Several[Word] = ()
    """Loaded in this order."""
    module_purge: bool = False
    """Unload what the submitting shell had loaded; not where Slurm itself is a module."""
    venv: LoosePath | None = None
    """Virtual environment to activate; on the shared directory."""
    conda: LoosePath | None = None
    """Prefix of the conda installation, the directory with etc/profile.d/conda.sh."""
    conda_environment: str | None = None
    """Environment of it: a name, or a path."""
    image: LoosePath | None = None
    """Apptainer image in which the roles run; the supervisor of the job runs outside."""
    binds: Several[Bind] = ()
    """More directories for the image; the shared directory and that of temporary files are always there."""
    code: LoosePath | None = None
    """Checkout whose packages go on PYTHONPATH; none: they are installed in venv or conda.  An image needs it."""
    python: Word = "python3"
    """Interpreter of the supervisor, 3.9 or newer; of the roles too, unless they run in an image."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Variables to set; $NAME in a value is expanded on the node of the batch step."""
    nccl_interface: Interface | None = None
    """Network interface for NCCL, gloo and our own sockets, such as "ib0"; none: they choose."""
    commands: Several[ShellLine] = ()
    """Lines of bash, verbatim, after everything else; one whose status is not 0 ends the job."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        chosen = [key for key in ("venv", "conda", "image") if getattr(self, key) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[1]}={str(getattr(self, chosen[1]))!r}: together with {chosen[0]}; legal: one")
        if self.conda_environment is not None and self.conda is None:
            raise ValueError(f"conda_environment={self.conda_environment!r}: needs conda")
        if self.image is not None and self.code is None:
            raise ValueError("code: missing; with an image, the supervisor runs outside and needs the checkout's path")
        for key in ("venv", "conda", "image", "code"):
            path = getattr(self, key)
            if path is not None and not path.is_absolute():
                raise ValueError(f"{key}={str(path)!r}: legal: an absolute path")
        return self


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RatesConfig(Section):
    """[rates]: how fast this site is, for `rlhpc plan --predict`; what is not given is measured (--from) or guessed."""

    engine_step_s: AboveZero | None = None
    """Seconds of a decoding step of an engine, whatever it decodes."""
    engine_sample_s: Seconds | None = None
    """Seconds that every rollout decoded in a step adds to it."""
    judge_s: Seconds | None = None
    """Seconds in which a reward worker judges a completion."""
    trainer_tokens_per_s: AboveZero | None = None
    """Tokens a second, prompts included, that one data-parallel rank trains."""
    between_steps_s: Seconds | None = None
    """Seconds from the end of a step to the next batch: sending new weights, packing, messages."""
    live_s: Seconds | None = None
    """Seconds from the publication of new weights until all engines sample with them."""
    pause_s: Seconds | None = None
    """Seconds of these in which engines sample nothing."""
    save_s: Seconds | None = None
    """Seconds for which a checkpoint holds up training."""


class Site(Section):
    """A whole site file.  `rlhpc check --site` needs trainer and generation, a plan needs cluster too."""

    cluster: ClusterConfig | None = None
    common: CommonConfig = CommonConfig()
    controller: ControllerConfig = ControllerConfig()
    trainer: GpuConfig
    generation: GpuConfig
    rewards: RewardsSection | None = None
    service: dict[Name, GpuConfig] = Field(default_factory=dict)
    evaluation: GpuConfig | None = None
    prologue: PrologueConfig = PrologueConfig()
    rates: RatesConfig = RatesConfig()

    def of_service(self, name: str) -> tuple[str, GpuConfig]:
        """Return the section of a service and its name: [service.NAME], or [generation] without its number of nodes."""
        if (section := self.service.get(name)) is not None:
            return f"service.{name}", section
        return "generation", self.generation.model_copy(update={"nodes": None})


# Section name → its class; X for an optional section, X | None, and for several, dict[Name, X].
SECTIONS: dict[str, type[Section]] = {
    name: next(
        part
        for part in (field.annotation, *get_args(field.annotation))
        if isinstance(part, type) and issubclass(part, Section)
    )
    for name, field in Site.model_fields.items()
}


def load_site(path: Path) -> Site:
    """Read a site file.  Raises ConfigError: missing, not TOML, unknown key, wrong type, a GPU of unknown memory."""
    document = read_toml(path, "site file")
    if document.keys() & set(OF_RUN_FILES) and not document.keys() & set(OF_SITE_FILES):
        raise ConfigError(f"{path}: a run file, not a site file; legal: the run file first, then the site file")
    try:
        site, faults = Site.model_validate(document), beyond_64_bits(document)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in fault_lines(error, _explain))) from None
    if faults:
        raise ConfigError("\n".join(f"{path}: {line}" for line in faults))
    return site


def legal_keys(section: str) -> list[str]:
    """Keys of a section: first its own, then those that it shares with others."""
    if not section:
        return list(Site.model_fields)
    fields = list(SECTIONS[section].model_fields)
    shared = list(CommonConfig.model_fields) if section != "common" else []
    return [name for name in fields if name not in shared] + [name for name in fields if name in shared]


def _explain(key: str, detail: ErrorDetails) -> str | None:
    """The message for errors that only site files can have."""
    value, section = detail["input"], str(detail["loc"][0])
    is_of_section = len(detail["loc"]) == (2 if section == "service" else 1)  # of [service.NAME]
    match detail["type"]:
        case "model_type" if section == "service":
            return f"{key}={shown(value)}: legal: keys of a service in a section of its name, [service.NAME]"
        case "extra_forbidden":
            said = unknown_key(key, value, legal_keys("" if is_of_section else section))
            return f"{said}; [{key}] is a section of run files" if is_of_section and key in sections() else said
        case "value_error":  # a rule over several keys of a section names its key itself
            return f"{key}.{_cause(detail)}" if is_of_section else f"{key}={shown(value)}: {_cause(detail)}"
        case "string_pattern_mismatch":
            return f"{key}={shown(value)}: would break a script; legal: {IN_WORDS[detail['ctx']['pattern']]}"
    return None


def _cause(detail: ErrorDetails) -> Any:
    return detail["ctx"]["error"]
