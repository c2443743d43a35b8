"""A run without Slurm: processes are started, watched, started again and ended; the failure that ends it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.run_files.plan_file import LOCAL, SCHEMA
from launch.run_files.records import last_error_line, read_exit_record, read_failures
from launch.run_files.run_state import Attempt
from launch.supervisor import controller_job, role_task
from launch.supervisor.local_run import LocalSignals, supervise_locally
from launch.supervisor.processes import ENDS, WARNINGS
from launch.view.events import read_story
from launch.view.run import RunView
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FENCED, EXIT_INTERRUPTED, OwnershipLost
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

# ------------------ A run without Slurm: processes are started, watched, started again and ended; the failure that ends

# In the place of `python -m rlhpc.roles ROLE …`, or of the evaluator's command: the program of that name, in the run
# directory.
ROLE = """
import signal, sys, pathlib
words = sys.argv
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # as a role does
if "--follow" in words:
    name, root = "evaluator-0", pathlib.Path(words[words.index("evaluate") + 1])
else:
    role, root = words[words.index("rlhpc.roles") + 1], pathlib.Path(words[words.index("--run-dir") + 1])
    name = role + "-" + words[words.index("--replica") + 1]
exec((root / (name + ".py")).read_text())
"""
PATIENT = "import time; time.sleep(600)"  # longer than any test has patience
STUBBORN = (
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)];"
    "(root / f'{name}.stubborn').touch(); time.sleep(600)"
)
COMPLETE = (
    "import json, time; (root / 'new').write_text(json.dumps("
    "dict(phase='complete', step=3, is_ending=True, roles=[], unix_time_s=time.time())));"
    "(root / 'new').rename(root / 'status.json'); (root / 'summary.json').write_text('{}')"
)
LEAVES = "import time\nwhile not (root / 'summary.json').exists(): time.sleep(0.02)"  # when the run is complete
TRAINS = (
    "import json, time; (root / 'new').write_text(json.dumps("
    "dict(phase='training', step=3, roles=[dict(name='generator-0')], unix_time_s=time.time())));"
    "(root / 'new').rename(root / 'status.json');"  # whole at once: its reader dies as soon as it is there
)
WITH_CHILD = (  # which would live for longer than any test has patience
    "import subprocess, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session={});"
    "(root / 'new').write_text(str(child.pid)); (root / 'new').rename(root / 'child'); time.sleep({});"
)
KILLED = "import os; print('step 5', flush=True); os.kill(os.getpid(), 9)"


class Lab:
    """Runs whose roles are small programs."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root / "run")
        self.layout.root.mkdir()
        self.told: list[str] = []
        self.pids: set[int] = set()
        self._role = root / "role.py"
        self._role.write_text(ROLE)
        self._strangers = _children()

    def run(
        self,
        while_waiting: Callable[[], None] = lambda: None,
        begins: Callable[[str], None] = lambda _: None,
        **programs: str,
    ) -> int:
        """Run `controller_0="…"`, … to the end; returns the exit status of the command."""
        for name, program in programs.items():
            (self.layout.root / f"{name.replace('_', '-')}.py").write_text(program)
        roles = [name.rpartition("_")[0] for name in programs]
        shares = [{"role": role, "num_processes": roles.count(role)} for role in dict.fromkeys(roles)]
        self.layout.local_plan.write_text(json.dumps(self._plan(shares)))
        return supervise_locally(
            self.layout,
            Attempt(0, None, 0, 0),
            self.told.append,
            LocalSignals([self._look, while_waiting], lambda: None),
            descriptors=(),
            begins=begins,
        )

    def _look(self) -> None:
        self.pids |= _children() - self._strangers

    def _plan(self, shares: list[dict[str, Any]]) -> dict[str, Any]:
        component = {"name": "all", "runs_in_batch_step": True, "roles": shares, "gpus_per_task": 0, "srun": []}
        component |= {"environment": {}, "defaults": {}, "python": [sys.executable, str(self._role)]}
        limits = {"meet_s": 60, "stall_s": 60, "max_retries": 2, "is_attended": True}
        job = {"name": LOCAL, "array_size": None, "components": [component]}
        plan = {"schema": SCHEMA, "run_directory": str(self.layout.root), "placement": LOCAL, "jobs": [job]}
        return plan | {"continuation": "requeue", "limits": limits}


