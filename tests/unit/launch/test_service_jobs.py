"""Services of a run file are placed like generators: beside them on one machine, and in jobs of their own on Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.plan.gpu_map import VisibleGpus, map_gpus
from launch.plan.jobs import Elastic, JobPlan, plan_elastic, plan_jobs
from launch.plan.processes import describe_plan, local_plan_document, process_names, shares_of
from launch.plan.script import describe_jobs, plan_document, plan_report, render_scripts
from launch.plan.site_file import load_site
from launch.run_files.plan_file import Share, read_plan
from launch.run_files.records import (
    JobRecord,
    next_elastic_name,
    next_replica,
    replica_numbers,
    role_of_job,
    service_of_job,
    write_job_record,
)
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests import build
from tests.unit.launch.site_kit import ROOT, Commands, component_of, job_of, site_of

TEACHER = {"name": "teacher", "kind": "teacher", "path": "/shared/models/large", "replicas": 2, "tensor_parallel": 4}
JUDGE = {"name": "judge", "kind": "judge", "path": "/shared/models/chat", "tensor_parallel": 2}
REMOTE = {"name": "scores", "kind": "reward", "url": "http://node7:8000/v1"}
SERVICES = [TEACHER, JUDGE, REMOTE]
PLACEMENTS = ["hetjob", "jobs"]


def served(**tables: Any) -> Config:
    """A run for nodes, with a teacher of two replicas, a judge, and a reward model that runs already."""
    settings = {
        "run": {"directory": "/shared/run"},
        "transport": {"kind": "tcp"},
        "generation": {"num_replicas": 2, "engine": "vllm"},
        "service": SERVICES,
    }
    return build.config(**(settings | tables))


def planned(config: Config | None = None, *, placement: str = "hetjob", **sections: dict[str, Any]) -> JobPlan:
    config = config or served()
    sections = {"cluster": {"placement": placement}} | sections
    return plan_jobs(config, site_of(**sections), RunLayout(config.run_directory))


# --------------------------------------------------------------------------------------------------------------- names


def test_processes_of_services_are_numbered_through_in_the_order_of_the_run_file() -> None:
    config = served()
    assert shares_of(config)[-2:] == (Share("service", 2, 0, "teacher"), Share("service", 1, 2, "judge"))
    assert process_names(config)[-5:] == ["generator-0", "generator-1", "service-0", "service-1", "service-2"]
    said = describe_plan(config, RunLayout(Path("/run")), map_gpus(config, VisibleGpus()))
    assert "2 generator, 2 service (teacher), 1 service (judge)" in said
    assert "services    teacher: teacher, /shared/models/large, 2 replicas\n" in said
    assert "            judge: judge, /shared/models/chat, 1 replica\n" in said
    assert "            scores: reward, http://node7:8000/v1\n" in said


# ---------------------------------------------------------------------------------------------------------------- jobs


def test_in_a_heterogeneous_job_each_service_is_a_component_with_the_gpus_of_its_replicas() -> None:
    (job,) = planned().jobs
    assert [part.name for part in job.components] == [
        "controller", "trainer", "generation", "service-teacher", "service-judge"
    ]  # fmt: skip
    teacher, judge = job.components[-2:]
    assert (teacher.roles, teacher.nodes, teacher.gpus_per_task) == ((Share("service", 2, 0, "teacher"),), 1, 4)
    assert (judge.roles, judge.num_tasks, judge.gpus_per_node) == ((Share("service", 1, 2, "judge"),), 1, 2)
    assert judge.cpus_per_task == 8


def test_with_a_job_per_role_the_replicas_of_a_service_are_an_array(tmp_path: Path) -> None:
    plan = planned(placement="jobs")
    assert {job.name: job.array_size for job in plan.jobs} == {
        "controller": None, "trainer": None, "generation": 2, "service-teacher": 2, "service-judge": 1
    }  # fmt: skip
    (replica,) = job_of(plan, "service-teacher").components
    assert (replica.roles, replica.num_tasks) == ((Share("service", 1, 0, "teacher"),), 1)
    path = tmp_path / "plan.json"
    path.write_text(plan_document(plan))
    part = read_plan(path, "service-judge")
    assert part.parts[0].share_of("service") == Share("service", 1, 2, "judge")
    assert "service-teacher" in part.other_jobs
    script = render_scripts(plan)["service-teacher.sbatch"]
    assert "#SBATCH --array=0-1" in script
    assert "--job service-teacher" in script
    whole = planned(placement="jobs", generation={"nodes": 2}, service={"teacher": {"gpus_per_node": 8, "nodes": 1}})
    teacher, judge = job_of(whole, "service-teacher"), job_of(whole, "service-judge")
    assert (teacher.array_size, teacher.components[0].roles) == (1, (Share("service", 2, 0, "teacher"),))
    assert judge.components[0].nodes == 1, "the nodes of the generators are not those of services"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_words_of_a_plan_say_which_service_a_part_is(placement: str) -> None:
    sections = {"service": {"teacher": {"partition": "big", "gpus_per_node": 4}}}
    said = [" ".join(line.split()) for line in describe_jobs(planned(placement=placement, **sections)).splitlines()]
    golden = {
        "hetjob": [
            "jobs one heterogeneous job on cluster: 6 nodes, 13 GPUs",
            "processes nodes tasks CPUs GPUs GiB time partition",
            "controller 1 controller, 1 reward 1 1 4 - default 1:00:00 (default)",
            "trainer 1 trainer 1 1 4 1 default 1:00:00 gpu",
            "generation 2 generator 1 2 4 1 default 1:00:00 gpu",
            "service-teacher 2 service (teacher) 2 1 16 4 default 1:00:00 big",
            "service-judge 1 service (judge) 1 1 8 2 default 1:00:00 gpu",
        ],
        "jobs": [
            "jobs 5 jobs on cluster: 7 nodes, 13 GPUs",
            "processes nodes tasks CPUs GPUs GiB time partition",
            "controller 1 controller, 1 reward 1 1 4 - default 1:00:00 (default)",
            "trainer 1 trainer 1 1 4 1 default 1:00:00 gpu",
            "generation 2 × 1 generator 1 1 4 1 default 1:00:00 gpu",
            "service-teacher 2 × 1 service (teacher) 1 1 16 4 default 1:00:00 big",
            "service-judge 1 × 1 service (judge) 1 1 8 2 default 1:00:00 gpu",
        ],
    }
    assert said[1:-1] == golden[placement]


def test_a_section_of_its_name_places_a_service_elsewhere_and_others_have_the_generators_section() -> None:
    sections = {"service": {"judge": {"partition": "small", "gpus_per_node": 2, "cpus_per_gpu": 1, "time": 60}}}
    plan = planned(generation={"gres_type": "h100", "account": "us"}, **sections)
    teacher, judge = component_of(plan, "service-teacher"), component_of(plan, "service-judge")
    assert (teacher.allocation.partition, teacher.allocation.account, teacher.gres_type) == ("gpu", "us", "h100")
    assert (judge.allocation.partition, judge.allocation.account, judge.gres_type) == ("small", None, None)
    assert judge.cpus_per_task == 2
    assert (teacher.section, judge.section) == ("generation", "service.judge")


def test_on_nodes_without_gpus_and_with_a_scripted_engine_services_have_no_gpu() -> None:
    one = [service | {"tensor_parallel": 1} for service in (TEACHER, JUDGE)]
    assert (
        component_of(planned(served(service=one, generation={"engine": "scripted"})), "service-judge").gpus_per_task
        == 0
    )
    plan = planned(served(service=one), generation={"gpus_per_node": None, "gpu": None})
    assert component_of(plan, "service-teacher").gpus_per_task == 0


@pytest.mark.parametrize(
    ("services", "sections", "words"),
    [
        ([TEACHER], {"generation": {"gpus_per_node": 2}},
         ["[[service]] teacher: tensor_parallel=4 is more than generation.gpus_per_node=2", "legal: up to 2"]),
        ([TEACHER], {"service": {"teacher": {"gpus_per_node": 2}}}, ["more than service.teacher.gpus_per_node=2"]),
        ([TEACHER], {"service": {"teacher": {"partition": "cpu"}}},
         ["service.teacher.gpus_per_node: missing in the site file", "tensor_parallel=4 needs GPUs"]),
        ([TEACHER | {"replicas": 3}], {},
         ["[[service]] teacher: replicas=3 does not fill nodes of 2", "generation.nodes=3 in"]),
        ([TEACHER], {"service": {"teacher": {"gpus_per_node": 8, "gres": "gpu:1"}}},
         ["service.teacher.gres='gpu:1'", "GPUs of [service.teacher]"]),
        ([TEACHER], {"service": {"teacher": {"gpus_per_node": 8, "time": 30}}},
         ["service.teacher.time='0:30:00' differs from common.time='1:00:00'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused_with_the_service_and_its_section(
    services: list[dict[str, Any]], sections: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(served(service=services), **sections)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[service]\ngpu = "h100"',
            "service.gpu='h100': legal: keys of a service in a section of its name, [service.NAME]",
        ),
        ('[service.a]\ngpuu = "h100"', "service.a.gpuu='h100': unknown key (did you mean gpu?); legal: gpu, "),
        ('[service.a]\ngpu = "h9000"', "service.a.gpu='h9000': its memory is unknown; set gpu_memory_gib"),
    ],
)
def test_mistakes_in_the_section_of_a_service_name_it(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f"[trainer]\n[generation]\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        load_site(path)
    assert words in str(refused.value)


# --------------------------------------------------------------------------------------------------------- one machine


def test_on_one_machine_services_have_the_gpus_after_those_of_the_generators() -> None:
    gpus = VisibleGpus(tuple("0123456789abcd"))
    config = served(trainer={"device": "cuda"})
    found = map_gpus(config, gpus)
    assert found.devices == {
        "trainer-0": ("0",), "generator-0": ("1",), "generator-1": ("2",),
        "service-0": tuple("3456"), "service-1": tuple("789a"), "service-2": tuple("bc"),
    }  # fmt: skip
    assert found.spare == ("d",)
    document = json.loads(local_plan_document(config, RunLayout(Path("/run")), found, 5, 8))
    parts = document["jobs"][0]["components"]
    assert [part["name"] for part in parts[-2:]] == ["service-teacher", "service-judge"]
    assert parts[-2]["visible_devices"] == {"service-0": "3,4,5,6", "service-1": "7,8,9,a"}
    assert parts[-1]["roles"] == [{"role": "service", "num_processes": 1, "first_replica": 2, "service": "judge"}]
    assert parts[-1]["visible_devices"] == {"service-2": "b,c"}


def test_too_few_gpus_for_services_are_told_with_each_of_them() -> None:
    with pytest.raises(ConfigError) as refused:
        map_gpus(served(), VisibleGpus(tuple("01234567")))
    said = str(refused.value)
    assert "[[service]] teacher: replicas=2 × tensor_parallel=4 + [[service]] judge: replicas=1" in said
    assert "need 13 GPUs, 8 visible" in said
    assert "one that runs elsewhere has a url in place of its path" in said
    small = served(service=[JUDGE | {"tensor_parallel": 1}], generation={"num_replicas": 1, "engine": "vllm"})
    with pytest.raises(ConfigError, match="need 3 GPUs, 1 visible") as refused:
        map_gpus(small, VisibleGpus(("0",)))
    assert "which share it" not in str(refused.value)


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_of_added_replicas_go_on_after_all_services_and_names_count_for_each(
    placement: str, tmp_path: Path
) -> None:
    config = served(run={"directory": str(tmp_path)})
    layout, site = RunLayout(tmp_path), site_of(cluster={"placement": placement, "shared_directory": str(tmp_path)})
    layout.scripts.mkdir()
    layout.job_plan.write_text(plan_document(plan_jobs(config, site, layout)))
    assert replica_numbers(layout, "service") == [0, 1, 2]
    for name, count, first in (("teacher", 2, 3), ("judge", 1, 5), ("teacher", 1, 6)):
        wanted = Elastic(next_elastic_name(layout, name), count, next_replica(layout, "service"), "jobs", service=name)
        assert wanted.first_replica == first
        plan = plan_elastic(config, site, layout, wanted)
        (part,) = plan.components
        assert part.roles == (Share("service", 1, first, name),)
        assert part.gpus_per_task == {"teacher": 4, "judge": 2}[name]
        plan.plan_file.write_text(plan_document(plan))
    assert sorted(path.name for path in layout.scripts.glob("*.json")) == [
        "service-judge.1.json", "service-teacher.1.json", "service-teacher.2.json"
    ]  # fmt: skip
    assert replica_numbers(layout, "service") == [0, 1, 2, 3, 4, 5, 6]
    assert replica_numbers(layout, "generator") == [0, 1]


def test_a_job_tells_its_role_and_its_service() -> None:
    assert [role_of_job(name) for name in ("hetjob", "generation-2", "service-a-1", "rewards")] == [
        "", "generator", "service", ""
    ]  # fmt: skip
    assert [service_of_job(name) for name in ("service-a-1", "service-a-1.2", "generation-2")] == ["a-1", "a-1", ""]


def test_the_plan_of_a_run_with_services_is_printed_with_every_script() -> None:
    text = plan_report(served(), site_of(service={"judge": {"gpus_per_node": 2, "partition": "small"}}))
    assert "#SBATCH hetjob\n#SBATCH --partition=small\n" in text
    assert "component 0 controller, 1 trainer, 2 generation, 3 service-teacher, 4 service-judge" in text
    assert (ROOT / "slurm" / "sites" / "example.toml").read_text().count("[service.teacher]") == 2


# --------------------------------------------------------------------------------------------------------------- scale


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run with services that was submitted, on a machine without Slurm's commands."""
    monkeypatch.setenv("PATH", "/nowhere")
    config, layout = served(run={"directory": str(tmp_path / "small")}), RunLayout(tmp_path / "small")
    for directory in (layout.scripts, layout.jobs, layout.logs):
        directory.mkdir(parents=True)
    write_resolved(config, layout, commit="")
    site = site_of(cluster={"shared_directory": str(tmp_path)})
    layout.job_plan.write_text(plan_document(plan_jobs(config, site, layout)))
    layout.site.write_text(
        f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\n'
        '[service.teacher]\ngpus_per_node = 8\npartition = "big"\n'
    )
    write_job_record(layout, JobRecord(12, "hetjob", "hetjob", None, "plan", "script", False, 0, 1, None, 0.0))
    return layout


