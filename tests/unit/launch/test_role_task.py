"""The wrapper around one process of a run: its exit status is that of the role, its log has a bound."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from launch.run_files.plan_file import LOCAL, SCHEMA
from launch.run_files.records import read_exit_records
from launch.run_files.run_state import append_event
from launch.supervisor import role_task
from launch.supervisor.role_task import BoundedLog
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

# ---------------------- The wrapper around one process of a run: its exit status is that of the role, a signal included


def plan_with(
    role_program: Path, layout: RunLayout, component: str = "trainer", placement: str = "jobs", **other: object
) -> Path:
    """A job of one trainer rank, whose Python is this program."""
    log_bytes = other.pop("log_bytes", 1 << 27)
    trainer = {
        "name": component,
        "roles": [{"role": "trainer", "num_processes": 1, "first_replica": 0}],
        "runs_in_batch_step": False,
        "srun": [],
        "gpus_per_task": 0,
        "python": [str(role_program)],
        "environment": {},
        "defaults": {},
        **other,
    }
    document = {
        "schema": SCHEMA,
        "run_directory": str(layout.root),
        "placement": placement,
        "continuation": "requeue",
        "limits": {"meet_s": 10, "stall_s": 10, "max_retries": 1, "log_bytes": log_bytes},
        "jobs": [{"name": "trainer", "array_size": None, "components": [trainer]}],
    }
    layout.job_plan.parent.mkdir(parents=True)
    layout.job_plan.write_text(json.dumps(document))
    return layout.job_plan


def a_role(directory: Path, script: str) -> tuple[RunLayout, Path]:
    """A run, and a program in the place of its role's Python."""
    role = directory / "role"
    role.write_text(script)
    role.chmod(0o700)
    return RunLayout(directory / "run"), role


def task_command(plan: Path, role: str = "trainer") -> list[str]:
    """Of process 0 of this role in the third attempt, in the plan's only part."""
    words = ["--job", "trainer", "--part", "trainer", "--role", role, "--attempt", "3"]
    return [sys.executable, "-m", "launch.supervisor.role_task", "--plan", str(plan), *words]


def in_job(directory: Path) -> dict[str, str]:
    """The environment of the first task of a job, with temporary files in `directory`."""
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "TMPDIR": str(directory)}
    return {**os.environ, **job}


def run_task(role: Path, layout: RunLayout, directory: Path, **plan: object) -> subprocess.CompletedProcess[str]:
    """A rank of the trainer's third attempt, with temporary files in `directory`, until it has ended."""
    command = task_command(plan_with(role, layout, **plan))
    return subprocess.run(command, env=in_job(directory), check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("ends_by", "status", "words"),
    [
        ("exit 0", 0, "exit status 0: all done"),
        ("exit 5", 5, "exit status 5: all done"),
        ("kill -SEGV $$", 139, "signal SIGSEGV: all done"),
        ("kill -KILL $$", 137, "signal SIGKILL: all done"),
    ],
)
def test_a_task_exits_as_its_role_does_and_writes_down_how(tmp_path, ends_by, status, words):
    layout, role = a_role(tmp_path, f"#!/bin/sh\necho all done\n{ends_by}\n")
    assert run_task(role, layout, tmp_path).returncode == status
    record = read_exit_records(layout, "trainer", 3)[0]
    assert record.status == status
    assert record.cause.endswith(f"ended with {words}")


def test_a_role_starts_after_a_cleaner_has_deleted_the_directory_for_temporary_files(tmp_path):
    """That of a run on one machine, which the supervisor made at the start."""
    layout, role, gone = RunLayout(tmp_path / "run"), tmp_path / "role", tmp_path / "gone"
    role.write_text('#!/bin/sh\necho "in $TMPDIR" && touch "$TMPDIR/made"\n')
    role.chmod(0o700)
    plan = plan_with(role, layout, placement="local")
    command = [*task_command(plan), "--index", "0"]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(gone)}, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"in {gone}/" in layout.log("trainer", 0, 3).read_text()
    assert gone.stat().st_mode & 0o777 == 0o700


def test_a_role_that_prints_in_a_loop_fills_no_disk_and_its_last_error_is_known(tmp_path):
    loop = "import sys, time\nfor k in range(300_000):\n    print('reward', k)\n    k % 1000 or time.sleep(0.01)\n"
    last = "x trainer-0 rlhpc.lifecycle ERROR ConfigError: my reward is wrong"
    layout, role = a_role(tmp_path, f"#!{sys.executable}\n{loop}sys.exit({last!r})\n")
    assert run_task(role, layout, tmp_path, log_bytes=100_000).returncode == 1
    log = layout.log("trainer", 0, 3).read_text()
    assert len(log) <= 100_000
    assert log.startswith("reward 0\n")
    assert "bytes are left out here" in log
    assert read_exit_records(layout, "trainer", 3)[0].last_words == "ConfigError: my reward is wrong"