@pytest.fixture
def lab(tmp_path) -> Lab:
    return Lab(tmp_path)


def test_a_controller_that_ends_well_ends_the_run_well(lab):
    assert lab.run(controller_0=COMPLETE, trainer_0=LEAVES, generator_0=LEAVES, reward_0=LEAVES) == 0
    assert lab.told == []


def test_a_json_py_where_the_user_is_does_not_take_the_standard_librarys_place(lab, tmp_path, monkeypatch):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(scripts)
    assert lab.run(controller_0=COMPLETE, trainer_0=LEAVES) == 0


def test_a_failure_before_the_first_step_ends_the_run_with_its_status_and_its_last_error(lab):
    program = "sys.exit('2026-01-01 trainer-0 rlhpc.lifecycle ERROR CheckpointError: torn')"
    assert lab.run(controller_0=PATIENT, trainer_0=program, generator_0=PATIENT) == 1
    (line,) = (line for line in lab.told if "is killed: it did not exit in time" not in line)  # on a busy machine
    assert "ended with exit status 1: CheckpointError: torn (log: " in line
    assert str(lab.layout.root / "logs/trainer-0/attempt_0.log") in line


def test_a_controller_that_fails_and_is_not_tried_again_is_a_fault_of_the_report(lab):
    assert lab.run(controller_0="sys.exit('a controller-0 rlhpc.lifecycle ERROR disk gone')", trainer_0=PATIENT) == 1
    (fault,) = (each for each in read_story(RunView(lab.layout)).faults if each.kind == "verdict")
    assert fault.text.startswith("failed: controller-0 ")
    assert len([line for line in lab.told if "disk gone" in line]) == 1


def test_a_controller_that_has_failed_and_told_all_to_leave_is_not_interrupted_when_they_do(lab):
    """An interrupt in its last moment would stand in the place of what it failed of."""
    fails = (
        "import json, time\n"
        "status = dict(phase='training', step=0, is_ending=True, roles=[], unix_time_s=time.time())\n"
        "(root / 'status.json').write_text(json.dumps(status))\n"
        "(root / 'told').touch()\n"
        "while 'part_' not in (root / 'jobs' / 'local.events.jsonl').read_text(): time.sleep(0.02)\n"
        "time.sleep(0.5)\n"
        "print('2026-01-01 controller-0 rlhpc.lifecycle ERROR StarvedError: nothing to learn', file=sys.stderr)\n"
        "sys.exit(2)"
    )
    leaves = "import time\nwhile not (root / 'told').exists(): time.sleep(0.02)"
    assert lab.run(controller_0=fails, trainer_0=leaves, generator_0=PATIENT) == EXIT_CONFIG
    assert any("ended with exit status 2: StarvedError: nothing to learn" in line for line in lab.told)


def test_a_trainer_that_leaves_with_status_0_before_the_end_is_named(lab):
    """A loss of the user's own may call sys.exit."""
    saves = "import signal, time; signal.signal(2, lambda *_: sys.exit(0)); (root / 'up').touch(); time.sleep(600)"
    leaves = "import time\nwhile not (root / 'up').exists(): time.sleep(0.02)"
    assert lab.run(controller_0=saves, trainer_0=leaves) == 1
    assert lab.told[-1].startswith("trainer-0 has ended: exit status 0, no error recorded")


