"""A sweep is every combination of seeds and values, under names that tell its runs apart; nonsense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.sweep import MOST_RUNS, sweep_of
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.ring.run_kit import Lab, make_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def run_file(lab: Lab) -> Path:
    """Its seed is 1."""
    return lab.run_file("base", transport={"kind": "tcp"})


@pytest.fixture
def site_file(lab: Lab, tmp_path: Path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(
        f'[cluster]\nshared_directory = "{lab.root}"\n[common]\ntime = "1:00:00"\n[trainer]\n[generation]\n'
    )
    return path


def seeds_of(members: dict[str, Config]) -> list[int]:
    return [config.run.seed for config in members.values()]


def test_a_number_counts_on_from_the_seed_of_the_run_file(run_file: Path, lab: Lab) -> None:
    members = sweep_of(run_file, (), "3", ())
    assert seeds_of(members) == [1, 2, 3]
    names = [config.run.name for config in members.values()]
    assert names == ["base-seed-1", "base-seed-2", "base-seed-3"]
    assert [config.run_directory for config in members.values()] == [lab.layout(name).root for name in names]
    assert seeds_of(sweep_of(run_file, ["run.seed=40"], "2", ())) == [40, 41]


def test_seeds_are_taken_as_they_are_listed(run_file: Path) -> None:
    assert seeds_of(sweep_of(run_file, (), "9,7,8", ())) == [9, 7, 8]
    assert seeds_of(sweep_of(run_file, (), "1234,", ())) == [1234]


def test_overrides_and_a_directory_of_its_own_hold_for_every_run(run_file: Path, tmp_path: Path) -> None:
    words = ["run.num_steps=9", f"run.directory={tmp_path / 'mine'}", "run.name=night"]
    members = sweep_of(run_file, words, "2", ()).values()
    assert [config.run.num_steps for config in members] == [9, 9]
    assert [config.run_directory.name for config in members] == ["mine-seed-1", "mine-seed-2"]
    assert [config.run.name for config in members] == ["night-seed-1", "night-seed-2"]


def test_a_sweep_is_every_combination_and_seeds_vary_fastest(run_file: Path) -> None:
    members = sweep_of(run_file, (), "2", ["trainer.learning_rate=1e-6,2e-6", "admission.max_staleness=0,2"])
    assert len(members) == 8
    assert [config.run.name for config in members.values()][:3] == [
        "base-learning_rate-1e-6-max_staleness-0-seed-1",
        "base-learning_rate-1e-6-max_staleness-0-seed-2",
        "base-learning_rate-1e-6-max_staleness-2-seed-1",
    ]
    last = members["trainer.learning_rate=2e-6 admission.max_staleness=2 run.seed=2"]
    assert (last.trainer.learning_rate, last.admission.max_staleness, last.run.seed) == (2e-6, 2, 2)


@pytest.mark.parametrize(
    ("seeds", "sweeps", "message"),
    [
        ("0", [], "0 runs; legal: 1 to"),
        ("x", [], "--seeds 'x': legal: how many"),
        ("-3", [], "--seeds '-3': legal"),
        ("", [], "--seeds '': legal"),
        ("7,,8", [], "--seeds '7,,8': legal"),
        ("7,7", [], "the same name"),
        ("1234", [], f"1234 runs; legal: 1 to {MOST_RUNS} at once; for the one seed: --seeds 1234,"),
        ("4294967295", [], "4294967295 runs; legal: .*: --seeds 4294967295,"),  # 300 GB as a list
        ("40", ["trainer.learning_rate=1e-6,2e-6"], "--seeds and --sweep: 80 runs"),
        (None, ["trainer.learning_rate"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rate=1e-6,"], "legal: section.key=value,value"),
        (None, ["=1"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rat=1"], r"trainer\.learning_rat=1: unknown key.*did you mean learning_rate"),
        (None, ["trainer.learning_rate=1e-6,fast"], "trainer.learning_rate='fast'"),
        (None, ["data.prompt_template={prompt}!,{prompt}?"], "the same name"),
    ],
)
def test_what_makes_no_sweep_is_refused(seeds: str | None, sweeps: list[str], message: str, run_file: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_of(run_file, (), seeds, sweeps)


def test_a_dry_run_lists_all_runs_and_asks_slurm_nothing(
    run_file: Path, site_file: Path, lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", str(run_file), str(site_file), "--seeds", "7,8,9", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 3
    assert f"{lab.layout('base-seed-8').root}: run.seed=8\n" in said
    assert not lab.layout("base-seed-7").root.parent.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "2", "--wait"], "--wait: only for a single run"),
        (["--seeds", "2", "--dry-run", "--after", "singleton"], "--after singleton"),
        (["--seeds", "2", "--after", "soon"], "--after 'soon': legal"),
    ],
)
def test_options_that_contradict_are_refused(
    words: list[str], message: str, run_file: Path, site_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(run_file), str(site_file), *words]) == EXIT_CONFIG
    assert message in capsys.readouterr().err
