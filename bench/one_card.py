"""What one card can show, in a quarter of an hour: NCCL between ranks that share it, then the numbers people compare.

    python -m bench.one_card [run] [--seconds 540] [--parts NAME …] [--results one_card.json] [--dry]
    python -m bench.one_card list             # what each part shows, and its time limit
    python -m bench.one_card pack DIR         # for a machine without network: bench/one_card_pack.py
    python -m bench.one_card unpack DIR SITE

Parts stand in order of worth.  Each runs in a process of its own, is ended at its limit, and may fail without the
others; one for which no time is left is skipped.  Results go into one JSON file after every part, and a table as
docs/gpu.md has it beside it.  A part that has passed in that file is not repeated, and one that has failed comes last,
so that a second call goes on where the first ended.

--dry: the same on CPU, with gloo in NCCL's place and sizes of toys, of which each is run once; runs that are killed are
left to tests/faults.  Its numbers say nothing.

Standard library only: it starts on a machine where half of the packages are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.figures import FIGURES_FILE, read_figures
from bench.one_card_pack import pack, unpack
from tests.gpu.one_card import PLACE

ROOT = Path(__file__).parents[1]
SECONDS = 540.0
RANKS_TIMEOUT = "RLHPC_TEST_RANKS_S"  # of one scenario of trainer ranks: the next layout is worth more than a long wait
DRY_PATIENCE = 5  # a busy machine of two cores beside a card's
GRACE_S = 8.0  # for pytest to end what its tests have started
TAIL_CHARACTERS = 6000
LAYOUTS, RUNS = "tests/gpu/test_layouts_nccl.py", "tests/gpu/test_one_card_runs.py"
TRANSPORT = "tests/contracts/test_weight_transport.py"
PROBE = "tests/unit/launch/test_doctor_command.py"
SERVICES = "tests/contracts/test_services.py"
PASSED, FAILED, TOO_LONG, SKIPPED = "passed", "failed", "too long", "skipped"
MACHINE = """
import json, os, torch
found = {"python": os.sys.version.split()[0], "torch": torch.__version__, "cores": os.cpu_count()}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name()
    found["GiB"] = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a card shows."""

    name: str
    shows: str
    limit_s: int
    words: tuple[str, ...]  # behind `python -m`
    dry: tuple[str, ...] = ()  # in a dry run; (): as on a card
    needs_engine: bool = False  # vLLM for CUDA


@dataclass(slots=True)
class Result:
    """The outcome of a part."""

    name: str
    outcome: str
    seconds: float = 0.0
    why: str = ""  # it did not pass; or how many tests did
    figures: dict[str, float] = field(default_factory=dict)
    tail: str = ""  # of its output


def tests(path: str, chosen: str) -> tuple[str, ...]:
    """Return the words that run the tests of a file which a -k expression chooses."""
    return ("pytest", "-q", "-rs", "--maxfail=3", "-p", "no:cacheprovider", path, "-k", chosen)


def trainer(model: str, *words: str) -> tuple[str, ...]:
    """Return the words that measure a trainer's step."""
    sizes = ("--tokens", "16384", "--rows", "2", "--repeats", "3", "--alone", "--layouts", "dp1")
    return ("bench.trainer", "--device", "cuda", "--dtype", "bfloat16", "--model", model, *sizes, *words)


def toy(*words: str) -> tuple[str, ...]:
    """Return the same for a dry run."""
    sizes = ("--tokens", "128", "--rows", "1", "--repeats", "1", "--alone", "--layouts", "dp1")
    return ("bench.trainer", "--model", "tiny", *sizes, *words)


