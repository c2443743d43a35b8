"""No job is lost or submitted twice, whatever becomes of sbatch's answer.

Programs on PATH stand for a slurmctld that takes a job and says nothing, or too much.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.run_files.records import JobRecord, read_job_records, write_job_record
from launch.slurm import sbatch
from launch.slurm.commands import SlurmError
from launch.slurm.sbatch import MayBeQueued, submit_script
from launch.supervisor.other_jobs import submit_again
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S
from tests.ring.run_kit import ROOT

pytestmark = pytest.mark.starts

TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "Batch job submission failed: Invalid partition name specified"
AWAY = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
TAKES = 'echo "77|$*" >> {here}/queue; '


class FakeSlurm:
    """sbatch, squeue and scancel of the test's own; what they were called with."""

    def __init__(self, here: Path) -> None:
        self.here = here
        (here / "bin").mkdir()
        self.program("squeue", "cat {here}/queue 2>/dev/null; true")
        self.program("scancel", "true")
        self.script = here / "job.sh"
        self.script.write_text("#!/bin/bash\n#SBATCH --time=1\ntrue\n")

    def program(self, name: str, body: str) -> None:
        path = self.here / "bin" / name
        text = f'#!/bin/bash\necho "$*" >> {self.here}/{name}.calls\n' + body.format(here=self.here) + "\n"
        path.write_text(text)
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.here / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(sbatch, "LOOK_PATIENCE_S", 0.0)
    return FakeSlurm(tmp_path)


def test_a_job_is_recorded_by_the_number_that_sbatch_says_last(fake: FakeSlurm) -> None:
    recorded: list[int] = []
    for said, number in (("12", 12), ("Welcome!\n13;east", 13), ("Submitted batch job 14", 14)):
        fake.program("sbatch", f"printf '{said}\\n'")
        assert submit_script(fake.script, ["--partition=gen"], record=recorded.append) == number
    assert recorded == [12, 13, 14]
    assert fake.calls("squeue") == []
    tags = [next(word for word in call.split() if word.startswith("--comment=rlhpc-")) for call in fake.calls("sbatch")]
    assert len(set(tags)) == 3


@pytest.mark.parametrize("lost", [f"echo '{TIMED_OUT}' >&2; exit 1", "kill -TERM $$", "true", "exec sleep 5"])
def test_a_job_whose_answer_was_lost_is_found_by_its_tag(
    fake: FakeSlurm, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "ANSWER_S", 0.5)
    recorded: list[int] = []
    fake.program("sbatch", TAKES + lost)
    assert submit_script(fake.script, record=recorded.append, patience_s=30.0) == 77
    assert recorded == [77]
    assert len(fake.calls("sbatch")) == 1


