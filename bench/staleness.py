"""Does asynchrony cost learning?  The demo's task, several seeds: synchronous, and S = 1, 4, 8 by five methods.

Every run makes the same number of steps on the same number of rollouts, with 4 optimiser steps on each batch; what
differs is how stale a rollout may be and how that is corrected.  Prints a table and draws a picture.  A run takes a
minute or two; runs that are there already are not repeated, so that it can be stopped and gone on with.

    python -m bench.staleness --directory runs/staleness --seeds 5
    python -m bench.staleness --directory runs/staleness --seeds 1 --methods decoupled gspo --staleness 4 --steps 30

method      objective       anchor of the ratio      importance weight (docs/algorithms.md)
ppo         clipped         the sampler              none
decoupled   clipped         start of the batch       truncated at 5 (AReaL masks above 5)
tis         clipped         start of the batch       truncated at 2
loglinear   clipped         interpolated by age      truncated at 2
gspo        of sequences    start of the batch       truncated at 2
scaled      as decoupled, at a learning rate divided by the mean age of the batch's tokens; S of 2 or more

What age costs depends on how far a step moves the policy, so on --learning-rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from bench.demo_runs import GOAL, Rewards, complete_run, known, make_demo_model, mean_and_deviation, trained_metrics
from launch.demo.run import NUM_PROBLEMS
from launch.demo.task import write_dataset
from rlhpc.algorithms.figures import effective_sample_share
from rlhpc.base.run_directory import RunLayout

METHODS: dict[str, tuple[str, ...]] = {
    "ppo": ("algorithm.proximal=behaviour", "algorithm.importance_cap=off"),
    "decoupled": ("algorithm.proximal=recompute", "algorithm.importance_cap=5.0"),
    "tis": ("algorithm.proximal=recompute",),
    "loglinear": ("algorithm.proximal=loglinear",),
    "gspo": (
        "algorithm.proximal=recompute",
        "algorithm.loss=gspo",
        "algorithm.aggregation=sequence",
        "algorithm.clip_low=3e-4",
        "algorithm.clip_high=4e-4",
    ),
    "scaled": (
        "algorithm.proximal=recompute",
        "algorithm.importance_cap=5.0",
        "algorithm.scale_rate_by_age=true",
    ),
}
SYNCHRONOUS = ("decoupled", 0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One setting, all seeds."""

    method: str
    staleness: int

    @property
    def name(self) -> str:
        return f"{self.method}-s{self.staleness}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    final_reward: float
    rollouts_to_goal: float  # nan: it did not get there
    ess: float  # mean over steps
    staleness: float  # worst
    curve: tuple[float, ...]  # running mean of the reward by version


def main() -> int:
    """Run what is missing, then print and draw everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/staleness"), help="of runs, model and picture")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="where the others have been run elsewhere")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at once; it changes how stale they are, below the bound"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    root = options.directory.absolute()
    model = make_demo_model(root)
    write_dataset(model / "train.jsonl", NUM_PROBLEMS, seed=0)
    arms = [
        Arm(*SYNCHRONOUS),
        *(
            Arm(method, bound)
            for bound, method in product(options.staleness, options.methods)
            if bound > 1 or method != "scaled"
        ),
    ]
    found: dict[Arm, list[Outcome]] = {arm: [] for arm in arms}
    cases = list(product(range(options.first_seed, options.first_seed + options.seeds), arms))

    def outcome(case: tuple[int, Arm]) -> Outcome:
        seed, arm = case
        words = [
            f"run.seed={seed}", f"run.num_steps={options.steps}", f"trainer.learning_rate={options.learning_rate}",
            f"model.path={model}", f"data.path={model / 'train.jsonl'}", f"admission.max_staleness={arm.staleness}",
            f"algorithm.minibatches={options.minibatches}", *METHODS[arm.method],
        ]  # fmt: skip
        return outcome_of(complete_run(root / f"{arm.name}-{seed}", words))

    with ThreadPoolExecutor(options.jobs) as pool:
        for (seed, arm), one in zip(cases, pool.map(outcome, cases), strict=True):
            found[arm].append(one)
            to_goal = f"{one.rollouts_to_goal:,.0f} rollouts to {GOAL}"
            print(
                f"{arm.name}-{seed}: {one.final_reward:.3f}, {to_goal}, ESS {one.ess:.3f}", file=sys.stderr, flush=True
            )
    print(
        table(
            found,
            f"{options.steps} steps at {options.learning_rate:g}, {options.minibatches} optimiser steps on each batch",
        )
    )
    draw(root / "staleness.png", found)
    return 0


def outcome_of(layout: RunLayout) -> Outcome:
    """Read a complete run."""
    rewards = Rewards.of(layout)
    return Outcome(
        final_reward=rewards.final,
        rollouts_to_goal=rewards.rollouts_to_goal,
        ess=statistics.fmean(
            effective_sample_share(metrics, 1)
            for metrics in trained_metrics(layout)
            if "importance_weight_squared" in metrics
        ),
        staleness=float(json.loads(layout.summary.read_bytes())["staleness_max"]),
        curve=rewards.curve,
    )


def table(found: dict[Arm, list[Outcome]], title: str) -> str:
    """Mean ± standard deviation over seeds; rollouts to the goal over those that reached it."""
    lines = [
        title,
        "",
        f"| method | S | worst staleness | final reward | rollouts to {GOAL} | reached it | ESS |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, outcomes in found.items():
        reached = known(one.rollouts_to_goal for one in outcomes)
        lines.append(
            f"| {arm.method} | {arm.staleness} | {max(one.staleness for one in outcomes):.0f} "
            f"| {mean_and_deviation([one.final_reward for one in outcomes], '.3f')} "
            f"| {mean_and_deviation(reached, ',.0f')} "
            f"| {len(reached)} of {len(outcomes)} | {statistics.fmean(one.ess for one in outcomes):.3f} |"
        )
    return "\n".join(lines)


def draw(path: Path, found: dict[Arm, list[Outcome]]) -> None:
    """Reward over versions, a panel for each staleness, beside the synchronous runs."""
    from matplotlib.figure import Figure

    bounds = sorted({arm.staleness for arm in found} - {SYNCHRONOUS[1]})
    figure = Figure(figsize=(4.2 * len(bounds), 3.6), dpi=130, layout="constrained")
    for place, bound in enumerate(bounds, 1):
        axes = figure.add_subplot(1, len(bounds), place)
        for arm, outcomes in found.items():
            if arm.staleness not in (bound, SYNCHRONOUS[1]):
                continue
            length = min(len(one.curve) for one in outcomes)
            mean = np.mean([one.curve[:length] for one in outcomes], axis=0)
            is_synchronous = arm.staleness == SYNCHRONOUS[1]
            axes.plot(mean, color="black" if is_synchronous else None, linewidth=2 if is_synchronous else 1.2,
                      label="synchronous" if is_synchronous else arm.method)  # fmt: skip
        axes.set(title=f"staleness up to {bound}", xlabel="policy version", ylabel="mean reward", ylim=(0, 1.02))
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    print(f"picture: {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
