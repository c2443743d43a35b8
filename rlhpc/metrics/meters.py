"""Small meters of a run, and the progress line that shows some of them.

In this file: busy time of an engine; how many samples a replica should hold; entries of the timeline; the progress
line; rates, event-loop lag, remaining time.

Pure except LoopLag; time is passed in, as an argument or as a clock, always monotonic seconds.  If the clock does not
advance, the result is zero, not a division by zero.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rlhpc.protocol.contracts import Clock

# ----------------------------------------------------------------------------------------------------------- busy clock
#
# Measure for how long an engine had work, and how much of it at once.
#
# Pure: the clock is passed in.


class BusyClock:
    """Seconds with at least one request in flight, pauses excluded."""

    def __init__(self, clock: Clock, max_num_seqs: int) -> None:
        """Starts without requests, not paused.  max_num_seqs: requests that are decoded together at most."""
        self._clock, self._max_num_seqs = clock, max_num_seqs
        self._num_in_hand = 0
        self._is_paused = False
        self._past_s = self._past_decoding_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Busy seconds up to now."""
        return self._past_s + self._present_s

    @property
    def decoding_s(self) -> float:
        """Request-seconds up to now: the number of requests that are decoded, integrated over the same seconds."""
        return self._past_decoding_s + self._present_s * self._num_decoded

    def enter(self) -> None:
        """A request begins."""
        self._settle()
        self._num_in_hand += 1
        self._go_on()

    def leave(self) -> None:
        """A request ends."""
        self._settle()
        self._num_in_hand -= 1
        self._go_on()

    def pause(self) -> None:
        """Stop counting."""
        self._settle()
        self._is_paused = True
        self._go_on()

    def resume(self) -> None:
        """Go on counting."""
        self._settle()
        self._is_paused = False
        self._go_on()

    @property
    def _present_s(self) -> float:
        """Busy seconds since the last change."""
        return self._clock() - self._since if self._since is not None else 0.0

    @property
    def _num_decoded(self) -> int:
        return min(self._num_in_hand, self._max_num_seqs)

    def _settle(self) -> None:
        present_s = self._present_s
        self._past_s += present_s
        self._past_decoding_s += present_s * self._num_decoded

    def _go_on(self) -> None:
        self._since = self._clock() if self._num_in_hand > 0 and not self._is_paused else None


# -------------------------------------------------------------------------------------------------------- sample window
#
# Number of samples that a replica should hold at once, from the lengths of finished ones.
#
# Input: the size of the KV cache and the lengths of finished requests.  Output: a number of samples.  Pure.
#
# Divided by the greatest length, the cache of a model that answers in a tenth of it stays nine tenths empty.  The size
# of a request is measured in two ways, of which the greater counts:
#     when it ends     prompt + completion, on average: requests that begin together may all be that long at once
#     while it runs    tokens held, averaged over the steps of all requests, so that long ones weigh more; plus two
#                      standard deviations of the sum over all running ones, so that the cache is rarely over-full
# The prior assumes the greatest length for every request.  Finished requests outweigh it gradually, recent ones most,
# since lengths change while a model learns.  Short requests finish first, so the first ones to finish are biased: that
# is why there is a prior.  An engine that runs out of KV cache nevertheless preempts a request and computes it again,
# which costs time and loses no rollout.

DEVIATIONS = 2.0
MEMORY_WINDOWS = 4  # memory of finished requests, in multiples of the samples that fit


