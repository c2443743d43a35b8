"""Records of submitted jobs are read as they were written, and no generator's number is given twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.commands.submit import write_plan
from launch.plan.jobs import Elastic, plan_elastic
from launch.plan.script import plan_document
from launch.run_files.records import (
    JobRecord,
    elastic_plans,
    generator_numbers,
    next_elastic_name,
    next_replica,
    read_job_records,
    write_job_record,
)
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError
from tests.unit.launch.site_kit import config_of, plan_of, site_of

RECORD = JobRecord(12, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0)


def add(layout: RunLayout, count: int) -> None:
    """What `rlhpc scale` leaves of an addition."""
    wanted = Elastic(next_elastic_name(layout), count, next_replica(layout), "hetjob")
    site = site_of(cluster={"shared_directory": str(layout.root)})
    write_plan(plan_elastic(config_of(f"run.directory={layout.root}"), site, layout, wanted))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def test_a_record_is_read_as_it_was_written(layout: RunLayout) -> None:
    write_job_record(layout, RECORD)
    assert read_job_records(layout) == [RECORD]
    assert json.loads(layout.job_record(12).read_bytes()) == {
        "job_id": 12, "name": "hetjob", "placement": "hetjob", "array_size": None, "plan": "p", "script": "s",
        "is_elastic": False, "first_replica": 0, "replicas_per_task": 2, "partition": "gpu",
        "submitted_unix_s": 100.0, "follows": None, "tasks": None,
    }  # fmt: skip


def test_records_stand_in_the_order_of_submission_and_events_are_none(layout: RunLayout) -> None:
    for record in (replace(RECORD, job_id=3, submitted_unix_s=200.0), RECORD):
        write_job_record(layout, record)
    layout.job_events("12").write_text("{}\n")
    (layout.jobs / "trainer.yield").touch()
    (layout.jobs / "notes.json").write_text("{}")
    assert [record.job_id for record in read_job_records(layout)] == [12, 3]


def test_a_field_of_a_later_version_is_no_fault_and_damage_is_named(layout: RunLayout) -> None:
    write_job_record(layout, RECORD)
    path = layout.job_record(12)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    assert read_job_records(layout) == [RECORD]
    path.write_text('{"job_id": 12}')
    with pytest.raises(RunDirectoryError, match=r"12\.json: damaged"):
        read_job_records(layout)


def test_the_run_goes_on_as_long_as_the_job_of_its_controller() -> None:
    assert RECORD.hosts_controller
    assert replace(RECORD, name="controller").hosts_controller
    assert not replace(RECORD, name="generation").hosts_controller


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_numbers_of_added_generators_go_on_after_the_planned_ones(layout: RunLayout, placement: str) -> None:
    plan = plan_of("generation.num_replicas=3", cluster={"placement": placement})
    layout.job_plan.write_text(plan_document(plan))
    assert generator_numbers(layout) == [0, 1, 2]
    add(layout, 2)
    assert [path.name for path in elastic_plans(layout)] == ["generation-1.json"]
    assert (next_replica(layout), next_elastic_name(layout)) == (5, "generation-2")
    add(layout, 9)
    assert generator_numbers(layout) == list(range(14))


def test_additions_are_counted_and_not_spelt(layout: RunLayout) -> None:
    layout.job_plan.write_text(plan_document(plan_of()))
    for _ in range(10):
        add(layout, 1)
    assert next_elastic_name(layout) == "generation-11"
    assert next_replica(layout) == 11


def test_a_number_is_not_given_again_when_a_resume_plans_fewer(layout: RunLayout) -> None:
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=3")))
    add(layout, 2)
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=1")))
    assert next_replica(layout) == 5
