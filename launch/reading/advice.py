"""Recommendations from the figures of a run, with the numbers behind them.

Input: RunFigures.  Output: sentences, the most important first.  Figures are means over the second half of the steps; a
run that is too young gets no recommendations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from launch.common.counted import counted
from launch.common.paths import written_unix_s
from launch.reading.run_figures import RunFigures
from launch.run_files.events import read_document
from rlhpc.config import obeys_rules, with_values

FEWEST_STEPS = 10
IDLE = 0.15  # of the time: below it nothing is recommended
_OTHER = 0.10  # a neighbour idle for less is the bottleneck


def advice_for(figures: RunFigures) -> list[str]:
    """Recommendations; none if all is well."""
    steps = figures.curves.get("time/step_s")
    if steps is None or len(steps.steps) < FEWEST_STEPS:
        return [f"Too early to recommend anything: fewer than {FEWEST_STEPS} steps are done."]
    rules = (
        _balance,
        _spread,
        _truncation,
        _packing,
        _lockstep,
        _preemptions,
        _verifier,
        _policy,
        _checkpoints,
        _losses,
    )
    return [said for rule in rules for said in rule(figures, _reader(figures))]


Reader = Callable[[str], float]


def _reader(figures: RunFigures) -> Reader:
    """Mean of a metric; 0 where it was not written."""
    return lambda name: figures.mean_of(name) or 0.0


def _balance(figures: RunFigures, mean: Reader) -> Iterator[str]:
    """Generators and trainer should wait for each other as little as possible."""
    generators, trainer = mean("generator/idle_ratio"), mean("trainer/idle_ratio")
    number = max(1, round(mean("generator/live")))
    if generators > IDLE and trainer < _OTHER:
        enough = max(1, math.ceil(number * (1 - generators) / 0.95))
        fewer = f"{enough} instead of {number} would do" if enough < number else "fewer would not do"
        more = "" if _no_room_for(figures, 1, 1) else "; or give the trainer more GPUs (trainer.num_ranks)"
        yield (
            f"Generators idle {generators:.0%}, trainer {trainer:.0%}: a step waits for the trainer. Generators: "
            f"{fewer}{more}."
        )
    planned = figures.config.generation.num_replicas if figures.config is not None else 0
    if trainer > IDLE and mean("generator/live") < planned - 0.2:
        yield (
            f"Trainer idle {trainer:.0%}: of {planned} generators {mean('generator/live'):.1f} were alive on average; "
            "the list of events shows when the others were lost."
        )
    elif trainer > IDLE and generators < _OTHER:
        wanted = math.ceil(number / max(0.05, 1 - trainer))
        per_engine = figures.config.generation.tensor_parallel if figures.config is not None else 1
        if taken := _no_room_for(figures, wanted - number, per_engine):
            yield (
                f"Trainer idle {trainer:.0%}, generators {generators:.0%}: batches wait for rollouts, and {taken}: "
                "more generators would only share it. Shorter completions, or a larger machine, would help."
            )
            return
        how = f"generation.num_replicas={wanted}"
        if figures.layout.job_plan.exists() and not figures.summary:  # submitted and still running
            how = f"`rlhpc scale RUN_DIR --generators +{wanted - number}`"
        yield (
            f"Trainer idle {trainer:.0%}, generators {generators:.0%}: batches wait for rollouts. {wanted} generators "
            f"instead of {number} would feed it at this speed ({how})."
        )
    elif trainer > IDLE and generators > IDLE:
        yield _both_wait(figures, mean, generators, trainer)


def _no_room_for(figures: RunFigures, num_processes: int, gpus_each: int) -> str:
    """Why this many processes more would find no place on the machine of a run without Slurm; "": they would."""
    layout = figures.layout
    if written_unix_s(layout.job_plan) > written_unix_s(layout.local_plan):
        return ""  # the site grants what is asked for
    machine = read_document(layout.local_plan).get("machine")
    if not isinstance(machine, dict) or figures.config is None:
        return ""
    if machine.get("uses_gpus"):
        left, needed = machine.get("num_gpus_left", 0), num_processes * gpus_each
        has = "no GPU" if not left else counted(left, "GPU")
        return "" if left >= needed else f"this machine has {has} left"
    cores, busy = machine.get("num_cores", 0), figures.config.trainer.num_ranks + figures.config.generation.num_replicas
    if busy + num_processes <= cores:
        return ""
    return f"{busy} busy processes have this machine's {counted(cores, 'core')}"


def _both_wait(figures: RunFigures, mean: Reader, generators: float, trainer: float) -> str:
    bound, step_s = mean("staleness/bound"), mean("time/step_s") or 1.0
    said = f"Generators idle {generators:.0%} and trainer {trainer:.0%}: they wait for each other in turn."
    weights = mean("time/wait_for_weights_s") / step_s
    if weights > 0.2:
        return f"{said} {weights:.0%} of a step passes until new weights are live (docs/operating.md)."
    parts = ", or admission.step_parts=4 at the same bound" if _can_be_in_parts(figures, mean) else ""
    return f"{said} admission.max_staleness={bound:.0f} leaves too little in flight: try {bound + 1:.0f}{parts}."


def _can_be_in_parts(figures: RunFigures, mean: Reader) -> bool:
    """And are not: by default parts begin only where they fill the rows of all ranks."""
    config = figures.config
    if config is None or config.admission.step_parts not in ("auto", 1) or mean("trainer/step_parts") > 1:
        return False
    return obeys_rules(with_values(config, {"admission.step_parts": 4}))


def _spread(figures: RunFigures, mean: Reader) -> Iterator[str]:
    share, easy = mean("reward/zero_spread_share"), mean("group/all_correct_share")
    why = "too easy" if easy > share / 2 else "too hard"
    if share >= 0.4:
        yield (
            f"{share:.0%} of finished groups have zero reward variance and teach nothing, mostly because prompts are "
            f"{why}: [curriculum] rests such prompts, which would save up to {share:.0%} of sampling."
        )


def _truncation(figures: RunFigures, mean: Reader) -> Iterator[str]:
    share, longest = mean("length/truncated_share"), mean("length/completion_max")
    if share >= 0.1:
        yield (
            f"{share:.0%} of completions are cut off at {longest:.0f} tokens: raise generation.max_completion_tokens, "
            "or mask them ([shaping])."
        )


def _packing(figures: RunFigures, mean: Reader) -> Iterator[str]:
    fill, rows = mean("packing/fill"), mean("packing/num_microbatches")
    budget = figures.config.trainer.token_budget if figures.config is not None else 0
    if 0 < fill < 0.6:
        yield (
            f"Micro-batches are {fill:.0%} full ({rows:.1f} per rank and step): trainer.token_budget={budget} is more "
            "than a rank can fill; use more groups per step, or a smaller budget, which saves memory."
        )


def _lockstep(figures: RunFigures, mean: Reader) -> Iterator[str]:
    slowdown = mean("packing/lockstep_slowdown")
    if slowdown >= 1.15:
        yield (
            f"The slowest rank has {slowdown - 1:.0%} more work than the mean, and the others wait for it: more groups "
            "per step (admission.groups_per_step) would even that out."
        )


def _preemptions(figures: RunFigures, mean: Reader) -> Iterator[str]:
    curve = figures.curves.get("generator/preemptions")
    total = curve.growth if curve is not None else 0.0  # each generator counts from its own start
    if total > 0.02 * max(1, figures.sampled.num_rollouts):
        yield (
            f"Engines have preempted {total:.0f} rollouts for lack of KV cache and recomputed them: lower "
            "generation.max_num_seqs, or give the cache more memory."
        )


def _verifier(figures: RunFigures, mean: Reader) -> Iterator[str]:
    share, queued = mean("reward/verifier_error_share"), mean("reward/queued")
    if share > 0.01:
        yield (
            f"{share:.1%} of verdicts are verifier errors, whose groups are dropped: "
            "`rlhpc rollouts RUN_DIR --verdict verifier_error` shows why."
        )
    if queued > 100:
        yield f"{queued:.0f} completions are queued at the reward services: raise rewards.workers_per_replica."


def _policy(figures: RunFigures, mean: Reader) -> Iterator[str]:
    ess, clipped = figures.mean_of("policy/ess"), mean("policy/clip_high_share")
    if ess is not None and ess < 0.3:
        yield f"The effective sample size is {ess:.0%}: lower admission.max_staleness or the learning rate."
    if clipped > 0.3:
        yield f"{clipped:.0%} of tokens are clipped from above: the learning rate is too high for this batch."


def _checkpoints(figures: RunFigures, mean: Reader) -> Iterator[str]:
    blocked, step_s = mean("time/checkpoint_s"), mean("time/step_s") or 1.0
    every = figures.config.checkpoint.every_steps if figures.config is not None else 0
    if every and (share := blocked / (every * step_s)) >= 0.02:
        yield (
            f"Checkpoints block training for {blocked:.1f} s each, {share:.0%} of the time: raise "
            f"checkpoint.every_steps={every}."
        )


def _losses(figures: RunFigures, mean: Reader) -> Iterator[str]:
    lost, kept = map(figures.curves.get, ("generator/tokens_lost_total", "tokens/generated_total"))
    if lost is not None and kept is not None and lost.last > 0.01 * kept.last:
        share = f"{lost.last / (lost.last + kept.last):.1%}"
        yield (
            f"{share} of tokens were lost with generators: lower buffer.partial_interval_tokens or partial_interval_s."
        )
