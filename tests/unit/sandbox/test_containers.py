"""Task containers: what commands see and leave, what hostile ones achieve, and what ends a container."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox import client
from rlhpc.sandbox.container import ContainerGone, Containers
from rlhpc.sandbox.container_init import ContainerLimits
from rlhpc.sandbox.images import RootCache, open_image
from tests.patience import PATIENCE_S
from tests.task_directories import reachable_directory, write_image

WITHOUT_OVERLAY = (  # of a server: as on a kernel that has none for users
    "import rlhpc.sandbox.kernel as k; k.real = k.mount; "
    "k.mount = lambda a, b, kind='', *c, **d: "
    "k.unmount('/none') if kind == 'overlay' else k.real(a, b, kind, *c, **d); "
)
LIMITS = ContainerLimits(processes=24, memory_bytes=128 << 20, disk_bytes=8 << 20)


@pytest.fixture(scope="module")
def root():
    with reachable_directory() as base:
        yield RootCache(base / "cache").root_of(open_image(write_image(base / "tree")))


@pytest.fixture(scope="module")
def containers():
    with Containers() as started:
        yield started


def run(opened, text, *, time_s=PATIENCE_S):
    return opened.run(["bash", "-c", text], time_s=time_s)


def said(opened, text):
    finished = run(opened, text)
    return finished.status, finished.output.decode()


def wait_until(is_so, seconds=PATIENCE_S):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(word):
    """Ids of the node's processes with a word on their command line."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if word.encode() in (each / "cmdline").read_bytes():
                    found.append(int(each.name))
            except OSError:
                pass
    return found


@pytest.mark.starts
def test_files_stay_between_commands_and_are_gone_with_the_container(containers, root):
    with containers.open(root, LIMITS) as first, containers.open(root, LIMITS) as second:
        assert said(first, "echo one > /note; rm /etc/motd; echo $((6 * 7)); exit 3") == (3, "42\n")
        assert said(first, "cat /note; ls /etc") == (0, "one\nhosts\n")
        assert said(second, "cat /note /etc/motd")[1] == "cat: /note: No such file or directory\nof the image\n"
    assert (root.path / "etc/motd").read_text() == "of the image\n"
    assert not (root.path / "note").exists()
    assert not (root.path / "etc/hosts").exists()


@pytest.mark.starts
def test_the_root_is_a_copy_where_the_kernel_has_no_overlay_for_users(root, monkeypatch):
    head, tail = client._COMMAND.split("from rlhpc.sandbox.{module}")
    monkeypatch.setattr(client, "_COMMAND", f"{head}{WITHOUT_OVERLAY}from rlhpc.sandbox.{{module}}{tail}")
    with Containers() as started, started.open(root, LIMITS) as opened:
        assert started.way == "copy"
        text = "cat /etc/motd; rm /etc/motd; echo mine > /etc/motd; cat /etc/motd"
        assert said(opened, text) == (0, "of the image\nmine\n")
        assert "limit exceeded" in said(opened, "cat /dev/zero > /big")[1]
    assert (root.path / "etc/motd").read_text() == "of the image\n"


@pytest.mark.starts
@pytest.mark.parametrize(
    ("text", "is_refused_by"),
    [
        ("mount -t tmpfs none /tmp", "denied"),
        ("unshare -Ur true", "not permitted"),
        ("chroot / true", "not permitted"),
        ("mknod /disk b 254 0 && cat /disk", "not permitted"),
        ("echo x > /proc/sys/kernel/core_pattern", "denied"),
        ("echo b > /proc/sysrq-trigger", "No such file"),
        ("ls /proc/1/root", "No such file"),
        ("echo x > /dev/tcp/127.0.0.1/22", "unreachable"),
        ("exec 3<> /dev/udp/1.1.1.1/53", "unreachable"),
    ],
)
def test_what_would_lead_outside_is_refused(containers, root, text, is_refused_by):
    with containers.open(root, LIMITS) as opened:
        status, output = said(opened, text)
    assert status
    assert is_refused_by in output