def test_a_task_without_room_for_temporary_files_writes_down_why_it_ends(tmp_path):
    layout = RunLayout(tmp_path / "run")
    command = task_command(plan_with(tmp_path / "role", layout))
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TMPDIR": ""}
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a longer path would not be taken
        Path(short, f"rlhpc-{os.getuid()}-12").write_text("in its way, as a full disk would be")
        done = subprocess.run(command, env={**os.environ, **job, "TMPDIR": short}, check=False)
    assert done.returncode == 1
    record = read_exit_records(layout, "trainer", 3)[0]
    assert (record.status, record.starts) == (1, 0)
    assert record.last_words.startswith("no temporary directory: [Errno 17]")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_role_that_is_asked_to_leave_before_it_listens_leaves_and_has_not_failed(tmp_path, number):
    """The signal comes before the role is started, and the role dies of it: `rlhpc stop` called that a failure."""
    unblocks = "import signal, time; signal.pthread_sigmask(signal.SIG_UNBLOCK, [2]); time.sleep(600)"
    layout, role = a_role(tmp_path, f"#!/bin/sh\nexec {sys.executable} -c '{unblocks}'\n")
    plan = plan_with(role, layout)
    content = plan.read_text()
    plan.unlink()
    os.mkfifo(plan)  # the task waits for it
    command = task_command(plan)
    task = subprocess.Popen(command, env=in_job(tmp_path), start_new_session=True)
    try:
        with plan.open("w") as pipe:  # from here on the task has its handlers, and reads
            os.killpg(task.pid, number)
            pipe.write(content)
        assert task.wait(PATIENCE_S) == 0
    finally:
        task.kill()
        task.wait()
    record = read_exit_records(layout, "trainer", 3)[0]
    assert (record.status, record.last_words) == (0, "asked to leave")


