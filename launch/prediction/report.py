"""A prediction as text for people, 80 columns wide, and as JSON for programs.

Input: Prediction.  Output: text.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.common.counted import counted, three_digits
from launch.common.text_table import aligned, span
from launch.prediction.lengths import Lengths
from launch.prediction.rates import GUESS, Rates
from launch.prediction.splits import WITHIN, Split
from rlhpc.metrics.progress import format_count

_WIDTH, _INDENT = 80, 12
_FEW = 4  # names that are shown at most
_NEVER_IN_IT = "waiting in the queue, time limits and requeues, faults, evaluations"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The content of the report."""

    run: str
    rates: Rates
    lengths: Lengths
    this: Split
    others: list[Split]
    best: Split
    left_out: list[str] = field(default_factory=list)  # settings of this run that the prediction ignores
    remarks: list[str] = field(default_factory=list)


def as_text(prediction: Prediction) -> str:
    """For a terminal."""
    return "\n".join(
        [*_head(prediction), "", *_rates(prediction), "", *_this(prediction), "", *_others(prediction), "",
         *_recommendation(prediction)]
    )  # fmt: skip


def as_json(prediction: Prediction) -> str:
    """The same figures; fields are only added."""
    lengths = prediction.lengths
    document = {
        "run": prediction.run,
        "num_steps": prediction.this.num_steps,
        "rates": {name: asdict(figure) for name, figure in prediction.rates.items().items()},
        "lengths": {
            "mean_tokens": lengths.mean_tokens, "dropped_share": lengths.dropped_share, "source": lengths.source
        },
        "this_split": _document(prediction.this),
        "other_splits": [_document(split) for split in prediction.others],
        "recommended": {"generators": prediction.best.num_engines, "max_staleness": prediction.best.max_staleness},
        "left_out": prediction.left_out,
        "remarks": prediction.remarks,
    }  # fmt: skip
    return json.dumps(document, indent=1)


def _document(split: Split) -> dict[str, Any]:
    outcome = split.outcome
    return {
        "generators": split.num_engines,
        "max_staleness": split.max_staleness,
        "steps_per_s": 1 / outcome.step_s,
        "wall_s": split.wall_s,
        "hours": split.hours,
        "unit": split.price.unit,
        "mean_staleness": outcome.mean_staleness,
        **asdict(outcome),
    }


# ---------------------------------------------------------------------------------------------------------------- text


def _head(prediction: Prediction) -> list[str]:
    left_out = "; ".join([_NEVER_IN_IT, *prediction.left_out])
    steps = counted(prediction.this.num_steps, "step")
    lines = [f"prediction  {prediction.run}, {steps} in virtual time; nothing is started"]
    lines += _wrapped("not in it", left_out)
    return lines + [line for remark in prediction.remarks for line in _wrapped("remark", remark)]


def _rates(prediction: Prediction) -> list[str]:
    """Each figure with a letter for its source, and a legend below."""
    sources: dict[str, str] = {}

    def letter(source: str) -> str:
        return sources.setdefault(source, chr(ord("a") + len(sources)))

    cells = [
        f"{name:<16}{_short(figure.value):>9} {letter(figure.source)}"
        for name, figure in prediction.rates.items().items()
    ]
    half = (len(cells) + 1) // 2
    rows = [f"{left}    {right}" for left, right in zip(cells[:half], [*cells[half:], ""], strict=False)]
    lengths = prediction.lengths
    said = f"{format_count(lengths.mean_tokens)} tokens a rollout; without spread {lengths.dropped_share:.0%} of groups"
    lines = [f"{'rates':<{_INDENT}}{rows[0]}", *(f"{'':<{_INDENT}}{row}".rstrip() for row in rows[1:])]
    lines += _wrapped("lengths", f"{said} ({letter(lengths.source)})")
    return lines + [line for source, name in sources.items() for line in _wrapped(f"  ({name})", source)]


