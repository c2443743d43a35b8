"""The tables [algorithm] and [shaping] of a run file; see tables.py.  Loads without torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhpc.base.user_code import did_you_mean, is_import_path
from rlhpc.config.tables import Arguments, LearningRate, LoosePath, NonNegative, Positive, PositiveFloat, Section, Share

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


# ---------------------------------------------------------------------------------------------------- config curriculum
#
# The table [curriculum] of a run file, and its rules; see tables.py.  Loads without torch.


Ascending = Annotated[tuple[float, ...], Field(strict=False)]  # a run file has lists


class CurriculumConfig(Section):
    """[curriculum]: which prompts are left out when their turn comes, by what the run remembers of them."""

    solved_rest_epochs: NonNegative = 0
    """Epochs for which a solved prompt is skipped before it is sampled again; 0: never skipped."""
    solved_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A prompt is solved if the pass rate of its newest group is at least this."""
    hopeless_rest_epochs: NonNegative = 0
    """Epochs for which a hopeless prompt is skipped before it is sampled again; 0: never skipped."""
    hopeless_at: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A prompt is hopeless if the pass rate of its newest group is at most this."""
    target_pass_rate: Annotated[float, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Prompts are sampled less often the farther their pass rate is from this; new prompts always are."""
    min_chance: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a prompt with the pass rate farthest from target_pass_rate is sampled when its turn comes."""
    newest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of a prompt's newest group in its pass rate, by which target_pass_rate and max_group_size go; the groups
    before it share the rest."""
    max_group_size: Positive | Literal["off"] = "off"
    """Maximum rollouts of one prompt: a hard one, by its pass rate, gets more than admission.group_size; a new prompt
    gets admission.group_size."""
    pass_chance: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Enough rollouts that at least one passes with this probability; only with max_group_size."""
    stages: Ascending = ()
    """Ascending bounds of difficulty: at first only prompts up to the first bound are sampled, then those up to the
    second too, …, finally all. Default: no stages."""
    difficulty_field: str = "difficulty"
    """Field of the record that holds its difficulty, a number."""
    stage_pass_rate: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The next stage begins when the mean pass rate of the newest stage_groups groups of a stage has reached this."""
    stage_groups: Positive = 64
    """Minimum number of groups for that."""

    @property
    def leaves_out(self) -> bool:
        """Whether some prompt may be left out: which one is next then depends on what was sampled before."""
        rests = self.solved_rest_epochs or self.hopeless_rest_epochs
        return bool(rests or self.stages or self.target_pass_rate != "off")

    @property
    def goes_by_memory(self) -> bool:
        """Whether the next prompt, or how often it is sampled, depends on what was sampled before."""
        return self.leaves_out or self.max_group_size != "off"


def stages_ascend(config: Config) -> None:
    """Each bound lets more prompts in than the one before."""
    stages = config.curriculum.stages
    if any(after <= before for before, after in pairwise(stages)):
        raise ValueError(f"curriculum.stages={list(stages)} must ascend; each stage adds harder prompts")


def no_prompt_is_solved_and_hopeless(config: Config) -> None:
    """A pass rate is on one side of both bounds, or between them."""
    curriculum = config.curriculum
    if curriculum.hopeless_at >= curriculum.solved_at:
        raise ValueError(
            f"curriculum.hopeless_at={curriculum.hopeless_at:g} is not below curriculum.solved_at="
            f"{curriculum.solved_at:g}"
        )


# --------------------------------------------------------------------------------------------------------- config guard
#
# [guard]: what follows when training leaves its bounds; see tables.py.  Loads without torch.


