"""The tables [algorithm] and [shaping] of a run file; see config_sections.py.  Loads without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhpc.config_sections import LoosePath, NonNegative, Positive, PositiveFloat, Section
from rlhpc.user_code import is_import_path

ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "gae")
LOSSES = ("ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo")


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names and not is_import_path(value):
            raise ValueError(f"legal: {', '.join(names)}, or package.module:name of your own")
        return value

    return check


class AlgorithmConfig(Section):
    """[algorithm]: advantages, policy loss, off-policy corrections."""

    advantage: Annotated[str, AfterValidator(_one_of(ADVANTAGES))] = "grpo"
    """How rewards become advantages: "grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp",
    "reinforce_pp_baseline", "gae" from a critic (docs/algorithms.md has the formulas), or package.module:function of
    your own."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """advantage = "gae": γ, what a reward counts a token earlier."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """advantage = "gae": λ; 1 trusts rewards alone, 0 the critic's value of the next token."""
    pass_k: Annotated[int, Field(gt=1)] = 4
    """k of advantage = "pass_at_k"."""
    advantage_normalization: Literal["off", "batch", "task"] = "off"
    """Then to mean 0 and standard deviation 1 over the loss tokens of the batch, or of each task in it."""
    loss: Annotated[str, AfterValidator(_one_of(LOSSES))] = "ppo"
    """What is maximised: "ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo" (docs/algorithms.md has the formulas), or
    package.module:name of your own."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """What counts alike in the loss: tokens, completions, tokens by a constant (Dr. GRPO), prompts."""
    minibatches: Positive = 1
    """Optimiser steps on one batch, each on its part of the samples; the policy version rises once a batch."""
    epochs: Positive = 1
    """Times that each minibatch is gone through."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower bound of the clipped ratio is 1 − clip_low; 1: there is none."""
    clip_high: PositiveFloat = 0.28
    """Upper bound of the clipped ratio is 1 + clip_high (clip-higher, DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | Literal["off"] = "off"
    """loss = "ppo": bound of the ratio where the advantage is negative, so that no token is pushed without end."""
    sapo_tau_positive: PositiveFloat = 1.0
    """loss = "sapo": steepness of the gate where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """loss = "sapo": and where it is not."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """The weight π_proximal / π_behaviour is that of a token, of its whole sequence, or that one's mean per token."""
    importance_cap: PositiveFloat | Literal["off"] = 2.0
    """Truncated importance sampling: cap of the weight; "off": no such weight."""
    mask_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A token whose weight is below this before it is capped counts nothing (IcePop); 0: all count."""
    mask_above: Annotated[float, Field(gt=1)] | Literal["off"] = "off"
    """And one whose weight is above this."""
    veto_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A sequence with a token that has become less likely by this factor counts nothing; sensible is 1e-4, 0: never."""
    max_token_age: NonNegative | Literal["off"] = "off"
    """A token that was sampled more versions ago counts nothing; admission.max_staleness bounds whole rollouts."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of a term that pulls the policy towards a reference, the model at model.path; 0: none."""
    reference_every: NonNegative = 0
    """The policy becomes the reference whenever this many batches more have changed it; 0: the reference is frozen."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that term is: in the loss, or in the rewards of tokens, which advantage = "gae" knows."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """That term of a token (docs/algorithms.md has the formulas).  "k1" is for rewards: its gradient pulls nowhere."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of a bonus in the loss for the mean entropy over loss tokens; 0: none."""
    scale_rate_by_age: bool = False
    """The learning rate of a batch is divided by the mean age of its loss tokens, in versions, if that is above 1."""
    proximal: Literal["current", "recompute", "loglinear", "behaviour"] = "current"
    """Where the clipped ratio starts.  Decoupled PPO: the trainer's log-probabilities at the start of the batch, which
    with one optimiser step a batch are the current ones ("current"), or those of a separate forward pass
    ("recompute").  A-3PO: interpolated by staleness ("loglinear").  PPO: the sampler's ("behaviour")."""

    @property
    def num_optimiser_steps(self) -> int:
        """On one batch."""
        return self.minibatches * self.epochs

    def renews_reference(self, version: int) -> bool:
        """Whether the policy of this version becomes the reference before it is trained."""
        return version > 0 and self.reference_every > 0 and version % self.reference_every == 0


class CriticConfig(Section):
    """[critic]: the model that values tokens, where algorithm.advantage is "gae"."""

    path: LoosePath | None = None
    """HF checkpoint that it begins as, with a new head; none: model.path."""
    learning_rate: PositiveFloat = 1e-5
    """Of its optimiser; what else the optimiser has stands in [trainer]."""
    follows_schedule: bool = False
    """Whether it warms up and falls by the share by which trainer.learning_rate does; False: it is constant."""
    head_start_steps: NonNegative = 0
    """So many steps at the beginning only the critic learns."""
    value_clip: PositiveFloat | Literal["off"] = "off"
    """A value that has moved by more than this since the start of the batch is pushed no further."""


class ShapingConfig(Section):
    """[shaping]: what a reward becomes before advantages are computed from it."""

    part_weights: dict[str, float] = Field(default={})
    """The reward is the sum of the reward function's parts by these weights, as { answer = 1.0, format = 0.2 }; every
    verdict has to name each of them.  Default: the function's own reward."""
    overlong_tokens: NonNegative = 0
    """The last so many tokens before generation.max_completion_tokens cost more and more (DAPO); 0: none does."""
    overlong_penalty: PositiveFloat = 1.0
    """What the longest completion costs then."""
    length_weight: float = 0.0
    """Reward for a completion of generation.max_completion_tokens, in proportion for others; below 0: a penalty."""
    truncated: Literal["scored", "masked"] = "scored"
    """A completion that was cut off: as any other, or not learnt from; its reward still counts for its group."""
    variance: Literal["reward", "shaped"] = "reward"
    """Rewards by which active sampling judges whether a group teaches anything: before lengths count, or after."""
