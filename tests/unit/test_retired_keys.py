"""Keys that run files once had: what an old run file or run directory that has them is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config_file import config_hash, load_config, override, read_resolved, sections
from rlhpc.errors import ConfigError
from rlhpc.retired_keys import RETIRED
from rlhpc.run_layout import RunLayout
from tests.unit.doc_pages import ROOT
from tests.unit.test_config import RUN_FILE

# config.json of a run that began when run files had 101 keys; every key that was retired since has a value of its own,
# where another one than the default was legal.
OF_101_KEYS = ROOT / "tests" / "golden" / "run_directories" / "settings_of_101_keys.json"

OTHER_VALUES = {float: 0.125, int: 3, str: "none"}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture
def old_run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    layout.config.write_bytes(OF_101_KEYS.read_bytes())
    return layout


def test_a_retired_key_is_no_key() -> None:
    for name in RETIRED:
        section, key = name.split(".")
        assert section not in sections() or key not in sections()[section].model_fields


def test_a_run_directory_of_before_loads_whatever_its_retired_keys_say(old_run: RunLayout) -> None:
    config, digest = read_resolved(old_run)
    assert digest == "781e7f9a831849c3"  # as its processes know it
    assert config.trainer.learning_rate == 1.2345678901234567e-7
    assert config.checkpoint.every_steps == 50
    assert config_hash(config) != digest


def test_a_run_that_began_with_a_key_without_effect_goes_on_and_a_change_is_told(old_run: RunLayout) -> None:
    config, _ = read_resolved(old_run)
    assert (config.algorithm.clip_high, config.algorithm.proximal) == (0.3, "current")
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high=0\.3 has no effect") as error:
        override(config, ["run.num_steps=9"])
    assert "legal: 0.28, its default" in str(error.value)
    words = ["algorithm.clip_high=0.28", "generation.gpu_memory_utilization=0.9", "run.num_steps=9"]
    assert override(config, words).run.num_steps == 9


@pytest.mark.parametrize(("old", "new"), [('"num_steps": 4', '"num_steps": 5'), (',\n   "max_skipped_steps": 7', "")])
def test_a_run_directory_of_before_that_was_altered_is_refused(old_run: RunLayout, old: str, new: str) -> None:
    text = old_run.config.read_text()
    assert old in text
    old_run.config.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match="altered since the run was started: its hash is 781e7f9a831849c3"):
        read_resolved(old_run)


@pytest.mark.parametrize("name", RETIRED)
def test_a_run_file_may_say_what_holds_anyway(run_file: Path, name: str) -> None:
    assert load_config(run_file, [f"{name}={RETIRED[name].value}"]) == load_config(run_file)


@pytest.mark.parametrize("name", RETIRED)
def test_a_run_file_that_wants_something_else_is_told_what_holds_and_what_to_do(run_file: Path, name: str) -> None:
    value = OTHER_VALUES[type(RETIRED[name].value)]
    with pytest.raises(ConfigError) as error:
        load_config(run_file, [f"{name}={value}"])
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"command line: {name}={value!r}: this key was removed: ")
    assert RETIRED[name].reason in line
    assert line.endswith("; legal: leave it out")


def test_a_table_whose_keys_were_all_left_out_as_told_may_stay(run_file: Path) -> None:
    run_file.write_text(RUN_FILE + "\n[metrics]\n")
    assert load_config(run_file).run.name


def test_a_retired_key_hides_no_other_fault(run_file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(run_file, ["generation.top_p=0.9", "trainer.token_budget=many", "trainer.max_skipped_steps=true"])
    lines = str(error.value).splitlines()
    assert [line.removeprefix("command line: ").split(":")[0] for line in lines] == [
        "generation.top_p=0.9",
        "trainer.max_skipped_steps=true",
        "trainer.token_budget='many'",
    ]


def test_a_table_that_is_no_table_is_answered_as_ever(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="transport=3: "):
        load_config(run_file, ["transport=3"])
