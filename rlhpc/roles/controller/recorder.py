"""Records each step: totals, TensorBoard and the progress line.

Input: StepRecord.  Called between steps; no decision depends on its figures.

    record ──▶ totals, live line ──▶ unwritten ──▶ figures of every rollout, TensorBoard, in their lane

The totals, which checkpoints hold, are up to date when `record` returns; event files and samples follow.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rlhpc.algorithms.figures import (
    age_figures,
    completion_lengths,
    effective_sample_share,
    length_figures,
    reward_figures,
    rewards,
    route_figures,
    staleness,
    staleness_figures,
    teacher_figures,
)
from rlhpc.algorithms.packing import packing_fill, tokens_trained
from rlhpc.metrics.meters import Eta, LoopLag, Rate
from rlhpc.metrics.tensorboard import Recorder, Sample
from rlhpc.protocol.contracts import Clock, ServerChannel
from rlhpc.protocol.types import Rollout, RolloutGroup
from rlhpc.rewards.outcomes import JUDGED, PREFIX, SECONDS, TEACHER_FIGURES, TEACHER_PREFIX, by_task
from rlhpc.roles.controller.batch_maker import StepRecord
from rlhpc.roles.controller.leases import IntakeStats, ProcessRegistry, RolloutSink
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.run_status import HeldOutLoss, LiveFigures
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.controller.weight_sync import WeightSync
from rlhpc.roles.lifecycle import RoleContext

# --------------------------------------------------------------------------------------------------------- step figures
#
# The metrics of a step, under the stable names of rlhpc/metrics/names.py.
#
# Input: StepRecord and the rollouts since the previous step.  Output: scalars.  No decision depends on them.


# Names in the trainer's report → names in the table; every other name is the loss's own.
_REPORTED = {
    "loss": "trainer/loss",
    "grad_norm": "trainer/grad_norm",
    "entropy": "trainer/entropy",
    "learning_rate": "trainer/learning_rate",
    "step_s": "trainer/step_s",
    "wait_for_batch_s": "time/wait_for_batch_s",
    "clip_low": "policy/clip_low_share",
    "clip_high": "policy/clip_high_share",
    "ratio": "policy/ratio_mean",
    "importance_weight": "policy/importance_weight_mean",
    "importance_capped": "policy/importance_capped_share",
    "importance_masked": "policy/importance_masked_share",
    "mismatch_abs": "policy/mismatch_abs_mean",
    "preference_accuracy": "sft/preference_accuracy",
    "preference_margin": "sft/preference_margin",
}

_OF_DATASETS = {
    "reward/mean": "dataset_reward",
    "reward/correct_share": "dataset_correct_share",
    "length/completion_mean": "dataset_length",
    "length/truncated_share": "dataset_truncated_share",
    "teacher/kl": "dataset_teacher_kl",
}


def training_figures(record: StepRecord, token_budget: int) -> dict[str, float]:
    """Metrics of the batch and the optimiser step; a loss's own metric NAME becomes policy/NAME."""
    return (
        step_figures(record, token_budget)
        | staleness_figures(record.groups, record.trained_version)
        | {
            "trainer/step_parts": float(record.batch.num_parts_before + 1),
            "time/wait_for_groups_s": record.wait_for_groups_s,
            "time/wait_for_weights_s": record.until_live_s,
        }
    )


def step_figures(record: StepRecord, token_budget: int) -> dict[str, float]:
    """Metrics of the optimiser step and of its rows, of rollouts or demonstrations."""
    report = dict(record.report.metrics)
    squares = report.pop("importance_weight_squared", None)
    by_age = {name: report.pop(name) for name in list(report) if name.startswith("age_")}
    # A loss of the user's own names a family itself.
    names = {name: _REPORTED.get(name, name if "/" in name else f"policy/{name}") for name in report}
    figures = {names[name]: value for name, value in report.items()} | age_figures(by_age)
    if squares is not None:  # the report holds means: n of each cancels in the ratio
        figures["policy/ess"] = effective_sample_share(record.report.metrics, 1)
    return figures | {
        "packing/fill": packing_fill(record.batch, token_budget),
        "packing/num_microbatches": float(sum(len(minibatch.ranks[0]) for minibatch in record.batch.minibatches)),
        "packing/lockstep_slowdown": record.lockstep_slowdown,
        "time/pack_s": record.pack_s,
        "time/checkpoint_s": record.checkpoint_s,
        "time/checkpoint_write_s": record.checkpoint_write_s,
        "guard/action": float(record.guard.action),
        "guard/alarm_steps": float(record.guard.num_bad_steps),
    }


