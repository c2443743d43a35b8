"""Lengths of rollouts, and which groups are dropped because their rewards are all equal.

Input: the groups that a run has resolved, or a law with a mean.  Output: DrawnGroup.  Pure; randomness is passed in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlhpc.errors import ConfigError

LAWS = "fixed, geometric, or lognormal:SIGMA"
OF_PROMPT = 0.5  # share of the variance of log lengths that the rollouts of a prompt have in common


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group before it is sampled: its lengths and fate, which the ring does not know yet."""

    prompt_tokens: int
    tokens: NDArray[np.int64]  # [G] of each completion
    has_spread: bool  # False: admission.active_sampling drops it

    @property
    def trained_tokens(self) -> NDArray[np.int64]:
        """[G] prompt and completion."""
        return self.tokens + self.prompt_tokens


class Lengths(ABC):
    """A distribution of groups."""

    source: str
    mean_tokens: float  # of a completion
    dropped_share: float  # of finished groups

    @abstractmethod
    def draw(self, group_size: int, random: np.random.Generator) -> DrawnGroup:
        """One group."""


class RecordedLengths(Lengths):
    """Groups of a run, drawn with replacement, each with its fate: easy prompts are short and have zero variance."""

    def __init__(self, groups: list[DrawnGroup], source: str) -> None:
        """groups: at least one, and none without a rollout."""
        self.source, self._groups = source, groups
        self.mean_tokens = float(np.concatenate([group.tokens for group in groups]).mean())
        self.dropped_share = sum(not group.has_spread for group in groups) / len(groups)

    def draw(self, group_size: int, random: np.random.Generator) -> DrawnGroup:
        """If the run's groups had another size, members are drawn from each group's own."""
        group = self._groups[int(random.integers(len(self._groups)))]
        if len(group.tokens) == group_size:
            return group
        return DrawnGroup(group.prompt_tokens, random.choice(group.tokens, group_size), group.has_spread)

    def cut_off(self, longest_prompt: int, longest: int) -> RecordedLengths:
        """The same groups in a run with other limits, whose completions end at `longest` tokens."""
        groups = [
            replace(
                each,
                prompt_tokens=min(each.prompt_tokens, longest_prompt),
                tokens=np.minimum(each.tokens, longest),
            )
            for each in self._groups
        ]
        num_cut = sum(int((each.tokens > longest).sum()) for each in self._groups)
        share = num_cut / sum(len(each.tokens) for each in self._groups)
        said = f"; {share:.0%} of completions cut off at {longest} tokens" if num_cut else ""
        return RecordedLengths(groups, f"{self.source}{said}")


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """A family of distributions over 1 … longest; sigma: of the logarithm, for lognormal."""

    name: str
    sigma: float = 0.0

    @classmethod
    def parsed(cls, text: str) -> LengthLaw:
        """Parse --length-law.  Raises ConfigError."""
        name, _, sigma = text.partition(":")
        if name in ("fixed", "geometric") and not sigma:
            return cls(name)
        try:
            value = float(sigma) if name == "lognormal" else math.nan
        except ValueError:
            value = math.nan
        if not 0 < value <= 3:
            raise ConfigError(f"--length-law {text!r}: legal: {LAWS}, SIGMA above 0, up to 3")
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.name}:{self.sigma:g}" if self.name == "lognormal" else self.name


class LawfulLengths(Lengths):
    """Lengths of a law, cut off at generation.max_completion_tokens, which makes their mean a little smaller."""

    def __init__(
        self, law: LengthLaw, mean_tokens: float, longest: int, *, prompt_tokens: int, dropped_share: float, source: str
    ) -> None:
        if not 1 <= mean_tokens <= longest:
            raise ConfigError(
                f"--mean-tokens {mean_tokens:g}: legal: 1 to generation.max_completion_tokens={longest} of the run file"
            )
        self.source, self.mean_tokens, self.dropped_share = source, mean_tokens, dropped_share
        self._law, self._longest, self._prompt_tokens = law, longest, prompt_tokens

    def draw(self, group_size: int, random: np.random.Generator) -> DrawnGroup:
        """Rollouts of one prompt are more alike than those of different prompts."""
        mean, sigma = self.mean_tokens, self._law.sigma
        if self._law.name == "fixed":
            tokens = np.full(group_size, round(mean))
        elif self._law.name == "geometric":
            tokens = random.geometric(1 / mean, group_size)
        else:
            common, own = random.standard_normal(), random.standard_normal(group_size)
            deviates = math.sqrt(OF_PROMPT) * common + math.sqrt(1 - OF_PROMPT) * own
            tokens = np.rint(mean * np.exp(sigma * deviates - sigma**2 / 2))
        lengths = np.clip(tokens, 1, self._longest).astype(np.int64)
        return DrawnGroup(self._prompt_tokens, lengths, bool(random.random() >= self.dropped_share))
