"""Turns of the policy in a rollout that others speak in, too: tokens exactly as they were sampled or read.

Input: the tokens so far, from which the engine continues, as from a Prefix.  Output: the same and one more turn.
Messages are rendered by the chat template, new ones only (data/prompt_form.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.tokenizer import PromptTokenizer, stopped_at
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.types import FinishReason, Int32, Prefix, RolloutRequest, Routes


@dataclass(slots=True)
class RowTokens:
    """The tokens of one row (protocol/types.py) so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 where a token was read
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True where a token was sampled in this row
    _made: Prefix | None = None  # of a beginning: rows are long, and asked for again and again

    def __len__(self) -> int:
        return len(self.ids)

    def sampled(self, tokens: Prefix) -> None:
        """Append tokens of the policy."""
        self.ids += tokens.token_ids.tolist()
        self.logprobs += tokens.behaviour_logprobs.tolist()
        self.versions += tokens.versions.tolist()
        self.mask += [True] * len(tokens.token_ids)

    def read(self, ids: Int32, version: int) -> None:
        """Append tokens of the environment."""
        self.ids += ids.tolist()
        self.logprobs += [0.0] * len(ids)
        self.versions += [version] * len(ids)
        self.mask += [False] * len(ids)

    def beginning(self, end: int) -> RowTokens:
        """A row that begins with these tokens: it has read them all, as the policy's turns are trained in this row."""
        return RowTokens(self.ids[:end], [0.0] * end, self.versions[:end], [False] * end)

    def up_to(self, end: int) -> Prefix:
        """Its tokens before this one."""
        ids, logprobs = np.asarray(self.ids[:end], np.int32), np.asarray(self.logprobs[:end], np.float32)
        return Prefix(ids, logprobs, np.asarray(self.versions[:end], np.int32))

    def prefix(self) -> Prefix | None:
        """Its tokens; None: there are none."""
        start = len(self._made.token_ids) if self._made is not None else 0
        if start < len(self.ids):
            ids, logprobs = np.asarray(self.ids[start:], np.int32), np.asarray(self.logprobs[start:], np.float32)
            new = Prefix(ids, logprobs, np.asarray(self.versions[start:], np.int32))
            self._made = new if self._made is None else self._made.followed_by(new)
        return self._made

    def dated(self, versions: list[int]) -> None:
        """Give all tokens other versions."""
        self.versions, self._made = versions, None


class TurnSampler:
    """Samples the turns of one rollout, and knows where a turn ends."""

    def __init__(
        self,
        request: RolloutRequest,
        engine: GenerationEngine,
        tokenizer: PromptTokenizer,
        stop_token_ids: Sequence[int],
        limits: EnvironmentConfig,
    ) -> None:
        """stop_token_ids: with which the template ends a turn, besides those of the request."""
        self._engine, self._tokenizer, self._limits = engine, tokenizer, limits
        self.stops = {*request.sampling.stop_token_ids, *stop_token_ids}
        self._stop_strings = request.sampling.stop_strings
        self._request = replace(request, sampling=replace(request.sampling, stop_token_ids=tuple(sorted(self.stops))))

    def num_left(self, tokens: RowTokens) -> int:
        """Tokens that this row may still have."""
        return self._request.sampling.max_tokens - len(tokens)

    def longest(self, tokens: RowTokens, wish: int | None) -> int:
        """Most tokens of the next turn; wish: its client's limit."""
        limits = (self.num_left(tokens), self._limits.max_turn_tokens, wish)
        return min(limit for limit in limits if limit is not None)

    async def sample(
        self, tokens: RowTokens, start: int, longest: int, row: int = 0
    ) -> tuple[FinishReason, Routes | None]:
        """Append the rest of the turn that begins at `start`.  Returns why it ended, and routes of all tokens.

        row: its number in the rollout.  Raises as GenerationEngine.generate.
        """
        sampling = replace(self._request.sampling, max_tokens=start + longest, searched_from=start)
        request = replace(self._request, prefix=tokens.prefix(), sampling=sampling, row=row)
        rollout = await self._engine.generate(request)
        new = slice(len(tokens), None)
        tokens.sampled(Prefix(rollout.token_ids[new], rollout.behaviour_logprobs[new], rollout.versions[new]))
        return rollout.finish_reason, rollout.routes

    def first_turn(self, left: Prefix, longest: int) -> Prefix:
        """The turn with which these tokens begin, perhaps unfinished."""
        stops = np.flatnonzero(np.isin(left.token_ids[:longest], sorted(self.stops)))
        end = int(stops[0]) + 1 if len(stops) else longest
        return left.row(slice(self._stopped_at(left.token_ids[:end].tolist()) or end))

    def reason(self, turn: Sequence[int], longest: int) -> FinishReason | None:
        """Tell why this turn has ended; None: it has not."""
        if turn and (turn[-1] in self.stops or self._stopped_at(turn) is not None):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(turn) >= longest else None

    def spoken(self, turn: Sequence[int], reason: FinishReason) -> tuple[str, str]:
        """The text of a turn: with special tokens, and without."""
        ended, stops = reason is FinishReason.STOP, self._stop_strings
        with_them = self._tokenizer.decode_completion(
            turn, has_ended=ended, stop_strings=stops, keep_special_tokens=True
        )
        return with_them, self._tokenizer.decode_completion(turn, has_ended=ended, stop_strings=stops)

    def _stopped_at(self, turn: Sequence[int]) -> int | None:
        return stopped_at(self._tokenizer.decode, self._stop_strings, turn)