class GuardConfig(Section):
    """[guard]: what follows when the figures of optimiser steps leave their bounds."""

    action: Literal["off", "warn", "tighten", "skip", "stop"] = "warn"
    """The strongest permitted action. Each includes those before it: "warn"; "tighten": admit with half of
    max_staleness, unless run.deterministic; "skip": all ranks skip steps that are out of bounds; "stop": end the
    run."""
    patience_steps: Positive = 3
    """Out-of-bounds steps before the next stronger action is taken, as long as fewer than calm_steps lie between
    them."""
    calm_steps: Positive = 20
    """Consecutive steps within bounds that end an alarm: admission returns to normal, and the next action is a
    warning."""
    max_mismatch_kl: PositiveFloat = 0.1
    """Bound of policy/mismatch_kl, nats: KL divergence of the sampler from the proximal policy."""
    min_ess: Share = 0.3
    """Bound of policy/ess, the effective sample size of the importance weights as a fraction."""
    min_entropy: Annotated[float, Field(ge=0)] = 0.001
    """Bound of trainer/entropy, nats: below it the policy always samples the same answer."""
    max_entropy: PositiveFloat = 5.0
    """Bound of trainer/entropy, nats: above it the policy samples noise, as if 150 tokens were equally likely
    everywhere."""
    grad_norm_deviations: PositiveFloat = 8.0
    """Bound of trainer/grad_norm: standard deviations of its logarithm over the last 50 steps, robustly estimated and
    at least 0.2, above their median; with 8 that is 5 times the median or more."""

    @model_validator(mode="after")
    def _entropy_has_a_range(self) -> Self:
        if self.min_entropy >= self.max_entropy:
            raise ValueError(f"guard.min_entropy={self.min_entropy:g} is not below max_entropy={self.max_entropy:g}")
        return self


# ----------------------------------------------------------------------------------------------------- config algorithm


ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "gae")
OVER_BATCH = ("reinforce_pp", "reinforce_pp_baseline")  # of these, normalised over the batch by definition
OF_REWARDS = ("reinforce_pp", "gae")  # made of the rewards themselves, not of what distinguishes them in a group
LOSSES = ("ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo", "dppo")


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names and not is_import_path(value):
            hint = did_you_mean(value, names)
            raise ValueError(f"legal: {', '.join(names)}, or package.module:name of your own{hint}")
        return value

    return check


