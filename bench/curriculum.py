"""Does a curriculum save samples?  The demo's task with a dataset of which a part cannot be solved, several seeds.

Half of the records ask what the model can learn, the others have a wrong key, as some of any dataset have: all their
rollouts are wasted.  Every run makes the same number of steps of the same number of groups; what differs is whom
[curriculum] leaves out.  How good the model is, is measured on held-out problems with sound keys, by one sample each at
temperature 1, at every checkpoint; the cost are all rollouts sampled by then, those of dropped groups included.

    python -m bench.curriculum --directory runs/curriculum --seeds 3
    python -m bench.curriculum --directory runs/curriculum --seeds 1 --arms uniform rest --steps 60

arm        whom it leaves out
uniform    nobody: active sampling alone drops what teaches nothing, after it was sampled
rest       solved prompts for one epoch, hopeless ones for eight
target     prompts the more often the farther their pass rate is from one half
stages     at first sums of four and five digits, as long as those of three do not pass

Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from bench.demo_runs import GOAL, complete_run, known, make_demo_model, mean_and_deviation
from launch.demo.task import problems
from launch.demo.warm_start import sampled_accuracy
from rlhpc.base.files import write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.roles.controller.state import read_saved_state
from rlhpc.training.checkpoint_export import export_hf

WRONG_BY = 1000  # no slip of a pupil comes to this
EVERY_STEPS = 10
ARMS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "rest": ("curriculum.solved_rest_epochs=1", "curriculum.hopeless_rest_epochs=8"),
    "target": ("curriculum.target_pass_rate=0.5",),
    "stages": ("curriculum.stages=[3.0]", "curriculum.difficulty_field=digits", "curriculum.stage_pass_rate=0.3"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A checkpoint."""

    rollouts: int  # sampled by then
    tokens: int  # of completions, sampled by then
    accuracy: float


def main() -> int:
    """Run what is missing, then print everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/curriculum"), help="of runs and model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--records", type=int, default=480)
    parser.add_argument("--wrong-keys", type=float, default=0.5, help="share of the records")
    options = parser.parse_args()
    root = options.directory.absolute()
    model, data = make_demo_model(root), root / "train.jsonl"
    write_mixed_dataset(data, options.records, options.wrong_keys)
    found: dict[str, list[list[Point]]] = {arm: [] for arm in options.arms}
    for seed, arm in product(range(options.seeds), options.arms):
        words = [
            f"run.seed={seed}", f"run.num_steps={options.steps}", f"model.path={model}", f"data.path={data}",
            f"checkpoint.every_steps={EVERY_STEPS}", f"checkpoint.keep={options.steps}", *ARMS[arm],
        ]  # fmt: skip
        curve = curve_of(complete_run(root / f"{arm}-{seed}", words))
        found[arm].append(curve)
        print(f"{arm}-{seed}: {GOAL} after {_to_goal(curve, 'rollouts'):,.0f} rollouts", file=sys.stderr, flush=True)
    print(table(found))
    return 0


def write_mixed_dataset(path: Path, num_records: int, share: float) -> None:
    """Problems of the demo in a seeded order, of which a share has a wrong key."""
    rng = random.Random(0)
    wrong = set(rng.sample(range(num_records), round(share * num_records)))
    records = [
        {
            "prompt": problem.prompt,
            "answer": str(problem.left + problem.right + WRONG_BY * (place in wrong)),
            "digits": len(str(problem.left)),
        }
        for place, problem in enumerate(problems(0, num_records))
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def curve_of(layout: RunLayout) -> list[Point]:
    """Of a complete run, its checkpoints; measured once, and kept beside it."""
    kept = layout.root / "accuracy.json"
    if kept.exists():
        return [Point(*point) for point in json.loads(kept.read_bytes())]
    points = [_point(layout, path) for path in sorted(layout.checkpoints.glob("step_*"))]
    points.sort(key=lambda point: point.rollouts)
    write_atomically(kept, json.dumps([[p.rollouts, p.tokens, p.accuracy] for p in points]).encode())
    return points


def _point(layout: RunLayout, checkpoint: Path) -> Point:
    saved = read_saved_state(layout, int(checkpoint.name.removeprefix("step_")))
    config = json.loads(layout.config.read_bytes())["config"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as exported:
            export_hf(checkpoint / "trainer", Path(config["model"]["path"]), Path(exported) / "model")
            model = Qwen2ForCausalLM.from_pretrained(Path(exported) / "model", dtype=torch.float32)
        accuracy = sampled_accuracy(model)
    rollouts = saved.totals["rollouts_trained"] + config["admission"]["group_size"] * saved.totals["groups_dropped"]
    return Point(rollouts, saved.totals["tokens_generated"], accuracy)


def _to_goal(curve: Sequence[Point], cost: str) -> float:
    """What it has cost to come to GOAL, interpolated between two checkpoints; nan: it did not."""
    for before, after in pairwise(curve):
        if after.accuracy >= GOAL > before.accuracy:
            share = (GOAL - before.accuracy) / (after.accuracy - before.accuracy)
            return float(getattr(before, cost) + share * (getattr(after, cost) - getattr(before, cost)))
    return float("nan")


def table(found: dict[str, list[list[Point]]]) -> str:
    """Mean ± standard deviation over the seeds that reached the goal, and their ratio to the first arm."""
    lines = [
        f"| arm | rollouts to {GOAL} | of {next(iter(found))} | tokens to {GOAL} | reached it | accuracy at the end |",
        "|---|---|---|---|---|---|",
    ]
    first: float | None = None
    for arm, curves in found.items():
        rollouts, tokens = (known(_to_goal(curve, name) for curve in curves) for name in ("rollouts", "tokens"))
        mean = statistics.fmean(rollouts) if rollouts else float("nan")
        first = mean if first is None else first
        lines.append(
            f"| {arm} | {mean_and_deviation(rollouts, ',.0f')} | {mean / first:.2f} "
            f"| {mean_and_deviation(tokens, ',.0f')} | {len(rollouts)} of {len(curves)} "
            f"| {mean_and_deviation([curve[-1].accuracy for curve in curves], '.3f')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