FULL, OFFLOADED = ("--recompute", "full"), ("--recompute", "full", "--offload")
# Without an offloaded optimiser in a dry run, which Megatron has on GPUs alone.
ENGINE = ("bench.engine", "--requests", "512", "--repeats", "2", "--kv-cache-gib", "16")
ENGINE_TOY = (
    "bench.engine", "--random", "tiny", "--requests", "4", "--prompt", "8", "--tokens", "8", "--max-num-seqs", "4",
    "--repeats", "1", "--dtype", "float32", "--kv-cache-gib", "0.1", "--eager", "--updates", "1",
)  # fmt: skip
ENGINE_7B = (*ENGINE, "--random", "qwen2.5-7b")
ADAPTERS, TOY_ADAPTERS = ("--rank", "32"), ("--rank", "8")
MERGED = ("--form", "merged")
VERSIONS = ("bench.weights", "--device", "cuda", "--transports", "nccl", "ipc", "--receivers", "1", "2")
VERSIONS_TOY = ("bench.weights", "--transports", "gloo", "ipc", "--megabytes", "16", "--versions", "2")
SHAPE_TOY = (
    "bench.gsm8k_shape", "--device", "cpu", "--engine", "scripted", "--model", "tiny", "--steps", "3", "--groups", "2",
    "--group-size", "2", "--tokens", "16", "--token-budget", "1024", "--kv-cache-bytes", "67108864",
    "trainer.backend=reference",
)  # fmt: skip
LAYOUTS_TOY = tests(LAYOUTS, "float32 and (cp2 or zero3) and five_steps or goes_on and tp2 or nan and pp2")
TRANSPORT_TOY = tests(TRANSPORT, "gloo and not tcp and (shadow and (dies or damaged or still) or paused and dies)")
PARTS = (
    Part("doctor", "doctor's broadcast by NCCL between two processes: it connects, and at what speed", 60,
         tests(PROBE, "two_probes and nccl"), tests(PROBE, "two_probes and gloo")),
    Part("weights", "a publisher and two receivers in an NCCL group: versions bit for bit, torn ones refused; one that "
         "dies or stands still in a broadcast, one killed between two; abort, and who rejoins", 150,
         tests(TRANSPORT, "nccl and shadow"), TRANSPORT_TOY),
    Part("layouts", "DP, TP, SP, PP, virtual stages, CP, EP 2, ZeRO 2 and 3 train as one rank does (float32)", 150,
         tests(LAYOUTS, "five_steps and float32"), LAYOUTS_TOY),
    Part("nodes", "a whole run whose trainer and two vLLM engines are three nodes, weights by NCCL", 150,
         tests(RUNS, "three_nodes"), needs_engine=True),
    Part("checkpoints", "checkpoints of seven layouts go on bit for bit, and in another layout", 120,
         tests(LAYOUTS, "goes_on"), LAYOUTS_TOY),
    Part("restart", "runs of DP 2 and TP 2, killed three times, end with the bits of runs that were not", 200,
         tests(RUNS, "two_ranks"), tests(RUNS, "three_nodes")),
    Part("votes", "all layouts: weights leave as they came, a nan on one rank is skipped on both, saves hold the state "
         "of their call", 150, tests(LAYOUTS, "leave_two or nan or holds_the_state"), LAYOUTS_TOY),
    Part("0.6B", "tokens/s, share of the dense peak and GiB of a 0.6B trainer", 60, trainer("qwen3-0.6b"), toy()),
    Part("versions", "GB/s of a version by NCCL over sockets and by CUDA IPC, to one engine and to two", 60,
         VERSIONS, VERSIONS_TOY),
    Part("engine", "tokens/s of a 0.6B engine, beside vLLM alone and while versions arrive", 180,
         ENGINE, ENGINE_TOY, needs_engine=True),
    Part("services", "a teacher, a judge, reward models: their answers are what transformers computes", 180,
         tests(SERVICES, "transformers and not run"), tests(SERVICES, "a_teacher"), needs_engine=True),
    Part("GSM8K", "a run of GSM8K's shape, 0.6B, trainer and engine on the card: steps, and where time goes", 180,
         ("bench.gsm8k_shape", "--steps", "10"), SHAPE_TOY, needs_engine=True),
    Part("1.7B", "as 0.6B, 1.7 billion parameters", 75, trainer("qwen3-1.7b"), toy()),
    Part("4B offloaded", "as 0.6B, 4 billion, activations recomputed, optimiser in host memory", 120,
         trainer("qwen3-4b", *OFFLOADED), toy(*FULL)),
    Part("4B recomputed", "as 0.6B, 4 billion, activations recomputed", 90, trainer("qwen3-4b", *FULL), toy(*FULL)),
    Part("1.7B recomputed", "as 0.6B, 1.7 billion, activations recomputed", 75,
         trainer("qwen3-1.7b", *FULL), toy(*FULL)),
    Part("1.7B offloaded", "as 0.6B, 1.7 billion, recomputed, optimiser in host memory", 75,
         trainer("qwen3-1.7b", *OFFLOADED), toy(*FULL)),
    Part("0.6B recomputed", "as 0.6B, activations recomputed", 60, trainer("qwen3-0.6b", *FULL), toy(*FULL)),
    Part("bfloat16", "the layouts in bfloat16", 120, tests(LAYOUTS, "five_steps and bfloat16"), LAYOUTS_TOY),
    Part("7B LoRA", "as 0.6B, 7 billion with adapters of rank 32, recomputed; seconds a version", 150,
         trainer("qwen2.5-7b", *FULL, *ADAPTERS), toy(*FULL, *TOY_ADAPTERS)),
    Part("7B LoRA merged", "the same, versions merged", 150, trainer("qwen2.5-7b", *FULL, *ADAPTERS, *MERGED),
         toy(*FULL, *TOY_ADAPTERS, *MERGED)),
    Part("7B offloaded", "as 0.6B, 7 billion, all weights, recomputed, optimiser in host memory: a card of 141 GB", 180,
         trainer("qwen2.5-7b", *OFFLOADED), toy(*FULL)),
    Part("7B LoRA engine", "as engine, 7 billion, versions are adapters of rank 32: how many a second", 240,
         (*ENGINE_7B, *ADAPTERS), (*ENGINE_TOY, *TOY_ADAPTERS), needs_engine=True),
    Part("7B engine", "as engine, 7 billion, versions are all weights, as of full training and of merged adapters", 240,
         ENGINE_7B, ENGINE_TOY, needs_engine=True),
    Part("weights, paused", "the NCCL group again, engines that load while buckets arrive", 120,
         tests(TRANSPORT, "nccl and paused"), TRANSPORT_TOY),
)  # fmt: skip


