"""Parts of `rlhpc doctor` that need no Slurm: room, probes, verdicts, table, and the report to send."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pwd
import shlex
import stat
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.figures import tell
from launch.cli import main
from launch.doctor import broadcast_probe, probe, site, verdicts
from launch.doctor.command import Private, is_secret_name, redact, write_report
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
from tests.gpu.one_card import environment_of, place, why_not
from tests.patience import PATIENCE_S
from tests.unit.launch.site_kit import ROOT, component_of, config_of, plan_of, site_of
from tests.unit.launch.test_slurm_check import FACTS

# --------------------- Parts of `rlhpc doctor` that need no Slurm: room and quotas, renames, the probe on this machine,

GIB = 1 << 30


def test_quotas_are_read_in_the_forms_of_lustre_and_of_quota():
    lustre = "/lustre/scratch  1048576  2097152  4194304  -  900  0  1000  -\n"
    assert list(parse_lfs(lustre, "q")) == [Room("q", GIB, 100)]
    assert list(parse_lfs("/lustre/scratch  3145728* 2097152 4194304 6d 9 0 0 -", "q")) == [Room("q", 0, None)]
    assert not list(parse_lfs("/lustre/scratch 10 0 0 - 3 0 0 -", "q"))
    plain = "Disk quotas for user bob (uid 1):\n  Filesystem blocks quota limit grace files quota limit grace\n"
    assert list(parse_quota(plain + "srv:/home 1024 2048 4096 0 7 10 20 0\n", "q")) == [Room("q", 1 << 20, 3)]
    assert not list(parse_quota("Disk quotas for user bob (uid 1): none\n", "q"))


def test_room_is_held_against_what_the_run_writes():
    wanted = Forecast(checkpoint_bytes=9 * GIB, rollout_bytes=GIB)
    verdicts = [[finding.verdict for finding in judge(Room("q", free * GIB, None), wanted)] for free in (9, 15, 25)]
    assert verdicts == [["fail"], ["warn"], ["pass"]]
    assert [finding.verdict for finding in judge(Room("q", None, 100), None)] == ["fail"]
    for left, said in ((0, "0 GiB left"), (GIB // 8, "0.125 GiB left"), (12_345 * GIB, "12,345 GiB left")):
        assert [finding.text for finding in judge(Room("/scratch", left, None), None)] == [said]


def test_the_forecast_counts_checkpoints_kept_the_one_in_work_and_what_else_they_hold(tmp_path):
    model = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    model |= {"intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(model))
    keys = (f"model.path={tmp_path}", "checkpoint.keep=3", "model.dtype=bfloat16", "run.num_steps=200")
    plain, averaged, judged = (
        forecast(config_of(*keys, *more))
        for more in ((), ("trainer.ema_decay=0.99",), ("algorithm.advantage=gae", "admission.active_sampling=false"))
    )
    num_parameters = 512 * 64 + 64 + 2 * (3 * 64 * 65 + 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert plain.checkpoint_bytes == 4 * (12 + 2) * num_parameters
    assert plain.rollout_bytes == 200 * 12 * 8 * (12 + 52) * 12
    assert averaged.checkpoint_bytes == plain.checkpoint_bytes * (12 + 4 + 2) // (12 + 2)
    assert judged.checkpoint_bytes == 4 * (12 + 12 + 2) * num_parameters
    teacher = ('service=[{name="big", kind="teacher", path="/models/big"}]', "admission.active_sampling=false")
    likely = ("algorithm.forward_kl_coefficient=0.1", "algorithm.teacher_top_k=5")
    for more, num_bytes in (((), 4), (likely, 4 + 5 * 8)):
        taught = forecast(config_of(*keys, *teacher, "algorithm.advantage=distillation", *more))
        assert taught.rollout_bytes == plain.rollout_bytes * (12 + num_bytes) // 12
    findings = check_space(tmp_path, forecast(config_of("model.path=/nowhere")))
    assert [finding.verdict for finding in findings if finding.key == "room: forecast"] == ["warn"]


def test_a_good_filesystem_and_clock_pass_and_nothing_is_left(tmp_path):
    assert [finding.verdict for finding in site.check_renames(tmp_path)] == ["pass", "pass"]
    assert [finding.verdict for finding in site.check_operations(tmp_path)] == ["pass", "pass", "pass"]
    assert not list(tmp_path.iterdir())
    there = datetime.fromisoformat(FACTS.clock_text).timestamp()
    found = [site.check_clock(FACTS, there + late).verdict for late in (0.9, 10, 100)]
    assert found == ["pass", "warn", "fail"]


def test_releases_of_slurm_are_known_as_tried_or_not():
    plan = plan_of()
    for version, verdict in (((20, 2), "fail"), ((21, 8), "warn"), ((22, 5), "pass"), ((25, 11), "pass"), ((26, 5), "pass"), ((26, 11), "warn")):  # fmt: skip # noqa: E501
        facts = replace(FACTS, version=version)
        findings = list(site.check_version(plan, facts))
        assert findings[0].verdict == verdict
        assert len(findings) == 1 + (version >= (25, 11))
        assert (findings[0].text == "has been tried") is (version in ((22, 5), (26, 5)))  # tests/slurm runs on these


def test_caches_on_a_network_filesystem_or_below_an_unset_directory_are_warned_of_and_none_is_needed():
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


def test_a_site_file_of_ours_makes_a_plan_without_a_run_file_and_sets_nothing_that_a_task_gets_by_itself():
    assert set(site.CACHES) == set(caches_below(Path("/")))
    for name in ("example", "apptainer", "conda-lustre", "module-venv"):
        loaded = load_site(ROOT / "slurm" / "sites" / f"{name}.toml")
        assert not {"TMPDIR", *site.CACHES} & set(loaded.prologue.environment)
        assert not [value for value in loaded.prologue.environment.values() if "TMPDIR" in value]
        plan = made_up_plan(loaded, None)
        assert "generation" in [part.name for job in plan.jobs for part in job.components]
    plan = made_up_plan(site_of(trainer={"gpus_per_node": None}, generation={"gpus_per_node": None}), None)
    assert not any(part.gpus_per_task for job in plan.jobs for part in job.components), "a site without GPUs"


def test_gpus_of_a_node_are_read_in_every_form_that_sites_have():
    for text, gpus in (
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
        ("mps:400", {}), ("(null)", {}), ("", {}),
    ):  # fmt: skip
        assert parse_gpus(text) == gpus, text


@pytest.mark.starts
def test_what_the_prologue_names_and_is_not_here_fails(tmp_path):
    prologue = PrologueConfig(venv=tmp_path / "venv", python="no-such-python")
    found = {finding.key: finding.verdict for finding in site.check_software(prologue)}
    assert found == {"prologue.venv": "fail", "prologue.python": "warn"}
    prologue = PrologueConfig(conda=tmp_path / "envs" / "rlhpc")  # an environment in place of the installation
    (finding,) = [each for each in site.check_software(prologue) if each.key == "prologue.conda"]
    assert finding.verdict == "fail"
    assert "`conda info --base`" in finding.remedy


# ----------------------------------------------------------------------------------------------------------- the probe


@pytest.mark.starts
def test_two_probes_on_one_machine_tell_their_node_and_reach_each_other(tmp_path):
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
def test_a_disk_from_which_nothing_can_be_loaded_is_known(tmp_path):
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


def test_the_probe_looks_where_a_task_puts_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert probe.facts(tmp_path)["tmp"]["path"] == str(tmp_path)


@pytest.mark.parametrize("name", ["probe.py", "broadcast_probe.py"])
def test_what_runs_on_nodes_is_python_3_9_and_needs_nothing_installed(name):
    path = Path(probe.__file__).with_name(name)
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    needed = {"torch"} if name == "broadcast_probe.py" else set()  # it is run only where there is one
    assert {each.split(".")[0] for each in names} <= sys.stdlib_module_names | needed


@pytest.mark.starts
def test_a_test_that_takes_too_long_on_a_busy_node_says_that_it_is_busy(monkeypatch):
    for load, said in ((1.0, "no result in 0 s"), (80.0, "no result in 0 s; this node is busy (load 80 on ")):
        monkeypatch.setattr(probe.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(probe.os, "cpu_count", lambda: 2)
        assert probe.child(["-c", "import time; time.sleep(60)"], 0.2)["error"].startswith(said)


def test_ranks_of_the_measured_broadcast_are_told_their_host_and_interface_unless_the_user_names_them(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for given, seen in ((None, "n1.12"), ("mine", "mine"), ("", None)):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if given is not None:
            monkeypatch.setenv("NCCL_HOSTID", given)
        broadcast_probe.name_host()
        assert os.environ.get("NCCL_HOSTID") == seen
    for named, told in (("ib77, lo", "lo"), ("ib77", None), ("", None)):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setenv("RLHPC_INTERFACE", named)
        broadcast_probe.tell_gloo()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == told


def test_a_probe_whose_directory_is_gone_ends_and_a_peer_that_does_not_listen_is_an_error_in_words(tmp_path):
    assert probe.wait_for(tmp_path / "none" / "peers.json", time.monotonic() + 30) is None
    listener = probe.listen()
    port = listener.getsockname()[1]
    assert probe.reach({"address": "127.0.0.1", "port": port})["ms"] > 0
    listener.close()
    assert "error" in probe.reach({"address": "127.0.0.1", "port": 9})
    assert "error" in probe.stream({"address": "127.0.0.1", "port": 9})


@pytest.mark.parametrize("request_form", ["gres", "gpus-per-task"])
def test_a_probe_asks_for_the_partitions_gpus_and_accounts_of_its_component(request_form):
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


def test_a_quote_in_a_path_stays_one_word_of_the_probes_command():
    image = "/shared/bob's images/rlhpc.sif"
    plan = plan_of(prologue={"image": image, "code": "/shared/code"})
    text = probe_script(plan, probe_component(component_of(plan, "trainer")), Path("/shared/x"))
    words = shlex.split(text.rstrip().splitlines()[-1])
    assert image in words
    assert words[-2:] == ["/shared/x", "trainer"]


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


def test_a_good_node_passes_everything_and_each_fault_has_its_line():
    assert not wrong()
    assert not wrong(plan=plan_of(trainer={"gpu_request": "gpus-per-task"}))
    tmp, unlimited = {"path": "/tmp", "free_bytes": 99 * GIB}, "limits: open files unlimited, locked"
    for changes, said in (
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
        ({"tmp": tmp | {"free_bytes": GIB, "is_noexec": False}}, "warn trainer: local room: /tmp 1 GiB free"),
        ({"tmp": tmp | {"is_noexec": True}}, "warn trainer: local room: /tmp 99 GiB free, which is mounted noexec"),
        ({"limits": NO_LIMITS | {"nofile": 1024}}, "warn trainer: limits: open files 1024"),
        ({"limits": NO_LIMITS | {"memlock": 65536}}, f"warn trainer: {unlimited}"),
        ({"limits": NO_LIMITS | {"cpu": 3600}}, f"warn trainer: {unlimited} memory unlimited, 3600 s of a core, then"),
        ({"limits": NO_LIMITS | {"as": 1 << 36}},
         f"warn trainer: {unlimited} memory unlimited, address space 68719476736 bytes"),
        ({"limits": NO_LIMITS | {"fsize": 1 << 30}},
         f"warn trainer: {unlimited} memory unlimited, files of 1073741824 bytes at most"),
        ({"address_error": "no ib0"}, "fail trainer: interface: no address on h0: no ib0"),
    ):  # fmt: skip
        (line,) = wrong(**changes)
        assert line.startswith(said)


def test_faults_between_nodes_have_their_lines():
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


def test_jobs_that_wait_are_warned_of_and_jobs_that_died_fail():
    reports = Reports("k", missing={"trainer": "PENDING (Resources)"}, failed={"controller": "job 7 FAILED: no word"})
    found = {finding.key: finding for finding in judge_reports(reports, plan_of(), None, 300)}
    assert found["trainer: job"].verdict == "warn"
    assert found["trainer: job"].text == "could not start in 300 s: PENDING (Resources)"
    assert found["controller: job"].verdict == "fail"


def test_the_table_keeps_its_width_and_a_warning_does_not_change_the_status():
    findings = [
        Finding("trainer.partition", "gpu", "pass", "word " * 40),
        Finding("a check with a name that is longer than its column", "", "warn", "text", "do " * 40),
    ]
    text = render(findings, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[-1] == "1 pass, 1 warn, 0 fail"
    assert exit_status(findings) == 0
    assert exit_status([*findings, Finding("x", "", "fail", "y")]) == 1


# --------------------- The file to send when a site does not work: everything is in it but what nobody else should read

ADA = Private(names=("ada",), homes=("/lustre/home/ada",), values=("open sesame 1",))
SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "SLURM_JWT_TOKEN": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "MY_PASSWORD": "correct horse",
    "VLLM_API_KEY": "plain-looking",
    "CUDA_AUTH_COOKIE": "biscuit-42",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Authorization: Bearer abc.DEF-123456", "Authorization: (removed) (removed)"),
        ("curl -H 'x: bearer abcdef123456'", "curl -H 'x: bearer (removed)'"),
        ('api_key = "two words"', "api_key = (removed)"),
        ("export HF_TOKEN=hf_short; run", "export HF_TOKEN=(removed); run"),
        ('{"password": "x", "n": 3}', '{"password": (removed), "n": 3}'),
        ("--token 'abc' --n 3", "--token (removed) --n 3"),
        ("rlhpc --api-key sk-12 --n 3", "rlhpc --api-key (removed) --n 3"),
        ("MY_PASSWORD=123456 and secret: 42", "MY_PASSWORD=(removed) and secret: (removed)"),
        ("token = 12345", "token = (removed)"),
        ("//ada:p@ss@mirror.example/simple", "//(removed)@mirror.example/simple"),
        ("https://ada:pw@mirror.example/simple", "https://(removed)@mirror.example/simple"),
        ("mail ada.l@uni.example now", "mail (removed) now"),
        ("said open sesame 1 twice", "said (removed) twice"),
        ("/lustre/home/ada/runs/x", "~/runs/x"),
        ("/lustre/home/adams/runs", "/lustre/home/adams/runs"),
        ("/scratch/ada/x and /home/grace/y", "/scratch/USER/x and /HOME/y"),
        ("user ada, canada, ada_project", "user USER, canada, USER_project"),
        ("sha 0123456789abcdef0123456789abcdef", "sha (removed)"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----", "(removed)"),
    ],
)
@pytest.mark.starts
def test_what_nobody_else_should_read_is_taken_out(text, wanted):
    assert redact(text, ADA) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "token_budget = 8_192",
        "transformers==5.19.0 tokenizers==0.23.3 TOKENIZERS_PARALLELISM=false",
        '{"num_tokens": 5, "stop_token_ids": [1, 2]}',
        'max_prompt_tokens = 512\n[trainer]\nbackend = "megatron"',
        "generation.max_completion_tokens=1024, 3 tokens a step",
        "NVIDIA A100-SXM4-80GB, 81920 MiB, 535.183.06, 8.0",
        "CUDA_VISIBLE_DEVICES=GPU-8f6d2b1a-0c4e-4f7a-9b5d-2f1e3a4b5c6d,1",
        "fail  trainer.partition   gpuu: no such partition   legal: cpu, gpu",
        "nvidia/cuda/compat:/opt/slurm/lib",
    ],
)
@pytest.mark.starts
def test_what_explains_a_failure_stays(text):
    assert redact(text, ADA) == text


@pytest.mark.starts
def test_planted_secrets_names_and_homes_do_not_reach_the_file(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "zoe77"
    site = tmp_path / "site.toml"
    site.write_text(
        "[cluster]\n"
        f'shared_directory = "{home}/shared"\n'
        "[prologue]\n"
        'commands = ["export OTHER_TOKEN=tok-in-a-command", "ulimit -n 65536"]\n'
        "[prologue.environment]\n"
        'WANDB_API_KEY = "in the site file"\n'
        'NCCL_SOCKET_IFNAME = "ib0"\n'
        'MIRROR = "https://zoe77:hunter2@mirror.example"\n'
    )
    environment = {
        **SECRETS,
        "HOME": str(home),
        "USER": "zoe77",
        "PATH": f"{home}/bin:/usr/bin",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_USER": "zoe77",
        "DIARY": "dear diary",
    }
    ready = {
        "node": "gpu01",
        "driver": "535.183.06",
        "executable": f"{home}/venv/bin/python",
        "known_sha256": "ab" * 32,
    }
    reports = Reports("k", {"trainer": ready}, {}, failed={"generation": f"cannot open {home}/x as zoe77"})
    finding = Finding("trainer: job", "", "fail", f"{home}/runs: HF_TOKEN={SECRETS['HF_TOKEN']} refused")
    path = tmp_path / "report.txt"
    write_report(path, [finding], reports, [site], environment=environment)
    text = path.read_text()
    assert all(map(is_secret_name, [*SECRETS, "GITHUB_PAT_TOKEN", "NPM_AUTH", "SSH_PASSPHRASE"]))
    planted = [*SECRETS.values(), "tok-in-a-command", "in the site file", "hunter2", "zoe77", str(home), "dear diary"]
    assert [word for word in planted if word in text] == []
    assert pwd.getpwuid(os.getuid()).pw_dir + "/" not in text
    for kept in (
        "gpu01",
        "535.183.06",
        "ulimit -n 65536",
        'NCCL_SOCKET_IFNAME = "ib0"',
        "NCCL_DEBUG=INFO",
        "~/venv/bin",
    ):
        assert kept in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.starts
def test_a_site_that_makes_no_plan_and_a_quick_look_without_slurm_leave_a_report(tmp_path, monkeypatch, capsys):
    site, report = tmp_path / "site.toml", tmp_path / "report.txt"
    site.write_text("[common]\ntime = 60\n")
    assert main(["doctor", str(site), "--quick", "--report", str(tmp_path / "none" / "report.txt")]) == 2
    assert "--report" in capsys.readouterr().err
    assert main(["doctor", str(site), "--quick", "--report", str(report)]) == 2
    text = report.read_text()
    assert "trainer: missing" in text.partition("==== what was found\n")[2].partition("====")[0]
    assert "time = 60" in text
    assert str(report) in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    report.unlink()
    site.write_text(f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\n')
    assert main(["doctor", str(site), "--quick", "--report", str(report)]) == 1
    assert "slurm" in report.read_text()
    assert f"report: {report}" in capsys.readouterr().out


# ---------------------------- Driver, architecture and compiler of a node, by what nvidia-smi has said on such machines

H100 = """\
NVIDIA H100 80GB HBM3, 81559 MiB, 580.82.07, 9.0
NVIDIA H100 80GB HBM3, 81559 MiB, 580.82.07, 9.0
"""
OLD_A100 = "NVIDIA A100-SXM4-80GB, 81920 MiB, 535.183.06, 8.0\n"
V100 = "Tesla V100-SXM2-32GB, 32768 MiB, 580.65.06, 7.0\n"
T4 = "Tesla T4, 15360 MiB, 580.65.06, 7.5\n"
OLD_4090 = "NVIDIA GeForce RTX 4090, 24564 MiB, 560.35.03, 8.9\n"
B200 = "NVIDIA B200, 183359 MiB, 580.82.07, 10.0\n"
WITHOUT_CAPABILITY = "Tesla V100-PCIE-16GB, 16384 MiB, 470.223.02\n"
LOST = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n" + OLD_A100
NOT_KNOWN = "NVIDIA A100-PCIE-40GB, 40960 MiB, 580.65.06, [N/A]\n"


def ready_of(text: str, **changes: Any) -> dict[str, Any]:
    """What a probe would report on a node where nvidia-smi says this."""
    cards = probe.parse_gpus(text)
    return {
        "node": "g0", "torch_cuda": "13.0", "gpus": [card["name"] for card in cards], "driver": cards[0]["driver"],
        "compute_capabilities": [card["compute_capability"] for card in cards], "cuda_library": "",
        "vllm_compatibility": "", "compiler": "/usr/bin/gcc", "has_python_headers": True, **changes,
    }  # fmt: skip


def judged(ready: dict[str, Any], component: str = "generation", dtype: str = "bfloat16") -> dict[str, Any]:
    config, plan = config_of(f"model.dtype={dtype}"), plan_of()
    (part,) = (part for job in plan.jobs for part in job.components if part.name == component)
    findings = verdicts.judge_gpu_software("node", ready, part, config)
    return {finding.key.removeprefix("node: "): finding for finding in findings}


def test_a_new_node_passes_and_what_needs_no_kernels_is_warned_of_at_most():
    found = judged(ready_of(H100))
    assert [finding.verdict for finding in found.values()] == ["pass"] * 3
    assert found["architecture"].text == "sm_90"
    assert "compatibility" not in judged(ready_of(OLD_4090))["driver"].remedy, "not for a consumer card"
    assert judged(ready_of(T4), dtype="float32")["architecture"].verdict == "warn"
    assert judged(ready_of(H100, compiler=""), component="trainer")["compiler"].verdict == "warn"
    for changes in ({"gpus": None}, {"gpus": []}, {"torch_cuda": ""}):
        assert judged(ready_of(H100, **changes)) == {}


@pytest.mark.parametrize(
    ("text", "changes", "key", "verdict", "said", "remedy"),
    [
        (
            OLD_A100,
            {},
            "driver",
            "fail",
            "535.183.06; torch is for CUDA 13.0, which needs 580",
            "compatibility package",
        ),
        (OLD_A100, {"torch_cuda": "12.8"}, "driver", "pass", "535.183.06", ""),
        (OLD_A100, {"cuda_library": "580.82.07"}, "driver", "warn", "libcuda 580.82.07", "VLLM_ENABLE_CUDA_COMPAT"),
        (OLD_A100, {"cuda_library": "580.82.07", "vllm_compatibility": "1"}, "driver", "pass", "libcuda 580.82.07", ""),
        (OLD_A100, {"cuda_library": "550.54.15"}, "driver", "fail", "which needs 580", "compatibility package"),
        (OLD_4090, {}, "driver", "fail", "which needs 580", "a torch and vLLM for an older CUDA"),
        (H100, {"driver": ""}, "driver", "warn", "not known", "torch.ones"),
        (H100, {"torch_cuda": "14.0"}, "driver", "warn", "not known", "torch.ones"),
        (V100, {}, "architecture", "fail", "sm_70: torch for CUDA 13.0 has no kernels", "sm_75"),
        (V100, {"torch_cuda": "12.8"}, "architecture", "fail", "sm_70: neither bfloat16", "sm_80"),
        (T4, {}, "architecture", "fail", "sm_75: neither bfloat16", "sm_80"),
        (B200, {}, "architecture", "pass", "sm_100", ""),
        (WITHOUT_CAPABILITY, {}, "architecture", "warn", "not reported", "sm_75"),
        (NOT_KNOWN, {}, "architecture", "warn", "not reported", "sm_75"),
        (H100 + V100, {}, "architecture", "fail", "sm_70, sm_90: torch", "V100"),
        (LOST, {}, "driver", "fail", "535.183.06", "compatibility package"),
        (H100, {"compiler": ""}, "compiler", "fail", "not on g0: a C compiler; Triton", "gcc"),
        (H100, {"has_python_headers": False}, "compiler", "fail", "not on g0: Python.h", "python3-dev"),
    ],
)
def test_what_keeps_torch_from_a_gpu_is_told_with_its_remedy(text, changes, key, verdict, said, remedy):
    finding = judged(ready_of(text, **changes))[key]
    assert finding.verdict == verdict
    assert said in finding.text
    assert remedy in finding.remedy


@pytest.mark.starts
def test_an_nvidia_smi_that_knows_no_architectures_is_asked_again(commands):
    commands.put("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9")
    assert probe.gpus() == []
    commands.put(
        "nvidia-smi",
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        "echo 'Tesla V100-PCIE-16GB, 16384 MiB, 470.223.02'",
    )
    assert probe.gpus() == [
        {"name": "Tesla V100-PCIE-16GB, 16384 MiB", "driver": "470.223.02", "compute_capability": ""}
    ]


def test_a_libcuda_of_the_compatibility_package_is_seen_by_its_version(tmp_path):
    (tmp_path / "libcuda.so.580.82.07").write_text("")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.82.07")
    assert probe.cuda_library(f"/nowhere::{tmp_path}") == "580.82.07"
    assert probe.cuda_library("/nowhere") == ""


@pytest.mark.starts
def test_a_probe_tells_compiler_and_headers_of_the_interpreter_it_runs_under():
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); import probe; print(probe.compiler())"
    said = subprocess.run(
        [sys.executable, "-c", program, str(Path(probe.__file__).parent)],
        env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "'compiler': ''" in said


# ----------------------- The measured broadcast: between two processes, by NCCL where there is a GPU, and on nodes with

NUM_GPUS = 4  # of each node
NOT_NCCL = why_not(2) if place() == "cuda" else "gloo in its place"
ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(bool(NOT_NCCL), reason=NOT_NCCL))


class Nccl:
    """Takes down the GPU of each collective; a barrier's is chosen as the docstring of torch's barrier has it."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self.used: list[int] = []
        for name in ("init_process_group", "destroy_process_group"):
            monkeypatch.setattr(dist, name, lambda *args, **options: None)
        for name in ("barrier", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> None:
        first = self.used[0] if self.used else self._rank % NUM_GPUS
        self.used.append(device_ids[0] if device_ids else first)

    def broadcast(self, buffer: _Buffer, source: int) -> None:
        self.used.append(buffer.device.index)


class _Buffer:
    def __init__(self, num_bytes: int, *, dtype: torch.dtype, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_probe_of_nccl_meets_on_the_gpu_that_it_broadcasts_from(rank, tmp_path, monkeypatch):
    # On another GPU it would be another communicator, which one rank would make alone: it would wait for ever.
    nccl = Nccl(rank, monkeypatch)
    monkeypatch.setattr(torch, "empty", _Buffer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(broadcast_probe, "_store", lambda *args: None)
    for variable in ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "given")
    assert broadcast_probe.main([str(tmp_path / "store"), "127.0.0.1", str(rank), "nccl"]) == 0
    assert nccl.used
    assert set(nccl.used) == {0}


@pytest.mark.starts
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=ON_A_GPU)])
def test_two_probes_measure_the_broadcast_between_them(backend, tmp_path):
    """As doctor starts them, each on a node."""
    probes = []
    for rank in range(2):
        own = environment_of(rank, 2) if backend == "nccl" else {}
        if backend == "nccl" and not own:
            own = {"CUDA_VISIBLE_DEVICES": str(rank)}
        words = [broadcast_probe.__file__, str(tmp_path / "store"), "127.0.0.1", str(rank), backend]
        environment = os.environ | own | {"OMP_NUM_THREADS": "1"}
        probes.append(subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment))
    try:
        said = [probe.communicate(timeout=2 * PATIENCE_S)[0] for probe in probes]
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
    for text in said:
        found = json.loads(text.splitlines()[-1])
        assert found["backend"] == backend
        assert found["gbit_per_s"] > 0
    tell(f"broadcast by {backend}, Gbit/s", found["gbit_per_s"])
