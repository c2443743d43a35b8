"""Ranks that share a card, and bench.one_card, which takes a run along to a machine without network."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from bench import one_card as program
from bench import one_card_pack, weights
from bench.one_card import FAILED, PARTS, PASSED, SKIPPED, TOO_LONG, Part, Parts, Result
from launch.doctor.gpus import parse_listing, parse_memory
from rlhpc.base.patience import Deadline
from rlhpc.weights.choice import choose_transport
from tests.gpu import one_card
from tests.gpu.one_card import DEVICE_WAY, HOSTS, OVER_SOCKETS, PLACE, WAY, Cards, settle
from tests.patience import PATIENCE_S

NEW, OLD = (2, 30, 3), (2, 27, 5)


@pytest.mark.parametrize(
    ("cards", "num_ranks", "reason"),
    [
        (Cards(1, OLD), 2, ""),
        (Cards(1, OLD), 4, ""),
        (Cards(2, OLD, HOSTS, "mine"), 2, ""),  # a card each: nothing is shared
        (Cards(1, NEW, DEVICE_WAY), 3, ""),
        (Cards(1, NEW, DEVICE_WAY, "mine"), 3, ""),
        (Cards(0), 1, "needs a CUDA device"),
        (Cards(1, ()), 2, "needs a torch with NCCL"),
        (Cards(1, OLD), 5, r"5 ranks on 1 card\(s\); at most 4 share one"),
        (Cards(1, (2, 8, 4)), 2, r"NCCL 2\.8\.4 refuses two ranks on one card; needs 2\.9"),
        (Cards(1, OLD, DEVICE_WAY), 2, r"NCCL 2\.27\.5 refuses two ranks on one card; needs 2\.30 for \w+=device"),
        (Cards(1, OLD, HOSTS, "n1.7.trainer"), 2, r"NCCL_HOSTID='n1\.7\.trainer' makes one host of all ranks"),
        (Cards(1, OLD, "luck"), 2, r"RLHPC_ONE_CARD_WAY='luck'; legal: hosts, device"),
    ],
)
def test_ranks_share_a_card_only_where_nccl_lets_them(cards: Cards, num_ranks: int, reason: str) -> None:
    if reason:
        assert re.match(reason, cards.why_not(num_ranks))
    else:
        assert cards.why_not(num_ranks) == ""


def test_each_rank_is_a_host_of_its_own_that_speaks_over_sockets() -> None:
    seen = [Cards(1, OLD).environment(rank, 3) for rank in range(3)]
    assert len({each["NCCL_HOSTID"] for each in seen}) == 3
    for each in seen:
        assert (each["NCCL_SOCKET_IFNAME"], each["NCCL_IB_DISABLE"]) == ("lo", "1")
        assert 1 <= int(each["NCCL_MAX_CTAS"]) <= 4


def test_ranks_of_one_host_ask_nccl_for_several_on_a_device() -> None:
    (seen,) = {tuple(Cards(1, NEW, DEVICE_WAY).environment(rank, 2).items()) for rank in range(2)}
    assert dict(seen)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in dict(seen)


def test_ranks_with_cards_of_their_own_set_nothing() -> None:
    assert Cards(2, OLD).environment(1, 2) == {}


def test_on_cpu_the_same_tests_run_with_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLACE, "cpu")
    assert (one_card.place(), one_card.why_not(9), one_card.environment_of(0, 9)) == ("cpu", "", {})
    assert one_card.several_nodes(tmp_path, 3) == {}
    monkeypatch.delenv(PLACE)
    assert one_card.place() == "cuda"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one card of 80 GB, as torch and nvidia-smi show it."""
    monkeypatch.setattr(Cards, "here", lambda: Cards(1, OLD))
    monkeypatch.setattr(one_card, "_memory_mib", lambda: 81_559)
    for name in (PLACE, WAY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.starts
def test_a_run_finds_a_card_for_each_process_and_each_role_takes_the_one_there_is(
    one_gpu: None, tmp_path: Path
) -> None:
    there = os.environ | one_card.several_nodes(tmp_path, 3)

    def said(*words: str, **variables: str) -> str:
        done = subprocess.run(words, env=there | variables, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout

    machine = parse_listing(said("nvidia-smi", "-L"))
    machine = parse_memory(machine, said("nvidia-smi", "--query-gpu=uuid,memory.total"))
    assert [round(gpu.memory_gib) for gpu in machine] == [27] * 3
    ask = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('NCCL_HOSTID'))"
    role = ("-m", "rlhpc.roles", "generator", "--replica", "1")
    assert said(sys.executable, "-c", ask, *role, CUDA_VISIBLE_DEVICES="2") == "0 generator-1\n"
    assert said(sys.executable, "-c", ask, CUDA_VISIBLE_DEVICES="2", NCCL_HOSTID="x") == "2 x\n"


def test_the_roles_of_a_run_are_hosts_that_weights_reach_by_nccl() -> None:
    """Named as rlhpc/weights/memory.py names them."""
    devices = {}
    for role, replica in (("trainer", 0), ("generator", 0), ("generator", 1)):
        environment = {"CUDA_VISIBLE_DEVICES": "1"}
        settle(["python", "-m", "rlhpc.roles", role, "--replica", str(replica)], environment)
        devices[f"{role}-{replica}"] = f"GPU-a@{environment['NCCL_HOSTID']}"
        assert environment.items() >= OVER_SOCKETS.items()
    trainer = devices.pop("trainer-0")
    assert choose_transport("nccl", trainer, {name: [device] for name, device in devices.items()}) == "nccl"


def test_a_role_without_a_gpu_is_given_none() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    settle(["python", "-m", "rlhpc.roles", "controller", "--replica", "0"], environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_measurement_over_nccl_is_taken_after_another(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has given this process a name, which is no reason to refuse the second."""
    monkeypatch.setattr(Cards, "here", lambda: Cards(1, OLD, HOSTS, os.environ.get("NCCL_HOSTID", "")))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    weights.cards_here.cache_clear()
    for num_ranks in (2, 3):
        names = [weights.host_of("nccl", rank, num_ranks)["NCCL_HOSTID"] for rank in range(num_ranks)]
        assert len(set(names)) == num_ranks
        monkeypatch.setenv("NCCL_HOSTID", names[0])
    with pytest.raises(SystemExit, match="nccl: 5 ranks"):
        weights.host_of("nccl", 0, 5)
    weights.cards_here.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_its_tests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLACE, raising=False)
    assert one_card.why_not(2) == "needs a CUDA device"


# ------------------------------------------------------------------------------------------------------- bench.one_card

ROOT = Path(__file__).parents[2]
QUICK = Part("quick", "that it starts", 30, ("this", "-c"))  # python -m this
MISSING = Part("missing", "that a failure is told", 30, ("no_such_module",))


def run(directory: Path, *parts: Part, seconds: float = 300.0, is_dry: bool = True) -> list[Result]:
    return Parts(directory / "found.json", seconds, is_dry).run(parts)


@pytest.mark.starts
def test_a_part_that_fails_leaves_the_others_alone_and_the_file_holds_both(tmp_path: Path) -> None:
    failed, passed = run(tmp_path, MISSING, QUICK)
    assert (failed.outcome, passed.outcome) == (FAILED, PASSED)
    assert "no_such_module" in failed.why
    document = json.loads((tmp_path / "found.json").read_text())
    assert [part["outcome"] for part in document["parts"]] == [FAILED, PASSED]
    table = (tmp_path / "found.md").read_text()
    assert "| missing | failed: " in table
    assert "| quick | passed | " in table


@pytest.mark.starts
def test_a_part_is_ended_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    code = "import os, subprocess, sys, time\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session=True)\n"
    code += "open('pid.partial', 'w').write(str(child.pid)); os.rename('pid.partial', 'pid'); time.sleep(900)\n"
    (tmp_path / "endless.py").write_text(code.replace("'pid", f"'{tmp_path}/pid"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    began = time.monotonic()
    status, _ = program.run_bounded([sys.executable, "-m", "endless"], environment, 5.0)
    assert status is None
    assert time.monotonic() - began < PATIENCE_S
    child = int((tmp_path / "pid").read_text())
    assert Deadline(PATIENCE_S).wait_for(lambda: not psutil.pid_exists(child), 0.05)


@pytest.mark.starts
def test_what_has_passed_is_not_repeated_and_what_does_not_fit_is_skipped(tmp_path: Path) -> None:
    run(tmp_path, QUICK)
    before = json.loads((tmp_path / "found.json").read_text())["parts"][0]
    again, skipped = run(tmp_path, QUICK, MISSING, seconds=0.0)
    assert (again.outcome, again.seconds) == (PASSED, before["seconds"])
    assert (skipped.outcome, skipped.why) == (SKIPPED, "0 s are left, its limit is 150 s")


@pytest.mark.starts
def test_what_has_failed_comes_behind_what_was_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, MISSING)
    capsys.readouterr()
    run(tmp_path, MISSING, QUICK)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["quick", "missing"]
    assert run(tmp_path, MISSING, seconds=0.0)[0].outcome == FAILED


@pytest.mark.starts
def test_parts_of_a_dry_run_that_differ_in_size_alone_are_run_once(tmp_path: Path) -> None:
    once, alike = run(tmp_path, QUICK, replace(QUICK, name="larger", words=("no_such_module",), dry=QUICK.words))
    assert (alike.outcome, alike.why, alike.name) == (PASSED, "as quick", "larger")
    assert once.seconds > 0 == alike.seconds


SAID = {
    "3 passed, 1 skipped in 2.0s": (0, PASSED, "3 passed, 1 skipped"),
    "FAILED tests/a.py::test_x[dp2] - E\n1 failed, 2 passed in 2.0s": (1, FAILED, "1 failed, 2 passed; test_x[dp2]"),
    "SKIPPED [2] tests/a.py:7: needs a CUDA device\n2 skipped in 1.0s": (0, SKIPPED, "needs a CUDA device"),
    "4 deselected in 0.1s": (5, FAILED, ""),
}


@pytest.mark.parametrize("output", SAID)
def test_tests_are_judged_by_what_pytest_says(output: str) -> None:
    status, outcome, why = SAID[output]
    found = program.judge(Part("p", "", 1, ("pytest",)), status, output, 1.0)
    assert (found.outcome, found.why) == (outcome, why)
    assert program.judge(QUICK, None, "", 5.0).outcome == TOO_LONG


def test_without_its_largest_library_no_engine_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert not program.has_engine()
    (tmp_path / "vllm" / "_C_stable_libtorch.abi3.so").write_bytes(b"")
    assert program.has_engine()


def test_packages_beside_the_checkout_are_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "site")
    assert program.environment_of_parts(is_dry=False)["PYTHONPATH"].split(os.pathsep)[1:] == [str(tmp_path / "site")]


def test_parts_have_names_of_their_own_and_choose_tests_that_are_there() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert [part.name for part in program.chosen(["GSM8K", "doctor"])] == ["doctor", "GSM8K"]
    with pytest.raises(SystemExit, match="no part luck; legal: doctor, weights"):
        program.chosen(["luck"])


def test_a_command_lists_the_parts_with_what_they_show_and_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["list"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [f"| {part.name} | {part.shows} | {part.limit_s} |" for part in PARTS]


@pytest.mark.starts
def test_every_part_chooses_tests() -> None:
    """On a card as in a dry run: a test that was renamed would be missed when there is a card."""
    chosen = [words for part in PARTS for words in (part.words, part.dry) if words[:1] == ("pytest",)]
    files = sorted({words[-3] for words in chosen})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    there = [line for line in done.stdout.splitlines() if "::" in line]
    for *_, file, _, expression in chosen:
        names = [line.partition("::")[2] for line in there if line.startswith(f"{file}::")]
        asked = re.sub(r"\b(?!(?:and|or|not)\b)\w+\b", lambda word: f"({word[0]!r} in name)", expression)
        assert [name for name in names if eval(asked, {"name": name})], (file, expression)


@pytest.mark.starts
def test_the_program_starts_where_no_package_is_installed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import bench.one_card",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_pieces_are_put_together_again(tmp_path: Path) -> None:
    """What a library was cut into, and an archive; the last piece completes it."""
    content, site = os.urandom(5000), tmp_path / "site"
    packed, name = lzma.compress(content), "_C_stable_libtorch.abi3.so.xz.part"
    for number, part in enumerate((packed[:3000], packed[3000:]), 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / f"{name}{number}-of-2").write_bytes(part)
    (tmp_path / "engine.py").write_text("x = 1\n")
    with tarfile.open(tmp_path / "1" / one_card_pack.BASE, "w:xz") as archive:
        archive.add(tmp_path / "engine.py", "vllm/engine.py")
    (tmp_path / "1" / "_vllm_fa3_C.abi3.so.xz").write_bytes(lzma.compress(b"attention"))
    assert one_card_pack.unpack(tmp_path / "1", site) == [one_card_pack.BASE, one_card_pack.ATTENTION]
    assert (site / one_card_pack.ATTENTION).read_bytes() == b"attention"
    assert (site / "vllm" / "engine.py").exists()
    assert one_card_pack.unpack(tmp_path / "2", site) == [one_card_pack.LIBRARY]
    assert (site / one_card_pack.LIBRARY).read_bytes() == content


def test_a_piece_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.whl").write_bytes(bytes(2000))
    monkeypatch.setattr(one_card_pack, "PIECE_BYTES", 1000)
    with pytest.raises(SystemExit, match=r"at most .* travel at once; the largest: large\.whl"):
        one_card_pack.check_size(tmp_path)


def test_of_the_engine_goes_along_what_a_hopper_card_imports() -> None:
    names = [
        "vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm-rs", "vllm/a.cpython-312-x86_64-linux-gnu.so",
        "vllm/a.cpython-311-x86_64-linux-gnu.so", "vllm/entrypoints/static/x.js", "vllm/_moe_C.abi3.so", "vllm/x/",
    ]  # fmt: skip
    kept = ["vllm/__init__.py", "vllm/a.cpython-312-x86_64-linux-gnu.so"]
    assert list(one_card_pack.members_of_base(names)) == kept


TOYS = {part.dry or part.words: part for part in reversed(PARTS)}  # each once, under the name of the first


@pytest.mark.starts
@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(1330)
@pytest.mark.parametrize("part", reversed(TOYS.values()), ids=lambda part: part.name)
def test_all_of_it_runs_dry(part: Part, tmp_path: Path) -> None:
    """On CPU with gloo in NCCL's place: what is left to a card is the card."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = ["run", "--dry", "--seconds", "1300", "--results", str(tmp_path / "dry.json"), "--parts", part.name]
    command = [sys.executable, "-m", "bench.one_card", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    (found,) = json.loads((tmp_path / "dry.json").read_text())["parts"]
    assert (done.returncode, found["outcome"]) == (0, PASSED), done.stdout + done.stderr + found["tail"]
    assert found["figures"] or part.words[0] == "pytest"
