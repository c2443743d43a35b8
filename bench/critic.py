"""Does a critic learn, and does PPO with it come as far as GRPO?  The demo's task, several seeds.

All arms make the same steps of the same number of rollouts.  Prints the reward at the end, what it has cost to come to
0.8, and how much of the returns the critic explains at the end.  Runs that are there already are not repeated.

    python -m bench.critic --directory runs/critic --seeds 3

arm       reward, and who says what it is worth
grpo      1 for the right total; the other members of the group
gae       the same; a critic
columns   a part for every right column, at its end (column_rewards.py); a critic.  Rewards of its own: only what the
          critic explains can be compared
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.demo_runs import GOAL, LAST, Rewards, known, mean_and_deviation, runs_of_arms, trained_metrics
from rlhpc.base.run_directory import RunLayout

EXPLAINED = "critic/explained_variance"
WITH_CRITIC = (
    "algorithm.advantage=gae",
    "admission.active_sampling=false",
    "algorithm.advantage_normalization=batch",
    "critic.learning_rate=1e-3",
    "critic.head_start_steps=5",
)
ARMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "gae": WITH_CRITIC,
    "columns": (*WITH_CRITIC, "data.task=bench.column_rewards:reward"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    final_reward: float
    rollouts_to_goal: float  # nan: it did not get there
    explained: float  # nan: there was no critic


def main() -> int:
    """Run what is missing, then print everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/critic"), help="of runs and model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    root = options.directory.absolute()
    found: dict[str, list[Outcome]] = {arm: [] for arm in options.arms}
    arms = {arm: ARMS[arm] for arm in options.arms}
    for arm, seed, layout in runs_of_arms(root, arms, num_seeds=options.seeds, num_steps=options.steps):
        found[arm].append(outcome_of(layout))
        print(f"{arm}-{seed}: {found[arm][-1]}", file=sys.stderr, flush=True)
    print(table(found))
    return 0


def outcome_of(layout: RunLayout) -> Outcome:
    """Read a complete run."""
    rewards = Rewards.of(layout)
    explained = [metrics[EXPLAINED] for metrics in trained_metrics(layout) if EXPLAINED in metrics][-LAST:]
    return Outcome(rewards.final, rewards.rollouts_to_goal, float(np.mean(explained)) if explained else float("nan"))


def table(found: dict[str, list[Outcome]]) -> str:
    """Mean ± standard deviation over seeds."""
    lines = [
        f"| arm | final reward | rollouts to {GOAL} | reached it | explained variance at the end |",
        "|---|---|---|---|---|",
    ]
    for arm, outcomes in found.items():
        reached = known(one.rollouts_to_goal for one in outcomes)
        explained = known(one.explained for one in outcomes)
        lines.append(
            f"| {arm} | {mean_and_deviation([one.final_reward for one in outcomes], '.3f')} "
            f"| {mean_and_deviation(reached, ',.0f')} | {len(reached)} of {len(outcomes)} "
            f"| {mean_and_deviation(explained, '.2f')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
