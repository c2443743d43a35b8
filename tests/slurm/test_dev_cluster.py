"""The dev cluster is a real Slurm: it schedules, binds GPUs, preempts, requeues, survives, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launch.cli import main
from launch.plan.script import component_directives, render_command, srun_sizes
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import Installation
from launch.private_slurm.processes import Process, process, wait_gone
from launch.private_slurm.shape import default_shape
from rlhpc.protocol.errors import RoleFailed
from tests.slurm import faults
from tests.slurm.cluster_kit import (
    MakeCluster,
    all_processes,
    directory_of,
    job_node,
    job_output,
    job_state,
    submit,
    wait_state,
    wait_until,
)
from tests.unit.launch.site_kit import component_of, plan_of

pytestmark = pytest.mark.long


def test_all_nodes_are_idle_once_a_cluster_has_started(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(default_shape())
    assert cluster.node_states() == dict.fromkeys(("t0", "t1", "g0", "g1", "g2", "g3", "c0"), "idle")


def test_a_batch_job_sees_as_many_gpus_as_it_asked_for(slurm: DevCluster) -> None:
    job = submit(slurm, "echo $SLURM_JOB_PARTITION $CUDA_VISIBLE_DEVICES", "--partition=gen", "--gres=gpu:fake:3")
    assert wait_state(slurm, job, "COMPLETED") == "COMPLETED"
    assert job_output(slurm, job) == "gen 0,1,2\n"


def test_two_jobs_on_one_node_get_different_gpus(slurm: DevCluster) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES; sleep 600"
    jobs = [submit(slurm, script, "--partition=gen", "--nodelist=g0", "--gpus-per-node=2") for _ in range(2)]
    wait_until(lambda: all(job_output(slurm, job) for job in jobs), "both run")
    assert {job_output(slurm, job) for job in jobs} == {"0,1\n", "2,3\n"}
    slurm.run("scancel", *map(str, jobs))
    slurm.wait_idle()


def test_srun_starts_a_task_on_every_node_of_a_partition(slurm: DevCluster) -> None:
    said = slurm.run("srun", "--partition=train", "--nodes=2", "--gpus-per-node=4", "sh", "-c",
                     "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES ${ROCR_VISIBLE_DEVICES-none}")  # fmt: skip
    assert sorted(said.splitlines()) == ["t0 0,1,2,3 none", "t1 0,1,2,3 none"]


@pytest.mark.parametrize("kind", [None, "fake"])
def test_a_task_sees_all_gpus_of_its_step_though_they_were_asked_for_by_task(
    slurm: DevCluster, tmp_path: Path, kind: str | None
) -> None:
    keys = {"gpu_request": "gpus-per-task", "gres_type": kind, "partition": "train", "memory_gib_per_gpu": 1}
    plan = plan_of("trainer.num_ranks=6", trainer={**keys, "gpus_per_node": 4, "nodes": 2})
    trainer = component_of(plan, "trainer")
    words = ["srun", *srun_sizes(trainer), "sh", "-c", "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"]
    output = tmp_path / "output"
    script = tmp_path / "script"
    script.write_text(render_command(plan, [f"--output={output}", *component_directives(trainer)], words))
    job = int(slurm.run("sbatch", "--parsable", str(script)))
    assert wait_state(slurm, job, "COMPLETED") == "COMPLETED"
    assert sorted(output.read_text().splitlines()) == [f"t{node} {k} 0,1,2" for node in range(2) for k in range(3)]


def test_one_heterogeneous_job_spans_three_partitions(slurm: DevCluster) -> None:
    script = "\n".join(f"srun --het-group={group} -N1 -n1 sh -c 'echo $SLURMD_NODENAME'" for group in range(3))
    parts = ("--partition=cpu", ":", "--partition=train", "--mem=16M", ":", "--partition=gen", "--mem=16M")
    job = submit(slurm, script, *parts)
    wait_state(slurm, job, "COMPLETED")
    assert [name[0] for name in job_output(slurm, job).split()] == ["c", "t", "g"]


def test_a_job_on_gen_takes_the_place_of_one_on_scavenge_which_is_requeued(slurm: DevCluster, tmp_path: Path) -> None:
    script = "echo life ${SLURM_RESTART_COUNT:-0}; sleep 600"
    low = submit(slurm, script, "--partition=scavenge", "--nodelist=g1", "--gres=gpu:4")
    wait_until(lambda: "life 0" in job_output(slurm, low), "it runs")
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.1; done"
    high = submit(slurm, script, "--partition=gen", "--nodelist=g1", "--gres=gpu:4")
    wait_state(slurm, high, "RUNNING")
    assert job_state(slurm, low) == "PENDING"
    go.touch()
    wait_until(lambda: "life 1" in job_output(slurm, low), "it runs again")
    assert job_state(slurm, high) == "COMPLETED"
    slurm.run("scancel", str(low))
    slurm.wait_idle()


def test_a_crashed_node_goes_down_and_its_job_runs_again_elsewhere(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    job = submit(cluster, "echo $SLURMD_NODENAME; sleep 300", "--partition=gen")
    wait_until(lambda: bool(job_output(cluster, job)), "it runs")
    node = job_node(cluster, job)
    processes = cluster.job_processes(node)
    faults.crash_node(cluster, node)
    assert processes
    assert not any(each.is_alive for each in processes)
    wait_until(lambda: cluster.node_states()[node].startswith("down"), "noticed")
    wait_until(lambda: len(job_output(cluster, job).split()) == 2, "it runs again")
    first, second = job_output(cluster, job).split()
    assert first == node != second
    faults.start_node(cluster, node)
    cluster.wait_up()


def test_a_node_declared_down_is_not_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    job = submit(cluster, "echo $SLURMD_NODENAME; sleep 300", "--partition=gen")
    wait_until(lambda: bool(job_output(cluster, job)), "it runs")
    node = job_node(cluster, job)
    faults.crash_node(cluster, node)
    faults.declare_down(cluster, node)
    wait_until(lambda: len(job_output(cluster, job).split()) == 2, "it runs again")
    # Under load 26.05 may process a registration of the daemon that is dead, and takes the node for whole.
    assert "Not responding" not in cluster.run("scontrol", "show", "node", node)


def test_processes_outlive_the_daemon_of_their_node(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    job = submit(cluster, "echo up; sleep 300", "--partition=gen")
    wait_until(lambda: bool(job_output(cluster, job)), "it runs")
    node = job_node(cluster, job)
    wait_until(lambda: len(cluster.job_processes(node)) >= 2, "the shell has started sleep")
    before = {each.pid for each in cluster.job_processes(node)}
    faults.kill_node_daemon(cluster, node)
    assert {each.pid for each in cluster.job_processes(node)} == before
    assert cluster.repair() == [f"slurmd-{node}"]
    assert job_state(cluster, job) == "RUNNING"


def test_a_job_ends_while_the_controller_is_away_and_counts_as_completed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    long = submit(cluster, "echo up; sleep 300", "--partition=gen")
    short = submit(cluster, "echo up; sleep 2; echo end", "--partition=gen")
    wait_until(lambda: all(job_output(cluster, job) for job in (long, short)), "both run")
    faults.stop_controller(cluster)
    assert not cluster.is_reachable()
    wait_until(lambda: "end" in job_output(cluster, short), "it ends")
    faults.start_controller(cluster)
    wait_state(cluster, short, "COMPLETED")
    assert job_state(cluster, long) == "RUNNING"
    assert job_output(cluster, long) == "up\n"


def test_a_cluster_whose_tests_are_killed_ends_with_its_jobs() -> None:
    program = """
