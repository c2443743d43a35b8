"""Steps in parts beside steps on whole batches: real processes, at several bounds on staleness, all at once.

    python -m bench.step_parts [--directory runs/step-parts] [--steps 60] [--parts 4] [--slowness 1]

Engines and trainer sleep, in proportion to a GPU's times (bench/ladder.py), so that runs beside each other on few cores
disturb each other little; both sides take about as long for a batch, which is where waiting costs most.  Lengths are
geometric with a mean of 28, cut at 64.  Each pair of runs differs by admission.step_parts alone.  staleness: mean, and
the worst, of all that was trained.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from bench.figures import tell
from bench.ladder import GENERATORS, GROUP_SIZE, GROUPS, PLACES, SAMPLE_S, settled_mean
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from tests.ring.rollouts_on_disk import consumed
from tests.ring.run_kit import Run, make_lab, summary_of
from tests.ring.timed_runs import LONGEST, LONGEST_S, STOP_PROBABILITY, TOKEN_S, slow_trainers

TRAINED_TOKEN_S = 0.0015
BOUNDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a run, without the first tenth of its steps."""

    steps_per_s: float
    trainer_idle: float
    generators_idle: float
    parts: float
    staleness: float
    worst_staleness: int


def measure(root: Path, bound: int, parts: int, num_steps: int, slowness: float) -> Measured:
    """A run of its own, begun anew."""
    lab = make_lab(root / f"{bound}-{parts}")
    lab.script_engine(token_s=slowness * TOKEN_S, sample_s=slowness * SAMPLE_S, stop_probability=STOP_PROBABILITY)
    run_file = lab.run_file(
        "one",
        run={"num_steps": num_steps},
        generation={"num_replicas": GENERATORS, "max_num_seqs": PLACES, "max_completion_tokens": LONGEST},
        admission={
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_staleness": bound,
            "step_parts": parts,
        },
        algorithm={"loss": "tests.ring.sleeping_loss:loss"},
        trainer={"token_budget": 128},
        checkpoint={"every_steps": 1000},
    )
    layout = lab.layout("one")
    with Run(run_file, layout, "--fresh") as run:
        if run.finish(LONGEST_S):
            raise SystemExit(run.story())
    return _figures(layout)


def _figures(layout: RunLayout) -> Measured:
    curves = RunView(layout).curves
    mean = partial(settled_mean, curves)
    ages = [rollout.trained_version - rollout.admitted_version for rollout in consumed(layout.rollouts)]
    return Measured(
        steps_per_s=1 / mean("time/step_s"),
        trainer_idle=mean("trainer/idle_ratio"),
        generators_idle=mean("generator/idle_ratio"),
        parts=mean("trainer/step_parts"),
        staleness=sum(ages) / len(ages),
        worst_staleness=summary_of(layout)["staleness_max"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/step-parts"), help="of the runs that are made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--parts", type=int, default=4, help="admission.step_parts of every second run")
    parser.add_argument("--slowness", type=float, default=1.0, help="of engines and trainer; for busy machines")
    options = parser.parse_args()
    cases, root = list(product(BOUNDS, (1, options.parts))), options.directory.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(cases)) as pool, slow_trainers(options.slowness * TRAINED_TOKEN_S):
        each = pool.map(lambda case: measure(root, case[0], case[1], options.steps, options.slowness), cases)
        found = dict(zip(cases, each, strict=True))
    print("| S | step_parts | steps/s | of whole batches | parts | trainer idle | generators idle | staleness |")
    print("|---|---|---|---|---|---|---|---|")
    for (bound, parts), one in found.items():
        ratio = one.steps_per_s / found[bound, 1].steps_per_s
        assert one.worst_staleness <= bound, (bound, one)
        print(
            f"| {bound} | {parts} | {one.steps_per_s:.3f} | {ratio:.2f} | {one.parts:.1f} | {one.trainer_idle:.0%} "
            f"| {one.generators_idle:.0%} | {one.staleness:.2f}, {one.worst_staleness} |",
            flush=True,
        )
        if parts > 1:
            tell(f"steps in parts over whole batches, S = {bound}", ratio)


if __name__ == "__main__":
    main()
