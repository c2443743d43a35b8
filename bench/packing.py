"""Plan seeded mixes of lengths with our planner and with four plain ones, and print what a synchronous step would wait.

    python -m bench.packing [--seeds 3] [--repeats 5]

Columns: micro-batches of all ranks; fill, tokens over budget; rank, costliest rank over the mean; lockstep, Σ over
micro-steps of the costliest row over an even split (1 is ideal, what a synchronous step takes); over, rows above the
token budget (illegal: out of memory); ms, median and range of warm calls, contenders interleaved in shuffled order.
Beside the name of a mix: what no plan's lockstep can be below, by `limit`.  Figures are means over seeds.  Every plan
is checked to hold every sample once.  The four plain planners are written here for reading, in Python; compare their
quality, not their time, with ours.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from bench.figures import tell
from rlhpc.algorithms.packing import FlopCost, Plan, plan

COST = FlopCost(linear=24576.0, quadratic=1.0)  # 6 · hidden size of a 7B model to 1, as verl counts
Lengths = NDArray[np.int64]
Steps = list[list[list[int]]]  # [micro-step][rank] → samples


@dataclass(frozen=True)
class Mix:
    name: str
    draw: Callable[[np.random.Generator], NDArray[np.float64]]
    token_budget: int
    num_ranks: int

    def lengths(self, seed: int) -> Lengths:
        return np.clip(self.draw(np.random.default_rng(seed)), 16, self.token_budget).astype(np.int64)


def skewed(num_samples: int) -> Callable[[np.random.Generator], NDArray[np.float64]]:
    return lambda random: random.lognormal(np.log(2725), 1.0, num_samples)


def bimodal(random: np.random.Generator) -> NDArray[np.float64]:
    return np.where(random.random(512) < 0.8, random.normal(1500, 400, 512), random.normal(10_000, 2000, 512))


MIXES = (
    Mix("512 log-normal, 32k, dp 8", skewed(512), 32_768, 8),
    Mix("512 bimodal, 16k, dp 8", bimodal, 16_384, 8),
    Mix("2048 log-normal, 32k, dp 32", skewed(2048), 32_768, 32),
    Mix("1024 uniform, 8k, dp 16", lambda random: random.uniform(200, 8192, 1024), 8_192, 16),
    Mix("10000 log-normal, 32k, dp 32", skewed(10_000), 32_768, 32),
    Mix("256 log-normal, 131k, dp 4", lambda random: random.lognormal(np.log(8000), 1.2, 256), 131_072, 4),
)


# --------------------------------------------------------------------------------------------------------- contenders


def ours(lengths: Lengths, budget: int, num_ranks: int) -> Plan:
    return plan(lengths, token_budget=budget, num_ranks=num_ranks, cost=COST)


def cost_lpt(lengths: Lengths, budget: int, num_ranks: int) -> Steps:
    """Longest first into the cheapest row with room; as many rows as best fit needs, rounded up, more if that fails."""
    costs = COST(lengths)
    num_rows = _whole(_best_fit_decreasing(lengths, budget), num_ranks)
    while (rows := _spread(lengths, costs, budget, num_rows)) is None:
        num_rows += num_ranks
    return _micro_steps(rows, costs, num_ranks)


def first_fit_decreasing(lengths: Lengths, budget: int, num_ranks: int) -> Steps:
    """Longest first into the first row with room; rows go to ranks in turn."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        k = next((k for k, free in enumerate(room) if free >= lengths[i]), len(rows))
        if k == len(rows):
            rows.append([])
            room.append(budget)
        rows[k].append(i)
        room[k] -= int(lengths[i])
    return _in_turn(rows, num_ranks)


def next_fit(lengths: Lengths, budget: int, num_ranks: int) -> Steps:
    """In order of arrival; a new row when the last one has no room; rows go to ranks in turn."""
    rows: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths.tolist()):
        if length > room:
            rows.append([])
            room = budget
        rows[-1].append(i)
        room -= length
    return _in_turn(rows, num_ranks)