import sys, time
from launch.private_slurm.packages import obtain
from launch.private_slurm.shape import default_shape
from tests.slurm.cluster_kit import submit, wait_state
from tests.slurm.stand import new_cluster
cluster = new_cluster(default_shape(1, 1, 1), obtain())
cluster.start(120)
wait_state(cluster, submit(cluster, "setsid sleep 600 & sleep 600"), "RUNNING")
print(cluster.layout.root, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        root = Path(tests.stdout.readline().strip())
        cluster = DevCluster.open(root)
        wait_until(lambda: len(cluster.job_processes()) >= 2, "the job runs")
        assert cluster.is_running
        tests.kill()
    wait_until(lambda: not (cluster.is_running or cluster.job_processes() or cluster.step_daemons()), "all has ended")
    shutil.rmtree(root)


def test_a_killed_controller_finds_its_jobs_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    job = submit(cluster, "echo up; sleep 300", "--partition=gen")
    wait_until(lambda: bool(job_output(cluster, job)), "it runs")
    changed = time.time()
    cluster.run("scontrol", "update", f"JobId={job}", "Comment=save")  # the start of a job alone is not saved
    saved = cluster.layout.state / "job_state"

    def is_saved() -> bool:
        with suppress(FileNotFoundError):  # the new file is put into the place of the old one, which is deleted first
            return saved.stat().st_mtime > changed
        return False

    wait_until(is_saved, "state saved")
    faults.kill_controller(cluster)
    faults.start_controller(cluster)
    assert job_state(cluster, job) == "RUNNING"
    assert job_output(cluster, job) == "up\n"


def test_the_end_of_a_cluster_is_the_end_of_its_processes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    # The inner one leaves session and tree and ignores SIGTERM, like the worker of an engine that has gone astray.
    script = "setsid sh -c 'trap \"\" TERM; echo $$ > stray; sleep 300' & \nsrun sleep 300 & wait"
    submit(cluster, script, "--partition=gen")
    stray_file = directory_of(cluster) / "stray"
    wait_until(lambda: stray_file.exists() and bool(stray_file.read_text()), "it runs")
    stray = process(int(stray_file.read_text()))
    processes = all_processes(cluster)
    assert stray is not None
    assert len(processes) > len(cluster.shape.nodes) + 4
    cluster.stop()
    assert not [each for each in (*processes, stray) if each.is_alive]
    assert not all_processes(cluster)
    cluster.stop()  # a second time does nothing


def test_a_started_again_cluster_goes_on_counting_jobs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    first = submit(cluster, "true", "--partition=gen")
    wait_state(cluster, first, "COMPLETED")
    cluster.stop()
    cluster.start()
    assert submit(cluster, "true", "--partition=gen") > first


def test_two_clusters_at_once_know_nothing_of_each_other(make_cluster: MakeCluster) -> None:
    one, other = make_cluster(), make_cluster()
    job = submit(one, "sleep 300", "--partition=gen")
    wait_state(one, job, "RUNNING")
    assert not other.run("squeue", "--noheader")
    other.stop()
    assert job_state(one, job) == "RUNNING"
    assert one.run("sinfo", "--noheader", "--responding", "--partition=gen", "--format=%D").strip() == "2"


def test_packages_in_a_prefix_serve_without_any_installed_slurm(
    make_cluster: MakeCluster, private_installation: Installation
) -> None:
    cluster = make_cluster(installation=private_installation)
    command = Path(f"/proc/{_living(cluster, 'slurmctld').pid}/cmdline").read_bytes().decode()
    assert command.startswith(str(private_installation.prefix))
    said = cluster.run("srun", "--partition=gen", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert said == "0,1\n"
    cluster.stop()
    assert not all_processes(cluster)


def test_with_accounting_jobs_are_charged_and_an_unknown_account_is_refused(slurm_accounts: DevCluster) -> None:
    job = submit(slurm_accounts, "true", "--partition=gen")
    wait_state(slurm_accounts, job, "COMPLETED")
    ask = ("sacct", f"--jobs={job}", "--noheader", "--parsable2", "--allocations", "--format=State,Account")
    wait_until(lambda: slurm_accounts.run(*ask) == "COMPLETED|lab\n", "charged")
    with pytest.raises(RoleFailed, match="Invalid account"):
        submit(slurm_accounts, "true", "--account=nobody")


def test_the_command_line_starts_shows_mends_and_ends_a_cluster(
    slurm_installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(f"/tmp/rlhpc-t{os.getpid()}")
    few = ("--train", "1", "--gen", "1", "--cpu", "0")
    try:
        assert main(["cluster", "up", str(root), *few]) == 0
        assert f"export SLURM_CONF={root}/etc/slurm.conf" in capsys.readouterr().out
        assert main(["cluster", "up", str(root), *few]) == 0
        assert "already running" in capsys.readouterr().out
        assert main(["cluster", "status", str(root)]) == 0
        shown = capsys.readouterr().out
        daemons = {line.split()[0]: process(int(line.split()[1])) for line in shown.splitlines() if " alive " in line}
        assert sorted(daemons) == ["munged", "slurmctld", "slurmd-g0", "slurmd-t0"]
        assert "scavenge" in shown
        faults.kill_node_daemon(DevCluster.open(root), "g0")
        assert main(["cluster", "up", str(root)]) == 0
        assert "restarted: slurmd-g0" in capsys.readouterr().out
    finally:
        assert main(["cluster", "down", str(root), "--delete"]) == 0
    assert not root.exists()
    assert not [daemon for daemon in daemons.values() if daemon and daemon.is_alive]
    assert main(["cluster", "status", str(root)]) == 2
    assert "no dev cluster here" in capsys.readouterr().err


def _living(cluster: DevCluster, daemon: str) -> Process:
    found = cluster.daemons.find(daemon)
    assert found is not None
    assert not wait_gone([found], 0)
    return found