class Parts:
    """Runs parts one after the other within a time, and keeps what came of them."""

    def __init__(self, results: Path, seconds: float, is_dry: bool) -> None:
        self._path, self._ends_at, self._is_dry = results, time.monotonic() + seconds, is_dry
        self._results = {each.name: each for each in read_results(results)}
        self._done: dict[tuple[str, ...], str] = {}  # words → part, of a dry run: parts that differ by size are one
        self._machine = {} if is_dry else machine_here()

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run those that have not passed yet, first those that have not been tried; returns the results of all."""
        before = {part.name: self._results[part.name].outcome for part in parts if part.name in self._results}
        for part in sorted(parts, key=lambda part: before.get(part.name, SKIPPED) != SKIPPED):
            if before.get(part.name) == PASSED:
                continue
            last = self._run(part)
            if last.outcome != SKIPPED or part.name not in self._results:  # a failure that is not repeated stays one
                self._results[part.name] = last
            self._write()
            print(f"{part.name:<18}{last.outcome:<10}{last.seconds:6.0f} s  {last.why}", flush=True)
        return [self._results[part.name] for part in parts]

    def _run(self, part: Part) -> Result:
        left_s, limit_s = self._ends_at - time.monotonic(), part.limit_s * (DRY_PATIENCE if self._is_dry else 1)
        if left_s < limit_s / 2:
            return Result(part.name, SKIPPED, why=f"{max(0.0, left_s):.0f} s are left, its limit is {limit_s} s")
        if part.needs_engine and not self._is_dry and not has_engine():
            return Result(part.name, SKIPPED, why="vLLM for CUDA is not here")
        words = (part.dry or part.words) if self._is_dry else part.words
        if self._is_dry and (like := self._done.setdefault(words, part.name)) != part.name:
            return replace(self._results[like], name=part.name, seconds=0.0, why=f"as {like}")
        with tempfile.TemporaryDirectory() as scratch:
            figures = Path(scratch) / "figures"
            environment = environment_of_parts(self._is_dry) | {FIGURES_FILE: str(figures)}
            began = time.monotonic()
            status, output = run_bounded([sys.executable, "-m", *words], environment, min(limit_s, left_s))
            result = judge(part, status, output, time.monotonic() - began)
            result.figures = read_figures(figures)
        return result

    def _write(self) -> None:
        there = list(self._results.values())
        document = {"machine": self._machine, "is_dry": self._is_dry, "parts": [asdict(each) for each in there]}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self._path.with_suffix(".md").write_text(table(self._machine, there), encoding="utf-8")


def read_results(path: Path) -> list[Result]:
    """Return what an earlier call has written; nothing where there was none."""
    if not path.exists():
        return []
    return [Result(**each) for each in json.loads(path.read_text(encoding="utf-8"))["parts"]]


def machine_here() -> dict[str, object]:
    """Ask torch about card and versions, in a process of its own; {} if it cannot say."""
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=False)
    found: dict[str, object] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def has_engine() -> bool:
    """Whether vLLM is here with its library for CUDA, which may come in another piece."""
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    return any(file for place in places or () for file in Path(place).glob("_C*.so"))


def environment_of_parts(is_dry: bool) -> dict[str, str]:
    """Return the environment in which the parts run."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join([str(ROOT), *(str(Path(place).absolute()) for place in given)])  # runs are elsewhere
    fixed = {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    kind = {PLACE: "cpu", "OMP_NUM_THREADS": "1"} if is_dry else {RANKS_TIMEOUT: "45"}
    return {**os.environ, **fixed, **kind}


def run_bounded(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in the checkout.  Returns (exit status, output); None: it and all below were ended at the limit."""
    with tempfile.TemporaryFile() as output:
        program = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        status: int | None = None
        started: set[tuple[int, str]] = set()
        try:
            status = program.wait(limit_s)
        except subprocess.TimeoutExpired:
            started |= set(below(program.pid))
            program.send_signal(signal.SIGINT)  # pytest leaves its fixtures, which end what they started
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(GRACE_S)
        finally:
            end_all(program, started)
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def end_all(program: subprocess.Popen[bytes], started: set[tuple[int, str]]) -> None:
    """End it, every process below it, and those of `started` that are still there."""
    for pid, began in (*below(program.pid), *started):
        with contextlib.suppress(OSError):
            if began_at(pid) == began:
                os.kill(pid, signal.SIGKILL)
    program.kill()
    program.wait()


def below(pid: int) -> Iterator[tuple[int, str]]:
    """Return the processes that a process has started, and they in turn, also in sessions of their own.

    Each with the time of its start: numbers are given out again.
    """
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                yield from below(child)
                yield child, began_at(child)


def began_at(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was.  Raises OSError: it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def judge(part: Part, status: int | None, output: str, seconds: float) -> Result:
    """Return what became of a part, from its exit status and its output."""
    tail = output[-TAIL_CHARACTERS:]
    if status is None:
        return Result(part.name, TOO_LONG, seconds, f"ended after {seconds:.0f} s", tail=tail)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", tail)}
    if part.words[0] != "pytest":
        last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
        return Result(part.name, FAILED if status else PASSED, seconds, last if status else "", tail=tail)
    told = ", ".join(f"{number} {word}" for word, number in counts.items())
    if status == 0 and not counts.get("passed"):
        reasons = re.findall(r"^SKIPPED \[\d+\] [^:]+(?::\d+)?: (.*)$", tail, re.MULTILINE)
        return Result(part.name, SKIPPED, seconds, "; ".join(dict.fromkeys(reasons)) or told, tail=tail)
    failures = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", tail, re.MULTILINE)
    return Result(part.name, FAILED if status else PASSED, seconds, "; ".join([told, *failures]), tail=tail)


def table(machine: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()) or "dry, on CPU: numbers say nothing", ""]
    lines += ["| part | outcome | s | figures |", "|---|---|---|---|"]
    for each in results:
        figures = "; ".join(f"{name} {value:,.3g}" for name, value in each.figures.items())
        outcome = f"{each.outcome}: {each.why}".removesuffix(": ").replace("|", "/")
        lines.append(f"| {each.name} | {outcome} | {each.seconds:.0f} | {figures} |")
    return "\n".join(lines) + "\n"


def table_of_parts(parts: Sequence[Part] = PARTS) -> str:
    """Return what each part shows and its limit, as Markdown."""
    rows = [f"| {part.name} | {part.shows} | {part.limit_s} |" for part in parts]
    return "\n".join(["| part | what it shows | at most s |", "|---|---|---|", *rows])


def chosen(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names, all if there are none.  Raises SystemExit for an unknown one."""
    if unknown := set(names) - {part.name for part in PARTS}:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; legal: {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or part.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="run", choices=["run", "list", "pack", "unpack"])
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--parts", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("one_card.json"))
    parser.add_argument("--dry", action="store_true", help="on CPU, with gloo in NCCL's place")
    options = parser.parse_args(arguments)
    if (wanted := {"pack": 1, "unpack": 2}.get(options.command, 0)) != len(options.directories):
        parser.error(f"{options.command} takes {wanted} directories")
    if options.command == "list":
        print(table_of_parts(chosen(options.parts)))
        return 0
    if wanted:
        print("\n".join(pack(*options.directories) if wanted == 1 else unpack(*options.directories)))
        return 0
    results = Parts(options.results, options.seconds, options.dry).run(chosen(options.parts))
    return int(any(each.outcome in (FAILED, TOO_LONG) for each in results))


if __name__ == "__main__":
    sys.exit(main())