class AlgorithmConfig(Section):
    """[algorithm]: advantages, policy loss, off-policy corrections."""

    advantage: Annotated[str, AfterValidator(_one_of(ADVANTAGES))] = "grpo"
    """How rewards become advantages: "grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp",
    "reinforce_pp_baseline", "gae" from a critic (docs/algorithms.md has the formulas), or package.module:function of
    your own."""
    advantage_arguments: Arguments = Field(default={})
    """Keyword arguments of an estimator of your own, as { scale = 0.5 }."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """advantage = "gae": γ, the discount of a reward per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """advantage = "gae": λ; 1 uses rewards alone, 0 bootstraps from the critic's value of the next token."""
    pass_k: Annotated[int, Field(gt=1)] = 4
    """k of advantage = "pass_at_k"."""
    advantage_normalization: Literal["off", "batch", "task"] = "off"
    """Normalise advantages to mean 0 and standard deviation 1 over the loss tokens of the batch, or of each task in
    it."""
    loss: Annotated[str, AfterValidator(_one_of(LOSSES))] = "ppo"
    """Objective to maximise: "ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo", "dppo" (docs/algorithms.md has the
    formulas), or package.module:name of your own."""
    loss_arguments: Arguments = Field(default={})
    """Keyword arguments of a loss of your own, as { clip = 0.2 }."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """What has equal weight in the loss: tokens, completions, tokens over a constant (Dr. GRPO), prompts."""
    minibatches: Positive = 1
    """Optimiser steps per pass over a batch, each on its part of the samples; the policy version rises once per
    batch."""
    epochs: Positive = 1
    """Passes over each batch."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The lower bound of the clipped ratio is 1 − clip_low; 1: no bound.  loss = "dppo": of the change of a token's
    probability, −clip_low."""
    clip_high: PositiveFloat = 0.28
    """The upper bound of the clipped ratio is 1 + clip_high (clip-higher, DAPO).  loss = "dppo": of the change of a
    token's probability, clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | Literal["off"] = "off"
    """loss = "ppo": bound of the ratio where the advantage is negative, so that no token's loss is unbounded."""
    sapo_tau_positive: PositiveFloat = 1.0
    """loss = "sapo": steepness of the gate where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """loss = "sapo": steepness of the gate elsewhere."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """The weight π_proximal / π_behaviour is per token, per sequence, or the sequence's geometric mean per token."""
    importance_cap: PositiveFloat | Literal["off"] = 2.0
    """Truncated importance sampling: maximum weight; "off": no importance weight."""
    mask_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens whose weight is below this, before the cap, are masked (IcePop); 0: none."""
    mask_above: Annotated[float, Field(gt=1)] | Literal["off"] = "off"
    """Tokens whose weight is above this, before the cap, are masked (IcePop)."""
    veto_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A sequence is masked if any of its tokens has become less likely by this factor; typical is 1e-4, 0: never."""
    veto_drift_above: PositiveFloat | Literal["off"] = "off"
    """A sequence of negative advantage is masked if the mean of log π_behaviour / π_proximal over its tokens is above
    this, in nats (off-policy sequence masking, DeepSeek-V3.2)."""
    max_token_age: NonNegative | Literal["off"] = "off"
    """Tokens sampled more than this many versions ago are masked; admission.max_staleness bounds whole rollouts."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL term towards a reference policy, the model at model.path; 0: none."""
    reference_every: NonNegative = 0
    """Policy versions after which the reference is replaced by the current policy; 0: the reference is frozen."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: into the loss, or into token rewards, which needs advantage = "gae"."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator per token (docs/algorithms.md has the formulas). "k1" is for rewards: its gradient in a loss is zero
    in expectation."""
    kl_importance: bool = False
    """Multiply the KL term in the loss by π_current / π_behaviour, truncated at importance_cap, so that its mean is
    over the current policy's tokens (DeepSeek-V3.2, with kl_estimator = "k2")."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of a bonus in the loss for the mean entropy over loss tokens; 0: none."""
    scale_rate_by_age: bool = False
    """Divide the learning rate of a batch by the mean age of its loss tokens, in versions, if that is above 1."""
    proximal: Literal["current", "recompute", "loglinear", "behaviour"] = "current"
    """Where the clipped ratio starts.  Decoupled PPO: the trainer's log-probabilities at the start of the batch, which
    with one optimiser step a batch are the current ones ("current"), or those of a separate forward pass
    ("recompute").  A-3PO: interpolated by staleness ("loglinear").  PPO: the sampler's ("behaviour")."""

    @property
    def own_formulas(self) -> list[tuple[str, str]]:
        """(key, package.module:function) of the user's own loss and estimator."""
        named = (("loss", self.loss, LOSSES), ("advantage", self.advantage, ADVANTAGES))
        return [(f"algorithm.{key}", value) for key, value, built_in in named if value not in built_in]

    def arguments_of(self, key: str) -> Arguments:
        """Keyword arguments of the user's own loss or estimator; key: as of own_formulas."""
        return self.loss_arguments if key == "algorithm.loss" else self.advantage_arguments

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
    """HF checkpoint that it is initialised from, with a new head; none: model.path."""
    learning_rate: LearningRate = 1e-5
    """Learning rate of the critic; it shares the other optimiser settings of [trainer]."""
    follows_schedule: bool = False
    """Apply the warm-up and decay of trainer.learning_rate to it; False: constant."""
    head_start_steps: NonNegative = 0
    """Initial steps in which only the critic is trained."""
    value_clip: PositiveFloat | Literal["off"] = "off"
    """Clip range of values around those at the start of the batch."""


class ShapingConfig(Section):
    """[shaping]: what a reward becomes before advantages are computed from it."""

    part_weights: dict[str, float] = Field(default={})
    """The reward is the weighted sum of the reward function's parts, as { answer = 1.0, format = 0.2 }; every verdict
    must have each of them. Default: the function's own reward."""
    overlong_tokens: NonNegative = 0
    """Length of the interval before generation.max_completion_tokens in which a penalty grows linearly (DAPO); 0: no
    penalty."""
    overlong_penalty: PositiveFloat = 1.0
    """Penalty of a completion of maximum length."""
    length_weight: float = 0.0
    """Reward of a completion of generation.max_completion_tokens, proportional for shorter ones; below 0: a penalty."""
    truncated: Literal["scored", "masked"] = "scored"
    """A completion that was cut off is treated as any other, or masked out of the loss; its reward counts for its group
    either way."""
    variance: Literal["reward", "shaped"] = "reward"
    """Rewards by which active sampling decides whether a group has zero variance: before lengths count, or after."""