@pytest.mark.starts
def test_a_container_sees_nothing_of_the_node(containers, root):
    os.environ["RLHPC_A_SECRET"] = "of the worker"
    with containers.open(root, LIMITS) as opened:
        assert "of the worker" not in said(opened, "cat /proc/*/environ; export")[1]
        assert said(opened, "ls -d /proc/[0-9]* | wc -l || ls /proc")[1].count("/proc/1\n") == 0
        assert said(opened, "cd /; cd ../../..; ls")[1].split() == said(opened, "ls /")[1].split()
        assert str(root.path) not in said(opened, "cat /proc/self/mountinfo /proc/self/mounts /proc/self/cmdline")[1]
    del os.environ["RLHPC_A_SECRET"]


@pytest.mark.starts
def test_the_loopback_is_there_where_it_is_allowed_and_leads_nowhere_else(containers, root):
    limits = ContainerLimits(has_loopback=True)
    with containers.open(root, limits) as opened:
        assert "refused" in said(opened, "echo x > /dev/tcp/127.0.0.1/22")[1]  # nobody listens: it is its own
        assert "unreachable" in said(opened, "echo x > /dev/tcp/192.0.2.1/80")[1]


@pytest.mark.starts
def test_a_fork_bomb_meets_its_limit_and_leaves_nothing(containers, root):
    with containers.open(root, LIMITS) as opened:
        bomb = run(opened, "b() { b | b & }; b; sleep 0.5; ls /proc", time_s=5)
        assert b"Resource temporarily unavailable" in bomb.output
        assert said(opened, "for p in /proc/[0-9]*; do echo $p; done")[1].count("\n") <= 2
        assert said(opened, "sleep 0 & sleep 0 & wait; echo usable") == (0, "usable\n")


@pytest.mark.starts
def test_signals_reach_neither_the_first_process_nor_one_outside(containers, root):
    with containers.open(root, LIMITS) as opened:
        text = f"kill -9 1; kill -INT 1; kill -TERM 1; kill -9 {os.getpid()} {os.getppid()}; kill -9 -1; echo here"
        status, output = said(opened, text)
        assert (status, output.splitlines()[-1]) == (0, "here")
        assert said(opened, "echo again") == (0, "again\n")


@pytest.mark.starts
def test_a_full_disk_is_the_command_s_and_no_one_else_s(containers, root):
    with containers.open(root, LIMITS) as full, containers.open(root, LIMITS) as other:
        status, output = said(full, "cat /dev/zero > /big")
        assert (status, "No space" in output or "too large" in output) == (1, True)
        assert said(other, "echo x > /small; cat /small") == (0, "x\n")
        assert said(full, "rm /big; echo x > /small; cat /small") == (0, "x\n")


@pytest.mark.starts
def test_memory_of_all_processes_together_is_limited(containers, root):
    hog = "x=$(yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    with containers.open(root, LIMITS) as opened:
        text = f"for i in 1 2 3 4 5 6; do ({hog} | while read -r -N 30000000 a; do sleep 60; break; done)) & done; wait"
        finished = run(opened, text, time_s=60)
        assert finished.stopped_for == "memory"
        assert finished.peak_bytes > LIMITS.memory_bytes
        assert said(opened, "echo x") == (0, "x\n")


@pytest.mark.starts
def test_a_command_that_takes_too_long_or_prints_too_much_is_stopped(containers, root):
    with containers.open(root, LIMITS) as opened:
        slow = run(opened, "echo begun; sleep 100", time_s=0.3)
        assert (slow.stopped_for, slow.status, slow.output) == ("time", -9, b"begun\n")
        assert run(opened, "yes").stopped_for == "output"
        long = opened.run(["bash", "-c", "for i in {1..999}; do echo $i; done"], time_s=PATIENCE_S, output_bytes=100)
        assert long.output.startswith(b"1\n2\n3\n")
        assert long.output.endswith(b"bytes left out ...]\n" + long.output[-50:])
        assert long.output.endswith(b"998\n999\n")
        assert opened.run(["bash", "-c", "x" * 10**6], time_s=1.0).status == 126
        assert opened.run(["no-such-program"], time_s=1.0).output == b"no-such-program: not found\n"


