"""What each switch between a synchronous trainer of static batches and this one is worth: an ablation, as OlmoRL's.

    python -m bench.ladder [--directory DIR] [--steps 60] [--first 6] [--slowness 1] [--demo]
                           [--draw docs/pictures/ladder.svg]

Runs of real processes, all at once, which differ by one switch from the one before; what is complete is not repeated.
Their engines and trainer sleep, in proportion to a GPU's times: with n rollouts decoded at once every token takes
TOKEN_S + SAMPLE_S · n, since weights are read once for all n; a trainer takes what TRAINED_TOKEN_S says for each token
of a row, padding up to the longest rollout of the row included where nothing is packed.  Lengths are geometric with a
mean of 28, cut at 64; every third prompt is one whose rollouts are rewarded alike.  All is measured twice, with a
trainer that is the faster side and with one that is the slower; each run once.

useful: rollouts of trained groups whose rewards have variance; the others have advantages of 0.  idle: generators
without a rollout that is decoded, a trainer without a batch.  --demo: the switches that the product has, on the demo
(vLLM, two cores), one run after the other.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from bench.demo_runs import GOAL, Rewards, complete_run, make_demo_model
from bench.figures import tell
from launch.demo.run import NUM_PROBLEMS
from launch.demo.task import write_dataset
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.curves import Curve
from tests.ring.rollouts_on_disk import consumed
from tests.ring.run_kit import Lab, Run, make_lab
from tests.ring.timed_runs import LONGEST, LONGEST_S, STOP_PROBABILITY, TOKEN_S, slow_trainers

SAMPLE_S = 0.00125
TRAINED_TOKEN_S = {"sampling": 0.0006, "training": 0.0025}  # by what takes longer
GENERATORS, PLACES = 2, 8
GROUPS, GROUP_SIZE = 8, 4
STALENESS = 4
COLOURS = ("#1f4e79", "#2f6b3a")
PUBLISHED = """published, of other quantities, on GPUs:
OlmoRL: 881 → 975 (continuous batching) → 1358 (better threading) → 2949 tokens/s (updates in flight): 3.35
AReaL: training up to 2.77 times as fast as synchronous systems, at equal accuracy"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The switches that are on."""

    name: str
    static_batches: bool = False
    drains: bool = False
    max_staleness: int = STALENESS
    active_sampling: bool = False
    is_packed: bool = False
    demo: tuple[str, ...] = ()  # overrides of configs/demo.toml; (): the product cannot do without


