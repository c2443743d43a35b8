"""Types of site-file values that are copied into a job script unchanged: words, times, directives, shell names.

Each type refuses what would break a script, or what Slurm would interpret differently from what it seems to say.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

T = TypeVar("T")

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
LONGEST_S = 366 * DAY_S  # nobody means more, and Slurm counts minutes in 32 bits
_TIME_FORMS = 'minutes (240), "H:MM:SS", "D-HH", "D-HH:MM" or "D-HH:MM:SS"'
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")

# Directives that the plan writes itself, and the key that sets each.
OWN_DIRECTIVES = {
    "partition": "partition",
    "p": "partition",
    "time": "time",
    "t": "time",
    "account": "account",
    "A": "account",
    "qos": "qos",
    "q": "qos",
    "constraint": "constraint",
    "C": "constraint",
    "reservation": "reservation",
    "exclusive": "exclusive",
    "nodes": "nodes",
    "N": "nodes",
    "gres": "gres, or for GPUs gpus_per_node, gres_type and gpu_request",
    "gpus": "gpus_per_node and gpu_request",
    "G": "gpus_per_node and gpu_request",
    "gpus-per-node": "gpus_per_node and gpu_request",
    "gpus-per-task": "gpus_per_node and gpu_request",
    "gpus-per-socket": "gpus_per_node and gpu_request",
    "cpus-per-gpu": "cpus_per_gpu",
    "cpus-per-task": "cpus_per_task or cpus_per_gpu",
    "c": "cpus_per_task or cpus_per_gpu",
    "mem": "memory_gib_per_task or memory_gib_per_gpu",
    "mail-user": "cluster.mail",
    "mail-type": "cluster.mail_events",
    "signal": "cluster.warn_s",
    "clusters": "RLHPC_SLURM_CLUSTER=NAME in the environment of every command",
    "cluster": "RLHPC_SLURM_CLUSTER=NAME in the environment of every command",
    "M": "RLHPC_SLURM_CLUSTER=NAME in the environment of every command",
}
# Directives that would break the plan; no key sets them.
FOREIGN_DIRECTIVES = {
    "ntasks", "n", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "tres-per-task",
    "array", "a", "output", "o", "error", "e", "open-mode", "job-name", "J", "requeue", "no-requeue", "dependency", "d",
    "chdir", "D", "no-kill", "k", "wrap", "hold", "H", "mem-per-cpu", "mem-per-gpu", "export", "export-file", "wait",
    "W", "test-only", "parsable", "hetjob", "het-group", "uid", "gid", "quiet", "Q", "help",
    "h", "usage", "u", "version", "V",
}  # fmt: skip
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
    full = name if known or len(name) < 2 else next((o for o in _long_options() if o.startswith(name)), name)
    said = "" if full == name else f"sbatch may read it as --{full}: "
    if full in OWN_DIRECTIVES:
        raise ValueError(f"{said}set by a separate key; legal: {OWN_DIRECTIVES[full]}")
    if full in FOREIGN_DIRECTIVES:
        raise ValueError(f"{said}the plan relies on its own value of this directive")


def _long_options() -> list[str]:
    return sorted(name for name in {*OWN_DIRECTIVES, *FOREIGN_DIRECTIVES} if len(name) > 1)


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