@pytest.mark.starts
def test_daemons_end_with_their_command_unless_they_are_kept(containers, root):
    daemon = "setsid bash -c 'while sleep 0.05; do echo x >> /beats; done' < /dev/null > /dev/null 2>&1 &"
    begin = daemon + " until [[ -s /beats ]]; do sleep 0.05; done"
    beats = "a=$(cat /beats); for i in {1..60}; do sleep 0.05; [[ $a == $(cat /beats) ]] || { echo more; exit; }; done"
    with containers.open(root, LIMITS) as opened:
        run(opened, begin)
        assert said(opened, beats) == (0, "")
    with containers.open(root, ContainerLimits(keeps_processes=True)) as opened:
        run(opened, begin)
        assert said(opened, beats) == (0, "more\n")


@pytest.mark.starts
def test_files_put_there_hide_what_a_command_has_prepared(containers, root, tmp_path):
    (tmp_path / "test.sh").write_text("echo from outside > /logs/verifier/reward.txt; cat /tests/deep/data\n")
    (tmp_path / "data").write_text("1\n")
    files = {"test.sh": tmp_path / "test.sh", "deep/data": tmp_path / "data"}
    with containers.open(root, LIMITS, ["/logs/verifier", "/tests"]) as opened:
        run(opened, "rm -r /tests; ln -s /etc /tests; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
        assert opened.put("/tests", files) == ""
        assert opened.put("/logs/verifier", {}) == ""
        assert opened.read(["/logs/verifier/reward.txt"]) == [None]
        assert said(opened, "bash /tests/test.sh") == (0, "1\n")
        assert opened.read(["/logs/verifier/reward.txt", "/tests/none"]) == ["from outside\n", None]
        run(opened, "rm /logs/verifier/reward.txt; ln -s /etc/motd /logs/verifier/reward.txt")
        assert opened.read(["/logs/verifier/reward.txt"]) == [None]


@pytest.mark.starts
@pytest.mark.parametrize("dies", ["worker", "server"])
def test_nothing_is_left_when_a_process_is_killed(root, dies):
    word = f"leftover-of-{os.getpid()}-{dies}"  # under which a kept process runs
    program = (
        "import sys, time, json\nfrom pathlib import Path\nfrom rlhpc.sandbox.container import Containers, Root\n"
        "from rlhpc.sandbox.container_init import ContainerLimits\n"
        "made = json.loads(sys.argv[1])\nroot = Root(Path(made.pop('path')), **made)\n"
        "containers = Containers()\nopened = containers.open(root, ContainerLimits(keeps_processes=True))\n"
        "word = sys.argv[2].replace('+', '')\n"
        "kept = 'setsid bash -c \"exec -a ' + word + ' sleep 1000\" < /dev/null > /dev/null 2>&1 &'\n"
        "opened.run(['bash', '-c', kept], time_s=60)\n"
        "print(containers.server_pid, flush=True)\ntime.sleep(1000)\n"
    )
    about = {name: getattr(root, name) for name in ("num_bytes", "num_files", "environment", "working_directory")}
    worker = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps({"path": str(root.path), **about}), "+".join(word)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(client.__file__).parents[2])},
    )
    try:
        server = int(worker.stdout.readline())
        wait_until(lambda: len(processes_with(word)) == 1)
        os.kill(worker.pid if dies == "worker" else server, signal.SIGKILL)
        wait_until(lambda: not processes_with(word))
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


@pytest.mark.starts
def test_a_container_without_commands_ends_by_itself(containers, root):
    with containers.open(root, ContainerLimits(idle_s=0.2)) as opened:
        assert said(opened, "echo x") == (0, "x\n")
        time.sleep(0.5)
        with pytest.raises(ContainerGone):
            run(opened, "echo x")


@pytest.mark.starts
def test_a_root_without_a_disk_or_a_server_is_an_error_that_says_so(containers, root):
    small = ContainerLimits(disk_bytes=4096, files=3)
    with pytest.raises(SandboxError, match=r"No space left.*larger container.disk_bytes"):
        containers.open(root, small)
    fallen = Containers()
    fallen.start()
    os.kill(fallen.server_pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="server of containers is gone"):
        fallen.open(root, LIMITS)
    with fallen, fallen.open(root, LIMITS) as opened:  # the next one starts another
        assert said(opened, "echo x") == (0, "x\n")
