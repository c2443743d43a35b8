"""Parts of `rlhpc doctor` that need no Slurm: room and quotas, renames, the probe on this machine, verdicts, table."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from launch.doctor import broadcast_probe, probe, site
from launch.doctor.command import plan_of as made_up_plan
from launch.doctor.probe_jobs import Reports, probe_component, probe_script
from launch.doctor.site import (
    Finding,
    Forecast,
    Room,
    check_space,
    exit_status,
    forecast,
    judge,
    parse_lfs,
    parse_quota,
    render,
)
from launch.doctor.verdicts import judge as judge_reports
from launch.plan.jobs import JobPlan
from launch.plan.site_file import PrologueConfig, load_site
from launch.slurm.cluster_facts import parse_gpus
from launch.supervisor.role_task import caches_below
from rlhpc.base.patience import Deadline
from tests.patience import PATIENCE_S
from tests.unit.launch.site_kit import ROOT, component_of, config_of, plan_of, site_of
from tests.unit.launch.test_slurm_check import FACTS

GIB = 1 << 30


def test_quotas_are_read_in_the_forms_of_lustre_and_of_quota() -> None:
    lustre = "/lustre/scratch  1048576  2097152  4194304  -  900  0  1000  -\n"
    assert list(parse_lfs(lustre, "q")) == [Room("q", GIB, 100)]
    assert list(parse_lfs("/lustre/scratch  3145728* 2097152 4194304 6d 9 0 0 -", "q")) == [Room("q", 0, None)]
    assert not list(parse_lfs("/lustre/scratch 10 0 0 - 3 0 0 -", "q"))
    plain = "Disk quotas for user bob (uid 1):\n  Filesystem blocks quota limit grace files quota limit grace\n"
    assert list(parse_quota(plain + "srv:/home 1024 2048 4096 0 7 10 20 0\n", "q")) == [Room("q", 1 << 20, 3)]
    assert not list(parse_quota("Disk quotas for user bob (uid 1): none\n", "q"))


def test_room_is_held_against_what_the_run_writes() -> None:
    wanted = Forecast(checkpoint_bytes=9 * GIB, rollout_bytes=GIB)
    verdicts = [[finding.verdict for finding in judge(Room("q", free * GIB, None), wanted)] for free in (9, 15, 25)]
    assert verdicts == [["fail"], ["warn"], ["pass"]]
    assert [finding.verdict for finding in judge(Room("q", None, 100), None)] == ["fail"]


def test_the_forecast_counts_checkpoints_kept_and_the_one_in_work(tmp_path: Path) -> None:
    model = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    model |= {"intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(model))
    bound = forecast(
        config_of(f"model.path={tmp_path}", "checkpoint.keep=3", "model.dtype=bfloat16", "run.num_steps=200")
    )
    num_parameters = 512 * 64 + 64 + 2 * (3 * 64 * 65 + 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert bound.checkpoint_bytes == 4 * (12 + 2) * num_parameters
    assert bound.rollout_bytes == 200 * 12 * 8 * (12 + 52) * 12


def test_the_forecast_counts_what_else_a_checkpoint_holds(tmp_path: Path) -> None:
    model = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(model | {"intermediate_size": 128, "vocab_size": 512}))
    keys = (f"model.path={tmp_path}", "checkpoint.keep=2", "model.dtype=bfloat16")
    plain, averaged, judged = (
        forecast(config_of(*keys, *more)).checkpoint_bytes
        for more in ((), ("trainer.ema_decay=0.99",), ("algorithm.advantage=gae", "admission.active_sampling=false"))
    )
    assert plain is not None
    assert averaged == plain * (12 + 4 + 2) // (12 + 2)
    assert judged == plain * (12 + 12 + 2) // (12 + 2)


@pytest.mark.parametrize(("left", "said"), [(0, "0 GiB"), (GIB // 8, "0.125 GiB"), (12_345 * GIB, "12,345 GiB")])
def test_room_is_a_number_that_people_read(left: int, said: str) -> None:
    (finding,) = judge(Room("/scratch", left, None), None)
    assert finding.text == f"{said} left"


def test_a_model_that_is_not_here_leaves_a_warning_and_no_forecast(tmp_path: Path) -> None:
    findings = check_space(tmp_path, forecast(config_of("model.path=/nowhere")))
    assert [finding.verdict for finding in findings if finding.key == "room: forecast"] == ["warn"]


def test_renames_on_a_good_filesystem_are_atomic_and_leave_nothing(tmp_path: Path) -> None:
    assert [finding.verdict for finding in site.check_renames(tmp_path)] == ["pass", "pass"]
    assert [finding.verdict for finding in site.check_operations(tmp_path)] == ["pass", "pass", "pass"]
    assert not list(tmp_path.iterdir())


def test_clocks_are_compared_to_the_second() -> None:
    there = datetime.fromisoformat(FACTS.clock_text).timestamp()
    found = [site.check_clock(FACTS, there + late).verdict for late in (0.9, 10, 100)]
    assert found == ["pass", "warn", "fail"]


def test_releases_of_slurm_are_known_as_tried_or_not() -> None:
    plan = plan_of()
    for version, verdict in (((20, 2), "fail"), ((21, 8), "warn"), ((22, 5), "pass"), ((25, 11), "pass"), ((26, 5), "pass"), ((26, 11), "warn")):  # fmt: skip # noqa: E501
        facts = replace(FACTS, version=version)
        findings = list(site.check_version(plan, facts))
        assert findings[0].verdict == verdict
        assert len(findings) == 1 + (version >= (25, 11))
        assert (findings[0].text == "has been tried") is (version in ((22, 5), (26, 5)))  # tests/slurm runs on these


def test_caches_on_a_network_filesystem_or_below_an_unset_directory_are_warned_of_and_none_is_needed() -> None:
    mounts = "srv:/ / nfs4 rw 0 0\n/dev/sda /tmp ext4 rw 0 0\n"

    def wrong(shell: dict[str, str], **environment: str) -> list[str]:
        found = site.check_caches(plan_of(prologue={"environment": environment}), shell, mounts)
        return [finding.line for finding in found if finding.verdict != "pass"]

    local = {"TRITON_CACHE_DIR": "${SLURM_TMPDIR:-/tmp}/$USER/triton", "CUDA_CACHE_PATH": "/tmp/$USER"}
    assert not wrong({})
    assert not wrong({}, **local)
    assert "Slurm does not set TMPDIR" in wrong({}, TRITON_CACHE_DIR="$TMPDIR/triton")[0]
    lines = wrong({"VLLM_CACHE_ROOT": "/nowhere/vllm"}, TRITON_CACHE_DIR="/nowhere/$USER/triton")
    assert [line.split("=")[0] for line in lines] == ["prologue.environment.TRITON_CACHE_DIR", "shell: VLLM_CACHE_ROOT"]


def test_the_caches_that_are_looked_at_are_those_that_a_task_gets_by_itself() -> None:
    assert set(site.CACHES) == set(caches_below(Path("/")))


@pytest.mark.parametrize("name", ["example", "apptainer", "conda-lustre", "module-venv"])
def test_no_site_file_of_ours_sets_what_a_task_gets_by_itself(name: str) -> None:
    given = load_site(ROOT / "slurm" / "sites" / f"{name}.toml").prologue.environment
    assert not {"TMPDIR", *site.CACHES} & set(given)
    assert not [value for value in given.values() if "TMPDIR" in value]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu", {"": 1}),
        ("gpu:4", {"": 4}),
        ("gpu:4(S:0-1)", {"": 4}),
        ("gpu:tesla", {"tesla": 1}),
        ("gpu:3090:4", {"3090": 4}),
        ("gpu:4090:8(S:0-1)", {"4090": 8}),
        ("gpu:2080ti:10(S:0,2-3)", {"2080ti": 10}),
        ("gpu:a100:no_consume:4", {"a100": 4}),
        ("gpu:no_consume:2", {"": 2}),
        ("gpu:a100:4(S:0-1),gpu:v100:2", {"a100": 4, "v100": 2}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}),
        ("gpu:nvidia_a100_80gb_pcie_1g.10gb:7", {"nvidia_a100_80gb_pcie_1g.10gb": 7}),
        ("gpu:a100:4(S:0-1),gpu:1g.10gb:7,shard:8,craynetwork:4", {"a100": 4, "1g.10gb": 7}),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:nvidia_h100_80gb_hbm3:32(S:0-1)", {"nvidia_h100_80gb_hbm3": 8}),
        ("craynetwork:4,gpu:mi250:8", {"mi250": 8}),
        ("lscratch:760,gpu:rtx-6000:4", {"rtx-6000": 4}),
        ("mps:400", {}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gpus_of_a_node_are_read_in_every_form_that_sites_have(text: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(text) == gpus


def test_what_the_prologue_names_and_is_not_here_fails(tmp_path: Path) -> None:
    prologue = PrologueConfig(venv=tmp_path / "venv", python="no-such-python")
    found = {finding.key: finding.verdict for finding in site.check_software(prologue)}
    assert found == {"prologue.venv": "fail", "prologue.python": "warn"}


@pytest.mark.starts
def test_an_environment_given_as_the_installation_of_conda_is_answered_with_where_to_find_it(tmp_path: Path) -> None:
    prologue = PrologueConfig(conda=tmp_path / "envs" / "rlhpc")
    (finding,) = [each for each in site.check_software(prologue) if each.key == "prologue.conda"]
    assert finding.verdict == "fail"
    assert "`conda info --base`" in finding.remedy


# ----------------------------------------------------------------------------------------------------------- the probe


@pytest.mark.starts
def test_two_probes_on_one_machine_tell_their_node_and_reach_each_other(tmp_path: Path) -> None:
    content = os.urandom(1000)
    (tmp_path / "known.bin").write_bytes(content)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    command = ["bash", "-c", 'ulimit -t 3600; exec "$@"', "-", sys.executable, probe.__file__, str(tmp_path)]
    started = [subprocess.Popen([*command, name], env=environment) for name in ("trainer", "generation")]
    try:
        ready = _answer_until(tmp_path, "ready", 2)
        there = list(ready.values())
        peers = {"probes": there, "streams": [["trainer", "generation"]], "broadcasts": [], "channel": []}
        probe.write(tmp_path / "peers.json", peers)
        results = _answer_until(tmp_path, "result", 2)
    finally:
        (tmp_path / "done").touch()
        assert [process.wait(PATIENCE_S) for process in started] == [0, 0]
    for name, peer in (("trainer", "generation"), ("generation", "trainer")):
        assert ready[name]["known_sha256"] == hashlib.sha256(content).hexdigest()
        assert abs(ready[name]["skew_s"]) <= ready[name]["round_trip_s"] < PATIENCE_S
        assert results[name]["reach"][peer]["ms"] > 0
        assert (ready[name]["limits"]["cpu"], ready[name]["limits"]["as"]) == (3600, -1)
    assert results["trainer"]["stream"]["generation"]["gbit_per_s"] > 0


def _answer_until(directory: Path, kind: str, number: int) -> dict[str, Any]:
    """Answer the probes' letters as the login node does, until so many files of a kind are there."""
    deadline = Deadline(PATIENCE_S)
    while len(found := list(directory.glob(f"*.{kind}.json"))) < number:
        assert not deadline.is_over
        for call in directory.glob("*.call.?"):
            answer = directory / call.name.replace("call", "answer")
            if not answer.exists():
                probe.write(answer, {"time": time.time()})
        time.sleep(0.01)
    return {path.name.split(".")[0]: json.loads(path.read_bytes()) for path in found}