class SampleWindow:
    """Divides the KV cache by the size of a request."""

    def __init__(self, *, kv_tokens: int, longest_tokens: int, max_num_seqs: int, block_tokens: int = 1) -> None:
        """kv_tokens: size of the cache.  longest_tokens: of a prompt with its completion.

        max_num_seqs: upper limit.  block_tokens: allocation unit of the cache.
        """
        self._kv_tokens, self._max_num_seqs, self._block = kv_tokens, max_num_seqs, block_tokens
        self._fewest = max(1, min(max_num_seqs, kv_tokens // longest_tokens))
        longest = self._whole_blocks(longest_tokens)
        self._num_finished = float(self._fewest)  # decays like all sums; starts with the prior
        self._final_tokens = self._num_finished * longest
        self._num_steps = self._num_finished * longest_tokens  # of requests that finished
        self._held_tokens = self._num_steps * longest  # summed over these steps
        self._held_squares = self._num_steps * longest**2

    def finished(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a finished request: num_tokens sampled after num_prompt_tokens (a continued prefix included)."""
        keep = 1 - 1 / (MEMORY_WINDOWS * self.num_samples + 1)
        held = num_prompt_tokens + (num_tokens + self._block) / 2  # half of the last block is empty on average
        self._num_finished = keep * self._num_finished + 1
        self._final_tokens = keep * self._final_tokens + self._whole_blocks(num_prompt_tokens + num_tokens)
        self._num_steps = keep * self._num_steps + num_tokens
        self._held_tokens = keep * self._held_tokens + num_tokens * held
        self._held_squares = keep * self._held_squares + num_tokens * (held**2 + num_tokens**2 / 12)

    @property
    def num_samples(self) -> int:
        """Samples to hold: at least as many as fit at their greatest length, at most max_num_seqs."""
        each = max(self._final_tokens / self._num_finished, self._tokens_while_running())
        return max(self._fewest, min(self._max_num_seqs, int(self._kv_tokens / each)))

    def _tokens_while_running(self) -> float:
        mean = self._held_tokens / self._num_steps
        variance = max(0.0, self._held_squares / self._num_steps - mean**2)
        return mean + DEVIATIONS * math.sqrt(variance * mean / self._kv_tokens)

    def _whole_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block) * self._block


# ----------------------------------------------------------------------------------------------------- timeline entries

WORKS = "works"  # instead of what a process waits for
SILENT = "silent"  # no heartbeat for some seconds: paused, hung, or dead and not yet given up


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A line of timeline.jsonl: an interval that ends at `unix_time_s`, or an event."""

    unix_time_s: float
    attempt: int
    step: int
    phase: str  # of the run: starting, training, …
    seconds: float = 0.0  # length of the interval; 0: an event
    # process → WORKS, SILENT or its reason for waiting → share
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    event: str = ""  # joined, lost, left, disk
    name: str = ""  # process
    text: str = ""  # for people


# ------------------------------------------------------------------------------------------------------------- progress
#
# The live progress line of a run.
#
# Input: metrics of a step, or the phase of the run before the first one.  Output: text, written to a stream.
# On a terminal the line is rewritten in place, and items that do not fit are left out; in a log file, lines are
# infrequent, so that a week's log stays readable.

_CLEAR_LINE = "\r\x1b[K"
_QUIET_S = 30.0  # least time between two lines in a log, except for the first and the last step


@dataclass(frozen=True, slots=True)
class Progress:
    """Metrics of one finished step."""

    step: int  # steps done
    num_steps: int
    reward: float
    trainer_tokens_per_s: float
    generator_tokens_per_s: float
    staleness: float  # the worst of the run so far, in versions
    eta_s: float | None
    loss: float | None = None  # of supervised fine-tuning, nats a token; None: reinforcement learning
    held_out: float | None = None


class ProgressLine:
    """Writes the line.  Errors of the stream are ignored: they must not end a run."""

    def __init__(self, stream: TextIO, is_terminal: bool, num_steps: int, clock: Clock = time.monotonic) -> None:
        """is_terminal: whether the stream understands a carriage return (stream.isatty())."""
        self._stream, self._is_terminal, self._num_steps, self._clock = stream, is_terminal, num_steps, clock
        self._last_s: float | None = None  # when the last line was written
        self._last_phase = ""
        self._is_open = False  # something stands on the terminal's line

    def update(self, progress: Progress) -> None:
        """Show the metrics of a finished step, if a line is due."""
        if self._is_terminal:
            self._rewrite(parts_of(progress))
        elif self._last_phase or self._is_due(progress.step):
            self._last_s, self._last_phase = self._clock(), ""
            self._write(" | ".join(parts_of(progress)) + "\n")

    def wait(self, phase: str, waits_for: str) -> None:
        """Show the phase of the run before it trains.  In a log, a line for each phase, and now and then another."""
        parts = [phase, waits_for] if waits_for else [phase]
        if self._is_terminal:
            self._rewrite(parts)
        elif phase != self._last_phase or self._is_due(0):
            self._last_s, self._last_phase = self._clock(), phase
            self._write(" | ".join(parts) + "\n")

    def finish(self) -> None:
        """Finish the last line, so that later output starts on a new one."""
        if self._is_open:
            self._is_open = False
            self._write("\n")

    def _rewrite(self, parts: Sequence[str]) -> None:
        self._is_open = True
        self._write(_CLEAR_LINE + fitting(parts, shutil.get_terminal_size().columns - 1))

    def _is_due(self, step: int) -> bool:
        return self._last_s is None or step >= self._num_steps or self._clock() - self._last_s >= _QUIET_S

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            return


def parts_of(progress: Progress) -> list[str]:
    """Parts of the line, the most important first.

    Example: step 120/2000 | 3 h 05 min left | reward 0.412 | staleness 1.2 | generate 48.1k tok/s | train 13.2k tok/s
    """
    left = [] if progress.eta_s is None else [f"{format_duration(progress.eta_s)} left"]
    done, train = (
        f"step {progress.step}/{progress.num_steps}",
        f"train {format_count(progress.trainer_tokens_per_s)} tok/s",
    )
    if progress.loss is not None:
        held_out = [] if progress.held_out is None else [f"held out {progress.held_out:.4f}"]
        return [done, *left, f"loss {progress.loss:.4f}", *held_out, train]
    return [
        done,
        *left,
        f"reward {progress.reward:.3f}",
        f"staleness {progress.staleness:.1f}",
        f"generate {format_count(progress.generator_tokens_per_s)} tok/s",
        train,
    ]


def fitting(parts: Sequence[str], width: int) -> str:
    """Join as many whole parts as there is room for; the first part is cut if even that is too long."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(" | ") + len(part) > width:
            break
        line += f" | {part}"
    return line[:width]


def format_count(count: float) -> str:
    """Three digits and a power of a thousand: 950, 13.2k, 1.05M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size * 0.9995:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 05 min, 2 d 04 h."""
    minutes = round(seconds / 60)
    if seconds < 59.5:
        return f"{max(0, round(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


# --------------------------------------------------------------------------------------------------------------- meters


class Rate:
    """Amount per second over a sliding window."""

    def __init__(self, window_s: float, now: float) -> None:
        """now: start of counting; until a window has passed, the rate is over the time since then."""
        self._window_s, self._began = window_s, now
        self._events: deque[tuple[float, float]] = deque()  # (when, how much)
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """Add `amount`; `now` never decreases."""
        self._events.append((now, amount))
        self._sum += amount
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Amount of the last window over its length; 0 if no time has passed."""
        self._forget(now)
        span_s = min(self._window_s, now - self._began)
        return self._sum / span_s if span_s > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self._window_s:
            self._sum -= self._events.popleft()[1]
        if not self._events:
            self._sum = 0.0  # so that rounding errors do not accumulate over weeks


class LoopLag:
    """Delay with which an event loop resumes a task that slept; it is added to every message's."""

    def __init__(
        self, clock: Clock, interval_s: float = 0.1, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """interval_s: between two measurements."""
        self._clock, self._interval_s, self._sleep = clock, interval_s, sleep
        self._max_s = 0.0
        self._sleeps_until: float | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._sleeps_until = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self._look()

    def take(self) -> float:
        """Return the worst lag in seconds since the last take.

        Includes a lag that still lasts: the caller runs on the loop too, perhaps before the task that slept.
        """
        self._look()
        worst_s, self._max_s = self._max_s, 0.0
        return worst_s

    def _look(self) -> None:
        if self._sleeps_until is not None:
            self._max_s = max(self._max_s, self._clock() - self._sleeps_until)


class Eta:
    """Remaining time of the run, from the pace of its last steps."""

    def __init__(self, num_steps: int, window_steps: int = 20) -> None:
        """num_steps: of the whole run.

        The first step of an attempt waits for engines to start; it only sets the clock and counts for nothing.
        """
        self._num_steps = num_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=window_steps + 1)  # (steps done, when)

    def step_done(self, num_done: int, now: float) -> None:
        """Record that `num_done` steps of the run are done."""
        self._ends.append((num_done, now))

    def remaining_s(self) -> float | None:
        """Seconds from the last step to the end of the run; None before two steps were seen."""
        if len(self._ends) < 2:
            return None
        (first_done, first_s), (last_done, last_s) = self._ends[0], self._ends[-1]
        if last_done <= first_done:
            return None
        return (last_s - first_s) / (last_done - first_done) * max(0, self._num_steps - last_done)
