"""Does a student learn from a teacher with fewer rollouts than from rewards?  The demo's sums, several seeds, on CPU.

The student is right about half of the time, the teacher nearly always; both are made first, by the demo's warm start.
All arms begin with the same student, sample the same problems, each once, and train at the same learning rate.  Prints
the rollouts until the running mean of the reward is 0.8, accuracy on held-out problems at the end, and the divergence
from the teacher in windows of ten steps.  Runs that are there already are not repeated.

    python -m bench.distillation --directory runs/distillation --seeds 3

arm            rollouts of a step    what is learnt from
rewards        12 problems, 8 each   GRPO: 1 for the right total, relative to the other members of the group
rewards_small   3 problems, 8 each   the same
distillation   12 problems, 2 each   advantages log π_teacher − log π_behaviour, and no rewards
top_k          12 problems, 2 each   the same, and ten times the forward KL over the teacher's 16 most likely tokens
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench.demo_runs import GOAL, Rewards, complete_run, known, mean_and_deviation
from launch.demo.run import NUM_PROBLEMS
from launch.demo.task import write_dataset
from launch.demo.warm_start import WarmStartRecipe, make_model, sampled_accuracy
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.curves import read_curves
from rlhpc.training.checkpoint_export import export_hf

STUDENT = WarmStartRecipe(slip_rate=0.15)  # (1 − 0.15)^n for n of 3, 4, 5 columns averages 0.53
TEACHER = WarmStartRecipe(careless_steps=200, slip_rate=0.0)  # so long that single samples are right, too
WINDOW = 10  # steps
WITH_TEACHER = (
    "admission.active_sampling=false",
    "admission.group_size=2",
    "service.name=teacher",
    "service.kind=teacher",
    "algorithm.advantage=distillation",
)
ARMS: dict[str, tuple[str, ...]] = {
    "rewards": (),
    "rewards_small": ("admission.groups_per_step=3",),
    "distillation": WITH_TEACHER,
    "top_k": (*WITH_TEACHER, "algorithm.forward_kl_coefficient=10.0", "algorithm.teacher_top_k=16"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run."""

    rollouts_to_goal: float  # nan: it did not get there
    final_reward: float
    held_out: float  # accuracy of the last checkpoint
    windows: tuple[float, ...]  # mean divergence from the teacher, nats a token; empty without one

    @property
    def falls(self) -> bool:
        """Whether it falls from each window to the next."""
        return all(later < earlier for earlier, later in pairwise(self.windows))


def main() -> int:
    """Run what is missing, then print everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/distillation"), help="of runs and models")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    root = options.directory.absolute()
    student, teacher, data = root / "student", root / "teacher", root / "train.jsonl"
    for directory, recipe in ((student, STUDENT), (teacher, TEACHER)):
        made = make_model(directory, recipe)
        print(f"{directory.name}: right {made.accuracy:.3f} of the time", file=sys.stderr, flush=True)
    write_dataset(data, NUM_PROBLEMS, seed=0)
    found: dict[str, list[Outcome]] = {arm: [] for arm in options.arms}
    for seed, arm in product(range(options.seeds), options.arms):
        words = [
            f"run.seed={seed}", f"run.num_steps={options.steps}", f"trainer.learning_rate={options.learning_rate}",
            f"model.path={student}", f"data.path={data}", *ARMS[arm],
        ]  # fmt: skip
        words += [f"service.path={teacher}"] if "service.kind=teacher" in ARMS[arm] else []
        found[arm].append(outcome_of(complete_run(root / f"{arm}-{seed}", words), student))
        print(f"{arm}-{seed}: {found[arm][-1]}", file=sys.stderr, flush=True)
    print(table(found))
    return 0


def outcome_of(layout: RunLayout, student: Path) -> Outcome:
    """Read a complete run."""
    rewards = Rewards.of(layout)
    curve = read_curves(layout.tensorboard).get("teacher/kl")
    values = [] if curve is None else [float(value) for value in curve.values if not math.isnan(value)]
    windows = (statistics.fmean(values[start : start + WINDOW]) for start in range(0, len(values), WINDOW))
    return Outcome(rewards.rollouts_to_goal, rewards.final, held_out(layout, student), tuple(windows))


def held_out(layout: RunLayout, student: Path) -> float:
    """Accuracy of one sample on each of 512 held-out problems, by the last checkpoint."""
    checkpoint = max(path for path in layout.checkpoints.iterdir() if (path / "COMPLETE").exists())
    with tempfile.TemporaryDirectory() as exported:
        export_hf(checkpoint / "trainer", student, Path(exported) / "model")
        model = LlamaForCausalLM.from_pretrained(Path(exported) / "model", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return sampled_accuracy(model)


def table(found: dict[str, list[Outcome]]) -> str:
    """Mean ± standard deviation over seeds; the divergence of every seed."""
    lines = [
        f"| arm | rollouts to {GOAL} | reached it | final reward | held-out problems |",
        "|---|---|---|---|---|",
    ]
    for arm, outcomes in found.items():
        reached = known(one.rollouts_to_goal for one in outcomes)
        lines.append(
            f"| {arm} | {mean_and_deviation(reached, ',.0f')} | {len(reached)} of {len(outcomes)} "
            f"| {mean_and_deviation([one.final_reward for one in outcomes], '.3f')} "
            f"| {mean_and_deviation([one.held_out for one in outcomes], '.3f')} |"
        )
    lines.append("")
    for arm, outcomes in found.items():
        for seed, one in enumerate(outcomes):
            if one.windows:
                shown = ", ".join(f"{value:.4f}" for value in one.windows)
                lines.append(
                    f"{arm}, seed {seed}: nats from the teacher by {WINDOW} steps: {shown}; falls always: {one.falls}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