def test_a_dry_run_of_another_replica_prints_its_script_and_makes_nothing(
    submitted: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(submitted.root.rglob("*"))
    assert main(["scale", str(submitted.root), "--service", "teacher", "+2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "----- service-teacher.1.sbatch" in out
    for line in ("--partition=big", "--array=0-1", "--gres=gpu:4", "--job-name=small.service-teacher.1"):
        assert f"#SBATCH {line}\n" in out
    assert "rollouts in flight" not in out, "rollouts in flight are the generators' concern"
    assert sorted(submitted.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--service", "teach", "+1"], "--service teach: this run has no such service; legal: teacher, judge"),
        (["--service", "scores", "+1"], "--service scores: has a url, and is not started by the run"),
        (["--service", "judge", "1"], "--service judge '1': legal: +N to add, -N to retire"),
        (["--service", "judge", "-0"], "--service judge '-0': legal: +N to add, -N to retire"),
    ],
)
def test_an_addition_that_cannot_be_is_refused(
    words: list[str], said: str, submitted: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(submitted.root), *words, "--dry-run"]) == EXIT_CONFIG
    assert said in capsys.readouterr().err


def test_only_added_replicas_of_the_same_service_are_retired(
    submitted: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands, ids = Commands(tmp_path / "slurm"), ["12"]
    monkeypatch.setenv("PATH", f"{commands.directory}:/usr/bin:/bin")
    for job, name, first in ((20, "service-teacher.1", 3), (21, "service-judge.1", 5), (22, "generation-1", 2)):
        added = JobRecord(job, name, "hetjob", 2, "plan", "script", True, first, 1, None, float(job))
        write_job_record(submitted, added)
        ids += [f"{job}_0", f"{job}_1"]
    commands.prints("squeue", "".join(f"{each}|RUNNING|0|None|gpu|0:04|4:56|5:00|N/A|n1|small\n" for each in ids))
    scale = ["scale", str(submitted.root), "--dry-run", "--service"]
    assert main([*scale, "teacher", "-1"]) == 0
    assert "would retire   service-4 (job 20_1, running)\n" in capsys.readouterr().out
    assert main([*scale, "judge", "-3"]) == EXIT_CONFIG
    assert "--service judge -3: only added services can be retired, and there are 2" in capsys.readouterr().err
