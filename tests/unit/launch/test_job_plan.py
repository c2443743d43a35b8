"""Nodes, tasks, GPUs and sizes follow from run file and site file; what cannot work is refused with its reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PosixPath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.cli import main
from launch.commands.schema import meaning_of
from launch.doctor import gpus
from launch.doctor.gpus import Gpu, parse_listing, visible_gpus
from launch.plan.gpu_map import VisibleGpus, describe_gpus, map_gpus
from launch.plan.jobs import Elastic, JobPlan, plan_elastic, plan_jobs
from launch.plan.processes import ROLE_ENVIRONMENT, describe_plan, local_plan_document, shares_of
from launch.plan.script import describe_jobs, plan_document, plan_report, render_scripts, shared_layout
from launch.plan.site_file import SECTIONS, CommonConfig, Site, load_site, slurm_time, walltime_s
from launch.run_files.plan_file import Share, read_plan
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests import build
from tests.unit.launch.site_kit import PAIRS, ROOT, SITE_FILES, component_of, config_of, job_of, plan_of, site_of

# ---------------------- Nodes, tasks and sizes follow from run file and site file; what cannot work is refused with its

# -------------------- Nodes, tasks and sizes follow from the run file; what does not divide, or cannot work, is refused

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
def test_the_jobs_hold_exactly_the_processes_of_the_run_and_the_supervisor_reads_their_plan(pair, tmp_path):
    wanted = Counter[str]()
    for share in shares_of(pair.config):  # a run has several services
        wanted[share.role] += share.num_processes
    plan = plan_jobs(pair.config, pair.site, RunLayout(pair.config.run_directory))
    assert num_processes(plan) == wanted
    path = tmp_path / "job_plan.json"
    path.write_text(plan_document(plan))
    for job in plan.jobs:
        for component in job.components:
            tasks = 1 if component.runs_in_batch_step else sum(share.num_processes for share in component.roles)
            assert component.num_tasks == tasks
        part = read_plan(path, job.name)
        assert part.hosts_controller == (job.name in ("hetjob", "controller"))
        assert [each.name for each in part.parts] == [each.name for each in job.components]


def test_trainer_ranks_and_replicas_fill_nodes():
    for ranks, nodes, tasks in ((1, 1, 1), (2, 1, 2), (6, 1, 6), (8, 1, 8), (16, 2, 8), (64, 8, 8)):
        trainer = component_of(plan_of(f"trainer.num_ranks={ranks}"), "trainer")
        assert (trainer.nodes, trainer.tasks_per_node, trainer.gpus_per_task) == (nodes, tasks, 1)
        assert trainer.gpus_per_node == tasks
    for replicas, tensor, nodes, tasks in ((1, 1, 1, 1), (8, 1, 1, 8), (4, 4, 2, 2), (3, 8, 3, 1), (2, 3, 1, 2)):
        plan = plan_of(f"generation.num_replicas={replicas}", f"generation.tensor_parallel={tensor}")
        generation = component_of(plan, "generation")
        assert (generation.nodes, generation.tasks_per_node, generation.gpus_per_task) == (nodes, tasks, tensor)
    trainer = component_of(plan_of("trainer.num_ranks=12", trainer={"nodes": 2}), "trainer")
    assert (trainer.nodes, trainer.tasks_per_node) == (2, 6), "nodes in the site file spread tasks thinner"
    keys = {"cpus_per_gpu": 12, "memory_gib_per_gpu": 100}
    generation = component_of(plan_of("generation.tensor_parallel=4", generation=keys), "generation")
    assert (generation.cpus_per_task, generation.memory_gib_per_task) == (48, 400), "they grow with its GPUs"
    assert component_of(plan_of("trainer.device=cpu"), "trainer").gpus_per_task == 0
    assert component_of(plan_of(trainer={"gpus_per_node": None}), "trainer").gpus_per_task == 0
    assert component_of(plan_of("generation.engine=scripted"), "generation").gpus_per_task == 0


def test_reward_services_run_beside_the_controller_unless_they_have_a_section():
    run = ("rewards.num_replicas=2", "rewards.workers_per_replica=8")
    beside = component_of(plan_of(*run), "controller")
    assert beside.roles == (Share("controller", 1), Share("reward", 2))
    assert (beside.num_tasks, beside.cpus_per_task, beside.runs_in_batch_step) == (1, 2 + 2 * 9, True)
    apart = plan_of(*run, rewards={"partition": "cpu"})
    assert component_of(apart, "controller").cpus_per_task == 2
    rewards = component_of(apart, "rewards")
    assert (rewards.nodes, rewards.tasks_per_node, rewards.cpus_per_task) == (1, 2, 9)


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_supervised_fine_tuning_holds_nodes_for_controller_and_trainer_alone(placement, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "taught"\ndirectory = "/shared/runs/taught"\n[model]\npath = "/m"\n'
        '[[demonstrations]]\npath = "/d.jsonl"\n[sft]\nheld_out = 0.1\nearly_stop = 3\n'
        '[trainer]\ntoken_budget = 4096\nnum_ranks = 2\ndevice = "cuda"\n'
    )
    config = load_config(tmp_path / "run.toml", [])
    site = site_of(cluster={"placement": placement, "shared_directory": "/shared"}, rewards={})
    plan = plan_jobs(config, site, RunLayout(config.run_directory))
    assert num_processes(plan) == {"controller": 1, "trainer": 2}
    assert component_of(plan, "controller").cpus_per_task == 2
    assert map_gpus(config, VisibleGpus(("0", "1"))).devices == {"trainer-0": ("0",), "trainer-1": ("1",)}
    document = local_plan_document(
        config, RunLayout(config.run_directory), map_gpus(config, VisibleGpus(("0", "1"))), 5, 8
    )
    parts = json.loads(document)["jobs"][0]["components"]
    assert [(part["name"], [share["role"] for share in part["roles"]]) for part in parts] == [
        ("controller", ["controller"]), ("trainer", ["trainer"])
    ]  # fmt: skip
    said = describe_plan(config, RunLayout(Path("/run")), map_gpus(config, VisibleGpus(("0", "1"))))
    assert "batch       64 conversations of up to 4096 tokens a step" in said
    assert "held out    loss every 50 steps and at the end; stops after 3 without a lower one" in said
    assert "generation" not in said
    assert "rollouts" not in said


def test_a_section_overrules_what_is_common():
    common = {"partition": "all", "account": "us", "extra": ["--licenses=a:1"]}
    plan = plan_of(common=common, trainer={"partition": "h100", "extra": []}, controller={"account": "them"})
    controller, trainer = component_of(plan, "controller").allocation, component_of(plan, "trainer").allocation
    assert (controller.partition, controller.account, controller.extra) == ("all", "them", ("--licenses=a:1",))
    assert (trainer.partition, trainer.account, trainer.extra) == ("h100", "us", ())


# ---------------------------------------------------------------------------------------------------------- placements


def test_hetjob_is_one_job_whose_first_component_is_the_controller_and_jobs_are_one_a_role():
    (job,) = plan_of(rewards={}).jobs
    assert [component.name for component in job.components] == ["controller", "trainer", "generation", "rewards"]
    assert [component.runs_in_batch_step for component in job.components] == [True, False, False, False]
    plan = plan_of("generation.num_replicas=4", "generation.tensor_parallel=2", rewards={}, **JOBS)
    sizes = {job.name: job.array_size for job in plan.jobs}
    assert sizes == {"controller": None, "trainer": None, "generation": 4, "rewards": None}
    (replica,) = job_of(plan, "generation").components
    assert (replica.nodes, replica.num_tasks, replica.gpus_per_node) == (1, 1, 2)
    for keys in ({"exclusive": True}, {"nodes": 2}):  # an array task is a node where nodes are whole
        job = job_of(plan_of("generation.num_replicas=16", generation=keys, **JOBS), "generation")
        assert (job.array_size, job.components[0].roles) == (2, (Share("generator", 8),))
    assert component_of(plan_of(trainer={"time": 30}, **JOBS), "trainer").allocation.time_s == 1800


# ------------------------------------------------------------------------------------------------------------ refusals


NO_GPUS: dict[str, Any] = {"gpus_per_node": None}


@pytest.mark.parametrize(
    ("run", "site", "words"),
    [
        ("trainer.num_ranks=12", {}, ["num_ranks=12 does not fill nodes of 8", "up to 8, or trainer.nodes=2"]),
        ("trainer.num_ranks=12", {"trainer": {"nodes": 5}}, ["trainer.nodes=5", "=12; legal: 2, 3, 4, 6, 12"]),
        ("trainer.num_ranks=32", {"trainer": {"nodes": 2}}, ["32 on trainer.nodes=2", "16 a node", "legal: 4 n"]),
        ("trainer.num_ranks=12 trainer.tensor_parallel=4", {"trainer": {"nodes": 2}},
         ["trainer.tensor_parallel=4 with 6 ranks on each of 2 nodes", "a divisor or a multiple"]),
        ("trainer.device=cuda", {"trainer": NO_GPUS}, ["trainer.gpus_per_node: missing"]),
        ("trainer.optimizer_offload=true", {"trainer": NO_GPUS}, ["trainer.optimizer_offload=true"]),
        ("generation.tensor_parallel=16", {}, ["=16 is more than generation.gpus_per_node=8", "up to 8"]),
        ("generation.tensor_parallel=2", {"generation": NO_GPUS},
         ["generation.gpus_per_node: missing", "generation.tensor_parallel=2 needs GPUs"]),
        ("generation.num_replicas=5 generation.tensor_parallel=4", {},
         ["generation.num_replicas=5 does not fill nodes of 2", "generation.nodes=5"]),
        ("rewards.num_replicas=3", {"rewards": {"nodes": 2}}, ["rewards.nodes=2", "num_replicas=3; legal: 1, 3"]),
        ("transport.kind=ipc", {}, ["transport.kind='ipc'", "legal: 'auto', 'tcp'"]),
        ("weights.transport=ipc", {}, ["weights.transport='ipc'", "'nccl'"]),
        ("run.directory=/home/me/run", {}, ["run.directory='/home/me/run'", "'/shared'", "'/shared/runs/run'"]),
        ("run.directory=/shared/50%", {}, ["'%' is not safe in a batch script"]),
        ("", {"common": {"time": None}}, ["controller.time: missing in the site file, as is common.time"]),
        ("", {"trainer": {"gres": "gpu:1"}}, ["trainer.gres='gpu:1'", "gpus_per_node", "[controller]"]),
        ("", {"common": {"gres": "disk:9,gpu:a100:1"}}, ["common.gres='disk:9,gpu:a100:1'", "[trainer]"]),
        ("", {"trainer": {"time": 30}}, ["trainer.time='0:30:00' differs from", "='1:00:00'", "common.time"]),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused_with_key_value_and_what_is_legal(run, site, words):
    with pytest.raises(ConfigError) as refused:
        plan_of(*run.split(), **site)
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_site_for_checks_alone_makes_no_plan_and_a_blank_in_a_directory_is_refused():
    with pytest.raises(ConfigError, match="cluster: missing in the site file"):
        plan_report(config_of(), site_of().model_copy(update={"cluster": None}))
    with pytest.raises(ConfigError, match="'/shared/my runs': ' ' is not safe in a batch script"):
        plan_of("run.directory=/shared/my runs")


# ------------------------------------------------------------------------------------------------------------- reports


def test_a_run_directory_that_is_reached_by_a_link_is_named_as_nodes_know_it(tmp_path):
    real, shared = tmp_path / "lustre" / "work", tmp_path / "work"
    real.mkdir(parents=True)
    shared.symlink_to(real)
    site = site_of(cluster={"shared_directory": str(shared)})
    assert shared_layout(config_of(f"run.directory={real}/runs/a"), site).root == shared / "runs" / "a"
    assert shared_layout(config_of(f"run.directory={shared}/runs/a"), site).root == shared / "runs" / "a"
    assert shared_layout(config_of(f"run.directory={tmp_path}/runs/a"), site).root == tmp_path / "runs" / "a"


def test_the_words_count_nodes_and_gpus_of_all_array_tasks():
    plan = plan_of("generation.num_replicas=4", "generation.tensor_parallel=2", "trainer.num_ranks=16", **JOBS)
    words = describe_jobs(plan)
    assert "3 jobs on cluster: 7 nodes, 24 GPUs" in words
    assert re.search(r"generation +4 × 1 generator +1 +1 +8 +2 +default +1:00:00 +gpu", words)


def test_the_plan_file_has_what_the_supervisor_starts():
    prologue = {"image": "/shared/a.sif", "code": "/home/me/rlhpc", "binds": ["/data"]}
    document = json.loads(plan_document(plan_of("trainer.num_ranks=16", prologue=prologue)))
    assert (document["schema"], document["run_directory"], document["placement"]) == (1, "/shared/run", "hetjob")
    (job,) = document["jobs"]
    controller, trainer, _ = job["components"]
    assert controller["runs_in_batch_step"]
    assert controller["roles"] == [
        {"role": "controller", "num_processes": 1, "first_replica": 0, "service": ""},
        {"role": "reward", "num_processes": 1, "first_replica": 0, "service": ""},
    ]
    sizes = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_task", "time_s")
    assert [trainer[key] for key in sizes] == [2, 8, 4, 1, 3600]
    assert trainer["srun"] == ["--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=4"]
    assert controller["srun"] == []
    inside = ["--bind", "/shared,/home/me/rlhpc,/data", "/shared/a.sif", "python3"]
    assert trainer["python"] == ["apptainer", "exec", "--nv", *inside]
    assert controller["python"] == ["apptainer", "exec", *inside]


def test_the_plan_file_has_the_limits_of_the_site_and_the_environment_of_the_roles():
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
def test_roles_have_assertions_and_docstrings_whatever_the_shell_has_set():
    """Under PYTHONOPTIMIZE=2 the model was blamed: transformers reads its own docstrings when it is imported."""
    environment = os.environ | {"PYTHONOPTIMIZE": "2"} | ROLE_ENVIRONMENT
    words = [sys.executable, "-c", "import sys; sys.exit(sys.flags.optimize)"]
    assert subprocess.run(words, env=environment, check=False, timeout=60).returncode == 0


def test_ranks_whose_gpu_waits_for_work_in_host_memory_use_all_their_cores():
    for words, threads in (
        (["trainer.optimizer_offload=true", "trainer.backend=deepspeed"], "6"),
        (["trainer.ema_decay=0.99"], "6"),
        ([], "1"),
        (["trainer.ema_decay=0.99", "trainer.ema_memory=device"], "1"),
        (["trainer.ema_decay=0.99", "trainer.device=cpu"], "1"),
        (["trainer.ema_decay=0.99", "run.deterministic=true"], "1"),
    ):
        document = json.loads(plan_document(plan_of(*words, trainer={"cpus_per_gpu": 6})))
        defaults = {each["name"]: each["defaults"] for each in document["jobs"][0]["components"]}
        assert defaults["trainer"] == {"OMP_NUM_THREADS": threads}
        assert defaults["controller"] == defaults["generation"] == {"OMP_NUM_THREADS": "1"}


# ------------------------------------------------------------------------------------------------------------- elastic


def test_added_generators_are_an_array_of_single_replicas_of_the_planned_size():
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
    wanted = Elastic("generation-1", 1, first_replica=1, placement="jobs", partition="cheap")
    plan = plan_elastic(config, site_of(), RunLayout(config.run_directory), wanted)
    assert component_of(plan, "generation").allocation.partition == "cheap", "that of the command line wins"
    assert component_of(plan, "generation").allocation.time_s == 3600


def test_no_step_binds_its_tasks_to_gpus_however_these_were_asked_for():
    keys = {"gpu_request": "gpus-per-task", "gres_type": "h100"}
    plan = plan_of("generation.num_replicas=2", "generation.tensor_parallel=4", generation=keys)
    generation = json.loads(plan_document(plan))["jobs"][0]["components"][2]
    assert generation["gpus_per_task"] == 4
    assert generation["srun"] == ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=16"]


def test_the_command_prints_the_plan_and_refuses_in_one_line(capsys):
    words = ["plan", str(ROOT / "configs" / "demo.toml"), str(ROOT / "slurm" / "sites" / "example.toml")]
    assert main([*words, "run.directory=/shared/project/run"]) == 0
    assert "----- hetjob.sbatch\n#!/bin/bash\n" in capsys.readouterr().out
    assert main([*words, "run.directory=/shared/project/run", "transport.kind=ipc"]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""
    refusal = "transport.kind='ipc' reaches one machine only, and a job has several; legal: 'auto', 'tcp'"
    assert captured.err == f"rlhpc: {refusal}\n"


def test_large_runs_are_for_more_than_one_machine():
    site = load_site(ROOT / "slurm" / "sites" / "example.toml")
    for path in (ROOT / "configs").glob("*/*.toml"):  # those that are large, and recipes
        config = load_config(path, ["run.directory=/shared/project/run"])
        plan_jobs(config, site, RunLayout(config.run_directory))


def test_the_page_shows_the_plan_that_is_printed(capsys, monkeypatch):
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    ((command, output),) = re.findall(r"^\$ rlhpc (plan .*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.partition("\n----- ")[0] == output


# --------------------------------- What a site file may say, what is refused and how, and that the pages list every key

SMALLEST = '[trainer]\ngpu = "h100"\n[generation]\ngpu = "h100"\n'


def load(tmp_path: Path, text: str) -> Site:
    path = tmp_path / "site.toml"
    path.write_text(SMALLEST + text)
    return load_site(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    said = str(refused.value)
    assert "\n" not in said
    return said.removeprefix(f"{tmp_path / 'site.toml'}: ")


# ------------------------------------------------------------------------------------------------------------- reading


def test_two_sections_are_enough_for_a_check_of_memory_and_a_shipped_site_says_where_runs_may_lie(tmp_path):
    for path in SITE_FILES:
        site = load_site(path)
        assert site.cluster is not None
        assert site.cluster.name == path.stem
    site = load(tmp_path, '[common]\nextra = ["--licenses=a:1"]\n')
    assert (site.cluster, site.trainer.memory_gib, site.common.extra) == (None, 79.1, ("--licenses=a:1",))
    with pytest.raises(ValidationError):
        site.common.account = "other"
    assert Site.model_validate({"trainer": {}, "generation": {}}).trainer.memory_gib is None


def test_a_time_limit_is_read_as_slurm_reads_it_and_refused_where_it_reads_two_ways():
    for value, seconds, written in (
        (240, 14_400, "4:00:00"),
        ("240", 14_400, "4:00:00"),
        ("4:00:00", 14_400, "4:00:00"),
        ("0:00:30", 30, "0:00:30"),
        ("36:00:00", 129_600, "1-12:00:00"),
        ("2-12", 216_000, "2-12:00:00"),
        ("2-12:30", 217_800, "2-12:30:00"),
        ("2-12:30:15", 217_815, "2-12:30:15"),
    ):
        assert (walltime_s(value), slurm_time(seconds), walltime_s(written)) == (seconds, written, seconds)
    for value, said in (
        ("4:00", 'minutes and seconds; legal: "4:00:00" for hours'),
        ("0:00:00", "longer than 0"), (0, "longer than 0"), (-5, "not a time limit; legal: minutes"),
        (True, "not a time limit"), (1.5, "not a time limit"), ("4h", "not a time limit"), ("", "not a time limit"),
        ("UNLIMITED", "not a time limit"), ("1:75:00", "not a time of day"), ("1-25:00:00", "not a time of day"),
        (12345678901234567890123, "longer than a year; legal: up to 366 days"),
        ("9" * 23 + "-00", "longer than a year"), (527_041, "longer than a year"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            walltime_s(value)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clustr]\n", ["clustr={}: unknown key (did you mean cluster?); legal: cluster, common"]),
        ("[cluster]\n", ["cluster.shared_directory: missing"]),
        ('[cluster]\nshared_directory = "work"', ["cluster.shared_directory='work': legal: an absolute path"]),
        ('[cluster]\nshared_directory = "/a"\nplacement = "het"', ["cluster.placement='het'", "'hetjob' or 'jobs'"]),
        ('[cluster]\nshared_directory = "/a"\nmail_events = ["EN"]', ["cluster.mail_events.0='EN'", "'END', 'FAIL'"]),
        (
            '[cluster]\nshared_directory = "/a"\nmail_events = ["ALL"]',
            ["cluster.mail_events=('ALL',): ", "without mail"],
        ),
        ('gres_type = "h100"', ["generation.gres_type='h100': ", "without gpus_per_node", "legal: both"]),
        ('gres_type = "gpu:h100:4"', ["generation.gres_type='gpu:h100:4': ", "legal: the TYPE in gpu:TYPE:N"]),
        ('gpu_request = "gpus-per-task"', ["generation.gpu_request='gpus-per-task': ", "without gpus_per_node"]),
        ('[cluster]\nshared_directory = "/a"\nwarn_s = 0', ["cluster.warn_s=0", "legal: above 0"]),
        (
            f'[cluster]\nshared_directory = "/a"\nstall_s = {10**23}',
            ["cluster.stall_s=100000000000000000000000: legal: below 2^63"],
        ),
        ('[common]\npartitions = "gpu"', ["common.partitions='gpu': unknown", "(did you mean partition?)"]),
        ('[common]\npartition = "gpu --wrap=x"', ["common.partition='gpu --wrap=x'", "would break a script"]),
        ('[common]\naccount = "a\\n#SBATCH --wrap=x"', ["common.account=", "would break a script"]),
        ('[common]\nqos = "--qos"', ["common.qos='--qos'"]),
        ('[common]\ntime = "4:00"', ["common.time='4:00'", '"4:00:00" for hours']),
        ('[common]\nextra = ["--mem=4G"]', ["common.extra.0='--mem=4G'", "legal: memory_gib_per_task or memory_gib_"]),
        ('[common]\nextra = ["-p gpu"]', ["common.extra.0='-p gpu'", "legal: partition"]),
        ('[common]\nextra = ["--array=0-3"]', ["common.extra.0='--array=0-3'", "the plan relies on its own"]),
        ('[common]\nextra = ["--cpus-per-gpu=4"]', ["common.extra.0='--cpus-per-gpu=4'", "legal: cpus_per_gpu"]),
        ('[common]\nextra = ["--licenses=\'a"]', ["common.extra.0=", "legal: the part after #SBATCH"]),
        ('[common]\nextra = ["licenses"]', ["common.extra.0='licenses'", "legal: the part after #SBATCH"]),
        ('[common]\nextra = ["--a=b\\nrm -r x"]', ["common.extra.0=", "legal: the part after #SBATCH"]),
        ('[common]\nextra = "--licenses=a"', ["common.extra='--licenses=a'", "legal: a list"]),
        ("[controller]\ncpus_per_task = 0", ["controller.cpus_per_task=0", "legal: above 0"]),
        ("[controller]\ngpus_per_node = 1", ["controller.gpus_per_node=1: unknown key", "legal: cpus_per_task"]),
        ("[rewards]\nmemory_gib_per_task = 1.5", ["rewards.memory_gib_per_task=1.5", "legal: a whole number"]),
        ('[prologue]\nnccl_interface = "^lo"', ["prologue.nccl_interface='^lo'"]),
        ('[prologue]\nenvironment = {"A B" = "c"}', ["prologue.environment.A B"]),
        ("[prologue]\nenvironment = {A = 1}", ["prologue.environment.A=1", "legal: a string"]),
        ('[prologue]\ncommands = ["a\\nb"]', ["prologue.commands.0='a\\nb'", "single line"]),
        ('[prologue]\ncommands = ["ulimit -n 65536 \\\\"]', ["prologue.commands.0=", "ends in a backslash"]),
        ('[prologue]\nvenv = "/a"\nimage = "/b"\ncode = "/c"', ["prologue.image='/b': together with venv"]),
        ('[prologue]\nimage = "/b"', ["prologue.code: missing"]),
        ('[prologue]\nconda_environment = "x"', ["prologue.conda_environment='x': needs conda"]),
        ('[prologue]\nvenv = ".venv"', ["prologue.venv='.venv': legal: an absolute path"]),
        ('[prologue]\nbinds = ["scratch"]', ["prologue.binds.0='scratch'"]),
    ],
)
def test_a_fault_is_said_with_key_value_and_what_is_legal(tmp_path, text, words):
    said = refusal(tmp_path, text)
    for word in words:
        assert word in said


def test_a_directive_that_wrecks_a_submission_is_refused_and_others_are_taken_as_they_stand(tmp_path):
    for directive in (
        "--wait", "-W", "--test-only", "--clusters=all", "-M all", "--cluster=all", "--parsable", "--hetjob",
        "--het-group=1", "--cpus-per-gpu=4", "--ntasks-per-gpu=1", "--ntasks-per-socket=1", "--ntasks-per-core=1",
        "--tres-per-task=cpu:2", "--gpus-per-socket=1", "--uid=0", "--gid=0", "--quiet", "-Q", "--help", "--usage",
        "-V", "--export-file=x", "--licenses=a:1 --array=0-3", "-sW", "-Ot1",
    ):  # fmt: skip
        assert f"common.extra.0={directive!r}: " in refusal(tmp_path, f'[common]\nextra = ["{directive}"]')
    for directive, said in (  # an abbreviation hides none of ours
        ("--parti=gpu", "sbatch may read it as --partition: set by a separate key; legal: partition"),
        ("--wra=x", "sbatch may read it as --wrap: the plan relies on its own value"),
        ("--exclusiv", "sbatch may read it as --exclusive"),
        ("--arr=0-3", "sbatch may read it as --array"),
        ("--ntasks-per-n=2", "sbatch may read it as --ntasks-per-node"),
    ):
        assert said in refusal(tmp_path, f'[common]\nextra = ["{directive}"]')
    taken = (
        "--licenses=a:1", "-L a:1", "--exclude=a1", "-x a1", "--nodelist=a[1-3]", "--begin=now+1hour", "--nice=-100",
        "--gres-flags=enforce-binding", "--wait-all-nodes=1", "--time-min=10", "--tmp=100G", "--mem-bind=local",
        "--cluster-constraint=x", "--gpu-bind=none", "--tres-bind=gres/gpu:none", "--use-min-nodes",
        "--deadline=now+1day", "--switches=1@10", "--kill-on-invalid-dep=yes", "--wckey=x", "--prefer=ib", "-vv",
    )  # fmt: skip
    assert load(tmp_path, f"[common]\nextra = {json.dumps(taken)}").common.extra == taken


def test_what_would_break_a_script_is_said_in_words_and_every_fault_at_once(tmp_path):
    for text, legal in (
        ('[common]\npartition = "a b"', "one word without spaces, quotes, backslashes and #"),
        ('[prologue]\nnccl_interface = "^lo"', "the name of a network interface, or several with commas"),
        ('[prologue]\nbinds = ["scratch"]', "an absolute path without spaces and commas"),
        ('[prologue]\nenvironment = {"A B" = "c"}', "letters, digits and _, no digit first"),
    ):
        assert f"would break a script; legal: {legal}" in refusal(tmp_path, text)
    with pytest.raises(ConfigError, match=r"generation\.gpu_request='gpus': legal: 'gres', 'gpus-per-node' or"):
        load(tmp_path, 'gpu_request = "gpus"\n')
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, '[cluster]\nname = "a b"\n[common]\ntime = 0\n')
    assert len(str(refused.value).splitlines()) == 3


# --------------------------------------------------------------------------------------------------------------- pages


def table_of(section: str) -> str:
    """The table of one section, as slurm/README.md holds it; keys of [common] stand only there."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    model = SECTIONS[section]
    for name, info in model.model_fields.items():
        if section == "common" or name not in CommonConfig.model_fields:
            meaning = meaning_of(model, name)
            rows.append(f"| `{name}` | {_type_in_words(info, meaning)} | {_default_in_words(info)} | {meaning} |")
    return "\n".join(rows)