SYNCHRONOUS = ("admission.max_staleness=0", "admission.active_sampling=false")
LADDER = (
    Configuration("synchronous, static batches", static_batches=True, max_staleness=0),
    Configuration("+ continuous batching", max_staleness=0, demo=SYNCHRONOUS),
    Configuration("+ asynchronous, drained for new weights", drains=True),
    Configuration("+ updates in flight", demo=("admission.active_sampling=false",)),
    Configuration("+ active sampling", active_sampling=True, demo=("admission.active_sampling=true",)),
    Configuration("+ packing", active_sampling=True, is_packed=True),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a run, rates without the first tenth of its steps."""

    name: str
    rollouts_per_s: float
    useful_per_s: float
    generators_idle: float
    trainer_idle: float
    staleness: float
    to_goal_s: float  # at a steady pace; nan: the reward did not get there

    @classmethod
    def of(cls, name: str, layout: RunLayout) -> Measured:
        """Read the directory of a complete run."""
        curves = RunView(layout).curves
        mean = partial(settled_mean, curves)
        rewards = defaultdict[int, set[float]](set)
        num_rollouts = 0
        for rollout in consumed(layout.rollouts):
            rewards[rollout.group_id].add(rollout.reward)
            num_rollouts += 1
        finished = Rewards.of(layout)
        useful_share = sum(len(values) > 1 for values in rewards.values()) / len(rewards)
        steps_s = curves["time/step_s"].values
        pace = num_rollouts / len(steps_s) / mean("time/step_s")
        return cls(
            name=name,
            rollouts_per_s=pace,
            useful_per_s=pace * useful_share,
            generators_idle=mean("generator/idle_ratio"),
            trainer_idle=mean("trainer/idle_ratio"),
            staleness=mean("staleness/mean"),
            to_goal_s=finished.rollouts_to_goal / finished.rollouts * float(steps_s.sum()),
        )


def settled_mean(curves: Mapping[str, Curve], metric: str) -> float:
    """Of a metric, without the first tenth of the steps."""
    values = curves[metric].values
    return float(values[len(values) // 10 :].mean())


def measure(root: Path, number: int, num_steps: int, speeds: Mapping[str, float]) -> list[Measured]:
    """The first `number` configurations, all at once since they sleep."""
    with ThreadPoolExecutor(number) as pool, slow_trainers(speeds["trained_token_s"]):
        return list(pool.map(lambda one: _measure_one(root, one, num_steps, speeds), LADDER[:number]))


def _measure_one(root: Path, configuration: Configuration, num_steps: int, speeds: Mapping[str, float]) -> Measured:
    place = root / configuration.name.strip("+ ").replace(" ", "-").replace(",", "")
    layout, made = RunLayout(place / "runs" / "one"), place / "settings.json"
    settings = {**asdict(configuration), **speeds, "steps": num_steps}
    is_the_same = made.exists() and json.loads(made.read_bytes()) == json.loads(json.dumps(settings))
    if not (layout.summary.exists() and is_the_same):
        place.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(settings))
        run_it(_make_lab(place, configuration, speeds), configuration, num_steps)
    return Measured.of(configuration.name, layout)


def _make_lab(place: Path, configuration: Configuration, speeds: Mapping[str, float]) -> Lab:
    lab = make_lab(place)
    lab.script_engine(
        token_s=speeds["token_s"],
        sample_s=speeds["sample_s"],
        stop_probability=STOP_PROBABILITY,
        static_batches=configuration.static_batches,
        drains=configuration.drains,
    )
    return lab


def run_it(lab: Lab, configuration: Configuration, num_steps: int) -> None:
    """Run it anew, to its end.  Raises SystemExit with what it said otherwise."""
    run_file = lab.run_file(
        "one",
        run={"num_steps": num_steps},
        data={"task": "tests.ring.ring_rewards:parity_or_alike"},
        generation={"num_replicas": GENERATORS, "max_num_seqs": PLACES, "max_completion_tokens": LONGEST},
        admission={
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_staleness": configuration.max_staleness,
            "active_sampling": configuration.active_sampling,
        },
        algorithm={"loss": f"tests.ring.sleeping_loss:{'loss' if configuration.is_packed else 'padded_loss'}"},
        trainer={"token_budget": 1024},
        checkpoint={"every_steps": 1000},
    )
    with Run(run_file, lab.layout("one"), "--fresh") as run:
        if run.finish(LONGEST_S):
            raise SystemExit(run.story())


def print_table(measured: Sequence[Measured], *, with_goal: bool) -> None:
    """As Markdown."""
    goal = f" s to reward {GOAL} |" if with_goal else ""
    print(
        "| switches | rollouts/s | useful/s | of the first | of the one before | generators idle | trainer idle "
        f"| staleness |{goal}\n|---|---|---|---|---|---|---|---|{'---|' if with_goal else ''}"
    )
    first = before = measured[0]
    for one in measured:
        to_goal = f" {one.to_goal_s:.0f} |" if with_goal else ""
        print(
            f"| {one.name} | {one.rollouts_per_s:.1f} | {one.useful_per_s:.1f} "
            f"| {one.useful_per_s / first.useful_per_s:.2f} | {one.useful_per_s / before.useful_per_s:.2f} "
            f"| {one.generators_idle:.0%} | {one.trainer_idle:.0%} | {one.staleness:.2f} |{to_goal}",
            flush=True,
        )
        before = one
    print()


def measure_demo(root: Path) -> list[Measured]:
    """One after the other: two cores are engine and trainer."""
    model = make_demo_model(root)
    write_dataset(model / "train.jsonl", NUM_PROBLEMS, seed=0)
    own = [f"model.path={model}", f"data.path={model / 'train.jsonl'}"]
    measured = []
    for number, configuration in enumerate(LADDER):
        if configuration.demo:
            layout = complete_run(root / f"demo-{number}", [*own, *configuration.demo])
            measured.append(Measured.of(configuration.name, layout))
    return measured


def draw(by_longer: Mapping[str, Sequence[Measured]]) -> str:
    """Bars of useful rollouts a second, two to each configuration, as SVG text."""
    ratios = {
        longer: [one.useful_per_s / measured[0].useful_per_s for one in measured]
        for longer, measured in by_longer.items()
    }
    longest, left, row = max(map(max, ratios.values())), 330, 22
    names = [one.name for one in next(iter(by_longer.values()))]
    height = row * len(names) * len(ratios) + 62
    title = "Useful rollouts a second, synchronous static batches = 1"
    parts = [f'<text x="20" y="20" font-size="15">{title}</text>']
    for series, (longer, values) in enumerate(ratios.items()):
        x, colour = left + 200 * series, COLOURS[series]
        parts.append(f'<rect x="{x}" y="31" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="42">{longer} takes longer</text>')
        for place, ratio in enumerate(values):
            y, width = 54 + row * (len(ratios) * place + series), 440 * ratio / longest
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 14}">{ratio:.2f}</text>')
    for place, name in enumerate(names):
        y = 54 + row * len(ratios) * place + 25
        parts.append(f'<text x="{left - 10}" y="{y}" text-anchor="end">{escape(name)}</text>')
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
    parser.add_argument("--first", type=int, default=len(LADDER), metavar="N", help="only the first N configurations")
    parser.add_argument("--slowness", type=float, default=1.0, help="of engines and trainer; for busy machines")
    parser.add_argument("--demo", action="store_true", help="on the demo, too; six minutes")
    parser.add_argument("--draw", type=Path, help="an SVG")
    options = parser.parse_args()
    root, by_longer = options.directory.absolute(), {}
    for longer, trained_token_s in TRAINED_TOKEN_S.items():
        seconds = {"token_s": TOKEN_S, "sample_s": SAMPLE_S, "trained_token_s": trained_token_s}
        speeds = {name: options.slowness * value for name, value in seconds.items()}
        measured = by_longer[longer] = measure(root / longer, options.first, options.steps, speeds)
        print(f"{longer} takes longer\n")
        print_table(measured, with_goal=False)
        tell(f"ladder, {longer} longer", measured[-1].useful_per_s / measured[0].useful_per_s)
    print(PUBLISHED)
    if options.draw is not None:
        options.draw.write_text(draw(by_longer), encoding="utf-8")
    if options.demo:
        print_table(measure_demo(root), with_goal=True)


if __name__ == "__main__":
    main()
