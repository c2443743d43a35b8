"""What `rlhpc plan --predict` says of runs, and what these then do.

    python -m bench.predict --directory runs/predict
    python -m bench.predict --pair runs/demo-s1 runs/demo
    python -m bench.predict --fleet 4096

The first makes runs of real processes whose engines and trainer take their time by sleeping (tests/ring/timed_runs.py).
One is measured, with one generator and max_staleness 1; from its rates and lengths alone the others are predicted.
Runs that are complete are not repeated.  --pair: two complete runs of any kind; the second is predicted from the first.
--fleet: what it costs to simulate so many generators for 1,000 steps.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.commands.predict import model_of
from launch.plan.site_file import Site
from launch.prediction.lengths import LawfulLengths, LengthLaw
from launch.prediction.measured import measure
from launch.prediction.rates import Figure, Rates
from launch.prediction.ring import Outcome, Ring, RingShape
from launch.prediction.sources import rates_of
from launch.reading.run_figures import read_figures
from rlhpc.config_admission import AUTO_PARTS, SmallestPart
from rlhpc.config_file import read_resolved
from rlhpc.config_sections import AdmissionConfig
from rlhpc.packing.cost import FlopCost
from rlhpc.run_layout import RunLayout
from tests.ring.run_kit import Lab
from tests.ring.timed_runs import TRAINED_TOKEN_S, make_timed_lab, slow_trainers, timed_run

NUM_STEPS = 50
CALIBRATION = (1, 1)  # generators, max_staleness
CASES = ((1, 0), (2, 1), (2, 4), (4, 2))
SEEDS = 5  # simulations, of which the mean is shown
NO_SITE = Site.model_validate({"trainer": {}, "generation": {}})


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a run, or of its prediction, without the first tenth of its steps."""

    step_s: float
    training_s: float
    generators_idle: float
    trainer_idle: float
    staleness: float

    @classmethod
    def measured(cls, layout: RunLayout) -> Figures:
        curves = read_figures(layout).curves

        def mean(name: str) -> float:
            values = curves[name].values
            return float(values[len(values) // 10 :].mean())

        idle = (mean("generator/idle_ratio"), mean("trainer/idle_ratio"))
        training_s = float(curves["time/step_s"].values.sum())
        return cls(mean("time/step_s"), training_s, *idle, mean("staleness/mean"))

    @classmethod
    def predicted(cls, outcomes: list[Outcome]) -> Figures:
        rows = [(one.step_s, one.seconds, one.engines_idle, one.trainer_idle, one.mean_staleness) for one in outcomes]
        return cls(*np.mean(rows, axis=0).tolist())


def compare(name: str, base: RunLayout, layout: RunLayout) -> None:
    """A row: the second predicted from the first, and measured."""
    config = read_resolved(layout)[0]
    model = model_of(config)
    cost = FlopCost.from_hf_config(model)
    known = measure(base, cost)
    rates = rates_of(config, NO_SITE, model, known, known.lengths.mean_tokens)
    shape = RingShape.of(config, cost)
    num_steps = read_figures(layout).num_steps  # of a run that was ended before its last, too
    outcomes = [Ring(shape, rates, known.lengths, seed).run(num_steps) for seed in range(SEEDS)]
    said, was = Figures.predicted(outcomes), Figures.measured(layout)
    print(
        f"| {name} | {1 / said.step_s:.3f} | {1 / was.step_s:.3f} | {was.step_s / said.step_s - 1:+.1%} "
        f"| {said.training_s:.0f} / {was.training_s:.0f} "
        f"| {said.generators_idle:.0%} / {was.generators_idle:.0%} | {said.trainer_idle:.0%} / {was.trainer_idle:.0%} "
        f"| {said.staleness:.2f} / {was.staleness:.2f} |",
        flush=True,
    )


HEAD = """predicted / measured; off by: seconds a step

| configuration | steps/s | measured | off by | training, s | generators idle | trainer idle | staleness |
|---|---|---|---|---|---|---|---|"""


def compare_timed_runs(root: Path, slowness: float) -> None:
    """Make what is missing, all at once since they sleep, and compare."""
    root.mkdir(parents=True, exist_ok=True)
    made = Lab(root, root / "model", root / "train.jsonl")
    lab = made if made.model.exists() else make_timed_lab(root, slowness)
    cases = (CALIBRATION, *CASES)
    with slow_trainers(slowness * TRAINED_TOKEN_S), ThreadPoolExecutor(len(cases)) as pool:
        layouts = list(pool.map(lambda case: _run(lab, *case), cases))
    print(HEAD)
    for (generators, staleness), layout in zip(cases, layouts, strict=True):
        compare(f"{generators} generators, S = {staleness}", layouts[0], layout)


def _run(lab: Lab, generators: int, staleness: int) -> RunLayout:
    name = f"g{generators}-s{staleness}"
    layout = lab.layout(name)
    if layout.summary.exists():
        return layout
    return timed_run(lab, name, generators=generators, max_staleness=staleness, num_steps=NUM_STEPS)


def fleet(num_engines: int, num_steps: int = 1000) -> None:
    """Batches of 2 rollouts a generator, of 1,000 tokens."""
    values = {
        "engine_step_s": 0.02, "engine_sample_s": 2e-4, "prefill_token_s": 1e-5, "judge_s": 0.1, "trainer_step_s": 0.2,
        "trainer_pflop_s": 0.5, "between_steps_s": 0.1, "publish_s": 1.0, "live_s": 1.0, "pause_s": 0.1, "save_s": 5.0,
        "start_s": 300.0,
    }  # fmt: skip
    rates = Rates(**{name: Figure(value, "made up") for name, value in values.items()})
    lengths = LawfulLengths(
        LengthLaw("lognormal", 0.8), 1000, 4096, prompt_tokens=200, dropped_share=0.2, source="made up"
    )
    admission = AdmissionConfig(groups_per_step=max(1, num_engines // 8), group_size=16, max_staleness=3)
    part = SmallestPart(-(-admission.groups_per_step // AUTO_PARTS), 64 * 16_384)
    shape = RingShape(admission, part, num_engines, 16, 64, 16_384, 1, 1, 50, FlopCost(3e9, 1e5))
    Ring(shape, rates, lengths).run(2)  # compiles
    began, cpu = time.monotonic(), time.process_time()
    outcome = Ring(shape, rates, lengths).run(num_steps)
    print(
        f"{num_engines} generators, {num_steps} steps of {16 * admission.groups_per_step} rollouts: "
        f"{time.process_time() - cpu:.1f} s of CPU, {time.monotonic() - began:.1f} s; {outcome.num_events:,} events"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="of the runs that are made")
    parser.add_argument("--slowness", type=float, default=1.0, help="of engines and trainer; for busy machines")
    parser.add_argument("--pair", type=Path, nargs=2, metavar="RUN_DIR", help="measured, predicted")
    parser.add_argument("--fleet", type=int, metavar="N")
    options = parser.parse_args()
    if options.directory is not None:
        compare_timed_runs(options.directory.absolute(), options.slowness)
    if options.pair is not None:
        base, layout = map(RunLayout, options.pair)
        print(HEAD)
        compare(f"{layout.root.name} from {base.root.name}", base, layout)
    if options.fleet is not None:
        fleet(options.fleet)


if __name__ == "__main__":
    main()
