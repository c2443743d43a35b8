"""Nodes, tasks and sizes follow from the run file; what does not divide, or cannot work, is refused with its reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.plan.jobs import Elastic, JobPlan, plan_elastic, plan_jobs
from launch.plan.processes import ROLE_ENVIRONMENT, shares_of
from launch.plan.script import describe_jobs, plan_document, plan_report, render_scripts, shared_layout
from launch.plan.site_file import load_site
from launch.run_files.plan_file import Share, read_plan
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.unit.launch.regenerate_scripts import PAIRS, ROOT, Pair
from tests.unit.launch.site_kit import component_of, config_of, job_of, plan_of, site_of

JOBS: dict[str, Any] = {"cluster": {"placement": "jobs"}}


def num_processes(plan: JobPlan) -> dict[str, int]:
    """Processes of every role, all array tasks together."""
    counts: dict[str, int] = {}
    for job in plan.jobs:
        for component in job.components:
            for share in component.roles:
                counts[share.role] = counts.get(share.role, 0) + share.num_processes * (job.array_size or 1)
    return counts


# -------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_jobs_hold_exactly_the_processes_of_the_run(pair: Pair) -> None:
    layout = RunLayout(pair.config.run_directory)
    wanted = {share.role: share.num_processes for share in shares_of(pair.config)}
    plan = plan_jobs(pair.config, pair.site, layout)
    assert num_processes(plan) == wanted
    for job in plan.jobs:
        for component in job.components:
            tasks = 1 if component.runs_in_batch_step else sum(share.num_processes for share in component.roles)
            assert component.num_tasks == tasks


@pytest.mark.parametrize(
    ("ranks", "nodes", "tasks"), [(1, 1, 1), (2, 1, 2), (6, 1, 6), (8, 1, 8), (16, 2, 8), (64, 8, 8)]
)
def test_trainer_ranks_fill_nodes_with_a_gpu_each(ranks: int, nodes: int, tasks: int) -> None:
    trainer = component_of(plan_of(f"trainer.num_ranks={ranks}"), "trainer")
    assert (trainer.nodes, trainer.tasks_per_node, trainer.gpus_per_task) == (nodes, tasks, 1)
    assert trainer.gpus_per_node == tasks


@pytest.mark.parametrize(
    ("replicas", "tensor", "nodes", "tasks"), [(1, 1, 1, 1), (8, 1, 1, 8), (4, 4, 2, 2), (3, 8, 3, 1), (2, 3, 1, 2)]
)
def test_replicas_fill_nodes_and_lie_on_one_each(replicas: int, tensor: int, nodes: int, tasks: int) -> None:
    plan = plan_of(f"generation.num_replicas={replicas}", f"generation.tensor_parallel={tensor}")
    generation = component_of(plan, "generation")
    assert (generation.nodes, generation.tasks_per_node, generation.gpus_per_task) == (nodes, tasks, tensor)


def test_nodes_in_the_site_file_spread_tasks_thinner() -> None:
    plan = plan_of("trainer.num_ranks=12", trainer={"nodes": 2})
    trainer = component_of(plan, "trainer")
    assert (trainer.nodes, trainer.tasks_per_node) == (2, 6)


def test_cores_and_memory_of_a_replica_grow_with_its_gpus() -> None:
    keys = {"cpus_per_gpu": 12, "memory_gib_per_gpu": 100}
    generation = component_of(plan_of("generation.tensor_parallel=4", generation=keys), "generation")
    assert (generation.cpus_per_task, generation.memory_gib_per_task) == (48, 400)


def test_reward_services_run_beside_the_controller_unless_they_have_a_section() -> None:
    run = ("rewards.num_replicas=2", "rewards.workers_per_replica=8")
    beside = component_of(plan_of(*run), "controller")
    assert beside.roles == (Share("controller", 1), Share("reward", 2))
    assert (beside.num_tasks, beside.cpus_per_task, beside.runs_in_batch_step) == (1, 2 + 2 * 9, True)
    apart = plan_of(*run, rewards={"partition": "cpu"})
    assert component_of(apart, "controller").cpus_per_task == 2
    rewards = component_of(apart, "rewards")
    assert (rewards.nodes, rewards.tasks_per_node, rewards.cpus_per_task) == (1, 2, 9)


def test_a_run_on_cpu_asks_for_no_gpu_of_the_trainer() -> None:
    assert component_of(plan_of("trainer.device=cpu"), "trainer").gpus_per_task == 0
    assert component_of(plan_of(trainer={"gpus_per_node": None}), "trainer").gpus_per_task == 0
    assert component_of(plan_of("generation.engine=scripted"), "generation").gpus_per_task == 0


def test_a_section_overrules_what_is_common() -> None:
    common = {"partition": "all", "account": "us", "extra": ["--licenses=a:1"]}
    plan = plan_of(common=common, trainer={"partition": "h100", "extra": []}, controller={"account": "them"})
    controller, trainer = component_of(plan, "controller").allocation, component_of(plan, "trainer").allocation
    assert (controller.partition, controller.account, controller.extra) == ("all", "them", ("--licenses=a:1",))
    assert (trainer.partition, trainer.account, trainer.extra) == ("h100", "us", ())


# ---------------------------------------------------------------------------------------------------------- placements


def test_hetjob_is_one_job_whose_first_component_is_the_controller() -> None:
    (job,) = plan_of(rewards={}).jobs
    assert [component.name for component in job.components] == ["controller", "trainer", "generation", "rewards"]
    assert [component.runs_in_batch_step for component in job.components] == [True, False, False, False]


def test_jobs_are_one_a_role_with_an_array_task_a_replica() -> None:
    plan = plan_of("generation.num_replicas=4", "generation.tensor_parallel=2", rewards={}, **JOBS)
    assert [(job.name, job.array_size) for job in plan.jobs] == [
        ("controller", None),
        ("trainer", None),
        ("generation", 4),
        ("rewards", None),
    ]
    (replica,) = job_of(plan, "generation").components
    assert (replica.nodes, replica.num_tasks, replica.gpus_per_node) == (1, 1, 2)


@pytest.mark.parametrize("keys", [{"exclusive": True}, {"nodes": 2}])
def test_an_array_task_is_a_node_where_nodes_are_whole(keys: dict[str, Any]) -> None:
    plan = plan_of("generation.num_replicas=16", generation=keys, **JOBS)
    job = job_of(plan, "generation")
    assert (job.array_size, job.components[0].roles) == (2, (Share("generator", 8),))


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("run", "site", "words"),
    [
        (["trainer.num_ranks=12"], {}, ["num_ranks=12 does not fill nodes of 8", "up to 8, or trainer.nodes=2"]),
        (["trainer.num_ranks=12"], {"trainer": {"nodes": 5}}, ["trainer.nodes=5", "=12; legal: 2, 3, 4, 6, 12"]),
        (["trainer.num_ranks=32"], {"trainer": {"nodes": 2}}, ["32 on trainer.nodes=2", "16 a node", "legal: 4 n"]),
        (
            ["trainer.num_ranks=12", "trainer.tensor_parallel=4"],
            {"trainer": {"nodes": 2}},
            ["trainer.tensor_parallel=4 with 6 ranks on each of 2 nodes", "a divisor or a multiple"],
        ),
        (["trainer.device=cuda"], {"trainer": {"gpus_per_node": None}}, ["trainer.gpus_per_node: missing"]),
        (["trainer.optimizer_offload=true"], {"trainer": {"gpus_per_node": None}}, ["trainer.optimizer_offload=true"]),
        (["generation.tensor_parallel=16"], {}, ["=16 is more than generation.gpus_per_node=8", "up to 8"]),
        (
            ["generation.tensor_parallel=2"],
            {"generation": {"gpus_per_node": None}},
            ["generation.gpus_per_node: missing", "generation.tensor_parallel=2 needs GPUs"],
        ),
        (
            ["generation.num_replicas=5", "generation.tensor_parallel=4"],
            {},
            ["generation.num_replicas=5 does not fill nodes of 2", "generation.nodes=5"],
        ),
        (["rewards.num_replicas=3"], {"rewards": {"nodes": 2}}, ["rewards.nodes=2", "num_replicas=3; legal: 1, 3"]),
        (["transport.kind=ipc"], {}, ["transport.kind='ipc'", "legal: 'auto', 'tcp'"]),
        (["weights.transport=ipc"], {}, ["weights.transport='ipc'", "'nccl'"]),
        (["run.directory=/home/me/run"], {}, ["run.directory='/home/me/run'", "'/shared'", "'/shared/runs/run'"]),
        (["run.directory=/shared/my runs"], {}, ["run.directory='/shared/my runs': ' ' is not safe in a batch script"]),
        (["run.directory=/shared/50%"], {}, ["'%' is not safe in a batch script"]),
        ([], {"common": {"time": None}}, ["controller.time: missing in the site file, as is common.time"]),
        ([], {"trainer": {"gres": "gpu:1"}}, ["trainer.gres='gpu:1'", "gpus_per_node", "[controller]"]),
        ([], {"common": {"gres": "disk:9,gpu:a100:1"}}, ["trainer.gres='disk:9,gpu:a100:1'"]),
        ([], {"trainer": {"time": 30}}, ["trainer.time='0:30:00' differs from", "='1:00:00'", "common.time"]),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused_with_key_value_and_what_is_legal(
    run: list[str], site: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(*run, **site)
    for word in words:
        assert word in str(refused.value)


def test_jobs_may_end_at_different_times() -> None:
    plan = plan_of(trainer={"time": 30}, **JOBS)
    assert component_of(plan, "trainer").allocation.time_s == 1800


def test_a_site_for_checks_alone_makes_no_plan() -> None:
    site = site_of().model_copy(update={"cluster": None})
    with pytest.raises(ConfigError, match="cluster: missing in the site file"):
        plan_report(config_of(), site)


# ------------------------------------------------------------------------------------------------------------- reports


def test_a_run_directory_that_is_reached_by_a_link_is_named_as_nodes_know_it(tmp_path: Path) -> None:
    real, shared = tmp_path / "lustre" / "work", tmp_path / "work"
    real.mkdir(parents=True)
    shared.symlink_to(real)
    site = site_of(cluster={"shared_directory": str(shared)})
    assert shared_layout(config_of(f"run.directory={real}/runs/a"), site).root == shared / "runs" / "a"
    assert shared_layout(config_of(f"run.directory={shared}/runs/a"), site).root == shared / "runs" / "a"
    assert shared_layout(config_of(f"run.directory={tmp_path}/runs/a"), site).root == tmp_path / "runs" / "a"


def test_the_words_count_nodes_and_gpus_of_all_array_tasks() -> None:
    plan = plan_of("generation.num_replicas=4", "generation.tensor_parallel=2", "trainer.num_ranks=16", **JOBS)
    words = describe_jobs(plan)
    assert "3 jobs on cluster: 7 nodes, 24 GPUs" in words
    assert re.search(r"generation +4 × 1 generator +1 +1 +8 +2 +default +1:00:00 +gpu", words)


def test_the_plan_file_has_what_the_supervisor_starts() -> None:
    prologue = {"image": "/shared/a.sif", "code": "/home/me/rlhpc", "binds": ["/data"]}
    document = json.loads(plan_document(plan_of("trainer.num_ranks=16", prologue=prologue)))
    assert (document["schema"], document["run_directory"], document["placement"]) == (1, "/shared/run", "hetjob")
    (job,) = document["jobs"]
    controller, trainer, _ = job["components"]
    assert controller["runs_in_batch_step"]
    assert controller["roles"] == [
        {"role": "controller", "num_processes": 1, "first_replica": 0},
        {"role": "reward", "num_processes": 1, "first_replica": 0},
    ]
    sizes = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_task", "time_s")
    assert [trainer[key] for key in sizes] == [2, 8, 4, 1, 3600]
    assert trainer["srun"] == ["--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=4"]
    assert controller["srun"] == []
    inside = ["--bind", "/shared,/home/me/rlhpc,/data", "/shared/a.sif", "python3"]
    assert trainer["python"] == ["apptainer", "exec", "--nv", *inside]
    assert controller["python"] == ["apptainer", "exec", *inside]


def test_the_plan_file_has_the_limits_of_the_site_and_the_environment_of_the_roles() -> None:
    keys = {"max_retries": 0, "meet_s": 60, "continuation": "successor"}
    document = json.loads(plan_document(plan_of("trainer.device=cpu", cluster=keys)))
    limits = {"meet_s": 60, "stall_s": 3600, "max_retries": 0, "dead_after_s": 15.0, "log_bytes": 1 << 27}
    assert document["limits"] == limits | {"is_attended": False}
    assert document["continuation"] == "successor"
    controller, trainer, generation = document["jobs"][0]["components"]
    assert controller["environment"] == generation["environment"] == ROLE_ENVIRONMENT
    assert trainer["environment"] == ROLE_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    assert controller["defaults"] == {"OMP_NUM_THREADS": "1"}


@pytest.mark.starts
def test_roles_have_assertions_and_docstrings_whatever_the_shell_has_set() -> None:
    """Under PYTHONOPTIMIZE=2 the model was blamed: transformers reads its own docstrings when it is imported."""
    environment = os.environ | {"PYTHONOPTIMIZE": "2"} | ROLE_ENVIRONMENT
    words = [sys.executable, "-c", "import sys; sys.exit(sys.flags.optimize)"]
    assert subprocess.run(words, env=environment, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["trainer.optimizer_offload=true", "trainer.backend=deepspeed"], "6"),
        (["trainer.ema_decay=0.99"], "6"),
        ([], "1"),
        (["trainer.ema_decay=0.99", "trainer.ema_memory=device"], "1"),
        (["trainer.ema_decay=0.99", "trainer.device=cpu"], "1"),
        (["trainer.ema_decay=0.99", "run.deterministic=true"], "1"),
    ],
    ids=str,
)
def test_ranks_whose_gpu_waits_for_work_in_host_memory_use_all_their_cores(words: list[str], threads: str) -> None:
    document = json.loads(plan_document(plan_of(*words, trainer={"cpus_per_gpu": 6})))
    defaults = {each["name"]: each["defaults"] for each in document["jobs"][0]["components"]}
    assert defaults["trainer"] == {"OMP_NUM_THREADS": threads}
    assert defaults["controller"] == defaults["generation"] == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_supervisor_reads_the_plan_of_every_shipped_pair(pair: Pair, tmp_path: Path) -> None:
    plan = plan_jobs(pair.config, pair.site, RunLayout(pair.config.run_directory))
    path = tmp_path / "job_plan.json"
    path.write_text(plan_document(plan))
    for job in plan.jobs:
        part = read_plan(path, job.name)
        assert part.hosts_controller == (job.name in ("hetjob", "controller"))
        assert [each.name for each in part.parts] == [each.name for each in job.components]


# ------------------------------------------------------------------------------------------------------------- elastic


def test_added_generators_are_an_array_of_single_replicas_of_the_planned_size() -> None:
    config = config_of("generation.num_replicas=4", "generation.tensor_parallel=2")
    keys = {"partition": "scavenge", "exclusive": True, "nodes": 1, "qos": "low"}
    wanted = Elastic("generation-3", 2, first_replica=7, placement="hetjob", time_s=600)
    plan = plan_elastic(config, site_of(generation=keys), RunLayout(config.run_directory), wanted)
    (job,) = plan.jobs
    (part,) = job.components
    assert (job.name, job.array_size, plan.placement) == ("generation-3", 2, "hetjob")
    assert part.roles == (Share("generator", 1, first_replica=7),)
    assert (part.nodes, part.tasks_per_node, part.gpus_per_task, part.cpus_per_task) == (1, 1, 2, 8)
    assert (part.allocation.partition, part.allocation.time_s, part.allocation.qos) == ("scavenge", 600, "low")
    (script,) = render_scripts(plan).values()
    assert "--plan /shared/run/scripts/generation-3.json --job generation-3" in script
    assert "#SBATCH --array=0-1" in script
    assert "#SBATCH hetjob" not in script
    assert "one job on cluster: 2 nodes, 4 GPUs" in describe_jobs(plan)


def test_the_partition_of_the_command_line_wins_for_added_generators() -> None:
    config = config_of()
    wanted = Elastic("generation-1", 1, first_replica=1, placement="jobs", partition="cheap")
    plan = plan_elastic(config, site_of(), RunLayout(config.run_directory), wanted)
    assert component_of(plan, "generation").allocation.partition == "cheap"
    assert component_of(plan, "generation").allocation.time_s == 3600


def test_no_step_binds_its_tasks_to_gpus_however_these_were_asked_for() -> None:
    keys = {"gpu_request": "gpus-per-task", "gres_type": "h100"}
    plan = plan_of("generation.num_replicas=2", "generation.tensor_parallel=4", generation=keys)
    generation = json.loads(plan_document(plan))["jobs"][0]["components"][2]
    assert generation["gpus_per_task"] == 4
    assert generation["srun"] == ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=16"]


def test_the_command_prints_the_plan_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(ROOT / "configs" / "demo.toml"), str(ROOT / "slurm" / "sites" / "example.toml")]
    assert main([*words, "run.directory=/shared/project/run"]) == 0
    assert "----- hetjob.sbatch\n#!/bin/bash\n" in capsys.readouterr().out
    assert main([*words, "run.directory=/shared/project/run", "transport.kind=ipc"]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""
    refusal = "transport.kind='ipc' reaches one machine only, and a job has several; legal: 'auto', 'tcp'"
    assert captured.err == f"rlhpc: {refusal}\n"


def test_a_plan_makes_nothing(tmp_path: Path) -> None:
    site = site_of(cluster={"shared_directory": str(tmp_path)})
    plan_report(config_of(f"run.directory={tmp_path}/run"), site)
    assert list(tmp_path.iterdir()) == []


def test_large_runs_are_for_more_than_one_machine() -> None:
    site = load_site(ROOT / "slurm" / "sites" / "example.toml")
    for path in (ROOT / "configs").glob("*/*.toml"):  # those that are large, and recipes
        config = load_config(path, ["run.directory=/shared/project/run"])
        plan_jobs(config, site, RunLayout(config.run_directory))


def test_the_page_shows_the_plan_that_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    ((command, output),) = re.findall(r"^\$ rlhpc (plan .*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.partition("\n----- ")[0] == output
