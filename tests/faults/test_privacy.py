"""A run is its user's: others get at nothing, keys are nowhere but in their files, nothing is unpickled."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils import z85

from rlhpc.base.files import KEEP_CORE_FILES
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqServer
from rlhpc.transport.security import load_secret, mint_run_keys, public_key
from tests.faults import privacy_kit as kit
from tests.ring.ring_rewards import GATE, GATE_AFTER, open_gate
from tests.ring.run_kit import Run, make_lab

pytestmark = pytest.mark.ring
NUM_STEPS = 8
KNOWN = (
    "/numba/core/caching.py:",  # machine code that numba has compiled, beside the source or in the user's cache
    "/rlhpc/algorithms/packing.py:plan",  # which that code is: it carries its constants as pickles
)
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a run, in its middle and at its end."""

    layout: RunLayout
    processes: dict[int, tuple[str, bytes, str]]  # in the middle: command line, environment, limits
    keys: dict[str, bytes]  # secret keys, Z85, by name
    got: dict[str, str]  # what each probe of another user got; "": nothing
    status: int
    output: bytes
    unpickled: list[list[str]]  # class, command line, stack from the innermost frame on
    num_watched: int  # processes


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Below directories that everybody may enter: only the run's own modes protect it."""
    root = Path(tempfile.mkdtemp(prefix="rlhpc-privacy-", dir="/tmp"))
    root.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield watch(root, patch)
        finally:
            shutil.rmtree(root)