def _this(prediction: Prediction) -> list[str]:
    split, outcome = prediction.this, prediction.this.outcome
    total = sum(outcome.staleness.values())
    ages = ", ".join(f"{age}: {count / total:.0%}" for age, count in outcome.staleness.items())
    waits = [
        (outcome.trainer_waits_for_groups, "waits for groups"),
        (outcome.trainer_publishes, "publishes"),
        (outcome.trainer_waits_for_weights, "waits for weights to be live"),
        (outcome.trainer_saves, "saves"),
    ]
    rest = "".join(f", {words} {share:.0%}" for share, words in waits if share >= 0.005)
    most = max(outcome.staleness)
    rows = [
        ("this split", f"{counted(split.num_engines, 'generator')}, max_staleness {split.max_staleness}"),
        ("speed", f"{_short(1 / outcome.step_s)} steps/s, {_short(outcome.step_s)} s a step; "
                  f"{format_count(outcome.tokens_per_s)} tokens/s trained"),
        ("wall time", f"{span(round(split.wall_s))} to step {split.num_steps}, "
                      f"{span(round(split.price.start_s))} of it before the first rollout"),
        ("cost", f"{_short(split.hours)} {split.price.unit}"),
        ("trainer", f"works {outcome.trainer_works:.0%}{rest}"),
        ("generators", f"work {1 - outcome.engines_idle:.0%}, and decode {outcome.engines_full:.0%} of max_num_seqs"),
        ("staleness", f"{ages} of rollouts; mean {outcome.mean_staleness:.2f}, most {most}"),
    ]  # fmt: skip
    return [line for title, text in rows for line in _wrapped(title, text)]


def _others(prediction: Prediction) -> list[str]:
    bounds = sorted({split.max_staleness for split in prediction.others})
    by_engines: dict[int, dict[int, Split]] = {}
    for split in prediction.others:
        by_engines.setdefault(split.num_engines, {})[split.max_staleness] = split
    head = ("generators", *(f"S = {bound}" for bound in bounds))
    speeds, costs = [head], [head]
    for engines, splits in by_engines.items():
        speeds.append((str(engines), *(_marked(splits[bound], prediction) for bound in bounds)))
        costs.append((str(engines), *(_short(splits[bound].hours) for bound in bounds)))
    return [
        "steps an hour, S = max_staleness (* this split, > recommended)",
        *(f"  {line}" for line in aligned(speeds)),
        f"{prediction.this.price.unit} to step {prediction.this.num_steps}",
        *(f"  {line}" for line in aligned(costs)),
    ]


def _marked(split: Split, prediction: Prediction) -> str:
    where = (split.num_engines, split.max_staleness)
    marks = "*" if where == (prediction.this.num_engines, prediction.this.max_staleness) else ""
    marks += ">" if where == (prediction.best.num_engines, prediction.best.max_staleness) else ""
    return f"{marks}{_short(3600 / split.outcome.step_s)}"


def _recommendation(prediction: Prediction) -> list[str]:
    best, this = prediction.best, prediction.this
    faster = this.outcome.step_s / best.outcome.step_s - 1
    pace = f"{faster:+.0%} steps/s" if abs(faster) > WITHIN else "as fast"
    dearer = best.hours / this.hours - 1
    cost = "as many" if abs(dearer) < 0.005 else f"{dearer:+.0%}"
    said = (
        f"generation.num_replicas={best.num_engines} admission.max_staleness={best.max_staleness}: "
        f"the fewest generators, and the lowest bound, within {WITHIN:.0%} of the fastest split no staler than this "
        f"one; {pace} and {cost} {this.price.unit}"
    )
    most = max(split.num_engines for split in prediction.others)
    said += "; more generators than in this table may be faster still" if best.num_engines == most else ""
    return _wrapped("recommended", said)


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{title:<{_INDENT}}{text}", _WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip


def _short(value: float) -> str:
    return format_count(value) if value >= 9999.5 else three_digits(value)


def guesses_among(rates: Rates, lengths: Lengths) -> list[str]:
    """A remark if figures are guesses, otherwise none."""
    names = [name for name, figure in rates.items().items() if figure.is_guess]
    names += ["lengths"] if lengths.source.startswith(GUESS) else []
    if not names:
        return []
    which = ", ".join(names) if len(names) <= _FEW else f"{len(names)} figures"
    return [f"guessed, and perhaps off by half: {which}; measured runs (--from RUN_DIR) and [rates] are better"]