def _type_in_words(info: FieldInfo, meaning: str) -> str:
    if info.alias == "time" or meaning.startswith("Time limit"):
        return "integer or text"
    annotation = info.annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return " or ".join(_part_in_words(part) for part in parts if part is not type(None))


def _part_in_words(part: Any) -> str:
    if hasattr(part, "__metadata__"):
        part = part.__origin__
    match get_origin(part):
        case None:
            words = {int: "integer", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
            return words[part]
        case origin if origin is Literal:
            return " or ".join(f'`"{value}"`' for value in get_args(part))
        case origin if origin is dict:
            return "table of texts"
        case _:
            inner = _part_in_words(get_args(part)[0])
            return "list of texts" if inner == "text" else f"list of {inner}"


def _default_in_words(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "`{}`" if info.default_factory else "**required**"
    match info.default:
        case None:
            return "none"
        case bool():
            return f"`{str(info.default).lower()}`"
        case tuple():
            return f"`{list(info.default)}`".replace("'", '"')
        case str() | PosixPath():
            return f'`"{info.default}"`'
        case _:
            return f"`{info.default}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_stands_in_the_page_with_its_type_and_default(section):
    page = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    assert table_of(section) in page, f"slurm/README.md is behind; paste:\n{table_of(section)}"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_shows_every_key(section):
    text = (ROOT / "slurm" / "sites" / "example.toml").read_text(encoding="utf-8")
    parts = re.split(r"^(?:# )?\[([\w.]+)\]\n", text, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    if section == "prologue":
        assert "prologue.environment" in shown
    own = [
        name for name in SECTIONS[section].model_fields if section == "common" or name not in CommonConfig.model_fields
    ]
    if section == "service":
        assert "service.teacher" in shown
    if section in ("generation", "service", "evaluation"):
        return  # the same keys as [trainer]
    missing = [
        name for name in own if name != "environment" and not re.search(rf"^(# )?{name} =", shown[section], re.M)
    ]
    assert missing == []


if __name__ == "__main__":
    for title in SECTIONS:
        sys.stdout.write(f"### [{title}]\n\n{table_of(title)}\n\n")


# --------------------- Every process of a run on one machine has GPUs of its own, or the run is refused before anything

TWO_WHOLE = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5e0c7ab1-0c3f-11ee-9a54-0242ac120002)
"""
ONE_CUT = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1a2b3c4d-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9f8e7d6c-0c3f-11ee-9a54-0242ac120002)
"""
FIRST, SECOND = (gpu.uuid for gpu in parse_listing(TWO_WHOLE))
PART_0, PART_1 = parse_listing(ONE_CUT)[0].parts
OLD_PART = "MIG-GPU-1a2b3c4d-d33d-2b2c-524d-9e3d8d2b8a77/1/0"  # as drivers before 470 called them


def config_of_gpus(*, trainer: Any = None, generation: Any = None, weights: Any = None, evaluation: Any = ()) -> Config:
    return build.config(
        generation=generation or {}, trainer=trainer or {}, weights=weights or {}, evaluation=evaluation
    )


def visible(*words: str) -> VisibleGpus:
    return VisibleGpus(words, ",".join(words))


# ------------------------------------------------------------------------------------------------------ what is visible


@pytest.mark.parametrize(
    ("listing", "shown", "words"),
    [
        (TWO_WHOLE, None, ("0", "1")),
        (TWO_WHOLE, "1", ("1",)),
        (TWO_WHOLE, " 1 , 0", ("1", "0")),
        (TWO_WHOLE, "", ()),
        (TWO_WHOLE, "-1", ()),
        (TWO_WHOLE, "NoDevFiles", ()),
        (TWO_WHOLE, "0,7,1", ("0",)),  # what comes after a device that is not there, CUDA does not show either
        (TWO_WHOLE, f"{SECOND},{FIRST}", (SECOND, FIRST)),
        (TWO_WHOLE, "GPU-5e,GPU-5d", (SECOND, FIRST)),
        (TWO_WHOLE, "GPU-77", ()),
        (ONE_CUT, None, (PART_0, PART_1, "1")),
        (ONE_CUT, PART_1, (PART_1,)),
        (ONE_CUT, OLD_PART, (OLD_PART,)),
        ("", None, ()),
        ("No devices were found\n", "0", ()),
    ],
)  # fmt: skip
def test_the_callers_own_choice_of_gpus_is_heeded_as_cuda_heeds_it(listing, shown, words):
    assert visible_gpus(parse_listing(listing), shown) == words


def test_a_gpu_named_twice_is_refused():
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES='0,1,0': 0 is named twice"):
        visible_gpus(parse_listing(TWO_WHOLE), "0,1,0")


def test_gpus_that_the_installed_torch_cannot_use_are_not_there(monkeypatch):
    monkeypatch.setattr(gpus, "_machine", lambda: parse_listing(TWO_WHOLE))
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "")
    assert gpus.gpus_here({}).words == ()
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    assert gpus.gpus_here({"CUDA_VISIBLE_DEVICES": "1"}).words == ("1",)


@pytest.mark.starts
def test_nvidia_smi_is_asked(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $# = 1 ] && [ $1 = -L ] && cat <<'END'\n{TWO_WHOLE}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    assert gpus.gpus_here({}).words == ("0", "1")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate'; exit 9\n")
    monkeypatch.setattr(gpus, "_device_files", lambda: (Gpu(""), Gpu(""), Gpu("")))
    assert gpus.gpus_here({}).words == ("0", "1", "2")
    assert gpus.gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-abc,2"}).words == ("GPU-abc", "2")


def test_device_files_are_counted_where_nobody_lists_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (tmp_path / name).touch()
    assert gpus._device_files(tmp_path) == (Gpu(""), Gpu(""))


# -------------------------------------------------------------------------------------------------------- who gets it


def components(config: Config, gpus: VisibleGpus) -> list[dict[str, Any]]:
    """Of the plan of `rlhpc run` on a machine of 32 cores."""
    layout, gpu_map = RunLayout(Path("/run")), map_gpus(config, gpus)
    found: list[dict[str, Any]] = json.loads(local_plan_document(config, layout, gpu_map, 0, 32))["jobs"][0][
        "components"
    ]
    return found


def environments(config: Config, gpus: VisibleGpus) -> dict[str, str | None]:
    """What each task of `rlhpc run` sets for its process."""
    return {
        name: component["visible_devices"].get(name, component["environment"].get("CUDA_VISIBLE_DEVICES"))
        for component in components(config, gpus)
        for share in component["roles"]
        for name in [f"{share['role']}-{replica}" for replica in range(share["num_processes"])]
    }


def test_trainer_ranks_come_first_then_the_engines_and_rewards_have_what_is_left_over():
    config = config_of_gpus(trainer={"num_ranks": 2}, generation={"num_replicas": 2, "tensor_parallel": 2})
    assert environments(config, visible("7", "6", "5", "4", "3", "2", "1", "0")) == {
        "controller-0": "",
        "reward-0": "1,0",
        "trainer-0": "7",
        "trainer-1": "6",
        "generator-0": "5,4",
        "generator-1": "3,2",
    }


def test_ranks_that_work_in_host_memory_have_their_share_of_the_cores_if_they_have_gpus():
    """Controller, reward service, two ranks and one engine."""
    config = config_of_gpus(trainer={"num_ranks": 2, "ema_decay": 0.9})
    threads = [component["defaults"]["OMP_NUM_THREADS"] for component in components(config, visible(*"012"))]
    assert threads == ["1", "6", "1"]
    for other, here in ((config, VisibleGpus()), (config_of_gpus(trainer={"num_ranks": 2}), visible(*"012"))):
        assert {component["defaults"]["OMP_NUM_THREADS"] for component in components(other, here)} == {"1"}


def test_evaluation_has_gpus_of_its_own_before_rewards_have_the_rest():
    tables = [{"path": "a.jsonl"}, {"path": "b.jsonl", "num_replicas": 2}]
    config = config_of_gpus(generation={"tensor_parallel": 2}, evaluation=tables)
    gpus = map_gpus(config, visible(*"01234567"))
    assert (gpus.variable("evaluator-0"), gpus.variable("reward-0")) == ("3,4,5,6", "7")
    assert "evaluator-0: 3,4,5,6" in describe_gpus(gpus)
    with pytest.raises(ConfigError, match=r"\[evaluation\] needs 4 GPU\(s\) beside those of the run, 2 are left of 5"):
        map_gpus(config, visible(*"01234"))
    alone = config_of_gpus(generation={"kv_cache_bytes": 1 << 30}, evaluation=tables[:1])
    with pytest.raises(ConfigError, match="0 are left"):
        map_gpus(alone, visible("0"))
    scripted = config_of_gpus(generation={"engine": "scripted"}, evaluation=tables)
    assert map_gpus(scripted, visible("0")).variable("evaluator-0") == ""
    assert map_gpus(scripted, VisibleGpus()).variable("evaluator-0") is None


def test_uuids_and_parts_are_handed_on_as_they_are():
    assert environments(config_of_gpus(), visible(SECOND, FIRST))["generator-0"] == FIRST
    beside = environments(config_of_gpus(generation={"tensor_parallel": 2}), visible(PART_0, "1", "2", PART_1))
    assert (beside["trainer-0"], beside["generator-0"], beside["reward-0"]) == (PART_0, "1,2", PART_1)


def test_a_trainer_on_cpu_and_a_scripted_engine_take_no_gpu():
    config = config_of_gpus(trainer={"device": "cpu", "num_ranks": 4})
    assert environments(config, visible("0"))["trainer-3"] == ""
    assert environments(config, visible("0"))["generator-0"] == "0"
    assert map_gpus(config, visible("0")).transport == "gloo"
    assert environments(config_of_gpus(generation={"engine": "scripted"}), visible("0"))["generator-0"] == ""


def test_without_a_gpu_nobody_is_told_anything():
    assert set(environments(config_of_gpus(), VisibleGpus()).values()) == {None}
    assert environments(config_of_gpus(trainer={"device": "cpu"}), VisibleGpus())["trainer-0"] == ""


def test_one_gpu_is_shared_if_the_cache_has_a_size():
    config = config_of_gpus(generation={"kv_cache_bytes": 1 << 30})
    assert environments(config, visible("3")) == {
        "controller-0": "", "reward-0": "", "trainer-0": "3", "generator-0": "3",
    }  # fmt: skip
    assert map_gpus(config, visible("3")).transport == "ipc"
    with pytest.raises(ConfigError, match=r"generation\.kv_cache_bytes is not given, and trainer and engine share"):
        map_gpus(config_of_gpus(), visible("3"))


def test_gpus_of_their_own_mean_nccl_and_the_plan_says_who_has_which():
    config = config_of_gpus(generation={"tensor_parallel": 2})
    found = map_gpus(config, visible("0", "1", "2", "3"))
    assert found.transport == "nccl"
    assert describe_gpus(found) == "trainer-0: 0; generator-0: 1,2; left over: 3"
    lines = describe_plan(config, RunLayout(Path("/run")), found)
    assert "weights by nccl\ngpus        trainer-0: 0; generator-0: 1,2; left over: 3\n" in lines


@pytest.mark.parametrize(
    ("sections", "words", "said"),
    [
        (
            {"trainer": {"num_ranks": 4}, "generation": {"num_replicas": 3}}, ("0", "1", "2", "3", "4"),
            r"num_ranks=4 \+ generation.num_replicas=3 × generation.tensor_parallel=1 need 7 GPUs, 5 visible "
            r"\(CUDA_VISIBLE_DEVICES='0,1,2,3,4'\); would fit: generation.num_replicas=1; for a run on Slurm",
        ),
        (
            {"trainer": {"num_ranks": 4, "tensor_parallel": 2}, "generation": {"tensor_parallel": 2}},
            ("0", "1", "2", "3", "4"), r"need 6 GPUs, 5 visible .* would fit: trainer.num_ranks=2;",
        ),
        ({"trainer": {"num_ranks": 2}}, ("0",), r"would fit: trainer.device=cpu;"),
        ({"trainer": {"num_ranks": 2}, "generation": {"kv_cache_bytes": 9}}, ("0",), r"fit: trainer.num_ranks=1;"),
        ({"generation": {"num_replicas": 2, "kv_cache_bytes": 9}}, ("0",), r"would fit: generation.num_replicas=1;"),
        ({"generation": {"tensor_parallel": 2}}, ("0",), r"fit: .*, which share it, with generation.kv_cache_bytes"),
        ({"generation": {"tensor_parallel": 8}}, ("0", "1"), r"need 9 GPUs, 2 visible .* no smaller layout fits"),
        ({"trainer": {"num_ranks": 2}}, (PART_0, PART_1, "1"), r"on MIG slices .*NCCL does not connect slices"),
        ({}, (PART_0, PART_1), rf"generator-0 on a MIG slice, {PART_1}: .* legal: whole GPUs for engines, after"),
        ({}, ("0", OLD_PART), rf"generator-0 on a MIG slice, {OLD_PART}"),
        ({"generation": {"kv_cache_bytes": 9}}, (PART_0,), rf"generator-0 on a MIG slice, {PART_0}"),
        ({"evaluation": [{"path": "a.jsonl"}]}, ("0", "1", PART_0), "evaluator-0 on a MIG slice"),
        ({"generation": {"kv_cache_bytes": 9}, "weights": {"transport": "nccl"}}, ("0",), r"both on GPU 0, .*ipc"),
        ({"weights": {"transport": "ipc"}}, ("0", "1"), r"trainer-0 on GPU 0, generator-0 on GPU 1"),
        ({"weights": {"transport": "nccl"}}, (), r"weights\.transport='nccl', and generator-0 is on CPU"),
        ({"trainer": {"optimizer_offload": True}}, (), r"offload=true .*device='auto' needs a GPU .* 0 visible"),
        ({"trainer": {"optimizer_offload": True, "device": "cpu"}}, ("0",), r"'cpu' needs a GPU .*: false"),
        ({"trainer": {"device": "cuda"}}, (), r"trainer\.device='cuda' needs 1 GPU\(s\), 0 visible"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_what_there_is_and_what_would_fit(sections, words, said):
    with pytest.raises(ConfigError, match=said):
        map_gpus(config_of_gpus(**sections), visible(*words))


@pytest.mark.parametrize("command", ["check", "run"])
def test_check_and_run_refuse_alike_before_anything_is_made(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "_machine", lambda: parse_listing(TWO_WHOLE)[:1])
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(f"launch.commands.{command}.preflight", lambda config, **_: None)
    monkeypatch.chdir(tmp_path)
    run_file = Path(__file__).parents[3] / "configs" / "gsm8k.toml"
    assert main([command, str(run_file), "trainer.num_ranks=1", "generation.num_replicas=1"]) == 2
    assert "generation.kv_cache_bytes is not given" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
