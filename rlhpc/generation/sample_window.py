"""How many samples a replica should hold at once, from the lengths of those that have finished.

Input: the size of the KV cache and the lengths of finished requests.  Output: a number of samples.  Pure.

Divided by the greatest length, the cache of a model that answers in a tenth of it stays nine tenths empty.  What one
request takes is measured in two ways, of which the greater counts:
    when it ends     prompt + completion, on average: of those that begin together all may be that long at once
    while it runs    tokens held, averaged over the steps of all requests, in which long ones weigh more; and two
                     standard deviations of the sum over all that run, so that the cache is rarely over-full
The prior assumes the greatest length for every request.  Finished requests outweigh it gradually, recent ones most,
since lengths change while a model learns.  Short requests finish first, so the first ones to finish are biased: that is
why there is a prior.  An engine that runs out of KV cache nevertheless preempts a request and computes it again, which
costs time and loses no rollout.
"""

from __future__ import annotations

import math

DEVIATIONS = 2.0
MEMORY_WINDOWS = 4  # memory of finished requests, in multiples of the samples that fit


class SampleWindow:
    """Divides the KV cache by the space that a request takes."""

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
        """A request ended, not aborted: num_tokens sampled, after num_prompt_tokens (a continued prefix included)."""
        keep = 1 - 1 / (MEMORY_WINDOWS * self.num_samples + 1)
        held = num_prompt_tokens + (num_tokens + self._block) / 2  # half of the last block is empty on average
        self._num_finished = keep * self._num_finished + 1
        self._final_tokens = keep * self._final_tokens + self._whole_blocks(num_prompt_tokens + num_tokens)
        self._num_steps = keep * self._num_steps + num_tokens
        self._held_tokens = keep * self._held_tokens + num_tokens * held
        self._held_squares = keep * self._held_squares + num_tokens * (held**2 + num_tokens**2 / 12)

    @property
    def num_samples(self) -> int:
        """Samples worth holding: from as many as fit at their greatest length, to max_num_seqs."""
        each = max(self._final_tokens / self._num_finished, self._tokens_while_running())
        return max(self._fewest, min(self._max_num_seqs, int(self._kv_tokens / each)))

    def _tokens_while_running(self) -> float:
        mean = self._held_tokens / self._num_steps
        variance = max(0.0, self._held_squares / self._num_steps - mean**2)
        return mean + DEVIATIONS * math.sqrt(variance * mean / self._kv_tokens)

    def _whole_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block) * self._block