def sampling_figures(stats: IntakeStats) -> dict[str, float]:
    """Metrics of all groups finished since the last step, with those of zero variance: they show the policy's skill."""
    shaped = {"reward/shaped_mean": float(np.mean(stats.shaped_rewards))} if stats.shaped_rewards else {}
    return reward_figures(stats.groups) | length_figures(stats.groups) | teacher_figures(stats.groups) | shaped


def verifier_figures(tasks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of each task: the counts of rewards/outcomes.py, and the mean seconds to verify a completion."""
    found: dict[str, float] = {}
    for task, figures in tasks.items():
        found |= {f"verifier_{name}/{task}": value for name, value in figures.items() if name != SECONDS}
        found[f"verifier_mean_s/{task}"] = figures.get(SECONDS, 0.0) / max(1.0, figures.get(JUDGED, 0.0))
    return found


def teacher_service_figures(teachers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of all teachers together, from heartbeats of generators; none if no teacher was asked."""
    if not teachers:
        return {}
    total = {name: sum(figures.get(name, 0.0) for figures in teachers.values()) for name in TEACHER_FIGURES}
    return {
        "teacher/waiting": total["waiting"],
        "teacher/failed": total["failed"],
        "teacher/retries": total["retries"],
        "teacher/request_s": total["seconds"] / max(1.0, total["answered"]),
    }


def dataset_figures(groups: Sequence[RolloutGroup], names: Sequence[str]) -> dict[str, float]:
    """Figures of each dataset with finished groups, by its name; none if there is only one dataset."""
    figures: dict[str, float] = {}
    for place, name in enumerate(names if len(names) > 1 else ()):
        own = [group for group in groups if group.prompt.prompt_id % len(names) == place]
        found = reward_figures(own) | length_figures(own) | teacher_figures(own)
        shown = {f"{family}/{name}": found[metric] for metric, family in _OF_DATASETS.items() if metric in found}
        figures |= shown | {f"dataset_share/{name}": len(own) / len(groups)} if own else {}
    return figures


def histograms(record: StepRecord) -> dict[str, np.ndarray]:
    """Distributions over the rollouts of the batch."""
    return {
        "reward/histogram": rewards(record.groups),
        "length/completion_histogram": completion_lengths(record.groups),
        "staleness/histogram": staleness(record.groups, record.trained_version),
    }


# ------------------------------------------------------------------------------------------------------------- recorder

RATE_WINDOW_S = 20.0
DETAILS_EVERY_STEPS = 10  # for histograms and completions: they are large, and segments hold everything
NUM_SAMPLES = 2  # completions shown
NUM_RECENT_STEPS = 10  # the longest of these is reported: long steps are rare, and plans must allow for them
MAX_UNWRITTEN = 4  # steps, with their rollouts, that may wait for a slow lane; then training waits


Step = TypeVar("Step")


class UnwrittenSteps(Generic[Step]):
    """Recorded steps, which a lane writes afterwards."""

    def __init__(self, lane: DiskLane, write: Callable[[Step], None]) -> None:
        """write: writes one step; one at a time, in their order."""
        self._lane, self._write = lane, write
        self.steps: deque[Step] = deque()
        self._has_work, self._has_room = asyncio.Event(), asyncio.Event()

    async def put(self, step: Step) -> None:
        """Queue a step; wait while MAX_UNWRITTEN steps are queued."""
        self.steps.append(step)
        self._has_work.set()
        while len(self.steps) > MAX_UNWRITTEN:
            self._has_room.clear()
            await self._has_room.wait()

    async def run(self) -> None:
        """Write queued steps, endlessly."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            await self.write_all()

    async def write_all(self) -> None:
        """Write the steps that are left."""
        while self.steps:
            step = self.steps.popleft()
            self._has_room.set()
            await self._lane.run(self._write, step)


class StepTimes:
    """Durations of the steps of one attempt, the training rate and the time left."""

    def __init__(self, num_steps: int, clock: Clock) -> None:
        self._eta, self._clock = Eta(num_steps), clock
        self._last_step_at: float | None = None
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)  # durations of the last steps
        self._trained = Rate(RATE_WINDOW_S, clock())

    def begin(self) -> None:
        """Call when training begins."""
        self._last_step_at = self._clock()
        self._trained = Rate(RATE_WINDOW_S, self._last_step_at)

    def step_done(self, num_steps: int, num_tokens: int) -> float:
        """Note the end of the step after which num_steps are done; return its duration in seconds."""
        now = self._clock()
        step_s = now - (self._last_step_at if self._last_step_at is not None else now)
        self._last_step_at = now
        self._recent_s.append(step_s)
        self._trained.add(now, num_tokens)
        self._eta.step_done(num_steps, now)
        return step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained a second, over the last steps."""
        return self._trained.per_second(self._clock())

    def show(self, live: LiveFigures) -> None:
        """Copy the duration of the longest recent step and the time left to the live figures."""
        live.step_s, live.eta_s = max(self._recent_s), self._eta.remaining_s()


class StepRecorder(ABC, Generic[Step]):
    """Keeps the totals of a run and writes recorded steps into its event file."""

    def __init__(
        self, context: RoleContext, totals: Totals, live: LiveFigures, lane: DiskLane, clock: Clock, *, step: int
    ) -> None:
        """step: that this attempt begins with."""
        self._config, self._totals, self._live, self._lane, self._clock = context.config, totals, live, lane, clock
        self.lag = LoopLag(clock)  # of the event loop, while its run() runs
        self._recorder = open_event_file(context, step)
        self._times, self._wall_from = StepTimes(context.config.run.num_steps, clock), clock() - totals.wall_s
        self._unwritten = UnwrittenSteps[Step](lane, self._write)
        live.attempt, live.resume_step = context.attempt, context.resume_step

    async def run(self) -> None:
        """Write recorded steps, endlessly."""
        await self._unwritten.run()

    def close_totals(self) -> None:
        """Update the seconds in the totals."""
        self._totals.wall_s = self._clock() - self._wall_from

    async def close(self) -> None:
        """Write the steps that are left, and flush."""
        await self._unwritten.write_all()
        await self._lane.run(self._recorder.close)

    @abstractmethod
    def _write(self, step: Step) -> None:
        """Write one recorded step; called in the lane."""

    def _write_figures(self, record: StepRecord, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, and the guard's note."""
        self._recorder.step(record.report.step, figures)
        if record.guard.text:
            self._recorder.guard(record.report.step, record.guard.text)


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A step that is recorded and not yet written."""

    record: StepRecord
    stats: IntakeStats
    figures: dict[str, float]  # known before its rollouts are counted
    samples: list[Sample]  # empty: no completions are shown at this step


class RunRecorder(StepRecorder[_Unwritten]):
    """Records the steps of reinforcement learning."""

    def __init__(
        self,
        context: RoleContext,
        state: ControllerState,
        live: LiveFigures,
        registry: ProcessRegistry,
        weight_sync: WeightSync,
        sink: RolloutSink,
        lane: DiskLane,
        *,
        channels: Sequence[ServerChannel],
        clock: Clock,
    ) -> None:
        super().__init__(context, state.totals, live, lane, clock, step=state.step)
        self._ledger, self._prompts, self._tokenizer = state.ledger, state.prompts, state.tokenizer
        self._registry, self._weight_sync, self._sink = registry, weight_sync, sink
        self._channels, self._generators, self._services = channels, GeneratorMeter(registry), ServiceMeter(registry)
        self._generated = Rate(RATE_WINDOW_S, clock())
        live.step, live.version = state.step, state.policy_version
        self._show_totals()

    def training_begins(self) -> None:
        """Call when the first weights are live: training time is counted from here."""
        self._times.begin()
        self._generated = Rate(RATE_WINDOW_S, self._clock())
        self._generators.look()
        self._live.phase = "training"

    async def record(self, record: StepRecord) -> None:
        """Record one step; wait while many are unwritten."""
        stats = self._sink.drain()
        step_s = self._times.step_done(record.report.step + 1, tokens_trained(record.batch))
        figures = self._account(record, stats, step_s) | self._situation()
        has_details = record.report.step % DETAILS_EVERY_STEPS == 0
        samples = self._samples(record.groups) if has_details else []
        self._show(record, stats, figures)
        await self._unwritten.put(_Unwritten(record, stats, figures, samples))

    # ------------------------------------------------------------------------------------------------------- internals

    def _write(self, step: _Unwritten) -> None:
        record, stats = step.record, step.stats
        figures = training_figures(record, self._config.trainer.token_budget) | sampling_figures(stats)
        if self._config.algorithm.routing_replay:
            figures |= route_figures(record.groups)
        figures |= dataset_figures(stats.groups, [dataset.title for dataset in self._config.data]) | step.figures
        self._write_figures(record, figures)
        number = record.report.step
        if number % DETAILS_EVERY_STEPS == 0:
            for name, values in histograms(record).items():
                self._recorder.histogram(name, number, values)
            self._recorder.samples(number, step.samples)

    def _account(self, record: StepRecord, stats: IntakeStats, step_s: float) -> dict[str, float]:
        """Add one step to the totals; return the metrics derived from them."""
        totals, now = self._totals, self._clock()
        rollouts = [member.rollout for group in record.groups for member in group.members]
        num_tokens = tokens_trained(record.batch)
        idle_s = record.report.metrics.get("wait_for_batch_s", 0.0)
        generator_s, generator_idle_s = self._generators.look()
        self._generated.add(now, stats.num_tokens)
        totals.steps += 1
        totals.skipped_steps += not record.report.applied
        totals.rollouts_trained += len(rollouts)
        totals.rollouts_spanning_update += sum(not rollout.is_of_one_version for rollout in rollouts)
        oldest = min(group.admitted_version for group in record.groups)
        totals.staleness_max = max(totals.staleness_max, record.trained_version - oldest)
        totals.tokens_trained += num_tokens
        stats.add_to(totals)
        totals.packing_fill_sum += packing_fill(record.batch, self._config.trainer.token_budget)
        totals.trainer_idle_s += min(idle_s, step_s)
        totals.generator_idle_s += generator_idle_s
        totals.generator_s += generator_s
        totals.training_s += step_s
        totals.canaries_failed += self._weight_sync.take_failed_canaries()
        self.close_totals()
        return {
            "trainer/idle_ratio": min(1.0, idle_s / step_s) if step_s else 0.0,
            "generator/idle_ratio": generator_idle_s / generator_s if generator_s else 0.0,
            **self._generators.decoding.figures(),
            "trainer/tokens_per_s": self._times.tokens_per_s,
            "generator/tokens_per_s": self._generated.per_second(now),
            "trainer/skipped_steps": float(totals.skipped_steps),
            "time/step_s": step_s,
            "tokens/generated_total": float(totals.tokens_generated),
            "tokens/trained_total": float(totals.tokens_trained),
            "group/dropped_total": float(totals.groups_dropped),
            "group/replaced_total": float(totals.zero_variance_groups * self._config.admission.active_sampling),
            "group/regranted_total": float(totals.leases_regranted),
            "generator/tokens_lost_total": float(totals.tokens_lost),
            "checkpoint/failed_total": float(totals.checkpoints_failed),
            "weights/canary_failed_total": float(totals.canaries_failed),
            "wall_s": totals.wall_s,
        }

    def _situation(self) -> dict[str, float]:
        """Current state: queues, weights, engines."""
        counts = self._ledger.counts()
        are_there = self._registry.names("generator")
        acks = [ack for name, ack in self._weight_sync.last_acks.items() if name in are_there and not ack.error]
        channels = [channel.statistics for channel in self._channels]
        num_generators = max(1, len(are_there))
        return {
            **self._prompts.figures(),
            "staleness/bound": float(self._ledger.staleness_bound),
            "queue/slots_free": float(counts["free_slots"]),
            "queue/in_flight": float(counts["in_flight"]),
            "queue/finished": float(counts["finished"]),
            "queue/taken": float(counts["taken"]),
            "weights/publish_s": self._weight_sync.publish_s,
            "weights/sent_share": self._weight_sync.sent_share,
            "weights/receive_s": max((ack.receive_s for ack in acks), default=0.0),
            "weights/pause_s": max((ack.pause_s for ack in acks), default=0.0),
            "weights/canary_logratio": self._weight_sync.canary_logratio,
            "weights/checksums_differed": float(self._weight_sync.num_checksums_differed),
            "weights/version": float(self._weight_sync.live_version),
            "weights/epoch": float(self._weight_sync.epoch),
            "weights/members": float(len(self._weight_sync.ready_members)),
            "generator/live": float(len(are_there)),
            "generator/tokens_unreported": self._registry.total("tokens_unreported", "generator"),
            "generator/running": self._registry.total("running", "generator"),
            "generator/waiting": self._registry.total("waiting", "generator"),
            "generator/preemptions": self._registry.total("preemptions", "generator"),
            "generator/kv_usage": self._registry.total("kv_usage", "generator") / num_generators,
            "reward/verifier_error_share": self._sink.verifier_error_share,
            "reward/queued": self._registry.total("queued", "reward"),
            "reward/worker_restarts": self._registry.total("restarts", "reward"),
            "reward/retries": self._registry.total("reward_retries", "generator"),
            **verifier_figures(by_task(self._registry.totals(PREFIX, "reward", "generator"))),
            **self._services.look(),
            **teacher_service_figures(by_task(self._registry.totals(TEACHER_PREFIX, "generator"), TEACHER_PREFIX)),
            "transport/lost_total": float(sum(one.messages_lost for one in channels)),
            "transport/rejected_total": float(sum(one.messages_rejected for one in channels)),
            "transport/denied_total": float(sum(one.connections_denied for one in channels)),
            "event_loop/lag_s": self.lag.take(),
        }

    def _samples(self, groups: Sequence[RolloutGroup]) -> list[Sample]:
        chosen = groups[:NUM_SAMPLES]
        return [
            Sample(
                prompt=self._tokenizer.decode(group.prompt.token_ids),
                completion=self._completion(group.members[0].rollout),
                reward=group.members[0].reward,
                reference=group.prompt.reference,
            )
            for group in chosen
        ]

    def _completion(self, rollout: Rollout) -> str:
        """Text of a completion, a paragraph for each row; if it has several turns, with special tokens between them."""
        is_plain = bool(rollout.loss_mask.all())
        rows = [
            self._tokenizer.decode(rollout.token_ids[row], keep_special_tokens=not is_plain) for row in rollout.rows
        ]
        return "\n\n".join(rows)

    def _show_totals(self) -> None:
        """Copy totals to the live figures before the first step; if no step is left, with rates of the whole run."""
        live, totals = self._live, self._totals
        live.reward, live.staleness_max = totals.last_reward, totals.staleness_max
        live.checkpoints_failed = totals.checkpoints_failed
        if live.step >= self._config.run.num_steps and totals.training_s:
            live.trainer_tokens_per_s = totals.tokens_trained / totals.training_s
            live.generator_tokens_per_s = totals.tokens_generated / totals.training_s

    def _show(self, record: StepRecord, stats: IntakeStats, figures: dict[str, float]) -> None:
        live, values = self._live, rewards(stats.groups)
        self._times.show(live)
        live.step, live.version = record.report.step + 1, record.report.policy_version
        live.save_s = record.longest_save_s
        live.reward = self._totals.last_reward = float(values.mean()) if len(values) else live.reward
        live.staleness_max = self._totals.staleness_max
        live.checkpoints_failed = self._totals.checkpoints_failed
        live.trainer_tokens_per_s = figures["trainer/tokens_per_s"]
        live.generator_tokens_per_s = figures["generator/tokens_per_s"]


class StageRecorder(StepRecorder[tuple[StepRecord, dict[str, float]]]):
    """Records the steps of supervised fine-tuning."""

    def __init__(
        self,
        context: RoleContext,
        totals: Totals,
        live: LiveFigures,
        held_out: HeldOutLoss,
        lane: DiskLane,
        *,
        channels: Sequence[ServerChannel],
        clock: Clock,
        num_conversations: int,
    ) -> None:
        """live: holds the step to begin with.  num_conversations: of an epoch."""
        super().__init__(context, totals, live, lane, clock, step=live.step)
        self._channels, self._held_out, live.held_out = channels, held_out, held_out
        self._epochs_a_step = context.config.sft.batch_size / num_conversations
        live.checkpoints_failed = totals.checkpoints_failed

    def training_begins(self) -> None:
        """Call when training begins: training time is counted from here."""
        self._times.begin()
        self._live.phase = "training"

    async def record(self, record: StepRecord) -> None:
        """Record one step; wait while many are unwritten."""
        totals, live, step = self._totals, self._live, record.report.step
        num_tokens, idle_s = tokens_trained(record.batch), record.report.metrics.get("wait_for_batch_s", 0.0)
        step_s = self._times.step_done(step + 1, num_tokens)
        fill = packing_fill(record.batch, self._config.trainer.token_budget)
        totals.steps += 1
        totals.skipped_steps += not record.report.applied
        totals.tokens_trained += num_tokens
        totals.packing_fill_sum += fill
        totals.trainer_idle_s += min(idle_s, step_s)
        totals.training_s += step_s
        self.close_totals()
        self._times.show(live)
        live.step, live.version, live.save_s = step + 1, record.report.policy_version, record.longest_save_s
        live.loss, live.checkpoints_failed = record.report.metrics.get("loss"), totals.checkpoints_failed
        live.trainer_tokens_per_s = self._times.tokens_per_s
        lost, denied = (
            float(sum(getattr(one.statistics, name) for one in self._channels))
            for name in ("messages_lost", "connections_denied")
        )
        figures = {
            "sft/epoch": (step + 1) * self._epochs_a_step,
            "trainer/idle_ratio": min(1.0, idle_s / step_s) if step_s else 0.0,
            "trainer/tokens_per_s": live.trainer_tokens_per_s,
            "trainer/skipped_steps": float(totals.skipped_steps),
            "time/step_s": step_s,
            "tokens/trained_total": float(totals.tokens_trained),
            "checkpoint/failed_total": float(totals.checkpoints_failed),
            "transport/lost_total": lost,
            "transport/denied_total": denied,
            "event_loop/lag_s": self.lag.take(),
            "wall_s": totals.wall_s,
        }
        if self._held_out.step == step + 1:
            figures |= self._held_out_figures()
        await self._unwritten.put((record, figures))

    async def evaluated(self) -> None:
        """Write a held-out loss that is not in the record of its step, since a stop came between the two."""
        await self._lane.run(self._recorder.step, self._held_out.step - 1, self._held_out_figures())

    def _held_out_figures(self) -> dict[str, float]:
        held_out = self._held_out
        if held_out.loss is None:
            return {}
        figures = {f"sft/held_out_{name}": value for name, value in held_out.figures.items()}
        return {"sft/held_out_loss": held_out.loss, **figures}

    def _write(self, step: tuple[StepRecord, dict[str, float]]) -> None:
        record, figures = step
        self._write_figures(record, step_figures(record, self._config.trainer.token_budget) | figures)


def open_event_file(context: RoleContext, step: int) -> Recorder:
    """Open the event file of this attempt, which begins with this step.  Raises RunDirectoryError, OSError."""
    recorder = Recorder(context.layout.tensorboard, seam=step if context.attempt > 0 else None)
    recorder.config(context.layout.config.read_text())
    if context.resume_step is not None:
        recorder.resumed(context.resume_step, context.attempt)
    return recorder


@dataclass(slots=True)
class Decoding:
    """Decoding time and tokens between two readings, summed over engines."""

    busy_s: float = 0.0
    decoding_s: float = 0.0  # busy time times the number of rollouts being decoded
    num_tokens: float = 0.0

    def figures(self) -> dict[str, float]:
        """Metrics; none for an interval without tokens."""
        if not (self.busy_s > 0 and self.num_tokens > 0):
            return {}
        return {
            "generator/decoded_together": self.decoding_s / self.busy_s,
            "generator/token_s": self.decoding_s / self.num_tokens,
        }


@dataclass(frozen=True, slots=True)
class _Reading:
    incarnation: str
    heard_at: float
    busy_s: float
    decoding_s: float
    num_tokens: float


class ServiceMeter:
    """Measures the load of each [[service]], summed over its processes, by heartbeats.

    Counters start at 0 with every incarnation; the first reading of an incarnation counts nothing.
    """

    def __init__(self, registry: ProcessRegistry) -> None:
        self._registry = registry
        self._last: dict[str, tuple[str, float, dict[str, float]]] = {}  # incarnation, when, metrics

    def look(self) -> dict[str, float]:
        """Return the figures by their stable names: requests now, and rates since the previous reading."""
        found: dict[str, float] = {}
        for name in self._registry.names("service"):
            member = self._registry.member(name)
            if member is None:
                continue
            metrics, incarnation = member.beat.metrics, member.hello.incarnation
            figures = {"requests_running": metrics.get("running", 0.0), "requests_waiting": metrics.get("waiting", 0.0)}
            was, since, before = self._last.get(name, ("", 0.0, {}))
            seconds = member.heard_at - since if was == incarnation else 0.0
            for figure, counter in (("requests_per_s", "answered"), ("tokens_per_s", "tokens")):
                growth = metrics.get(counter, 0.0) - before.get(counter, 0.0)
                figures[figure] = growth / seconds if seconds > 0 else 0.0
            if seconds > 0 or was != incarnation:
                self._last[name] = (incarnation, member.heard_at, dict(metrics))
            for figure, value in figures.items():
                key = f"service_{figure}/{member.hello.service}"
                found[key] = found.get(key, 0.0) + value
        return found


class GeneratorMeter:
    """Measures how busy generators were between two readings of the counters in their heartbeats.

    Counters start at 0 with every incarnation; the first reading of an incarnation counts nothing.
    """

    def __init__(self, registry: ProcessRegistry) -> None:
        self._registry = registry
        self._last: dict[str, _Reading] = {}
        self.decoding = Decoding()  # between the last two readings

    def look(self) -> tuple[float, float]:
        """Return seconds since the previous reading and those of them that were idle, summed over generators."""
        seconds = idle_s = 0.0
        self.decoding = Decoding()
        for name in self._registry.names("generator"):
            member = self._registry.member(name)
            if member is None:
                continue
            counters = (member.beat.metrics.get(each, 0.0) for each in ("busy_s", "decoding_s", "tokens"))
            now = _Reading(member.hello.incarnation, member.heard_at, *counters)
            before = self._last.get(name)
            self._last[name] = now
            if before is None or before.incarnation != now.incarnation:
                continue
            elapsed = now.heard_at - before.heard_at
            seconds += elapsed
            idle_s += max(0.0, elapsed - (now.busy_s - before.busy_s))
            self.decoding.busy_s += now.busy_s - before.busy_s
            self.decoding.decoding_s += now.decoding_s - before.decoding_s
            self.decoding.num_tokens += now.num_tokens - before.num_tokens
        return seconds, idle_s