def test_a_controller_that_ends_without_a_word_is_told_at_once(lab):
    """A function of the user's own may call os._exit(0), and no trainer has been told to leave."""
    began = time.monotonic()
    program = TRAINS.replace("generator-0", "trainer-0") + "import os; os._exit(0)"
    assert lab.run(controller_0=program, trainer_0=PATIENT) == 1
    assert time.monotonic() - began < controller_job.FINISH_GRACE_S
    assert "the controller ended before the run did, without a word: by os._exit in code of your own?" in lab.told[-1]


def test_the_failure_is_written_down_also_of_a_process_that_was_killed(lab):
    assert lab.run(controller_0=PATIENT, trainer_0=KILLED, generator_0=PATIENT) == 137
    (record,) = [
        each for each in read_failures(lab.layout, 0) if each.name != "controller-0"
    ]  # not who was told to end
    assert (record.name, record.status, record.last_words) == ("trainer-0", 137, "step 5")


def test_the_last_generator_that_fails_before_the_first_step_ends_the_run(lab):
    began = time.monotonic()
    refused = "sys.exit(2)"
    assert lab.run(controller_0=PATIENT, trainer_0=PATIENT, generator_0=refused, generator_1=refused) == 2
    assert time.monotonic() - began < role_task.PAUSE_S + PATIENCE_S
    assert any("no generator is left: generator-" in line and "exit status 2" in line for line in lab.told)


def test_a_generator_that_had_registered_is_started_again(lab):
    ends = "\nwhile not (root / 'again').exists(): time.sleep(0.02)\n" + COMPLETE
    dies_once = (
        "import time\n"
        "while not (root / 'status.json').exists(): time.sleep(0.02)\n"
        "if (root / 'seen').exists(): (root / 'again').touch(), time.sleep(600)\n"
        "(root / 'seen').touch()\n"
    )
    assert lab.run(controller_0=TRAINS + ends, generator_0=dies_once + KILLED) == 0
    assert any("generator-0 on " in line and line.endswith("step 5; it is restarted") for line in lab.told)


def test_a_generator_that_cannot_start_is_not_missed_while_another_runs(lab):
    ends = "import time\nwhile not (root / 'told').exists(): time.sleep(0.02)\n" + COMPLETE

    def let_end() -> None:
        if lab.told:
            (lab.layout.root / "told").touch()

    assert lab.run(let_end, controller_0=ends, generator_0=KILLED, generator_1=PATIENT) == 0
    (line,) = (line for line in lab.told if "is killed: it did not exit in time" not in line)  # on a busy machine
    assert line.startswith("generator-0 has ended: ")
    assert "signal SIGKILL: step 5" in line


def test_an_evaluator_that_fails_is_started_again_and_the_run_goes_on(lab):
    ends = "import time\nwhile not (root / 'told').exists(): time.sleep(0.02)\n" + COMPLETE
    refused_at_last = (
        "if (root / 'seen').exists(): sys.exit(2)\n"  # its settings: no other start would help
        "(root / 'seen').touch(), sys.exit('rlhpc: no engine')\n"
    )
    looks: list[int] = []

    def let_end() -> None:
        looks.extend([1] * any("[evaluation] has failed" in line for line in lab.told))
        if len(looks) > 10:  # and nobody has ended the run for it meanwhile
            (lab.layout.root / "told").touch()

    assert lab.run(let_end, controller_0=ends, evaluator_0=refused_at_last) == 0
    restarted, given_up = (line for line in lab.told if "evaluator-0 on " in line)
    assert restarted.endswith("rlhpc: no engine; it is restarted")
    assert given_up.startswith("[evaluation] has failed, and the run continues without it: ")


EVALUATES = "import time\nwhile not (root / 'evaluated').exists(): time.sleep(0.02)"


