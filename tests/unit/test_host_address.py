"""Which of its addresses a host tells to others."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from rlhpc.base.host_address import host_address, interface_addresses, interface_of, refuse_foreign_network, tell_gloo
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.sockets import bind, make_socket


def test_the_address_for_other_hosts_is_one_ipv4_address_of_this_host() -> None:
    address = host_address({})
    socket.inet_aton(address)
    assert address != "0.0.0.0"
    with socket.create_server((address, 0)):  # it can be bound here
        pass


def test_the_loopback_address_is_told_only_where_there_is_no_other() -> None:
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


def test_a_named_interface_gives_its_own_address() -> None:
    for name, address in interface_addresses().items():
        assert host_address({"RLHPC_INTERFACE": name}) == address


def test_of_several_named_interfaces_the_first_that_exists_is_taken() -> None:
    assert host_address({"RLHPC_INTERFACE": "ib77, lo"}) == "127.0.0.1"
    assert host_address({"RLHPC_INTERFACE": "lo,ib77"}) == "127.0.0.1"


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


def test_an_empty_variable_names_nothing() -> None:
    assert host_address({"RLHPC_INTERFACE": " "}) == host_address({})


def test_an_address_belongs_to_an_interface_or_to_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(host_address({})) in interface_addresses()
    assert interface_of("203.0.113.7") is None


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