def test_how_a_role_ended_is_known_also_where_a_parent_ignores_the_ends_of_children(tmp_path):
    layout, role = a_role(tmp_path, "#!/bin/sh\nexit 5\n")
    command = task_command(plan_with(role, layout))
    done = subprocess.run(
        command, env=in_job(tmp_path), check=False, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert done.returncode == 5
    assert read_exit_records(layout, "trainer", 3)[0].status == 5


def test_who_asks_a_generator_to_leave_between_two_starts_is_heard(tmp_path):
    """By SIGUSR2, as srun passes it on; a role ignores that until it listens, so one that starts now would stay."""
    layout, role = a_role(tmp_path, "#!/bin/sh\necho started\nexit 3\n")
    plan = plan_with(role, layout)
    plan.write_text(plan.read_text().replace('"role": "trainer"', '"role": "generator"'))
    command = task_command(plan, role="generator")
    task = subprocess.Popen(command, env=in_job(tmp_path))
    try:
        assert Deadline(PATIENCE_S).wait_for(lambda: 0 in read_exit_records(layout, "generator", 3), 0.05)
        task.send_signal(signal.SIGUSR2)
        assert task.wait(PATIENCE_S) == 0
    finally:
        task.kill()
        task.wait()
    record = read_exit_records(layout, "generator", 3)[0]
    assert (record.status, record.starts, record.is_final, record.last_words) == (0, 1, True, "asked to leave")


def test_a_generator_that_still_loads_leaves_by_sruns_notice_and_has_not_failed(tmp_path):
    """By SIGUSR2, which it ignores until it listens; it loaded on until it was killed."""
    layout, role = a_role(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/loads\nexec sleep 600\n")
    plan = plan_with(role, layout)
    plan.write_text(plan.read_text().replace('"role": "trainer"', '"role": "generator"'))
    task = subprocess.Popen(task_command(plan, role="generator"), env=in_job(tmp_path))
    try:
        assert Deadline(PATIENCE_S).wait_for((tmp_path / "loads").exists, 0.05)
        task.send_signal(signal.SIGUSR2)
        assert task.wait(PATIENCE_S) == 0
    finally:
        task.kill()
        task.wait()
    record = read_exit_records(layout, "generator", 3)[0]
    assert (record.status, record.starts, record.last_words) == (0, 1, "asked to leave")


def test_a_role_that_stands_still_is_killed_also_where_nobody_can_write_that_into_its_log(tmp_path):
    log = RunLayout(tmp_path / "run").log("trainer", 0, 3)
    layout, role = a_role(tmp_path, f"#!/bin/sh\nrm {log}\nmkdir {log}\nkill -STOP $$\n")  # as on a full disk
    plan = plan_with(role, layout)
    plan.write_text(plan.read_text().replace('"meet_s": 10', '"meet_s": 10, "dead_after_s": 0.5'))
    command = task_command(plan)
    assert subprocess.run(command, env=in_job(tmp_path), check=False).returncode == 128 + signal.SIGKILL


def test_a_node_that_cannot_open_a_log_says_nothing_of_the_settings(tmp_path):
    """Which would end the run for good."""
    layout, role = a_role(tmp_path, "#!/bin/sh\n")
    plan, log = plan_with(role, layout), layout.log("trainer", 0, 3)
    log.parent.mkdir(parents=True)
    log.symlink_to(log)  # in its way, as a full disk would be
    command = task_command(plan)
    assert subprocess.run(command, env=in_job(tmp_path), check=False).returncode == 1
    record = read_exit_records(layout, "trainer", 3)[0]
    assert record.status == 1
    assert str(log) in record.last_words


def seen_by_role(directory: Path, job: dict[str, str], component: str = "trainer", **plan: Any) -> dict[str, str]:
    """The environment of the role of a task that Slurm has given these variables."""
    layout, role = RunLayout(directory / "run"), directory / "role"
    directory.mkdir()
    role.write_text("#!/bin/sh\nexec env\n")
    role.chmod(0o700)
    command = [sys.executable, "-m", "launch.supervisor.role_task", "--plan"]
    command += [str(plan_with(role, layout, component, **plan)), "--job", "trainer", "--part", component]
    command += ["--role", "trainer", "--attempt", "3", *(["--index", "0"] if plan.get("placement") == LOCAL else [])]
    first = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
    subprocess.run(command, env={**os.environ, "TMPDIR": str(directory), **first, **job}, check=True)
    lines = layout.log("trainer", int(job.get("SLURM_PROCID", "0")), 3).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_processes_of_a_component_on_a_node_are_one_host_to_nccl_and_all_others_are_other_hosts(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)

    def host(name: str, component: str = "trainer", **job: str) -> str:
        return seen_by_role(tmp_path / name, job, component)["NCCL_HOSTID"]

    one = host("one")
    assert host("other-task", SLURM_PROCID="1", SLURM_LOCALID="1") == one
    others = {
        host("other-node", SLURMD_NODENAME="n2"),
        host("other-job", SLURM_JOB_ID="13"),
        host("other-component", "generation"),  # of a heterogeneous job: its SLURM_JOB_ID is the leader's
    }
    assert len(others - {one}) == 3


def test_who_names_hosts_to_nccl_is_heeded_and_a_local_run_names_none(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert seen_by_role(tmp_path / "named", {"NCCL_HOSTID": "mine"})["NCCL_HOSTID"] == "mine"
    assert "NCCL_HOSTID" not in seen_by_role(tmp_path / "left-to-nccl", {"NCCL_HOSTID": ""})
    assert "NCCL_HOSTID" not in seen_by_role(tmp_path / "local", {}, placement=LOCAL)


def test_a_task_takes_its_own_gpus_of_all_that_its_component_has_on_the_node(tmp_path):
    job = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert seen_by_role(tmp_path / "task", job, gpus_per_task=2)["CUDA_VISIBLE_DEVICES"] == "6,7"


@pytest.mark.parametrize(("nvidia", "mine"), [({}, "2,3"), ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "6,7")])
def test_a_task_on_amds_gpus_takes_its_own_of_those_that_slurm_names_for_rocm(tmp_path, monkeypatch, nvidia, mine):
    """ROCm applies both variables one after the other: the second would count among the GPUs that the first leaves."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "ROCR_VISIBLE_DEVICES": "0,1,2,3", **nvidia}
    seen = seen_by_role(tmp_path / "task", job, gpus_per_task=2)
    assert seen["CUDA_VISIBLE_DEVICES"] == mine
    assert "ROCR_VISIBLE_DEVICES" not in seen


def test_a_role_in_an_image_sees_the_directory_of_its_temporary_files_and_caches(tmp_path):
    """Of a site whose TMPDIR is not below /tmp: apptainer shows an image /tmp, and nothing else of a node's disks."""
    scratch = Path(tempfile.mkdtemp(dir="/var/tmp"))
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text('#!/bin/sh\nprintf "%s\\n" "CALLED=$*"\nexec env\n')
    apptainer.chmod(0o700)
    search = {"PATH": f"{apptainer.parent}:{os.environ['PATH']}"}
    image = {"python": ["apptainer", "exec", "--nv", "--bind", "/shared", "/a.sif", "python3"]}
    try:
        seen = seen_by_role(tmp_path / "there", {"TMPDIR": str(scratch), **search}, **image)
        base = Path(seen["TMPDIR"]).parent
        assert base.parent == scratch
        assert Path(seen["TRITON_CACHE_DIR"]).is_relative_to(base)
        words = f"CALLED=exec --bind {base} --nv --bind /shared /a.sif python3 -P -m rlhpc.roles trainer"
        assert f"CALLED={seen['CALLED']}".startswith(words)
    finally:
        shutil.rmtree(scratch)
    below = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        seen = seen_by_role(tmp_path / "tmp", {"TMPDIR": str(below), **search}, **image)
        assert seen["CALLED"].startswith("exec --nv --bind /shared /a.sif")
    finally:
        shutil.rmtree(below)


def test_a_node_need_not_know_its_users_by_name(tmp_path):
    """As where its directory service does not answer."""
    tells, where = "import os, pwd; pwd.getpwuid(os.getuid())", {"TMPDIR": str(tmp_path)}
    looks = f"import launch.supervisor.role_task as t; print(t.own_directory(t.base_directory(7, {where})))"
    as_stranger = ["unshare", "--user", "--map-user=54321", sys.executable, "-c"]
    stranger = subprocess.run([*as_stranger, tells], capture_output=True, text=True, check=False)
    if "KeyError" not in stranger.stderr:
        pytest.skip(f"nobody can be a stranger here: {stranger.stderr}")
    base = subprocess.run([*as_stranger, looks], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(base).name == "rlhpc-54321-7"
    Path(base).rmdir()


def test_a_role_imports_nothing_that_lies_where_the_user_has_submitted(tmp_path):
    """Such as a profile.py, which torch would import."""
    layout, seen = RunLayout(tmp_path / "run"), tmp_path / "seen"
    (tmp_path / "pydantic.py").write_text(f"open({str(seen)!r}, 'w').close(); raise SystemExit(9)\n")
    plan = plan_with(Path(sys.executable), layout)
    command = task_command(plan)
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **job}, check=False)
    assert done.returncode == EXIT_CONFIG  # there is no run
    assert not seen.exists()


def test_of_a_run_that_is_moved_away_a_task_ends_quietly_and_makes_nothing_anew(tmp_path):
    layout, role = a_role(tmp_path, f"#!/bin/sh\nmv {tmp_path / 'run'} {tmp_path / 'elsewhere'}\nexit 4\n")
    done = run_task(role, layout, tmp_path)
    assert done.returncode == 4
    assert done.stderr == ""
    assert not layout.root.exists()


def test_events_of_a_run_that_is_gone_make_no_directory_for_it(tmp_path):
    layout = RunLayout(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        append_event(layout.job_events("local"), "end", "", attempt=0)
    assert not layout.root.exists()


def test_what_a_killed_task_has_left_goes_with_others_of_its_job_and_what_living_ones_have_stays():
    """As after a requeue: the job, and so the directory, have the name that they had."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        layout, role = RunLayout(Path(parent, "run")), Path(parent, "role")
        role.write_text("#!/bin/sh\necho $TMPDIR > $TMPDIR/../../$SLURM_PROCID.there\nexec sleep 600\n")
        role.chmod(0o700)
        command = task_command(plan_with(role, layout))
        base = role_task.base_directory(12, {"TMPDIR": parent})

        def start(rank: str) -> tuple[subprocess.Popen[bytes], Path]:
            environment = {**in_job(Path(parent)), "SLURM_PROCID": rank}
            task = subprocess.Popen(command, env=environment, start_new_session=True)
            there = Path(parent, f"{rank}.there")
            assert Deadline(PATIENCE_S).wait_for(lambda: there.exists() and bool(there.read_text()), 0.02)
            return task, Path(there.read_text().strip())

        (killed, left), (living, kept), (last, _) = start("0"), start("1"), start("2")
        (base / "cache").mkdir()
        try:
            killed.kill()
            killed.wait()
            assert left.is_dir()
            os.killpg(last.pid, signal.SIGTERM)
            assert last.wait(PATIENCE_S) == 0
            assert {path.name for path in base.iterdir()} == {"cache", kept.name}
            os.killpg(living.pid, signal.SIGTERM)
            assert living.wait(PATIENCE_S) == 0
            assert not base.exists()
        finally:
            for task in (killed, living, last):
                task.kill()
                task.wait()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_temporary_directory_that_somebody_else_may_have_put_there_is_refused(is_link):
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:  # of a short name, which unix sockets need
        base = role_task.base_directory(7, {"TMPDIR": parent})
        assert base == Path(parent, f"rlhpc-{os.getuid()}-7")
        assert role_task.own_directory(base).stat().st_mode & 0o777 == 0o700
        assert role_task.own_directory(base) == base
        if is_link:
            base.rename(Path(parent, "ours"))
            base.symlink_to(Path(parent, "ours"))
        else:
            base.chmod(0o770)
        with pytest.raises(role_task.TaskError, match="is a link, belongs to another user or is accessible to others"):
            role_task.own_directory(base)


# -------------------- A role's log has a bound: of a longer one the beginning and the end stay, and what is left out is

MOST = 4000
LINE = "a line of forty bytes, with its number "


def lines(first: int, end: int) -> str:
    return "".join(f"{LINE}{number:06}\n" for number in range(first, end))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def look(path: Path, name: str = "reward-0") -> None:
    with path.open("a+b") as file:
        BoundedLog(name, MOST).look(file.fileno())


def test_a_log_below_its_bound_is_left_as_it_is(tmp_path):
    path = tmp_path / "log"
    append(path, lines(0, 50))
    look(path)
    assert path.read_text() == lines(0, 50)


def test_of_a_longer_log_the_first_and_last_lines_stay_whole_and_the_rest_is_counted(tmp_path):
    path = tmp_path / "log"
    for first in range(0, 900, 100):
        append(path, lines(first, first + 100))
        look(path)  # each time as the next start of a task would
    content = path.read_text()
    assert len(content) < MOST
    head, remark, tail = re.fullmatch(r"((?:a line.*\n)*)(.*left out.*\n)((?:a line.*\n)*)", content).groups()
    assert lines(0, 900).startswith(head)
    assert lines(0, 900).endswith(tail)
    num_bytes = len(lines(0, 900)) - len(head) - len(tail)
    said = f"{num_bytes:,} bytes are left out here: run.log_bytes=4,000 is the most of one log"
    assert remark.endswith(f" reward-0 rlhpc.task WARNING {said}\n")


def test_a_log_of_one_endless_line_is_shortened_too(tmp_path):
    path = tmp_path / "log"
    append(path, "." * 10 * MOST)
    look(path)
    assert len(path.read_text()) < MOST
    append(path, "." * 10 * MOST)
    look(path)
    assert len(path.read_text()) < MOST
    assert path.read_text().count("left out") == 1


def test_however_often_a_log_of_long_lines_is_shortened_one_line_says_so(tmp_path):
    path, num_bytes = tmp_path / "log", 0
    for number in range(40):
        line = f"{number:03}{'.' * 396}\n"
        append(path, line)
        num_bytes += len(line)
        look(path)
    assert path.read_text().count("bytes are left out here") == 1
    said = int(re.search(r"([\d,]+) bytes are left out", path.read_text())[1].replace(",", ""))
    own = next(line for line in path.read_text().splitlines(keepends=True) if "left out" in line)
    assert said == num_bytes - (path.stat().st_size - len(own))


@pytest.mark.waits
@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_log_that_its_user_deletes_or_renames_has_its_bound_all_the_same(tmp_path, monkeypatch, is_deleted):
    """Its role goes on writing into it, and a deleted one would fill the disk unseen."""
    monkeypatch.setattr(role_task, "LOOK_S", 0.05)
    path = tmp_path / "log"
    with path.open("a+b") as file, BoundedLog("reward-0", MOST).over(file.fileno()):
        path.unlink() if is_deleted else path.rename(tmp_path / "old")
        file.write(b"." * 10 * MOST)
        file.flush()
        assert Deadline(PATIENCE_S).wait_for(lambda: os.fstat(file.fileno()).st_size < MOST, 0.05)
    assert not path.exists()


def test_where_no_thread_can_be_started_a_log_is_shortened_at_the_end(tmp_path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (tmp_path / "log").open("a+b") as file, BoundedLog("reward-0", MOST).over(file.fileno()):
        file.write(b"." * 10 * MOST)
        file.flush()
    assert (tmp_path / "log").stat().st_size < MOST
