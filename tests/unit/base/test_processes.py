"""Processes: of which user, with whose parent, at which address, and loading what."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhpc.base.host_address import host_address, interface_addresses, interface_of, refuse_foreign_network, tell_gloo
from rlhpc.base.native import loading_libraries
from rlhpc.base.processes import name_nameless_user, own_home, own_user
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.sockets import bind, make_socket
from tests.ring.run_kit import Lab, command_environment, make_lab

# -------------------------------------------------------------------------------- A uid that the system has no name for

UID = 54321
_STRANGER = ["unshare", "--user", f"--map-user={UID}", f"--map-group={UID}"]


def as_stranger(*words: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """A process of such a uid, without HOME, USER and LOGNAME."""
    hidden = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "RLHPC_CACHE")
    environment = {name: value for name, value in command_environment().items() if name not in hidden}
    environment["TMPDIR"] = str(temporary)
    done = subprocess.run([*_STRANGER, *words], env=environment, capture_output=True, text=True, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"nobody can be a stranger here: {done.stderr}")
    return done


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return make_lab(tmp_path)


def test_a_user_with_a_name_has_it_and_the_environment_is_left_alone() -> None:
    environment: dict[str, str] = {}
    name_nameless_user(environment)
    assert environment == {}
    assert own_home({"HOME": "/h"}) == Path("/h")
    assert own_user()


@pytest.mark.starts
def test_libraries_find_a_name_and_a_private_home(tmp_path: Path) -> None:
    looks = (
        "import getpass, os; from pathlib import Path; from rlhpc.base.processes import *; name_nameless_user(); "
        "print(own_user(), getpass.getuser(), Path.home(), os.path.expanduser('~'), oct(Path.home().stat().st_mode))"
    )
    home = tmp_path / f"rlhpc-home-{UID}"
    expected = f"{UID} {UID} {home} {home} 0o40700\n"
    assert as_stranger(sys.executable, "-c", looks, temporary=tmp_path).stdout == expected
    home.chmod(0o777)  # somebody else's, perhaps: Python runs what lies in a home
    other = as_stranger(sys.executable, "-c", looks, temporary=tmp_path).stdout.split()[2]
    assert other != str(home)
    assert Path(other).stat().st_mode & 0o777 == 0o700


@pytest.mark.ring
@pytest.mark.starts
@pytest.mark.timeout(600)
def test_a_run_needs_neither_a_name_of_its_user_nor_a_home(lab: Lab) -> None:
    short = Path("/tmp", f"rlhpc-stranger-{os.getpid()}")  # unix sockets are below it
    short.mkdir()
    try:
        run_file = str(lab.run_file("stranger"))
        for command in ("check", "run"):
            done = as_stranger(sys.executable, "-m", "launch.cli", command, run_file, temporary=short)
            assert done.returncode == 0, done.stdout + done.stderr
        assert lab.layout("stranger").summary.exists()
    finally:
        shutil.rmtree(short)


@pytest.mark.starts
def test_the_doctor_says_what_is_wrong_also_to_a_nameless_user(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n')
    words = ("-m", "launch.cli", "doctor", str(site), "--quick", "--report", str(tmp_path / "report.txt"))
    done = as_stranger(sys.executable, *words, temporary=tmp_path)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "report.txt").exists(), done.stderr


# ---------------------- A child that a signal has stopped is killed after a while, and one that goes on in time is not

SCRIPT = """
import os, signal, subprocess, sys, threading
from rlhpc.base.processes import wait_for_child
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({sleep_s})"])
os.kill(child.pid, signal.SIGSTOP)
if {goes_on}:
    threading.Timer(0.5, os.kill, (child.pid, signal.SIGCONT)).start()
print(wait_for_child(child.pid, {standstill_s}, lambda: print("said")))
"""


@pytest.mark.starts
@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"sleep_s": 1000, "goes_on": False, "standstill_s": 0.6}, ["said", "-9"]),
        ({"sleep_s": 0.1, "goes_on": True, "standstill_s": 1000}, ["0"]),
    ],
)
def test_a_child_that_stands_still_is_killed_after_a_while(settings: dict[str, object], printed: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT.format(**settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == printed


# ----------------------------------------------------------------------- Which of its addresses a host tells to others


def test_the_address_for_other_hosts_is_one_of_this_hosts_and_loopback_only_where_there_is_no_other() -> None:
    address = host_address({})
    socket.inet_aton(address)
    assert address != "0.0.0.0"
    with socket.create_server((address, 0)):  # it can be bound here
        pass
    for name, address in interface_addresses().items():
        assert host_address({"RLHPC_INTERFACE": name}) == address
    assert host_address({"RLHPC_INTERFACE": "ib77, lo"}) == "127.0.0.1"
    assert host_address({"RLHPC_INTERFACE": "lo,ib77"}) == "127.0.0.1"
    assert host_address({"RLHPC_INTERFACE": " "}) == host_address({})
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(host_address({})) in interface_addresses()
    assert interface_of("203.0.113.7") is None
    others = [address for address in interface_addresses().values() if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no network")
    assert not host_address({}).startswith("127.")


@pytest.mark.parametrize("elsewhere", ["192.0.2.77", "127.0.1.1"])
def test_an_address_of_the_name_that_is_not_of_this_host_is_passed_over(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old lease in /etc/hosts, or the address outside of a network that translates: no socket can be bound to it."""
    told = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (elsewhere, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: told)
    address = host_address({})
    assert address != elsewhere
    with socket.create_server((address, 0)):
        pass


