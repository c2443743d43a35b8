"""Task directories in Harbor's form: an instruction, where it is to be done, and tests that give the reward.

    TASK/instruction.md            what the policy is asked
    TASK/task.toml                 limits; the name of an image, or of none
    TASK/environment/              an image or a root tree; files for the working directory
    TASK/tests/test.sh             writes the reward to /logs/verifier/reward.txt, or reward.json
    TASK/solution/                 is never read

Input: a directory.  Output: Task, and the record of a dataset.  Sources: the task format of Harbor
(harborframework.com/docs/tasks).  Faults are DataErrors that name file and key.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.protocol.errors import DataError

TASK_FILE = "task.toml"
_INSTRUCTION, _TESTS = "instruction.md", "tests/test.sh"
_IN_PLACE = ("image", "root")  # below environment/: an image or a root tree
_TARBALLS = (".tar", ".tar.gz", ".tgz")
_BUILT = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
_MIB = 1 << 20
_REMEDY = (
    "images are neither built nor pulled during a run; legal: make one before (docker build, then docker save -o "
    "environment/image.tar; or apptainer build --sandbox environment/root …; or skopeo copy docker://NAME "
    "oci:environment/image), or environment.docker_image in task.toml, which container.images has"
)


@dataclass(frozen=True, slots=True)
class Task:
    """One task directory."""

    directory: Path
    instruction: str
    image: Path
    files: Mapping[str, Path]  # for the working directory, by their paths in it
    working_directory: str  # "": the image's
    tests: Mapping[str, Path]  # by their paths below tests/
    tests_environment: Mapping[str, str]
    tests_s: float | None  # limits of the task itself
    memory_bytes: int | None
    disk_bytes: int | None
    has_loopback: bool


def is_task_file(file: Path) -> bool:
    """Whether a file of a dataset is one of a task directory; only its task.toml is a record."""
    return any((parent / TASK_FILE).is_file() for parent in list(file.parents)[:4])


def files_of_tasks(path: Path) -> list[Path]:
    """Files by which task directories at a path are what they are, images besides; none: there are no tasks."""
    tasks = [path] if (path / TASK_FILE).is_file() else [each.parent for each in sorted(path.glob(f"*/{TASK_FILE}"))]
    return [file for task in tasks for file in _files(task)]


def record_of(file: Path) -> dict[str, Any]:
    """The record of a task by its task.toml.  Raises DataError."""
    directory = file.parent.absolute()
    digest, sizes = hashlib.sha256(), dict[str, int]()
    for each in _files(directory):
        name, content = str(each.relative_to(directory)), _bytes(each)
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
        sizes[name] = len(content)
    return {
        "prompt": _text(directory / _INSTRUCTION),
        "task": str(directory),
        "name": directory.name,
        "digest": digest.hexdigest(),
        "files": sizes,
    }


def read_task(directory: Path, images: Path | None) -> Task:
    """Read a task; images: the directory that has those which tasks name.  Raises DataError."""
    file = directory / TASK_FILE
    try:
        said = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{file}: {error}") from error
    where, tests = _table(said, "environment", file), _table(said, "verifier", file)
    if (directory / "steps").is_dir():
        raise DataError(f"{directory}: a task of several steps; legal: one instruction.md, and tests/")
    if _number(where, "gpus", file):
        raise DataError(f"{file}: environment.gpus={where['gpus']!r}; containers have none; legal: 0")
    if not (directory / _TESTS).is_file():
        raise DataError(f"{directory / _TESTS} is missing; legal: a script that writes {REWARD_FILES[0]}")
    memory, disk = (_number(where, key, file) for key in ("memory_mb", "storage_mb"))
    instruction = _text(directory / _INSTRUCTION)
    image, files = _image(directory, where, images, file)
    return Task(
        directory=directory,
        instruction=instruction,
        image=image,
        files=files,
        working_directory=str(where.get("workdir") or ""),
        tests=_below(directory / "tests"),
        tests_environment={str(name): str(value) for name, value in _table(tests, "env", file).items()},
        tests_s=_number(tests, "timeout_sec", file) or None,
        memory_bytes=int(memory * _MIB) or None,
        disk_bytes=int(disk * _MIB) or None,
        has_loopback=_table(said, "metadata", file).get("network") == "loopback",
    )


REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")


def _image(directory: Path, where: Mapping[str, Any], images: Path | None, file: Path) -> tuple[Path, dict[str, Path]]:
    """(Image or root tree of a task, files for its working directory)."""
    here = directory / "environment"
    for name in (*_IN_PLACE, *(name + suffix for name in _IN_PLACE for suffix in _TARBALLS)):
        if (here / name).exists():
            return here / name, _beside(here)
    name = str(where.get("docker_image") or "")
    if not name:
        raise DataError(f"{directory}: there is no image: environment/image, environment/root; {_REMEDY}")
    if images is None:
        raise DataError(f"{file}: environment.docker_image={name!r}, and container.images is not set; {_REMEDY}")
    if ".." in name.split("/"):
        raise DataError(f"{file}: environment.docker_image={name!r}; legal: a name below container.images={images}")
    flat = name.replace("/", "_").replace(":", "_")
    tried = [images / (each + suffix) for each in (name, flat) for suffix in ("", *_TARBALLS)]
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        raise DataError(f"{file}: environment.docker_image={name!r} is not at {tried[0]} nor at {tried[5]}; {_REMEDY}")
    return found, _beside(here)


def _beside(here: Path) -> dict[str, Path]:
    """Files of environment/ for the working directory: those that no Dockerfile has copied into the image."""
    if any((here / name).exists() for name in _BUILT):
        return {}
    own = {*_IN_PLACE, *(name + suffix for name in _IN_PLACE for suffix in _TARBALLS)}
    return {name: path for name, path in _below(here).items() if name.split("/")[0] not in own}


def _below(directory: Path) -> dict[str, Path]:
    found = {str(file.relative_to(directory)): file for file in _walk(directory)}
    return dict(sorted(found.items()))


def _walk(directory: Path) -> Iterator[Path]:
    """Files below a directory, without those of images and root trees."""
    for each in sorted(directory.iterdir()) if directory.is_dir() else ():
        if each.is_dir() and not (directory.name == "environment" and each.name in _IN_PLACE):
            yield from _walk(each)
        elif each.is_file() and not (each.name.startswith(_IN_PLACE) and each.name.endswith(_TARBALLS)):
            yield each


def _files(task: Path) -> list[Path]:
    """task.toml first, then the files that determine what is asked and rewarded."""
    others = [file for name in ("environment", "tests") for file in _walk(task / name)]
    index = task / "environment/image/index.json"
    return [task / TASK_FILE, task / _INSTRUCTION, *others, *([index] if index.is_file() else [])]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; a task has {TASK_FILE}, {_INSTRUCTION} and {_TESTS}") from error


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: no UTF-8: {error}") from error


def _table(said: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    table = said.get(name, {})
    if not isinstance(table, dict):
        raise DataError(f"{file}: {name}={table!r}; legal: a table")
    return table


def _number(table: Mapping[str, Any], name: str, file: Path) -> float:
    """A number of a table; 0: it has none."""
    value = table.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise DataError(f"{file}: {name}={value!r}; legal: a number, 0 or more")
    return float(value)