@pytest.mark.starts
def test_a_disk_from_which_nothing_can_be_loaded_is_known(tmp_path: Path) -> None:
    looks = f"import json; from launch.doctor import probe; print(json.dumps(probe.disk({str(tmp_path)!r})))"
    mounts = f'mount -t tmpfs -o noexec none "{tmp_path}" && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        mounts,
        "-",
        sys.executable,
        "-c",
        looks,
    ]
    seen = subprocess.run(command, capture_output=True, text=True, check=False)
    if seen.returncode:
        pytest.skip(f"nothing can be mounted here: {seen.stderr}")
    assert json.loads(seen.stdout)["is_noexec"]
    assert not probe.disk(str(tmp_path))["is_noexec"]
    assert probe.disk(str(tmp_path / "none"))["free_bytes"] is None


def test_the_probe_looks_where_a_task_puts_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert probe.facts(tmp_path)["tmp"]["path"] == str(tmp_path)


@pytest.mark.parametrize("name", ["probe.py", "broadcast_probe.py"])
def test_what_runs_on_nodes_is_python_3_9_and_needs_nothing_installed(name: str) -> None:
    path = Path(probe.__file__).with_name(name)
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    needed = {"torch"} if name == "broadcast_probe.py" else set()  # it is run only where there is one
    assert {each.split(".")[0] for each in names} <= sys.stdlib_module_names | needed


