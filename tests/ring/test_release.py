"""A release as people get it: source distribution and wheel, installed into an environment with no checkout near it.

Nothing comes from a network: the new environment sees the libraries of the test's own by a .pth file, which does not
read the .pth file of the editable rlhpc beside them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.doc_pages import ROOT, blocks

pytestmark = [pytest.mark.ring, pytest.mark.long, pytest.mark.starts]
WITHOUT_INDEX = ("--quiet", "--no-deps", "--no-index")


@dataclass(frozen=True, slots=True)
class Release:
    """What `python -m build` makes."""

    tracked: frozenset[str]
    archive: Path  # the source distribution
    wheel: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Both of the working tree, files that git ignores left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: nothing says which files belong to it")
    place = tmp_path_factory.mktemp("release")
    source, built = place / "source", place / "built"
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    tracked = frozenset(name for name in listed if name and (ROOT / name).exists())
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, built], cwd=source, check=True, capture_output=True, text=True)
    (archive,) = built.glob("*.tar.gz")
    return Release(tracked, archive, _wheel_of(source, built))


@pytest.fixture(scope="module")
def home(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with README's run file and data, and an environment with the wheel in `environment`."""
    home = tmp_path_factory.mktemp("home")
    environment = home / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", *WITHOUT_INDEX, release.wheel], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (home / "train.jsonl").write_text(next(blocks(ROOT / "README.md", "json")))
    (home / "RUN.toml").write_text(next(blocks(ROOT / "README.md", "toml")))
    assert ended(home, "rlhpc", "demo", "--model-only", "stand-in").startswith("stand-in: ")
    return home


def _wheel_of(source: Path, target: Path) -> Path:
    words = ["wheel", *WITHOUT_INDEX, "--no-build-isolation", "--wheel-dir", target, source]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True, text=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def ended(home: Path, program: str, *words: str) -> str:
    """What a program of the new environment prints; it ends with status 0."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [home / "environment" / "bin" / program, *words]
    done = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_the_files_of_the_packages_and_no_others(release: Release) -> None:
    packages = {name for name in release.tracked if name.startswith(("rlhpc/", "launch/"))} - {"launch/configs"}
    run_files = {f"launch/{name}" for name in release.tracked if name.startswith("configs/")}
    held = {name for name in zipfile.ZipFile(release.wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        name for name in packages | run_files if not name.endswith(".md")
    }  # pages: the source distribution's


def test_the_source_distribution_holds_every_file_and_builds_the_same_wheel(release: Release, tmp_path: Path) -> None:
    with tarfile.open(release.archive) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in release.tracked if not name.startswith((".ci/", ".gitignore"))} <= held
    again = _wheel_of(release.archive, tmp_path)
    assert again.name == release.wheel.name
    one, other = (
        {file.filename: file.CRC for file in zipfile.ZipFile(path).infolist()} for path in (release.wheel, again)
    )
    assert one == other


def test_the_description_is_readme_and_no_link_of_it_needs_the_repository(release: Release) -> None:
    wheel = zipfile.ZipFile(release.wheel)
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    head, _, description = wheel.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert "License-Expression: Apache-2.0" in head
    assert description.startswith("# rlhpc\n")
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def test_commands_of_the_wheel_need_no_checkout(home: Path) -> None:
    places = ended(home, "python", "-c", "import launch, rlhpc; print(rlhpc.__file__); print(launch.__file__)")
    assert [str(home / "environment") in place for place in places.splitlines()] == [True, True]
    assert '"AdmissionConfig"' in ended(home, "rlhpc", "schema", "run")
    assert "drgrpo-1.5b" in ended(home, "rlhpc", "recipes")
    ended(home, "rlhpc", "recipes", "copy", "drgrpo-1.5b")
    own = ["model.path=stand-in", "data.path=train.jsonl"]
    assert "grpo_no_std" in ended(home, "rlhpc", "check", "drgrpo-1.5b.toml", *own, "data.use_chat_template=false")
    assert "Anna has 3 apples" in ended(home, "rlhpc", "check", "RUN.toml", "model.path=stand-in")


@pytest.mark.vllm
def test_a_run_of_the_wheel_trains(home: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    small = [
        "model.path=stand-in", "model.dtype=float32", "run.num_steps=2", "admission.active_sampling=false",
        "admission.groups_per_step=2", "admission.group_size=2", "generation.max_completion_tokens=8",
        "generation.max_num_seqs=8", "generation.kv_cache_bytes=134217728", "rewards.workers_per_replica=1",
    ]  # fmt: skip
    ended(home, "rlhpc", "run", "RUN.toml", *small)
    assert "complete" in ended(home, "rlhpc", "status", "runs/first")
    assert "clean" in ended(home, "rlhpc", "audit", "runs/first")
