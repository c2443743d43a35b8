"""GPU without a GPU: our adapters beside official wheels, and the CUDA build of torch on a machine without a device.

    python -m tests.gpu_dry names            every name and call of vLLM, Megatron-Core, DeepSpeed that we use, held
                                             against the oldest, the locked and the newest version in pyproject's ranges
    python -m tests.gpu_dry torch            what happens before the engine starts, in an environment like a GPU node's
    python -m tests.gpu_dry kernels          our Triton kernels compiled for cards from A100 to B200, there, too

Wheels (1 GB, of which the sources are kept) and the environment (9 GB, unless --python names one that is there) lie
below --cache.  One line, and success, where there is no package index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from bench.locks import PYTHONS, NoIndex, locks, name_of, pins_in, reach_index
from tests.gpu_dry.library import Library
from tests.gpu_dry.names import ROOT, complaints, our_uses

IMPORTED_AS = {"vllm": "vllm", "megatron-core": "megatron", "deepspeed": "deepspeed"}
IN_ENVIRONMENT = {"torch": "tests.gpu_dry.before_engine", "kernels": "tests.gpu_dry.kernels"}
# A wheel for another machine than this one: only its sources are looked at.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_35_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def main(arguments: list[str] | None = None) -> int:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("names", "torch", "kernels"))
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "gpu-dry")
    parser.add_argument(
        "--python", help="of torch and kernels: an interpreter in whose environment '.[gpu]' is installed"
    )
    options = parser.parse_args(arguments)
    if options.what != "names" and options.python:
        return run_there(Path(options.python), IN_ENVIRONMENT[options.what])
    try:
        reach_index()
    except NoIndex as error:
        print(f"gpu-dry: {options.what} skipped: no index ({error})")
        return 0
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.what == "names":
        return names(options.cache)
    return run_there(environment(options.cache), IN_ENVIRONMENT[options.what])


# --------------------------------------------------------------------------------------------------------------- names


def names(cache: Path) -> int:
    """Print a line a version, and what it lacks."""
    uses, failures = our_uses(), 0
    for package, imported in IMPORTED_AS.items():
        mine = {use.dotted for use in uses if use.dotted.partition(".")[0] == imported}
        looked_at: set[str] = set()
        for requirement in versions(package):
            try:
                root = unpacked(requirement, cache)
            except subprocess.CalledProcessError as error:
                failures += 1
                print(f"gpu-dry: {requirement}: cannot be had: {(error.stderr.strip().splitlines() or ['?'])[-1]}")
                continue
            if root.name not in looked_at:
                looked_at.add(root.name)
                wrong = complaints(Library(root, imported), uses)
                failures += len(wrong)
                print("\n  ".join([f"gpu-dry: {root.name}: {len(mine)} names of ours, {len(wrong)} wrong", *wrong]))
    return int(failures > 0)


def versions(package: str) -> list[str]:
    """The oldest in pyproject's range, the locked one, and the range itself, of which pip takes the newest."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = next(
        requirement
        for extra in extras.values()
        for requirement in map(Requirement, extra)
        if requirement.name == package
    )
    oldest = next(each.version for each in wanted.specifier if each.operator == ">=")
    lock = next(lock for lock in locks() if not lock.is_for_cpu)
    locked = next(pin for pin in pins_in(lock.path.read_text()) if name_of(pin) == package)
    return [f"{package}=={oldest}", locked, str(wanted)]


def unpacked(requirement: str, cache: Path) -> Path:
    """A directory with the Python sources of a version, named for it.  Raises CalledProcessError."""
    exact = requirement.replace("==", "-") if "==" in requirement else None
    if exact is not None and (cache / exact).is_dir():
        return cache / exact
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        if not requirement.startswith("deepspeed"):  # which comes as a source archive
            tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
            python = PYTHONS[0]
            command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *tags]
            command += ["--abi", "abi3", "--abi", f"cp{python.replace('.', '')}", "--abi", "none"]
        environment = os.environ | {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([*command, requirement], env=environment, check=True, capture_output=True, text=True)
        (archive,) = Path(scratch).iterdir()
        package = Requirement(requirement).name
        version = archive.name.removesuffix(".tar.gz").split("-")[1]
        target = cache / f"{package}-{version}"
        if not target.is_dir():
            fresh = Path(scratch) / "unpacked"
            _unpack(archive, fresh)
            fresh.rename(target)
    return target


def _unpack(archive: Path, target: Path) -> None:
    """The Python files alone, with the package at the top."""
    target.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(".py")])
        return
    with tarfile.open(archive) as sources:
        sources.extractall(target, [each for each in sources if each.name.endswith(".py")], filter="data")
    (inner,) = target.iterdir()
    for child in list(inner.iterdir()):
        child.rename(target / child.name)
    inner.rmdir()


# --------------------------------------------------------------------------------------------------------------- torch


def environment(cache: Path) -> Path:
    """The interpreter of an environment as docs/install.md makes it for CUDA; made if it is not there whole."""
    from uv import find_uv_bin

    place, whole = cache / "venv", cache / "venv" / ".complete"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lock = ROOT / "requirements" / f"gpu-{version}.txt"
    if not whole.exists() or whole.read_text() != lock.read_text():
        shutil.rmtree(place, ignore_errors=True)
        print("gpu-dry: torch: an environment of 9 GB is made", flush=True)
        subprocess.run([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(place)], check=True)
        words = ["pip", "install", "--quiet", "--python", str(place), "--constraint", str(lock), f"{ROOT}[gpu]"]
        subprocess.run([find_uv_bin(), *words], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
        whole.write_text(lock.read_text())
    return place / "bin" / "python"


def run_there(python: Path, module: str) -> int:
    """With the code of this checkout."""
    command = [str(python), "-m", module]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