def karmarkar_karp(lengths: Lengths, budget: int, num_ranks: int) -> Steps:
    """Largest differencing on cost into ⌈tokens / budget⌉ rows, rounded up, whatever that does to the budget."""
    costs = COST(lengths)
    num_rows = _whole(-(-int(lengths.sum()) // budget), num_ranks)
    heap = []
    for i, cost in enumerate(costs.tolist()):
        loads = np.zeros(num_rows)
        loads[0] = cost
        heap.append((-cost, i, loads, [[i]] + [[] for _ in range(num_rows - 1)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, i, loads, rows = heapq.heappop(heap)
        _, _, other_loads, other_rows = heapq.heappop(heap)
        loads = loads + other_loads[::-1]
        rows = [a + b for a, b in zip(rows, reversed(other_rows), strict=True)]
        order = np.argsort(-loads, kind="stable")
        loads, rows = loads[order], [rows[k] for k in order]
        heapq.heappush(heap, (float(loads[-1] - loads[0]), i, loads, rows))
    return _micro_steps(heap[0][3], costs, num_ranks)


CONTENDERS: dict[str, Callable[[Lengths, int, int], Steps | Plan]] = {
    "ours": ours,
    "cost LPT (ref_b)": cost_lpt,
    "first-fit decreasing": first_fit_decreasing,
    "next-fit, arrival order": next_fit,
    "Karmarkar–Karp, no cap": karmarkar_karp,
}


def _whole(num_rows: int, num_ranks: int) -> int:
    return -(-num_rows // num_ranks) * num_ranks


def _best_fit_decreasing(lengths: Lengths, budget: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        k = bisect_left(rooms, length)
        room = rooms.pop(k) if k < len(rooms) else budget
        insort(rooms, room - length)
    return len(rooms)


def _spread(lengths: Lengths, costs: NDArray[np.float64], budget: int, num_rows: int) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [budget] * num_rows
    heap = [(0.0, k) for k in range(num_rows)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        full = []
        while heap and room[heap[0][1]] < lengths[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, k = heap[0]
        rows[k].append(i)
        room[k] -= int(lengths[i])
        heapq.heapreplace(heap, (load + float(costs[i]), k))
        for item in full:
            heapq.heappush(heap, item)
    return rows


def _micro_steps(rows: list[list[int]], costs: NDArray[np.float64], num_ranks: int) -> Steps:
    """Sort rows by cost, cut into micro-steps, costliest row to the rank with the least so far."""
    rows = sorted(rows, key=lambda row: -float(costs[row].sum()))
    rank_costs = [0.0] * num_ranks
    steps: Steps = []
    for first in range(0, len(rows), num_ranks):
        step: list[list[int]] = [[] for _ in range(num_ranks)]
        ranks = sorted(range(num_ranks), key=rank_costs.__getitem__)
        for rank, row in zip(ranks, rows[first : first + num_ranks], strict=True):
            step[rank] = row
            rank_costs[rank] += float(costs[row].sum())
        steps.append(step)
    return steps


def _in_turn(rows: list[list[int]], num_ranks: int) -> Steps:
    rows = rows + [[] for _ in range(_whole(len(rows), num_ranks) - len(rows))]
    return [rows[first : first + num_ranks] for first in range(0, len(rows), num_ranks)]


# -------------------------------------------------------------------------------------------------------- measurement


@dataclass
class Result:
    num_rows: list[int]
    fill: list[float]
    rank: list[float]
    lockstep: list[float]
    over: list[int]
    seconds: list[float]

    def add(self, planned: Steps | Plan, lengths: Lengths, mix: Mix) -> None:
        steps = _steps(planned)
        assert sorted(i for step in steps for row in step for i in row) == list(range(len(lengths)))
        tokens = np.array([[lengths[row].sum() for row in step] for step in steps])
        costs = np.array([[COST(lengths[row]).sum() for row in step] for step in steps])
        self.num_rows.append(tokens.size)
        self.fill.append(float(tokens.sum() / (tokens.size * mix.token_budget)))
        self.rank.append(float(costs.sum(axis=0).max() * mix.num_ranks / costs.sum()))
        self.lockstep.append(float(costs.max(axis=1).sum() * mix.num_ranks / costs.sum()))
        self.over.append(int((tokens > mix.token_budget).sum()))


def _steps(planned: Steps | Plan) -> Steps:
    if not isinstance(planned, Plan):
        return planned
    ranks = range(planned.num_ranks)
    return [[planned.row(rank, m).tolist() for rank in ranks] for m in range(planned.num_microbatches)]


def measure(mix: Mix, seeds: int, repeats: int) -> dict[str, Result]:
    """Shuffled, interleaved calls; a contender that takes long is called once per seed."""
    shuffle = random.Random(0)
    results = {name: Result([], [], [], [], [], []) for name in CONTENDERS}
    if len(mix.lengths(0)) > 5000:
        del results["Karmarkar–Karp, no cap"]  # N · K numbers: gigabytes
    for seed in range(seeds):
        lengths = mix.lengths(seed)
        calls = [name for name in results for _ in range(repeats + 1)]
        shuffle.shuffle(calls)
        seen: dict[str, float] = {}
        for name in calls:
            if seen.get(name, 0.0) > 1.0:
                continue
            start = time.perf_counter()
            planned = CONTENDERS[name](lengths, mix.token_budget, mix.num_ranks)
            elapsed = time.perf_counter() - start
            if name not in seen:
                results[name].add(planned, lengths, mix)
            if name in seen or elapsed > 1.0:  # the first call warms caches
                results[name].seconds.append(elapsed)
            seen[name] = elapsed
    return results


def first_call(cache: str) -> float:
    """Seconds of the first plan of a fresh process, imports not counted."""
    program = (
        "import time, numpy as np; from rlhpc.algorithms.packing import warm_up\n"
        "start = time.perf_counter(); warm_up(); print(time.perf_counter() - start)"
    )
    env = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


def limit(lengths: Lengths, budget: int, num_ranks: int) -> float:
    """No plan's lockstep is less.

    The micro-step of the longest sequence lasts as long as that, and beside it fit num_ranks − 1 rows of `budget`
    tokens.  Filled with the next longest sequences, those that cost most a token, cut where the room ends, that is the
    most work which this time can do; the rest is taken as split evenly.
    """
    costs = np.sort(COST(lengths))[::-1]
    tokens = np.sort(lengths)[::-1]
    by_tokens = np.interp((num_ranks - 1) * budget, np.cumsum(tokens) - tokens[0], np.cumsum(costs) - costs[0])
    beside = min(float(by_tokens), (num_ranks - 1) * float(costs[0]))
    return 1.0 + ((num_ranks - 1) * float(costs[0]) - beside) / float(costs.sum())


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        print("more processes run than there are cores: the times below say little")
    print(f"python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}", end="; ")
    print(f"seeds 0–{options.seeds - 1}, cost {COST.linear:.0f}·L + {COST.quadratic:.0f}·L²")
    with tempfile.TemporaryDirectory() as cache:
        print(f"ours, first call of a process: {first_call(cache):.2f} s compiling, {first_call(cache):.2f} s cached")
    least, least_of_limit = 1.0, 1.0
    for mix in MIXES:
        drawn = [mix.lengths(seed) for seed in range(options.seeds)]
        fewest = statistics.mean(float(lengths.sum()) / mix.token_budget for lengths in drawn)
        best = statistics.mean(limit(lengths, mix.token_budget, mix.num_ranks) for lengths in drawn)
        print(f"\n{mix.name} (tokens / budget = {fewest:.1f}, lockstep ≥ {best:.4f})")
        print(f"  {'':24} {'rows':>7} {'fill %':>7} {'rank':>7} {'lockstep':>9} {'over':>6} {'ms':>9}  range")
        for name, result in measure(mix, options.seeds, options.repeats).items():
            mean = statistics.mean
            low, middle, high = (1e3 * f(result.seconds) for f in (min, statistics.median, max))
            if name == "ours":
                least = min(least, 1 / mean(result.lockstep))
                least_of_limit = min(least_of_limit, best / mean(result.lockstep))
                if mix.name.startswith("10000"):
                    tell("packing 10k ms", middle)
            print(
                f"  {name:24} {mean(result.num_rows):7.1f} {100 * mean(result.fill):7.2f} {mean(result.rank):7.4f} "
                f"{mean(result.lockstep):9.4f} {mean(result.over):6.1f} {middle:9.2f}  {low:.2f}–{high:.2f}"
            )
    tell("lockstep efficiency, least", least)
    tell("lockstep limit over ours, least", least_of_limit)


if __name__ == "__main__":
    main()
