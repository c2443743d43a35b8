"""A family is every combination of seeds and values, under names that tell its runs apart; nonsense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.family.members import MOST_RUNS, Member, members_of
from launch.commands.family.submit import How, describe_family, submit_family
from rlhpc.errors import ConfigError
from rlhpc.exit_status import EXIT_CONFIG
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


def seeds_of(members: list[Member]) -> list[int]:
    return [member.config.run.seed for member in members]


def test_a_number_counts_on_from_the_seed_of_the_run_file(run_file: Path, lab: Lab) -> None:
    members = members_of(run_file, (), "3", ())
    assert seeds_of(members) == [1, 2, 3]
    assert [member.name for member in members] == ["base-seed1", "base-seed2", "base-seed3"]
    assert [m.config.run_directory for m in members] == [lab.layout(m.name).root for m in members]
    assert seeds_of(members_of(run_file, ["run.seed=40"], "2", ())) == [40, 41]


def test_seeds_are_taken_as_they_are_listed(run_file: Path) -> None:
    assert seeds_of(members_of(run_file, (), "9,7,8", ())) == [7, 8, 9]
    assert seeds_of(members_of(run_file, (), "1234,", ())) == [1234]
    assert seeds_of(members_of(run_file, (), "0,1", ())) == [0, 1]


def test_overrides_and_a_directory_of_its_own_hold_for_every_run(run_file: Path, tmp_path: Path) -> None:
    words = ["run.num_steps=9", f"run.directory={tmp_path / 'mine'}", "run.name=night"]
    members = members_of(run_file, words, "2", ())
    assert [member.config.run.num_steps for member in members] == [9, 9]
    assert [member.config.run_directory.name for member in members] == ["mine-seed1", "mine-seed2"]
    assert [member.name for member in members] == ["night-seed1", "night-seed2"]


def test_a_sweep_is_every_combination_and_seeds_vary_fastest(run_file: Path) -> None:
    sweeps = ["trainer.learning_rate=1e-6,2e-6", "admission.max_staleness=0,2"]
    members = members_of(run_file, (), "2", sweeps)
    assert len(members) == 8
    assert [member.name for member in members[:3]] == [
        "base-learning_rate-1e-6-max_staleness-0-seed1",
        "base-learning_rate-1e-6-max_staleness-0-seed2",
        "base-learning_rate-1e-6-max_staleness-2-seed1",
    ]
    last = members[-1]
    assert (last.config.trainer.learning_rate, last.config.admission.max_staleness, last.config.run.seed) == (
        2e-6,
        2,
        2,
    )
    assert last.varied == "trainer.learning_rate=2e-6 admission.max_staleness=2 run.seed=2"


def test_keys_of_one_name_are_written_out(run_file: Path) -> None:
    sweeps = ["rewards.num_replicas=1,2", "generation.num_replicas=1"]
    assert [member.name for member in members_of(run_file, (), None, sweeps)] == [
        "base-rewards.num_replicas-1-generation.num_replicas-1",
        "base-rewards.num_replicas-2-generation.num_replicas-1",
    ]


@pytest.mark.parametrize(
    ("seeds", "sweeps", "message"),
    [
        ("0", [], "--seeds '0': legal: how many"),
        ("x", [], "--seeds 'x': legal: how many"),
        ("-3", [], "--seeds '-3': legal"),
        ("", [], "--seeds '': legal"),
        ("7,,8", [], "--seeds '7,,8': legal"),
        ("7,7", [], "--seeds '7,7': a seed is listed twice"),
        ("1234", [], f"1234 runs; legal: up to {MOST_RUNS} at once; for the one seed: --seeds 1234,"),
        ("4294967295", [], "4294967295 runs; legal: .*: --seeds 4294967295,"),  # 300 GB as a list
        ("40", ["trainer.learning_rate=1e-6,2e-6"], "--seeds and --sweep: 80 runs"),
        (None, ["trainer.learning_rate"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rate=1e-6,"], "legal: section.key=value,value"),
        (None, ["=1"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rat=1"], r"trainer\.learning_rat=1: unknown key.*did you mean learning_rate"),
        (None, ["trainer.learning_rate=1e-6,fast"], "trainer.learning_rate='fast'"),
        (None, ["run.name=a,b"], "run.name follows from"),
        (None, ["run.directory=a,b"], "run.directory follows from"),
        (None, ["run.seed=1,2"], "legal: --seeds 1,2"),
        (None, ["trainer.learning_rate=1e-6", "trainer.learning_rate=2e-6"], "given twice"),
        (None, ["trainer.learning_rate=1e-6,0.000001"], "are the same run"),
        (None, ["data.prompt_template={prompt}!,{prompt}?"], "would both be called"),
    ],
)
def test_what_makes_no_family_is_refused(seeds: str | None, sweeps: list[str], message: str, run_file: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        members_of(run_file, (), seeds, sweeps)


def test_a_dry_run_says_all_runs_and_their_jobs_once(
    run_file: Path, site_file: Path, lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", str(run_file), str(site_file), "--seeds", "7,8,9", "--chain", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "3 runs one after the other\n" in out
    assert f"base-seed8: run.seed=8 in {lab.layout('base-seed8').root}\n" in out
    assert out.count("one heterogeneous job") == 1
    assert "#SBATCH" not in out
    assert not lab.layout("base-seed7").root.parent.exists()


def test_jobs_that_differ_are_said_of_each(run_file: Path, site_file: Path) -> None:
    members = members_of(run_file, (), None, ["generation.num_replicas=1,2"])
    text = describe_family(members, site_file, chain=False)
    assert text.startswith("2 runs side by side\n")
    assert text.count("one heterogeneous job") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chain"], "--chain: the order of several runs; give --seeds or --sweep"),
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


def test_a_chain_needs_runs_that_keep_their_job(run_file: Path, site_file: Path) -> None:
    site_file.write_text(site_file.read_text().replace("[common]", 'continuation = "successor"\n[common]'))
    with pytest.raises(ConfigError, match=r"--chain with cluster\.continuation='successor'"):
        submit_family(members_of(run_file, (), "2", ()), site_file, How(chain=True), print)
