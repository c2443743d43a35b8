"""An installation has what a checkout has: code, pages, run files of the demo and of recipes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhpc.protocol.errors import EXIT_CONFIG

ROOT = Path(__file__).parents[3]
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")
pytestmark = pytest.mark.starts


def image_sections() -> dict[str, list[str]]:
    """Lines of the Apptainer definition by section, without comments."""
    sections, lines = {}, list[str]()
    for line in (ROOT / "slurm" / "rlhpc.def").read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            lines = sections.setdefault(line.strip("% "), [])
        elif line.strip() and not line.startswith("#"):
            lines.append(line.strip())
    return sections


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the source, unpacked."""
    built = tmp_path_factory.mktemp("built")
    _pip("wheel", "--wheel-dir", built, source)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "installed")
    return built / "installed"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Apptainer definition copies of the working tree."""
    source = tmp_path_factory.mktemp("source")
    for line in image_sections()["files"]:
        name, target = line.split()
        assert target == f"/opt/rlhpc/{name}"
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, source)
    return source


def _pip(command: str, *words: str | Path) -> None:
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", command, *how, *words], check=True, capture_output=True, text=True)


def rlhpc(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_an_editable_install_is_a_path_that_editors_and_type_checkers_follow(source: Path, tmp_path: Path) -> None:
    _pip("install", "--target", tmp_path, "--editable", source)
    (path,) = tmp_path.glob("*.pth")  # beside it no __editable___rlhpc_finder.py, which they would not run
    assert path.read_text().strip() == str(source)
    assert not [*tmp_path.glob("*.py")]


def test_no_file_of_the_packages_is_left_out(installed: Path) -> None:
    files = {path.relative_to(ROOT) for folder in ("launch", "rlhpc") for path in (ROOT / folder).rglob("*.*")}
    files |= {
        Path("launch/configs") / path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.toml")
    }
    wanted = {path for path in files if path.suffix in (".py", ".pyi", ".html", ".typed", ".toml")}
    assert {str(path) for path in wanted if not (installed / path).is_file()} == set()


def test_recipes_are_listed_and_copied(installed: Path, tmp_path: Path) -> None:
    assert "drgrpo-1.5b" in rlhpc(installed, tmp_path, "recipes").stdout
    assert rlhpc(installed, tmp_path, "recipes", "copy", "gsm8k").returncode == 0
    assert (tmp_path / "gsm8k.toml").read_bytes() == (ROOT / "configs" / "gsm8k.toml").read_bytes()


def test_the_demo_finds_its_run_file(installed: Path, tmp_path: Path) -> None:
    """A wrong key ends it before it begins: the message is of one who has read the file."""
    ended = rlhpc(installed, tmp_path, "demo", "run.nme=x")
    assert ended.returncode == EXIT_CONFIG
    assert "run.nme" in ended.stderr
    assert "no such run file" not in ended.stderr


def test_the_apptainer_definition_installs_what_the_page_on_gpus_does() -> None:
    sections = image_sections()
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    (install,) = [
        line for line in page.splitlines() if line.startswith(".venv/bin/pip install") and line.endswith("'.[gpu]'")
    ]
    wanted = install.removeprefix(".venv/bin/pip install ")
    assert f"pip install --no-cache-dir {wanted}" in sections["post"]
    version = wanted.split("gpu-")[1].split(".txt")[0]
    assert f"From: python:{version}-" in (ROOT / "slurm" / "rlhpc.def").read_text(encoding="utf-8")
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input="\n".join(sections[name]), text=True, check=True)
