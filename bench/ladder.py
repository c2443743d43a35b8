"""What each step from a synchronous trainer of static batches to this one is worth: OlmoRL's ladder, climbed here.

    python -m bench.ladder [--directory DIR] [--steps 60] [--rungs 6] [--slowness 1] [--demo]
                            [--draw docs/pictures/ladder.svg]

Runs of real processes, all at once, which differ by one switch from the one before; what is complete is not repeated.
Their engines and trainer sleep, and take so long as a GPU's would by proportion: with n rollouts decoded at once every
token takes TOKEN_S + SAMPLE_S · n, since weights are read once for all n; a trainer takes what PACES says for each
token of a row, those included that fill rollouts up to the longest of their row where nothing is packed.  Lengths are
geometric with a mean of 28, cut at 64; every third prompt is one whose rollouts are rewarded alike.  The whole ladder
is climbed twice, with a trainer that is the faster side and with one that is the slower.

useful: rollouts of groups whose rewards have variance; the others have advantages of 0.  --demo: the switches that the
product has, on the demo (vLLM, two cores), one run after the other.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.demo_runs import GOAL, Rewards, complete_run, make_demo_model
from bench.figures import tell
from launch.demo.run import NUM_PROBLEMS
from launch.demo.task import write_dataset
from launch.reading.run_figures import read_figures
from rlhpc.run_layout import RunLayout
from tests.ring.run_kit import Lab, Run, make_lab
from tests.ring.timed_runs import slow_trainers

TOKEN_S, SAMPLE_S = 0.02, 0.00125
STOP_PROBABILITY = 0.03
LONGEST = 64
PACES = {"sampling": 0.0006, "training": 0.0025}  # which is the longer part → seconds that a trainer takes for a token
GENERATORS, PLACES = 2, 8
GROUPS, GROUP_SIZE = 8, 4
STALENESS = 4
LONGEST_S = 3600.0
COLOURS = ("#1f4e79", "#2f6b3a")
PUBLISHED = (  # of tokens a second, synchronous static batches = 1
    ("OlmoRL, in-flight updates", 3.35, "Olmo 3 report, table of its section on infrastructure"),
    ("AReaL, asynchronous", 2.77, "AReaL paper, abstract"),
)


@dataclass(frozen=True, slots=True)
class Rung:
    """One run: the switches that are on."""

    name: str
    static_batches: bool = False
    drains: bool = False
    max_staleness: int = STALENESS
    active_sampling: bool = False
    is_packed: bool = False
    demo: tuple[str, ...] = ()  # overrides of configs/demo.toml; (): the product cannot do without

    @property
    def script(self) -> dict[str, Any]:
        """Of its engines."""
        return {"static_batches": self.static_batches, "drains": self.drains}


SYNCHRONOUS = ("admission.max_staleness=0", "admission.active_sampling=false")
LADDER = (
    Rung("synchronous, static batches", static_batches=True, max_staleness=0),
    Rung("+ continuous batching", max_staleness=0, demo=SYNCHRONOUS),
    Rung("+ asynchronous, drained for new weights", drains=True),
    Rung("+ updates in flight", demo=("admission.active_sampling=false",)),
    Rung("+ active sampling", active_sampling=True, demo=("admission.active_sampling=true",)),
    Rung("+ packing", active_sampling=True, is_packed=True),
)


@dataclass(frozen=True, slots=True)
class Climbed:
    """What came of a rung, without the first tenth of its steps."""

    name: str
    rollouts_per_s: float
    useful_per_s: float
    generators_idle: float
    trainer_idle: float
    staleness: float
    to_goal_s: float = field(default=math.nan)

    @classmethod
    def of(cls, rung: Rung, layout: RunLayout, rollouts_per_step: int) -> Climbed:
        """Read the run directory."""
        curves = read_figures(layout).curves

        def mean(name: str) -> float:
            values = curves[name].values
            return float(values[len(values) // 10 :].mean())

        pace = rollouts_per_step / mean("time/step_s")
        useful = 1.0 if rung.active_sampling else 1 - mean("reward/zero_spread_share")
        idle = (mean("generator/idle_ratio"), mean("trainer/idle_ratio"))
        return cls(rung.name, pace, pace * useful, *idle, mean("staleness/mean"), seconds_to_goal(layout))


def seconds_to_goal(layout: RunLayout) -> float:
    """Since the first step; nan: the reward did not get there."""
    needed = Rewards.of(layout).rollouts_to_goal
    if math.isnan(needed):
        return math.nan
    times = read_figures(layout).curves["time/step_s"].values.cumsum()
    summary = json.loads(layout.summary.read_bytes())
    return float(needed / summary["rollouts_trained"] * times[-1])


def climb(root: Path, num_rungs: int, num_steps: int, slowness: float) -> list[Climbed]:
    """The first rungs, all at once since they sleep; runs that are complete are not repeated."""
    rungs = LADDER[:num_rungs]
    with ThreadPoolExecutor(len(rungs)) as pool:
        return list(pool.map(lambda rung: _climb_one(root, rung, num_steps, slowness), rungs))


def _climb_one(root: Path, rung: Rung, num_steps: int, slowness: float) -> Climbed:
    place = root / rung.name.strip("+ ").replace(" ", "-").replace(",", "")
    layout = RunLayout(place / "runs" / "rung")
    if not layout.summary.exists():
        run_it(_make_lab(place, rung, slowness), rung, num_steps)
    return Climbed.of(rung, layout, GROUPS * GROUP_SIZE)


def _make_lab(place: Path, rung: Rung, slowness: float) -> Lab:
    place.mkdir(parents=True, exist_ok=True)
    lab = make_lab(place)
    path = lab.model / "config.json"
    pace = {"token_s": slowness * TOKEN_S, "sample_s": slowness * SAMPLE_S, "stop_probability": STOP_PROBABILITY}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scripted_engine": pace | rung.script}))
    return lab


def run_it(lab: Lab, rung: Rung, num_steps: int) -> None:
    """Run it to its end.  Raises SystemExit with what it said otherwise."""
    run_file = lab.run_file(
        "rung",
        run={"num_steps": num_steps},
        data={"task": "tests.ring.ring_rewards:parity_or_alike"},
        generation={"num_replicas": GENERATORS, "max_num_seqs": PLACES, "max_completion_tokens": LONGEST},
        admission={
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_staleness": rung.max_staleness,
            "active_sampling": rung.active_sampling,
        },
        algorithm={"loss": f"tests.ring.sleeping_loss:{'loss' if rung.is_packed else 'padded_loss'}"},
        trainer={"token_budget": 1024},
        checkpoint={"every_steps": 1000},
    )
    with Run(run_file, lab.layout("rung")) as run:
        if run.finish(LONGEST_S):
            raise SystemExit(run.story())


def print_table(climbed: Sequence[Climbed], *, with_goal: bool) -> None:
    """As Markdown."""
    goal = f" s to reward {GOAL} |" if with_goal else ""
    print(
        "| switches | rollouts/s | useful/s | of the first | of the one before | generators idle | trainer idle "
        f"| staleness |{goal}\n|---|---|---|---|---|---|---|---|{'---|' if with_goal else ''}"
    )
    first = before = climbed[0]
    for one in climbed:
        to_goal = f" {one.to_goal_s:.0f} |" if with_goal else ""
        print(
            f"| {one.name} | {one.rollouts_per_s:.1f} | {one.useful_per_s:.1f} "
            f"| {one.useful_per_s / first.useful_per_s:.2f} | {one.useful_per_s / before.useful_per_s:.2f} "
            f"| {one.generators_idle:.0%} | {one.trainer_idle:.0%} | {one.staleness:.2f} |{to_goal}",
            flush=True,
        )
        before = one
    print()


def climb_demo(root: Path) -> list[Climbed]:
    """One after the other: two cores are engine and trainer."""
    model = make_demo_model(root)
    write_dataset(model / "train.jsonl", NUM_PROBLEMS, seed=0)
    own = [f"model.path={model}", f"data.path={model / 'train.jsonl'}"]
    climbed: list[Climbed] = []
    for rung in LADDER:
        if rung.demo:
            layout = complete_run(root / f"demo-{len(climbed)}", [*own, *rung.demo])
            climbed.append(Climbed.of(rung, layout, 96))
    return climbed


def draw(by_pace: Mapping[str, Sequence[Climbed]]) -> str:
    """Bars of useful rollouts a second, and what others have published, as SVG text."""
    bars: list[tuple[str, float, str]] = []
    for place, rung in enumerate(LADDER[: min(map(len, by_pace.values()))]):
        for (pace, climbed), colour in zip(by_pace.items(), COLOURS, strict=False):
            name = rung.name if pace == next(iter(by_pace)) else ""
            bars.append((name, climbed[place].useful_per_s / climbed[0].useful_per_s, colour))
    bars += [(f"{name} (tokens/s, published)", ratio, "#9aa5b1") for name, ratio, _ in PUBLISHED]
    longest, left, row = max(ratio for _, ratio, _ in bars), 330, 22
    height = row * len(bars) + 62
    title = "Useful rollouts a second, synchronous static batches = 1"
    parts = [f'<text x="20" y="20" font-size="15">{title}</text>']
    for place, (pace, colour) in enumerate(zip(by_pace, COLOURS, strict=False)):
        x = left + 200 * place
        parts.append(f'<rect x="{x}" y="31" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="42">{pace} takes longer</text>')
    for place, (name, ratio, colour) in enumerate(bars):
        y = 54 + row * place
        width = 440 * ratio / longest
        parts += [
            f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{left + width + 6:.1f}" y="{y + 14}">{ratio:.2f}</text>',
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {height}" width="840" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2933" role="img">'
    )
    ground = f'<title>{title}</title><rect width="840" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/ladder"), help="of the runs that are made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rungs", type=int, default=len(LADDER), help="so many of them, from below")
    parser.add_argument("--slowness", type=float, default=1.0, help="of engines and trainer; for busy machines")
    parser.add_argument("--demo", action="store_true", help="on the demo, too; six minutes")
    parser.add_argument("--draw", type=Path, help="an SVG")
    options = parser.parse_args()
    root, by_pace = options.directory.absolute(), {}
    for pace, token_s in PACES.items():
        with slow_trainers(options.slowness * token_s):
            by_pace[pace] = climb(root / pace, options.rungs, options.steps, options.slowness)
        print(f"{pace} takes longer\n")
        print_table(by_pace[pace], with_goal=False)
        tell(f"ladder, {pace} longer", by_pace[pace][-1].useful_per_s / by_pace[pace][0].useful_per_s)
    for name, ratio, source in PUBLISHED:
        print(f"{name}: {ratio} ({source})")
    if options.draw is not None:
        options.draw.write_text(draw(by_pace), encoding="utf-8")
    if options.demo:
        print_table(climb_demo(root), with_goal=True)


if __name__ == "__main__":
    main()