def test_ranks_of_the_measured_broadcast_are_on_other_hosts_to_nccl_unless_the_user_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for given, seen in ((None, "n1.12"), ("mine", "mine"), ("", None)):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if given is not None:
            monkeypatch.setenv("NCCL_HOSTID", given)
        broadcast_probe.name_host()
        assert os.environ.get("NCCL_HOSTID") == seen


def test_gloo_of_a_probe_is_told_the_interface_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, told in (("ib77, lo", "lo"), ("ib77", None), ("", None)):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setenv("RLHPC_INTERFACE", named)
        broadcast_probe.tell_gloo()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == told


def test_a_probe_whose_directory_is_gone_ends(tmp_path: Path) -> None:
    assert probe.wait_for(tmp_path / "none" / "peers.json", time.monotonic() + 30) is None


def test_a_peer_that_does_not_listen_is_an_error_in_words() -> None:
    listener = probe.listen()
    port = listener.getsockname()[1]
    assert probe.reach({"address": "127.0.0.1", "port": port})["ms"] > 0
    listener.close()
    assert "error" in probe.reach({"address": "127.0.0.1", "port": 9})
    assert "error" in probe.stream({"address": "127.0.0.1", "port": 9})


@pytest.mark.parametrize("request_form", ["gres", "gpus-per-task"])
def test_a_probe_asks_for_the_partitions_gpus_and_accounts_of_its_component(request_form: str) -> None:
    keys = {"account": "lab", "qos": "long", "constraint": "ib", "gpu_request": request_form}
    plan = plan_of("trainer.num_ranks=24", trainer=keys)
    part = probe_component(component_of(plan, "trainer"))
    text = probe_script(plan, part, Path("/shared/x"))
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ["partition=gpu", "account=lab", "qos=long", "constraint=ib", "time=0:02:00", "nodes=2"]
    wanted.append("gres=gpu:8" if request_form == "gres" else "gpus-per-task=1")
    assert set(wanted) <= set(directives)
    assert text.rstrip().splitlines()[-1].startswith("exec srun ")
    assert "launch.supervisor" not in text
    assert "requeue" not in [line for line in directives if line != "no-requeue"]


