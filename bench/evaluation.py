"""What does evaluating a run cost the run?  The demo with and without [[evaluation]], and how long its training took.

Both arms save a checkpoint as often.  On a machine without GPUs the evaluation shares the cores with the run, at low
priority: this is the worst case.  Runs that are there already are not repeated.

    python -m bench.evaluation --directory runs/evaluated --seeds 3
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

from bench.demo_runs import complete_run, make_demo_model, mean_and_deviation
from launch.demo.run import NUM_PROBLEMS
from launch.demo.task import write_dataset
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout

ARMS = ("alone", "evaluated")
EVERY_STEPS = 20


def main() -> int:
    """Run what is missing, then print everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/evaluated"), help="of runs and model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    root = options.directory.absolute()
    model, data, held_out = make_demo_model(root), root / "train.jsonl", root / "held-out.jsonl"
    write_dataset(data, NUM_PROBLEMS, seed=0)
    write_dataset(held_out, options.prompts, seed=1)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed, arm in product(range(options.seeds), ARMS):
        words = [
            f"run.seed={seed}", f"run.num_steps={options.steps}", f"model.path={model}", f"data.path={data}",
            f"checkpoint.every_steps={EVERY_STEPS}",
        ]  # fmt: skip
        if arm == "evaluated":
            words += [f"evaluation.path={held_out}", f"evaluation.samples={options.samples}"]
        layout = complete_run(root / f"{arm}-{seed}", words)
        seconds[arm].append(training_s(layout))
        found = figures(layout)
        if arm == "evaluated" and options.steps not in found:
            raise SystemExit(f"{layout.root}: step {options.steps} was not evaluated; see its log, `rlhpc logs`")
        shown = "".join(f", step {step} {accuracy:.3f}" for step, accuracy in found.items())
        print(f"{arm}-{seed}: {seconds[arm][-1]:.1f} s{shown}", file=sys.stderr, flush=True)
    for arm in ARMS:
        print(f"{arm:<10}{mean_and_deviation(seconds[arm], '.1f')} s of training")
    pairs = [with_it / without for without, with_it in zip(*(seconds[arm] for arm in ARMS), strict=True)]
    print(f"ratio     {mean_and_deviation(pairs, '.3f')}, of pairs with one seed")
    return 0


def training_s(layout: RunLayout) -> float:
    """From the first step's beginning to the last one's end."""
    return float(json.loads(layout.summary.read_bytes())["training_s"])


def figures(layout: RunLayout) -> dict[int, float]:
    """What the evaluation has found: pass@1 by step."""
    past = RunView(layout).evaluations.get("held-out", {})
    return {step: each["pass@1"]["value"] for step, each in past.items()}


if __name__ == "__main__":
    sys.exit(main())