def test_of_a_complete_run_the_last_model_is_evaluated_when_all_others_have_left(lab):
    def evaluate() -> None:
        if any("its last model is evaluated now" in line for line in lab.told):
            assert read_exit_record(lab.layout, "generator-0", 0) is not None
            (lab.layout.root / "evaluated").touch()

    leaves_late = LEAVES + "\ntime.sleep(1.0)"
    assert lab.run(evaluate, controller_0=COMPLETE, generator_0=leaves_late, evaluator_0=EVALUATES) == 0
    (line,) = lab.told
    assert line.startswith("the run is complete; its last model is evaluated now (`rlhpc logs ")


@pytest.mark.parametrize("asks_by", ["a request", "a signal"])
def test_nobody_waits_for_the_last_evaluation_who_asks_for_an_end(lab, asks_by):
    ends_as_a_command = "import signal; signal.signal(15, lambda *_: sys.exit(130))\n" + EVALUATES

    def ask() -> None:
        if any("its last model is evaluated now" in line for line in lab.told):
            if asks_by == "a request":
                lab.layout.stop_request.touch()
            else:
                os.kill(os.getpid(), signal.SIGTERM)

    assert lab.run(ask, controller_0=COMPLETE, evaluator_0=ends_as_a_command) == 0
    assert any("`rlhpc evaluate " in line for line in lab.told)
    assert read_failures(lab.layout, 0) == []
    assert_gone(lab.pids)


def test_what_does_not_end_in_time_is_killed(lab, monkeypatch):
    monkeypatch.setattr(controller_job, "INTERRUPT_S", 0.5)
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell has put the tests in the background
    began: list[float] = []

    def interrupt() -> None:
        if len(list(lab.layout.root.glob("*.stubborn"))) == 2 and not began:
            began.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(interrupt, controller_0=STUBBORN, generator_0=STUBBORN) == EXIT_INTERRUPTED
    assert time.monotonic() - began[0] < PATIENCE_S
    assert_gone(lab.pids)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_everything_at_once(lab, monkeypatch):
    monkeypatch.setattr(controller_job, "INTERRUPT_S", 1000.0)
    sent: list[int] = []

    def interrupt() -> None:
        if len(list(lab.layout.root.glob("*.stubborn"))) == 2 and len(sent) < 2:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(interrupt, controller_0=STUBBORN, generator_0=STUBBORN) == EXIT_INTERRUPTED
    assert_gone(lab.pids)
    assert lab.told[0] == "interrupted: everything ends within 1000 s; Ctrl-C again: kill now"
    assert [fault.text for fault in read_story(RunView(lab.layout)).faults] == []  # somebody wanted it


IN_A_STEP = (
    "import json, time; status = dict(phase='training', step=3, step_s={}, roles=[], unix_time_s=time.time());"
    "(root / 'new').write_text(json.dumps(status)); (root / 'new').rename(root / 'status.json');"
    "import signal; signal.signal(2, lambda *_: sys.exit(0)); (root / 'up').touch(); time.sleep(600)"
)


@pytest.mark.parametrize(
    ("step_s", "says"),
    [
        (2.2, "finishing the step, about 3 s, and saving"),
        (60.0, "a step takes about 60 s: this one is not finished, and trained again by a resume"),
    ],
)
def test_ctrl_c_says_what_becomes_of_the_step_and_what_another_does(lab, step_s, says):
    assert lab.run(once_up(lab, signal.SIGINT), controller_0=IN_A_STEP.format(step_s)) == 0
    assert lab.told == [f"interrupted: {says}; everything ends within 7 s; Ctrl-C again: kill now"]
    assert read_story(RunView(lab.layout)).faults == []


STOPS = "asks the run to stop: the controller finishes its step and saves; Ctrl-C: end within seconds"
SAVES = "import signal, time; signal.signal(15, lambda *_: sys.exit(0)); (root / 'up').touch(); time.sleep(600)"


@pytest.mark.parametrize("number", [*ENDS, *WARNINGS])
def test_a_signal_to_end_or_a_schedulers_warning_lets_the_controller_save(lab, number):
    """`--signal=USR1@60` of an `srun rlhpc run` killed the launcher: no checkpoint, no word."""
    before = signal.signal(number, signal.SIG_DFL)  # the suite may run under nohup
    try:
        assert lab.run(once_up(lab, number), controller_0=SAVES, generator_0=PATIENT) == 0
    finally:
        signal.signal(number, before)
    assert lab.told == [f"{number.name} {STOPS}"]


