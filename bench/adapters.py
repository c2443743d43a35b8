"""Do adapters learn as fast as all weights do?  The demo's task, several seeds, run after run.

    nice -n 10 python -m bench.adapters --directory runs/adapters --seeds 5 [--ranks 8 32]
                                        [--alpha 32] [--learning-rate 1e-3] [--steps 120]

All arms make the same steps of the same number of rollouts, with the reference backend: configs/demo.toml as it is, and
with adapters of each rank beside frozen weights.  Prints the reward at the end, rollouts to 0.8, and these over what
full training took, seed by seed.  Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.demo_runs import GOAL, Rewards, known, mean_and_deviation, runs_of_arms
from bench.figures import tell

FULL = "full"


def main() -> int:
    """Run what is missing, then print everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/adapters"), help="of runs and model")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of adapters; full training's is 2e-4")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    settings = (f"lora.alpha={options.alpha}", f"lora.learning_rate={options.learning_rate}")
    arms: dict[str, Sequence[str]] = {FULL: ("trainer.backend=reference",)}
    for rank in options.ranks:
        name = f"rank-{rank}-alpha-{options.alpha:g}-rate-{options.learning_rate:g}"
        arms[name] = ("trainer.backend=reference", f"lora.rank={rank}", *settings)
    found: dict[str, list[Rewards]] = {arm: [] for arm in arms}
    root = options.directory.absolute()
    for arm, seed, layout in runs_of_arms(root, arms, num_seeds=options.seeds, num_steps=options.steps):
        found[arm].append(one := Rewards.of(layout))
        print(f"{arm}-{seed}: {one.final:.3f}, {one.rollouts_to_goal:,.0f} rollouts to {GOAL}", file=sys.stderr)
    print(table(found))
    return 0


def table(found: Mapping[str, Sequence[Rewards]]) -> str:
    """Mean ± standard deviation over seeds, and ratios seed by seed."""
    lines = [
        f"| arm | final reward | rollouts to {GOAL} | reached it | over {FULL}, by seed | of means |",
        "|---|---|---|---|---|---|",
    ]
    for arm, runs in found.items():
        reached = known(one.rollouts_to_goal for one in runs)
        ratios = [one.rollouts_to_goal / all_.rollouts_to_goal for one, all_ in zip(runs, found[FULL], strict=True)]
        of_means = statistics.fmean(one.rollouts_to_goal for one in runs) / statistics.fmean(
            one.rollouts_to_goal for one in found[FULL]
        )
        tell(f"rollouts to {GOAL} with {arm}, of full training", of_means)
        lines.append(
            f"| {arm} | {mean_and_deviation([one.final for one in runs], '.3f')} "
            f"| {mean_and_deviation(reached, ',.0f')} | {len(reached)} of {len(runs)} "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} | {of_means:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