def test_gloo_is_told_the_one_interface_that_is_here() -> None:
    """It makes a device of every name that it is told, and fails for the first that a node lacks."""
    for told, gloo in (("ib77,lo", "lo"), ("lo,ib77", "lo")):
        environment = {"RLHPC_INTERFACE": told}
        tell_gloo(environment)
        assert environment["GLOO_SOCKET_IFNAME"] == gloo
        assert dist.ProcessGroupGloo.create_device(interface=environment["GLOO_SOCKET_IFNAME"])
    with pytest.raises(RuntimeError, match="ib77"):
        dist.ProcessGroupGloo.create_device(interface="ib77")
    chosen = {"RLHPC_INTERFACE": "lo", "GLOO_SOCKET_IFNAME": "eth9"}
    tell_gloo(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth9"
    for nothing in ({}, {"RLHPC_INTERFACE": "ib77"}):
        tell_gloo(nothing)
        assert "GLOO_SOCKET_IFNAME" not in nothing


@pytest.mark.parametrize("value", ["ib77", "ib77,^lo", ",", "an-interface-with-a-name-too-long-for-any-kernel"])
def test_an_interface_that_is_not_there_is_an_error_that_names_those_that_are(value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        host_address({"RLHPC_INTERFACE": value})
    assert f"RLHPC_INTERFACE={value!r}" in str(refused.value)
    assert "lo (127.0.0.1)" in str(refused.value)


def test_channels_listen_at_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq

    monkeypatch.setenv("RLHPC_INTERFACE", "lo")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, make_socket(context, zmq.ROUTER, CONTROL, TransportConfig(kind="tcp")) as listener:
        assert bind(listener, "tcp", None).address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib77"}, "GLOO_SOCKET_IFNAME='ib77': no interface 'ib77'"),
        ({"GLOO_SOCKET_IFNAME": "lo,ib77"}, "GLOO_SOCKET_IFNAME='lo,ib77': no interface 'ib77'"),
        ({"NCCL_SOCKET_IFNAME": "ib77,eth77"}, "NCCL_SOCKET_IFNAME='ib77,eth77': no such interface"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME='=l': no such interface"),
        ({"VLLM_HOST_IP": "192.0.2.7"}, "VLLM_HOST_IP='192.0.2.7': no such address"),
        ({"HOST_IP": "elsewhere"}, "HOST_IP='elsewhere': no such address"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, ""),
        ({"GLOO_SOCKET_IFNAME": ""}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib77,l"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^docker,ib77"}, ""),
        ({"VLLM_HOST_IP": "127.0.0.1", "HOST_IP": "192.0.2.7"}, ""),
    ],
    ids=str,
)
def test_what_a_library_is_told_of_another_machines_network_is_refused(environment: dict[str, str], said: str) -> None:
    if not said:
        refuse_foreign_network(has_cuda=True, has_vllm=True, environment=environment)
        return
    with pytest.raises(ConfigError) as refused:
        refuse_foreign_network(has_cuda=True, has_vllm=True, environment=environment)
    assert str(refused.value).startswith(said)
    assert "unset it" in str(refused.value)
    if "GLOO" not in said:
        refuse_foreign_network(has_cuda=False, has_vllm=False, environment=environment)


@pytest.mark.starts
def test_without_a_default_route_the_interface_that_is_there_is_taken() -> None:
    """A cluster's own network often has none, and a host's name is 127.0.1.1."""
    up = "ip link add cable type veth peer name other && ip addr add 10.9.8.7/24 dev cable && ip link set cable up"
    tells = f"{sys.executable} -c 'from rlhpc.base.host_address import host_address; print(host_address())'"
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f"ip link set lo up; {up} && {tells}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network of one's own here: {done.stderr}")
    assert done.stdout.strip() == "10.9.8.7"


# ------------------------- The garbage collector is off while libraries load, and never looks at what they are made of


@pytest.mark.starts  # in a process of its own: what is frozen stays so
@pytest.mark.parametrize(("words", "is_frozen"), [("import decimal", True), ("pass", False)])
def test_what_is_loaded_is_permanent_afterwards(words: str, is_frozen: bool) -> None:
    code = (
        "import gc\n"
        "from rlhpc.base.native import loading_libraries\n"
        "before = gc.get_freeze_count()\n"
        "with loading_libraries():\n"
        "    with loading_libraries():\n"
        f"        assert not gc.isenabled(); {words}\n"
        "    assert not gc.isenabled() and gc.get_freeze_count() == before\n"
        "assert gc.isenabled()\n"
        f"assert (gc.get_freeze_count() > before) is {is_frozen}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failed_import_and_whoever_has_switched_the_collector_off_find_it_as_it_was() -> None:
    with pytest.raises(ModuleNotFoundError), loading_libraries():
        raise ModuleNotFoundError
    assert gc.isenabled()
    gc.disable()
    try:
        with loading_libraries():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.starts
def test_numba_is_loaded_by_the_first_call_of_what_it_compiles() -> None:
    """vLLM 0.32 looks for kernels in every module that is loaded and fails at llvmlite's (triton_utils/dispatcher.py):
    an engine's workers, which import the main module of whoever spawns them, did not start.
    """
    code = (
        "import sys\n"
        "import rlhpc.roles.controller.controller, rlhpc.transport.codec\n"
        "import rlhpc.weights.checksums, rlhpc.weights.deltas\n"
        "assert 'llvmlite' not in sys.modules\n"
        "import torch\n"
        "from rlhpc.weights.checksums import checksum64\n"
        "checksum64(torch.zeros(1 << 22, dtype=torch.uint8))\n"
        "assert 'llvmlite' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