def test_under_nohup_a_closed_terminal_does_not_end_the_run(lab):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert lab.run(once_up(lab, signal.SIGHUP, signal.SIGTERM), controller_0=SAVES, generator_0=PATIENT) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert lab.told == [f"SIGTERM {STOPS}"]


def once_up(lab: Lab, *numbers: signal.Signals) -> Callable[[], None]:
    """Sends these signals, one a look, once the controller can take them."""
    to_send = list(numbers)

    def end() -> None:
        if (lab.layout.root / "up").exists() and to_send:
            os.kill(os.getpid(), to_send.pop(0))

    return end


def test_a_stop_before_the_controller_is_started_is_a_stop(lab):
    def stop(_: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert lab.run(begins=stop, controller_0=PATIENT, generator_0=PATIENT) == 0
    assert lab.pids == set()
    assert lab.layout.stop_request.exists()  # what `rlhpc status` and `rlhpc list` go by
    assert read_story(RunView(lab.layout)).faults == []


SLOW_TASK = """
import pathlib, sys, time
if "launch.supervisor.role_task" in sys.orig_argv and "controller" in sys.orig_argv:
    pathlib.Path({0!r}, "up").touch()
    while not pathlib.Path({0!r}, "asked").exists():
        time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_controllers_task_can_handle_it_is_a_stop(lab, tmp_path, monkeypatch, number):
    """It died of the signal, or with status 1 and a traceback: nothing had begun that could be lost."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TASK.format(str(lab.layout.root)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    stop = once_up(lab, number)

    def stop_and_let_go() -> None:
        stop()
        if lab.told:  # it has been asked
            (lab.layout.root / "asked").touch()

    assert lab.run(stop_and_let_go, controller_0=PATIENT, generator_0=PATIENT) == 0
    assert lab.layout.stop_request.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_controller_that_fails_while_it_is_to_stop_has_failed(lab, number):
    """Not 130, as if somebody had been in a hurry: what it failed of may have cost its last steps."""
    fails = "import signal, time\ndef fail(*_):\n  print('disk gone'); sys.exit(3)\n"
    fails += f"signal.signal({int(number)}, fail); (root / 'up').touch(); time.sleep(600)"
    assert lab.run(once_up(lab, number), controller_0=fails, generator_0=PATIENT) == 3
    assert "ended with exit status 3: disk gone (log: " in lab.told[-1]
    assert [fault.kind for fault in read_story(RunView(lab.layout)).faults] == ["verdict"]


def test_a_run_that_another_start_has_taken_over_ends_and_says_so(lab):
    def look() -> None:
        raise OwnershipLost("taken over by somebody")

    assert lab.run(look, controller_0=PATIENT, generator_0=PATIENT) == EXIT_FENCED
    assert lab.told[-1] == "taken over by somebody"


@pytest.mark.parametrize(("lives_s", "has_own_session"), [(0, False), (60, False), (0, True)])
def test_children_that_a_process_leaves_behind_end_with_it(lab, monkeypatch, lives_s, has_own_session):
    """Whether it ends by itself or is killed; one in a session of its own, if it ends by itself."""
    child = lab.layout.root / "child"
    ends = "import time\nwhile not (root / 'child').exists(): time.sleep(0.02)\n" + COMPLETE
    program = WITH_CHILD.format(has_own_session, lives_s)
    monkeypatch.setattr(controller_job, "FINISH_GRACE_S", 1.0)
    assert lab.run(controller_0=ends, trainer_0=program) in (0, 1)
    assert_gone({int(child.read_text())})


def test_a_run_that_is_complete_has_not_been_interrupted(lab):
    """Its trainer may leave first, and the supervisor's interrupt find a controller that has written all."""
    assert lab.run(controller_0=COMPLETE + "\nsys.exit(130)", trainer_0=PATIENT) == 0
    assert lab.told == []


def test_a_controller_that_ends_by_the_supervisors_interrupt_has_failed(lab):
    """Its trainer has left without a word: Ctrl-C was not pressed, and the exit status must not say so."""
    assert lab.run(controller_0=PATIENT, trainer_0="") == 1


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (b"", "no output"),
        (b"Segmentation fault\n\n", "Segmentation fault"),
        (b"a role-0 rlhpc.lifecycle ERROR RoleFailed: gone\na role-0 rlhpc.lifecycle INFO x\n", "RoleFailed: gone"),
        (b"a r rlhpc.x ERROR first\na r rlhpc.lifecycle ERROR last\nwarning: leaked semaphores\n", "last"),
        (b"vllm.engine ERROR theirs\nTraceback\nOSError: \xff\n", "OSError: \ufffd"),
        (b"2026-01-01 10:00:00,1 trainer-0 rlhpc.trainer INFO step 3 of 4\n", "step 3 of 4"),
    ],
)
def test_last_words_are_our_last_error_or_the_last_line(log, words):
    assert last_error_line(log) == words


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def assert_gone(pids: set[int]) -> None:
    """All of them, in a moment."""
    assert Deadline(PATIENCE_S).wait_for(lambda: not any(map(_lives, pids)), 0.02)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_temporary_files_of_all_processes_are_private_and_go_with_the_run(lab):
    leaves_one = (
        "import os, tempfile; (root / 'seen').write_text(tempfile.gettempdir()); tempfile.mkstemp();"
        "assert os.stat(tempfile.gettempdir()).st_mode & 0o777 == 0o700;"
    )
    assert lab.run(controller_0=leaves_one + COMPLETE) == 0
    directory = Path((lab.layout.root / "seen").read_text())
    assert not directory.exists()
    assert not directory.parent.exists()