def test_a_quote_in_a_path_stays_one_word_of_the_probes_command() -> None:
    image = "/shared/bob's images/rlhpc.sif"
    plan = plan_of(prologue={"image": image, "code": "/shared/code"})
    text = probe_script(plan, probe_component(component_of(plan, "trainer")), Path("/shared/x"))
    words = shlex.split(text.rstrip().splitlines()[-1])
    assert image in words
    assert words[-2:] == ["/shared/x", "trainer"]


@pytest.mark.parametrize("name", ["example", "apptainer", "conda-lustre", "module-venv"])
def test_every_site_file_of_ours_makes_a_plan_without_a_run_file(name: str) -> None:
    plan = made_up_plan(load_site(ROOT / "slurm" / "sites" / f"{name}.toml"), None)
    assert "generation" in [part.name for job in plan.jobs for part in job.components]


# ------------------------------------------------------------------------------------------------------------ verdicts

NO_LIMITS = dict.fromkeys(("nofile", "memlock", "as", "cpu", "fsize"), -1)
NODE: dict[str, Any] = {
    "name": "trainer", "node": "h0", "python": "3.11.7", "executable": "/v/python", "torch_cuda": "12.8",
    "versions": {"rlhpc": "0.1.0", "torch": "2.13.0", "megatron-core": "0.16.1"}, "driver": "570.1", "has_rlhpc": True,
    "gpus": ["NVIDIA H100"] * 2, "visible": "0,1", "shm_bytes": 99 * GIB,
    "tmp": {"path": "/tmp", "free_bytes": 99 * GIB, "is_noexec": False}, "limits": NO_LIMITS,
    "known_sha256": "k", "round_trip_s": 0.02,
    "skew_s": 0.001, "address": "10.0.0.1", "compute_capabilities": ["9.0"] * 2, "cuda_library": "",
    "vllm_compatibility": "", "compiler": "/usr/bin/gcc", "has_python_headers": True,
}  # fmt: skip


def wrong(result: dict[str, Any] | None = None, plan: JobPlan | None = None, **changes: Any) -> list[str]:
    reports = Reports("k", {"trainer": {**NODE, **changes}}, {"trainer": result or {}})
    found = judge_reports(reports, plan or plan_of(), config_of(), 300)
    return [f"{f.verdict} {f.key}: {f.text}" for f in found if f.verdict != "pass"]


