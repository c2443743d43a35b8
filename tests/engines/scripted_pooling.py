"""A reward model without a model, for tests of everything else.

Input: a row of tokens.  Output: numbers that the checkpoint's config.json states, in its table "scripted_engine":
scores = {TEXT = NUMBER, …}, or a list of one number a class.  The score of a row is the sum of those of the texts that
occur in it; the score in a place, that of the row up to there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, PromptTokenizer
from rlhpc.protocol.contracts import PoolingEngine
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingScript:
    """Settings of a scripted reward model."""

    scores: Mapping[str, Sequence[float]]  # text → a number a class
    num_classes: int = 1
    row_s: float = 0.0  # seconds that a row takes
    die_after_rows: int | None = None  # the engine dies after scoring this many

    @classmethod
    def of(cls, config: Config) -> PoolingScript:
        """The script in the checkpoint's config.json."""
        path = config.model.path / "config.json"
        table = dict(json.loads(path.read_text()).get("scripted_engine", {})) if path.exists() else {}
        stated = table.pop("scores", {})
        scores = {text: value if isinstance(value, list) else [value] for text, value in stated.items()}
        return cls(scores=scores, num_classes=max(map(len, scores.values()), default=1), **table)


class ScriptedPoolingEngine(PoolingEngine):
    """Adds up stated scores."""

    def __init__(self, script: PoolingScript, decode: Decode) -> None:
        self.script, self._decode = script, decode
        self.num_rows = 0
        self._death = ""

    @classmethod
    def of(cls, config: Config) -> ScriptedPoolingEngine:
        """Return the engine of the checkpoint's script, for texts as its tokenizer decodes them."""
        return cls(PoolingScript.of(config), PromptTokenizer(config.model.path).decode)

    async def classify(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """See PoolingEngine."""
        await self._take_time()
        return self._activated(self._score(token_ids), use_activation)

    async def classify_tokens(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """See PoolingEngine."""
        await self._take_time()
        scores = [self._score(token_ids[: place + 1]) for place in range(len(token_ids))]
        return np.stack([self._activated(each, use_activation) for each in scores])

    async def close(self) -> None:
        """See PoolingEngine."""
        self._death = self._death or "closed"

    async def _take_time(self) -> None:
        await asyncio.sleep(self.script.row_s)
        limit = self.script.die_after_rows
        if limit is not None and self.num_rows >= limit:
            self._death = f"scripted to die after {limit} rows"
        if self._death:
            raise EngineError(f"the pooling engine is dead: {self._death}")
        self.num_rows += 1

    def _score(self, token_ids: Int32) -> Float32:
        text, found = self._decode(token_ids.tolist()), np.zeros(self.script.num_classes, np.float32)
        for part, score in self.script.scores.items():
            found += np.asarray(score, np.float32) if part in text else 0
        return found

    def _activated(self, scores: Float32, use_activation: bool) -> Float32:
        if not use_activation:
            return scores
        if len(scores) == 1:
            return np.asarray(1 / (1 + np.exp(-scores)), np.float32)
        exponents = np.exp(scores - scores.max())
        return np.asarray(exponents / exponents.sum(), np.float32)