# ------------------- Ctrl-C and `rlhpc stop --now` when no controller runs that would hear of it: between two attempts,

DEAF = STUBBORN.replace("time.sleep(600)", "(root / 'deaf').touch(); time.sleep(600)")
ONCE_DEAF = "import time\nwhile not (root / 'deaf').exists(): time.sleep(0.02)\n"
FAILS = TRAINS + "time.sleep(1)\n" + ONCE_DEAF + TRAINS.replace("step=3", "step=4") + "sys.exit(1)"


@pytest.mark.parametrize("is_asked", ["SIGINT", "ABORT"])
def test_what_is_asked_for_between_two_attempts_ends_everything_as_soon(lab, monkeypatch, is_asked):
    monkeypatch.setattr(controller_job, "INTERRUPT_S", 0.5)
    monkeypatch.setattr(controller_job, "FINISH_GRACE_S", 1000.0)
    sent: list[str] = []

    def ask() -> None:
        if not sent and lab.told and "another attempt in" in lab.told[-1]:
            sent.append(is_asked)
            if is_asked == "ABORT":
                lab.layout.abort_request.touch()
            else:
                os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(ask, controller_0=FAILS, generator_0=DEAF) == 0  # what is lost, the failed attempt has lost
    assert_gone(lab.pids)


def test_an_interrupt_while_a_complete_run_ends_kills_what_is_left(lab, monkeypatch):
    monkeypatch.setattr(controller_job, "FINISH_GRACE_S", 1000.0)
    ended = lab.layout.exit_record("controller", 0, 0)
    looks: list[int] = []

    def interrupt() -> None:
        if ended.exists():
            looks.append(signal.SIGINT)
            if len(looks) == 20:  # and no look at the controller sees it run
                os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(interrupt, controller_0=ONCE_DEAF + COMPLETE, generator_0=DEAF) == 0
    assert_gone(lab.pids)
