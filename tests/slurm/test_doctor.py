"""`rlhpc doctor` on a real Slurm: a healthy site passes, a broken one is told with the remedy, nothing stays behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.plan.site_file import Site, slurm_time
from launch.private_slurm import processes
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.shape import default_shape
from rlhpc.protocol.errors import ConfigError
from tests.slurm.cluster_kit import PATIENCE_S, MakeCluster, known_jobs, submit, wait_state, wait_until
from tests.slurm.doctor_kit import ROOT, site_of, turned_to

Rows = dict[str, tuple[str, str]]  # verdict and everything else, by check


@pytest.fixture
def ask(slurm: DevCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on a site; returns exit status and rows of the table."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(site: Site, *words: str) -> tuple[int, Rows]:
        path = tmp_path / "site.toml"
        path.write_text(_toml(site), encoding="utf-8")
        with turned_to(slurm):
            status = main(["doctor", str(path), *words])
        header, *lines, _ = capsys.readouterr().out.splitlines()
        place = header.index("result")
        return status, {line[6:place].strip(): (line[:4], line[place:].strip()) for line in lines}

    return run


def _toml(site: Site) -> str:
    document = site.model_dump(mode="json", exclude_unset=True)
    sections = {name: keys for name, keys in document.items() if keys}
    return "\n".join(
        line
        for name, keys in sections.items()
        for line in (f"[{name}]", *(f"{key} = {_value(key, value)}" for key, value in keys.items()))
    )


def _value(key: str, value: Any) -> str:
    return json.dumps(slurm_time(value) if key == "time" else value)


def own_jobs(slurm: DevCluster) -> list[str]:
    """Names of the doctor's jobs that nobody has cancelled; those that were may still be ending."""
    names = slurm.run("squeue", "--noheader", "--states=PENDING,CONFIGURING,RUNNING", "--format=%j").split()
    return [name for name in names if name.startswith("rlhpc-d")]


def test_from_the_login_node_alone_it_takes_no_job(slurm: DevCluster, ask: Any, tmp_path: Path) -> None:
    before = known_jobs(slurm)
    status, rows = ask(site_of(tmp_path), "--quick")
    assert status == 0
    assert rows["shared: rename"][0] == rows["clock: slurmctld"][0] == rows["trainer"][0] == "pass"
    assert known_jobs(slurm) <= before  # Slurm may have forgotten old ones meanwhile
    assert [path.name for path in tmp_path.iterdir()] == ["site.toml"]


def test_jobs_on_all_partitions_tell_what_nodes_see_and_whom_they_reach(
    slurm: DevCluster, ask: Any, tmp_path: Path
) -> None:
    overrides = [f"run.directory={tmp_path}/run", "transport.kind=tcp", "trainer.device=cuda", "rewards.num_replicas=2",
                 "trainer.num_ranks=2"]  # fmt: skip
    site = site_of(tmp_path, trainer={"nodes": 2}, cluster={"placement": "jobs"}, rewards={"partition": "cpu"})
    status, rows = ask(site, str(ROOT / "configs" / "demo.toml"), *overrides)
    failed = {check: row for check, row in rows.items() if row[0] == "fail"}
    assert not failed
    assert status == 0
    for name, node in (
        ("controller", "c0"),
        ("trainer", "t0"),
        ("trainer-1", "t1"),
        ("generation", "g"),
        ("rewards", "c"),
    ):
        assert rows[f"{name}: job"][1].startswith(f"ran on {node}")
        assert rows[f"{name}: shared directory"][0] == rows[f"{name}: clock"][0] == rows[f"{name}: python"][0] == "pass"
    assert rows["trainer: reaches"][1].count(" ms") == 4
    assert all(rows[f"{name}: ZeroMQ"][0] == "pass" for name in ("trainer", "generation", "rewards"))
    assert "Gbit/s" in rows["trainer → generation"][1]
    said = [rows[f"weights: trainer → {to}"][1] for to in ("generation", "trainer-1")]
    assert [each for each in said if "gloo broadcast" not in each and "this node is busy" not in each] == []
    assert [path.name for path in tmp_path.iterdir()] == ["site.toml"]
    slurm.wait_idle()