def watch(root: Path, patch: pytest.MonkeyPatch) -> Watched:
    lab, site, notes, gate = make_lab(root), root / "site", root / "notes", root / "gate"
    site.mkdir()
    notes.mkdir()
    (site / "sitecustomize.py").write_text(kit.WATCH, encoding="utf-8")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", "")))))
    for name, value in (("RLHPC_TEST_WATCH", notes), (GATE, gate), (GATE_AFTER, 64)):
        patch.setenv(name, str(value))
    run_file = lab.run_file(
        "private",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 300.0},
        trainer={"num_ranks": 2},
        checkpoint={"every_steps": 1},
        transport={"kind": "tcp"},
    )
    layout = lab.layout("private")
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))  # as on a site that keeps core files
    patch.delenv(KEEP_CORE_FILES, raising=False)
    with Run(run_file, layout) as run:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
        run.wait_until(lambda status: status["step"] >= 2 and any(layout.checkpoints.glob("step_*")))
        processes = {process.pid: described(process.pid) for process in run.survivors()}
        keys = {path.stem: load_secret(layout.secrets, path.stem) for path in layout.secrets.glob("*.secret")}
        got = (
            {name: kit.as_nobody(probe) for name, probe in probes(layout, list(processes)).items()}
            if can_probe()
            else {}
        )
        open_gate(gate)
        status = run.finish()
        output = run.output.encode() + (run.story().encode() if status else b"")
    lines = [line for path in notes.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    unpickled = [line.split("\t") for line in lines if line != "watched"]
    return Watched(layout, processes, keys, got, status, output, unpickled, lines.count("watched"))


def can_probe() -> bool:
    return os.geteuid() == 0


def described(pid: int) -> tuple[str, bytes, str]:
    proc = Path(f"/proc/{pid}")
    command = proc.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
    return command, proc.joinpath("environ").read_bytes(), proc.joinpath("limits").read_text()


def probes(layout: RunLayout, pids: list[int]) -> dict[str, Callable[[], str]]:
    """Twenty and some ways of another user into a run, by name."""
    channels, inodes, words = kit.endpoints(layout.rendezvous), kit.sockets_of(pids), [str(pid) for pid in pids]
    controller, reward = channels["control-0"], channels["rewards-0"]
    own, guessed = zmq.curve_keypair(), zmq.curve_keypair()[0]
    known = public_key(layout.secrets, "controller-0"), public_key(layout.secrets, "reward-0")
    unix = kit.unix_addresses(inodes)
    temporary = {Path(p) for pid in pids if (p := temporary_directory(pid))}
    ports = kit.tcp_ports(inodes)
    assert len(ports) >= 5  # three channels, rewards, the ranks among each other
    shared = [str(path) for path in Path("/dev/shm").glob("*") if is_open_in(path, pids)]
    proc = {name: [f"/proc/{pid}/{name}" for pid in words] for name in ("mem", "environ", "maps", "fd", "cwd", "root")}

    def files(*patterns: str) -> list[str]:
        found = [str(path) for pattern in patterns for path in layout.root.glob(pattern)]
        assert found, f"{layout.root} has no {patterns}"
        return found

    return {
        "a TCP port without a key": partial(kit.handshake, controller, None),
        "a TCP port with a guessed key": partial(kit.handshake, controller, (*own, guessed)),
        "a TCP port with the server's public key": partial(kit.handshake, controller, (*own, known[0])),
        "the reward service without a key": partial(kit.handshake, reward, None),
        "the reward service with its public key": partial(kit.handshake, reward, (*own, known[1])),
        "unix sockets": partial(kit.any_of, kit.unix_socket, [name for name in unix if name[0] != "\0"]),
        "abstract sockets": partial(kit.any_of, kit.unix_socket, [name for name in unix if name[0] == "\0"]),
        "secret keys": partial(kit.any_of, kit.content, files("secrets/*.secret")),
        "public keys": partial(kit.any_of, kit.content, files("secrets/public/*.pub")),
        "the run directory": partial(kit.content, str(layout.root)),
        "the journal": partial(kit.any_of, kit.content, files("rollouts/journal_*.log", "rollouts/events_*.log")),
        "checkpoints": partial(kit.any_of, kit.content, files("checkpoints/step_*/**/*")),
        "logs": partial(kit.any_of, kit.content, files("logs/*/*.log")),
        "settings and status": partial(kit.any_of, kit.content, files("*.json", "*.jsonl")),
        "metrics": partial(kit.any_of, kit.content, files("tensorboard/**/events*")),
        "rendezvous files": partial(kit.any_of, kit.content, files("rendezvous/*", "weights")),
        "a request to stop": partial(kit.new_file, str(layout.stop_request)),
        "temporary directories": partial(kit.any_of, kit.content, [str(path) for path in temporary]),
        "memory": partial(kit.any_of, kit.content, proc["mem"]),
        "environments": partial(kit.any_of, kit.content, proc["environ"]),
        "memory maps": partial(kit.any_of, kit.content, proc["maps"]),
        "open files": partial(kit.any_of, kit.links, proc["fd"]),
        "working directories": partial(kit.any_of, kit.content, [*proc["cwd"], *proc["root"]]),
        "shared memory": partial(kit.any_of, kit.content, shared),
        "a debugger": partial(kit.any_of, kit.traced, words),
        "signals": partial(kit.any_of, kit.signalled, words),
        "noise at every port": partial(kit.any_of, kit.noise, ports),
    }


def temporary_directory(pid: int) -> str:
    return psutil.Process(pid).environ().get("TMPDIR", "")


def is_open_in(path: Path, pids: list[int]) -> bool:
    return any(str(path) in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


@is_root
def test_another_user_of_the_machine_gets_at_nothing_and_disturbs_nothing(watched: Watched) -> None:
    assert len(watched.got) >= 20
    assert {name: got for name, got in watched.got.items() if got} == {}
    assert watched.status == 0, watched.output.decode()


@is_root
async def test_another_user_cannot_connect_to_a_channel_within_one_machine(tmp_path: Path) -> None:
    mint_run_keys(tmp_path / "secrets", ["controller-0"])
    config = TransportConfig(kind="ipc")
    server = ZmqServer(CONTROL, name="controller-0", config=config, secrets=tmp_path / "secrets", clock=time.monotonic)
    path = server.address.removeprefix("ipc://")
    assert kit.unix_socket(path)  # ours can
    assert kit.as_nobody(partial(kit.unix_socket, path)) == ""
    await server.close()


def test_secret_keys_are_nowhere_but_in_their_files(watched: Watched) -> None:
    assert len(watched.keys) >= 5
    shapes = {shape: name for name, key in watched.keys.items() for shape in shapes_of(key)}
    roles = [command for command, _, _ in watched.processes.values() if "rlhpc.roles" in command]
    assert len(roles) >= 5
    for command, environment, _ in watched.processes.values():
        assert leaks(command.encode() + environment, shapes) == set(), command
    assert leaks(watched.output, shapes) == set()
    files = [path for path in watched.layout.root.rglob("*") if path.is_file()]
    elsewhere = [path for path in files if watched.layout.secrets not in path.parents]
    for kind in ("*.h5", "*.jsonl", "*.log", "events.out*", "*.safetensors", "config.json"):
        assert any(path.match(kind) for path in elsewhere), kind
    assert {path: leaks(path.read_bytes(), shapes) for path in elsewhere if leaks(path.read_bytes(), shapes)} == {}
    assert leaks(b"x" + next(iter(watched.keys.values())), shapes)  # the search finds what is there


def shapes_of(key: bytes) -> list[bytes]:
    raw = z85.decode(key)
    return [key, raw, raw.hex().encode(), raw.hex().upper().encode(), b64encode(raw)[:42], urlsafe_b64encode(raw)[:42]]


def leaks(content: bytes, shapes: dict[bytes, str]) -> set[str]:
    return {name for shape, name in shapes.items() if shape in content}


def test_no_process_of_a_run_leaves_a_core_file(watched: Watched) -> None:
    for command, _, limits in watched.processes.values():
        if "rlhpc.roles" in command:
            (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
            assert line.split()[4] == "0", command


def test_nothing_is_unpickled_in_any_process_of_a_run(watched: Watched) -> None:
    """But by libraries that keep pickles of their own, which are neither on a socket nor in the run directory."""
    assert watched.num_watched >= 8
    found = [line for line in watched.unpickled if not any(known in frame for known in KNOWN for frame in line[2:])]
    assert {(line[0], *[frame for frame in line[2:] if "pickle" not in frame][:6]) for line in found} == set()
