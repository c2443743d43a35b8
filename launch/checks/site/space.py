"""Free space on the shared filesystem, quotas, and how much a run will write.

Input: a directory, the output of `lfs quota` and `quota`, and a Config.  Output: Findings.  The forecast is an upper
bound: 12 bytes per parameter plus the weights for every checkpoint kept and the one being written, plus rollouts; a
critic, taken to be of the policy's size, doubles the 12, and an average of the weights adds 4.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.checks.finding import Finding, Verdict
from launch.checks.memory.plan import ELEMENT_BYTES, GIB
from launch.checks.site.login_checks import output_of
from launch.checks.site.shared_directory import filesystem_type
from launch.common.counted import three_digits
from rlhpc.config import Config
from rlhpc.model_shape import ModelShape

STATE_BYTES = 12  # a parameter: master and two moments in float32
AVERAGE_BYTES = 4
TOKEN_BYTES = 12  # of a rollout in a segment before compression: token, log-probability, version
INODES = 2_000  # files of a run: checkpoints of some ranks, segments, logs, metrics; rounded up
_TIGHT = 2.0  # times the forecast


@dataclass(frozen=True, slots=True)
class Room:
    """What is left; None: no limit, or not told."""

    source: str
    free_bytes: int | None
    free_inodes: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run writes at most."""

    checkpoint_bytes: int | None  # None: the model's size is not known
    rollout_bytes: int

    @property
    def total(self) -> int:
        """Bytes of both."""
        return (self.checkpoint_bytes or 0) + self.rollout_bytes


def forecast(config: Config) -> Forecast:
    """From the run file, and the model's config.json where it can be read."""
    tokens = config.generation.max_tokens
    rollouts = config.run.num_steps * config.admission.groups_per_step * config.largest_group
    parameters = _num_parameters(config.model.path / "config.json")
    states = STATE_BYTES * (2 if config.has_critic else 1) + (AVERAGE_BYTES if config.trainer.ema_decay != "off" else 0)
    each = None if parameters is None else parameters * (states + ELEMENT_BYTES[config.model.dtype])
    checkpoints = None if each is None else each * (config.checkpoint.keep + 1)
    return Forecast(checkpoints, rollouts * tokens * TOKEN_BYTES)


def _num_parameters(file: Path) -> int | None:
    try:
        shape = ModelShape.of(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError):
        return None
    return None if shape is None else shape.num_parameters


def check_space(directory: Path, wanted: Forecast | None) -> list[Finding]:
    """Free space and quotas against the forecast; None: against nothing."""
    rooms = [_of_filesystem(directory), *_quotas(directory)]
    findings = [finding for room in rooms for finding in judge(room, wanted)]
    if wanted is not None and wanted.checkpoint_bytes is None:
        text = "the size of checkpoints is unknown: model.path/config.json is missing, or of another family"
        findings.append(Finding("room: forecast", "", "warn", text, "set model.path to the model's directory"))
    return findings


def judge(room: Room, wanted: Forecast | None) -> Iterator[Finding]:
    """One source of room."""
    need = wanted.total if wanted else 0
    if room.free_bytes is not None:
        text = f"{_size(room.free_bytes)} left" + (f"; the run writes up to {_size(need)}" if wanted else "")
        verdict = _verdict(room.free_bytes, need, GIB)
        yield Finding(
            f"room: {room.source}", "", verdict, text, "" if verdict == "pass" else "delete, or ask for more space"
        )
    if room.free_inodes is not None:
        text = f"{room.free_inodes} files left; a run creates up to {INODES}"
        verdict = _verdict(room.free_inodes, INODES, 0)
        remedy = "" if verdict == "pass" else "put large environments (100,000 files) into an image"
        yield Finding(f"files: {room.source}", "", verdict, text, remedy)


def _verdict(left: int, need: int, least: int) -> Verdict:
    return "fail" if left < max(need, 1) else "warn" if left < max(_TIGHT * need, least) else "pass"


def _size(num_bytes: int) -> str:
    return f"{three_digits(num_bytes / GIB)} GiB"


def _of_filesystem(directory: Path) -> Room:
    status = os.statvfs(directory)
    has_inodes = status.f_files > 0  # btrfs and others count none
    return Room("filesystem", status.f_bavail * status.f_frsize, status.f_favail if has_inodes else None)


def _quotas(directory: Path) -> Iterator[Room]:
    if shutil.which("lfs") is not None and filesystem_type(directory) == "lustre":
        for option, name, owner in (("-u", "user", os.getuid()), ("-g", "group", directory.stat().st_gid)):
            yield from parse_lfs(output_of("lfs", "quota", "-q", option, str(owner), str(directory)), f"{name}'s quota")
    elif shutil.which("quota") is not None:
        yield from parse_quota(output_of("quota", "-w", "-p", "-f", str(directory)), "quota")


def parse_lfs(text: str, source: str) -> Iterator[Room]:
    """`lfs quota -q`: path kbytes quota limit grace files quota limit grace; 0 is no limit, "*" means exceeded."""
    words = text.replace("*", "").split()
    if len(words) >= 9 and all(words[index].isdigit() for index in (1, 2, 3, 5, 6, 7)):
        yield from _room(source, [int(words[index]) for index in (1, 2, 3)], [int(words[index]) for index in (5, 6, 7)])


def parse_quota(text: str, source: str) -> Iterator[Room]:
    """`quota -w -p`: filesystem blocks quota limit grace files quota limit grace, blocks of 1 KiB, after two lines."""
    for line in text.splitlines():
        words = line.replace("*", "").split()
        if len(words) == 9 and all(word.isdigit() for word in words[1:]):
            numbers = [int(word) for word in words[1:]]
            yield from _room(source, numbers[0:3], numbers[4:7])


def _room(source: str, kib: list[int], files: list[int]) -> Iterator[Room]:
    """used, soft, hard of each; the soft one holds after its days of grace."""
    free = [None if not (soft or hard) else max(0, (soft or hard) - used) for used, soft, hard in (kib, files)]
    if free != [None, None]:
        yield Room(source, None if free[0] is None else free[0] * 1024, free[1])