@pytest.mark.long
def test_a_prologue_that_fails_on_the_nodes_is_told_with_the_line_and_the_remedy(
    slurm: DevCluster, ask: Any, tmp_path: Path
) -> None:
    status, rows = ask(site_of(tmp_path, prologue={"commands": ["cd /scratch/nowhere"]}))
    assert status == 1
    for name in ("controller", "trainer", "generation"):
        verdict, text = rows[f"{name}: job"]
        assert verdict == "fail"
        assert "prologue: 'cd /scratch/nowhere' failed on " in text
        assert "this line of [prologue] must work on that node" in text
    assert [path.name for path in tmp_path.iterdir()] == ["site.toml"]


@pytest.mark.long
def test_a_job_that_cannot_start_is_a_warning_and_is_cancelled(slurm: DevCluster, ask: Any, tmp_path: Path) -> None:
    blockers = [submit(slurm, "sleep 300", "--partition=train", "--exclusive") for _ in range(2)]
    for job in blockers:
        wait_state(slurm, job, "RUNNING")
    try:
        status, rows = ask(site_of(tmp_path), "--timeout-s", "60")
    finally:
        slurm.run("scancel", *map(str, blockers))
    assert status == 0
    assert rows["trainer: job"][0] == "warn"
    assert "could not start in 60 s: PENDING (Resources)" in rows["trainer: job"][1]
    assert rows["controller: job"][0] == "pass"
    assert not own_jobs(slurm)
    slurm.wait_idle()


def test_a_site_with_a_partition_that_is_not_there_fails_by_its_key(ask: Any, tmp_path: Path) -> None:
    status, rows = ask(site_of(tmp_path, generation={"partition": "gpus"}), "--quick")
    assert status == 1
    assert rows["generation.partition"][0] == "fail"
    assert "no such partition" in rows["generation.partition"][1]


def test_without_slurm_the_rest_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(_toml(site_of(tmp_path)), encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")  # no line of the table is broken
    assert main(["doctor", str(site)]) == 1
    shown = capsys.readouterr().out
    assert "no such command here" in shown
    assert "shared: rename" in shown


@pytest.mark.long
def test_two_nodes_that_do_not_reach_each_other_are_told_and_the_others_are_not_blamed(
    make_cluster: MakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        processes.require()
    except ConfigError as error:
        pytest.skip(str(error))
    cluster = make_cluster(replace(default_shape(1, 1, 1, gpus=2), has_networks=True))
    shown = cluster.run("scontrol", "show", "node", "t0", "--oneliner")
    address = next(word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr="))
    # The job of g0 shuts its own node's way to t0, as a firewall between partitions would.
    line = f"[ $SLURMD_NODENAME != g0 ] || ip route add blackhole {address}"
    monkeypatch.setenv("COLUMNS", "1000")
    path = tmp_path / "site.toml"
    path.write_text(_toml(site_of(tmp_path, prologue={"commands": [line]})), encoding="utf-8")
    with turned_to(cluster):
        assert main(["doctor", str(path)]) == 1
    failed = [line[6:].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert [line.split(" on ")[0].split() for line in failed] == [
        ["generation:", "reaches", "trainer"],
        ["trainer:", "reaches", "generation"],
    ]
    assert all("an interface that all partitions share" in line for line in failed)


def test_ctrl_c_leaves_neither_jobs_nor_files(slurm: DevCluster, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(_toml(site_of(tmp_path)), encoding="utf-8")
    # A child of a shell in the background would ignore SIGINT.
    program = (
        "import signal, sys; signal.signal(2, signal.default_int_handler); import launch.cli as c; sys.exit(c.main())"
    )
    command = [sys.executable, "-c", program, "doctor", str(site)]
    with subprocess.Popen(
        command, env=slurm.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        wait_until(lambda: bool(list(tmp_path.glob(".rlhpc-doctor-*/*.sbatch"))), "jobs are being submitted")
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["site.toml"]
    assert not own_jobs(slurm)
    slurm.wait_idle()
