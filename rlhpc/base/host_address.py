"""The address under which other hosts reach this one.

Input: the environment variable RLHPC_INTERFACE and the kernel's network configuration.  Output: IPv4 addresses as text.
Also checks the network variables that libraries read: a shell may have inherited those of another machine.
Each of our sockets that serves other hosts is bound to host_address().
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from rlhpc.protocol.errors import ConfigError

VARIABLE = "RLHPC_INTERFACE"
_SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface


def host_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address at which other hosts reach this one.

    That of the first interface named in RLHPC_INTERFACE ("ib0" or "ib0,eth0") that this host has; if none is named,
    that of the host's name, else of the default route's interface, else of any: many distributions map the host's own
    name to 127.0.1.1, which no other host reaches, and some sites to an address that the host does not have, and a
    cluster's network may have no default route.  Sends nothing.  127.0.0.1 if there is no network at all.
    Raises ConfigError if none of the named interfaces has an address here.
    """
    if first := first_interface(environment):
        return interface_addresses()[first]
    return _address_of_name() or _address_of_default_route() or _address_of_any() or "127.0.0.1"


def first_interface(environment: Mapping[str, str] = os.environ) -> str | None:
    """The first interface named in RLHPC_INTERFACE that this host has; None if none is named.  Raises ConfigError."""
    names = environment.get(VARIABLE, "").strip()
    if not names:
        return None
    present = interface_addresses()
    for name in (word.strip() for word in names.split(",")):
        if name in present:
            return name
    here = ", ".join(f"{name} ({address})" for name, address in present.items()) or "none"
    raise ConfigError(
        f"{VARIABLE}={names!r}: no such interface with an IPv4 address on {socket.gethostname()}; there are: {here}"
    )


def tell_gloo(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo use the interface of host_address(), if it is on this host and gloo is not configured otherwise.

    Gloo requires every interface it is given to exist, whereas NCCL and rlhpc use the first that does.
    """
    with suppress(ConfigError):  # host_address() raises it again if a run needs one
        if interface := first_interface(environment):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)


def refuse_foreign_network(*, has_cuda: bool, has_vllm: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if gloo, NCCL or vLLM is told an interface or an address that this host does not have.

    Their own errors name neither the variable nor this host's interfaces.
    """
    here = [name for _, name in socket.if_nameindex()]
    told = [name.strip() for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",")]
    missing = [name for name in told if name and name not in here]
    if missing:
        raise ConfigError(_of_another_host("GLOO_SOCKET_IFNAME", environment, f"no interface {missing[0]!r}", here))
    told = [name for name in environment.get("NCCL_SOCKET_IFNAME", "").removeprefix("=").split(",") if name]
    is_exact = environment.get("NCCL_SOCKET_IFNAME", "").startswith("=")
    fits = (name for name in here for each in told if name == each or (name.startswith(each) and not is_exact))
    if has_cuda and told and not told[0].startswith("^") and not any(fits):
        raise ConfigError(_of_another_host("NCCL_SOCKET_IFNAME", environment, "no such interface", here))
    for variable in ("VLLM_HOST_IP", "HOST_IP"):  # the second where the first is not set
        if has_vllm and (address := environment.get(variable, "")):
            if not _is_here(address):
                raise ConfigError(
                    _of_another_host(variable, environment, "no such address", interface_addresses().values())
                )
            break


def _of_another_host(variable: str, environment: Mapping[str, str], what: str, here: Iterable[str]) -> str:
    return (
        f"{variable}={environment[variable]!r}: {what} on {socket.gethostname()}; there are: {', '.join(here)}; "
        "legal: one of them, or unset it: it was perhaps inherited from another machine"
    )


def interface_addresses() -> dict[str, str]:
    """IPv4 addresses of this host, by interface name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = ((name, _address_of(probe, name)) for _, name in socket.if_nameindex())
        return {name: address for name, address in found if address}


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address; None: this host has no such address."""
    return next((name for name, its in interface_addresses().items() if its == address), None)


def _address_of_name() -> str | None:
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return None
    addresses = [str(entry[-1][0]) for entry in entries]
    return next((address for address in addresses if not address.startswith("127.") and _is_here(address)), None)


def _is_here(address: str) -> bool:
    """True if a socket can be bound to the address: a name may resolve to an old lease, or to one outside a NAT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except (OSError, ValueError):
            return False
        return True


def _address_of_default_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737: chooses a route, sends no packet
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of_any() -> str | None:
    """An address of a host without a default route: real devices before bridges and tunnels, those up first."""
    found = interface_addresses().items()
    ranked = [(_rank(name, address), address) for name, address in found if not address.startswith("127.")]
    return min(ranked)[1] if ranked else None


def _rank(name: str, address: str) -> tuple[bool, bool, bool, str]:
    place = Path("/sys/class/net", name)
    try:
        is_down = (place / "operstate").read_text().strip() == "down"
    except OSError:
        is_down = False  # /sys is of another network namespace, or hidden
    return is_down, address.startswith("169.254."), not (place / "device").exists(), name


def _address_of(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # an interface without an IPv4 address
        return None
    return socket.inet_ntoa(answer[20:24])  # struct ifreq: 16 bytes of name, family, port, address
