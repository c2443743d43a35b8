"""Services are started again wherever they run, and a run does not end for one that dies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.run_files.records import JobRecord, processes_of_service, write_job_record
from launch.supervisor.other_jobs import Resubmitter
from launch.supervisor.outcomes import RetryBudget
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.launch.test_local_run import COMPLETE, KILLED, PATIENT, Lab
from tests.unit.launch.test_supervised_jobs import ALIVE, CONTROLLER, LONG_AGO, Site

pytestmark = pytest.mark.starts
TEACHER = 5310300

# --------------------------------------------------------------------------------------------------------- one machine


class ServedLab(Lab):
    """Runs whose processes of the role `service` are those of one service, teacher."""

    def _plan(self, shares: list[dict[str, Any]]) -> dict[str, Any]:
        of_service = {"first_replica": 0, "service": "teacher"}
        return super()._plan([share | of_service if share["role"] == "service" else share for share in shares])


@pytest.fixture
def lab(tmp_path: Path) -> ServedLab:
    return ServedLab(tmp_path)


def test_a_service_that_is_killed_while_it_loads_is_started_again_with_its_name(lab: ServedLab) -> None:
    ends = "import time\nwhile not (root / 'again').exists(): time.sleep(0.02)\n" + COMPLETE
    dies_once = (
        "import time\n"
        "if (root / 'seen').exists(): (root / 'again').write_text(' '.join(sys.argv)), time.sleep(600)\n"
        "(root / 'seen').touch()\n"
    )
    assert lab.run(controller_0=ends, service_0=dies_once + KILLED) == 0
    assert any("service-0 on " in line and line.endswith("step 5; it is restarted") for line in lab.told)
    assert "--service teacher" in (lab.layout.root / "again").read_text()
    assert processes_of_service(lab.layout, "teacher") == ["service-0"]


def test_a_service_that_refuses_its_settings_ends_the_run_with_its_message(lab: ServedLab) -> None:
    refuses = "print('x service-0 rlhpc.lifecycle ERROR ConfigError: no such model', flush=True); sys.exit(2)"
    assert lab.run(controller_0=PATIENT, generator_0=PATIENT, service_0=refuses) == EXIT_CONFIG
    assert any("no process of a service is left: service-0 on " in line for line in lab.told)
    assert any("ConfigError: no such model" in line for line in lab.told)


def test_a_run_goes_on_while_another_replica_of_the_service_is_there(lab: ServedLab) -> None:
    ends = "import time\nwhile not (root / 'told').exists(): time.sleep(0.02)\n" + COMPLETE

    def let_end() -> None:
        if any("service-0 has ended: " in line for line in lab.told):
            (lab.layout.root / "told").touch()

    assert lab.run(let_end, controller_0=ends, service_0="sys.exit(2)", service_1=PATIENT) == 0


# ---------------------------------------------------------------------------------------------------------------- jobs


class ServedSite(Site):
    """The jobs of a run with a teacher of two replicas besides."""

    def start(self) -> None:
        """A life of the controller's job."""
        script = str(self.bin / "job.sh")
        record = JobRecord(TEACHER, "service-teacher", "jobs", 2, "p", script, False, 0, 1, None, LONG_AGO)
        write_job_record(self.layout, record)
        super().start()
        self.plan = replace(self.plan, other_jobs=(*self.plan.other_jobs, "service-teacher"))
        budget = RetryBudget(self.layout, self.plan.limits.max_retries)
        self.resubmitter = Resubmitter(self.plan, self.job, self.resubmitter._log, budget)

    def lose(self, *states: str) -> None:
        """Let squeue show these states of the teacher's tasks, and everything else alive."""
        self.queue([*ALIVE, *(f"{TEACHER}_{task}|{state}" for task, state in enumerate(states))])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedSite:
    import os
    import time

    from launch.supervisor import other_jobs

    clock = [time.monotonic()]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(other_jobs.time, "monotonic", lambda: clock[0])
    return ServedSite(tmp_path, clock)


OTHERS = ("trainer-0", "generator-0", "generator-1", "generator-2", "generator-3")


def test_a_cancelled_replica_stays_away_and_a_cancelled_service_comes_back(site: ServedSite) -> None:
    site.lose("CANCELLED", "RUNNING")
    assert site.look(*OTHERS, "service-1") is None
    assert site.submitted == []
    assert site.events[-1] == ("left_away", f"job {TEACHER}_0 (service-teacher) was cancelled: it is not resubmitted")
    site.lose("CANCELLED", "CANCELLED")
    assert site.look(*OTHERS) is None
    assert site.submitted == ["--array=1"], "without it nobody would answer"


def test_a_service_that_is_lost_again_and_again_does_not_end_the_run(site: ServedSite) -> None:
    for attempt in range(5):
        again = [f"{6001 + k}_{task}|NODE_FAIL" for k in range(attempt) for task in (0, 1)]
        site.lose("NODE_FAIL", "NODE_FAIL")
        (site.bin / "queue").write_text((site.bin / "queue").read_text() + "".join(f"{line}\n" for line in again))
        assert site.look(*OTHERS, after_s=1000.0) is None
    assert site.submitted == ["--array=0,1"] * 2, "max_retries"
    assert site.events[-1][0] == "left_away"
    assert json.loads(site.layout.job_record(6001).read_bytes())["follows"] == TEACHER
    assert CONTROLLER in {int(path.stem) for path in site.layout.jobs.glob("[0-9]*.json")}