def test_a_good_node_passes_everything() -> None:
    assert not wrong()
    assert not wrong(plan=plan_of(trainer={"gpu_request": "gpus-per-task"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"known_sha256": "x"}, "fail trainer: shared directory: h0 sees different content"),
        ({"round_trip_s": None}, "fail trainer: shared directory: h0: a file written on the login node"),
        ({"round_trip_s": 9.0}, "warn trainer: shared directory: same content; round trip of a renamed file"),
        ({"skew_s": -90.0}, "fail trainer: clock: -90.000 s"),
        ({"python": "3.9.2"}, "fail trainer: python: 3.9.2"),
        ({"has_rlhpc": False}, "fail trainer: python: rlhpc and launch cannot be imported"),
        ({"versions": {"torch": "2.13"}}, "fail trainer: packages: not installed: megatron"),
        ({"visible": "0"}, "fail trainer: GPUs: CUDA_VISIBLE_DEVICES='0', and 2 GPUs were requested"),
        ({"gpus": None}, "warn trainer: GPUs: 2 given, but no nvidia-smi"),
        ({"gpus": []}, "fail trainer: GPUs: nvidia-smi fails"),
        ({"torch_cuda": ""}, "fail trainer: GPUs: NVIDIA H100, but torch is built without CUDA"),
        ({"tmp": {"path": "/tmp", "free_bytes": GIB, "is_noexec": False}}, "warn trainer: local room: /tmp 1 GiB free"),
        (
            {"tmp": {"path": "/tmp", "free_bytes": 99 * GIB, "is_noexec": True}},
            "warn trainer: local room: /tmp 99 GiB free, which is mounted noexec",
        ),
        ({"limits": NO_LIMITS | {"nofile": 1024}}, "warn trainer: limits: open files 1024"),
        ({"limits": NO_LIMITS | {"memlock": 65536}}, "warn trainer: limits: open files unlimited, locked"),
        (
            {"limits": NO_LIMITS | {"cpu": 3600}},
            "warn trainer: limits: open files unlimited, locked memory unlimited, 3600 s of a core, then killed",
        ),
        (
            {"limits": NO_LIMITS | {"as": 1 << 36}},
            "warn trainer: limits: open files unlimited, locked memory unlimited, address space 68719476736 bytes",
        ),
        (
            {"limits": NO_LIMITS | {"fsize": 1 << 30}},
            "warn trainer: limits: open files unlimited, locked memory unlimited, files of 1073741824 bytes at most",
        ),
        ({"address_error": "no ib0"}, "fail trainer: interface: no address on h0: no ib0"),
    ],
)  # fmt: skip
def test_each_fault_of_a_node_has_its_line(changes: dict[str, Any], said: str) -> None:
    lines = wrong(**changes)
    assert len(lines) == 1
    assert lines[0].startswith(said)


def test_faults_between_nodes_have_their_lines() -> None:
    lines = wrong(
        {
            "reach": {"generation": {"error": "timed out"}, "controller": {"ms": 0.1}},
            "channel": {"error": "controller-0 does not answer"},
            "broadcast": {"trainer-to-generation": {"gbit_per_s": 3.0, "backend": "nccl"}},
        }
    )
    assert lines == [
        "fail trainer: reaches: generation on ?: timed out",
        "fail trainer: ZeroMQ: controller-0 does not answer",
        "warn weights: trainer → generation: nccl broadcast 3 Gbit/s",
    ]


def test_jobs_that_wait_are_warned_of_and_jobs_that_died_fail() -> None:
    reports = Reports("k", missing={"trainer": "PENDING (Resources)"}, failed={"controller": "job 7 FAILED: no word"})
    found = {finding.key: finding for finding in judge_reports(reports, plan_of(), None, 300)}
    assert found["trainer: job"].verdict == "warn"
    assert found["trainer: job"].text == "could not start in 300 s: PENDING (Resources)"
    assert found["controller: job"].verdict == "fail"


def test_the_table_keeps_its_width_and_a_warning_does_not_change_the_status() -> None:
    findings = [
        Finding("trainer.partition", "gpu", "pass", "word " * 40),
        Finding("a check with a name that is longer than its column", "", "warn", "text", "do " * 40),
    ]
    text = render(findings, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[-1] == "1 pass, 1 warn, 0 fail"
    assert exit_status(findings) == 0
    assert exit_status([*findings, Finding("x", "", "fail", "y")]) == 1


def test_a_site_without_gpus_makes_a_plan_too() -> None:
    none = {"gpus_per_node": None}
    assert not any(part.gpus_per_task for job in made_up_plan(site_of(trainer=none, generation=none), None).jobs
                   for part in job.components)  # fmt: skip