def test_a_request_that_was_lost_is_no_job_and_that_is_asked_twice(fake: FakeSlurm) -> None:
    fake.program("sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"Socket timed out.*; no job of this submission is in the queue"):
        submit_script(fake.script, record=print)
    assert len(fake.calls("squeue")) == 2


def test_sbatch_is_repeated_only_after_squeue_has_said_that_there_is_no_job(fake: FakeSlurm) -> None:
    again = f"if [ $(wc -l < {fake.here}/sbatch.calls) = 1 ]; then echo '{TIMED_OUT}' >&2; exit 1; fi; echo 5"
    fake.program("sbatch", again)
    assert submit_script(fake.script, record=lambda _: None, patience_s=0.5) == 5
    assert len(fake.calls("sbatch")) == 2
    assert len(fake.calls("squeue")) == 2


def test_where_squeue_is_silent_too_nobody_repeats_and_the_error_says_how_to_look(fake: FakeSlurm) -> None:
    fake.program("sbatch", TAKES + f"echo '{TIMED_OUT}' >&2; exit 1")
    fake.program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(MayBeQueued, match=r"a job may be queued nevertheless, `squeue --me .*grep rlhpc-[0-9a-f]{12}`"):
        submit_script(fake.script, record=print, patience_s=30.0)
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize("said", [REFUSED, AWAY])
def test_where_nothing_can_have_been_submitted_nobody_is_asked(fake: FakeSlurm, said: str) -> None:
    fake.program("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(SlurmError, match=said.partition(":")[0]):
        submit_script(fake.script, record=print)
    assert fake.calls("squeue") == []


def test_the_comment_of_a_script_is_left_alone(fake: FakeSlurm) -> None:
    fake.script.write_text("#!/bin/bash\n#SBATCH --time=1 --comment=project7\ntrue\n")
    fake.program("sbatch", TAKES + 'cat "${{@: -1}}" >> {here}/seen; ' + f"echo '{TIMED_OUT}' >&2; exit 1")
    assert submit_script(fake.script, record=lambda _: None) == 77
    (call,) = fake.calls("sbatch")
    assert "--comment" not in call
    assert call.endswith("/job.sh")  # its name is the job's where nothing else is
    assert (fake.here / "seen").read_text() == fake.script.read_text()


def test_a_job_that_cannot_be_recorded_is_cancelled(fake: FakeSlurm) -> None:
    def full(job_id: int) -> None:
        raise OSError(28, "No space left on device")

    fake.program("sbatch", "echo 12")
    with pytest.raises(OSError, match="No space"):
        submit_script(fake.script, record=full)
    assert fake.calls("scancel") == ["12"]


def test_a_job_that_is_submitted_again_is_recorded_though_the_answer_was_lost(fake: FakeSlurm) -> None:
    layout = RunLayout(fake.here)
    write_job_record(layout, JobRecord(12, "trainer", "jobs", None, "p", str(fake.script), False, 0, 0, "gpu", 100.0))
    fake.program("sbatch", TAKES + f"echo '{TIMED_OUT}' >&2; exit 1")
    assert submit_again(layout, 12, "--dependency=afterany:12") == 77
    assert [(record.job_id, record.follows) for record in read_job_records(layout)] == [(12, None), (77, 12)]
    assert len(fake.calls("sbatch")) == 1


SUBMITS = (
    "import sys; from pathlib import Path; from launch.slurm import sbatch; sbatch.LOOK_AGAIN_S = 0.05\n"
    "try:\n    sbatch.submit_script(Path(sys.argv[1]), record=lambda job: print('recorded', job, flush=True))\n"
    "except KeyboardInterrupt as interrupt:\n    print('interrupted:', interrupt)\n"
)


@pytest.mark.parametrize("ending", ["echo 77", f"echo '{TIMED_OUT}' >&2; exit 1"])
def test_ctrl_c_waits_for_sbatch_and_cancels_what_it_submits(fake: FakeSlurm, ending: str) -> None:
    fake.program("sbatch", "touch {here}/begun; while [ ! -e {here}/go ]; do sleep 0.05; done; " + TAKES + ending)
    out, err = _interrupted(fake, times=1)
    assert out == "interrupted: job 77 was submitted, and has been cancelled\n"
    assert "waiting for sbatch" in err
    assert fake.calls("scancel") == ["77"]


def test_a_second_ctrl_c_does_not_wait_and_says_how_to_look(fake: FakeSlurm) -> None:
    fake.program("sbatch", "touch {here}/begun; exec sleep 300")
    began = time.monotonic()
    out, _ = _interrupted(fake, times=2)
    assert out.startswith("interrupted: a job may be queued: `squeue --me")
    assert time.monotonic() - began < 2 * PATIENCE_S


def _interrupted(fake: FakeSlurm, times: int) -> tuple[str, str]:
    """Submit in a process group that Ctrl-C reaches as a whole, as at a terminal."""
    said = fake.here / "said"
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SUBMITS, str(fake.script)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
    assert Deadline(PATIENCE_S).wait_for((fake.here / "begun").exists, 0.05)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        assert Deadline(PATIENCE_S).wait_for(lambda: "waiting for sbatch" in said.read_text(), 0.05)
    (fake.here / "go").touch()
    out, _ = process.communicate(timeout=PATIENCE_S)
    return out, said.read_text()
