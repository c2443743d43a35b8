"""The tables [algorithm], [lora] and [shaping] of a run file; see tables.py.  Loads without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from rlhpc.base.user_code import did_you_mean, is_import_path
from rlhpc.config.setting import (
    ANY_SIZE,
    GROUPS,
    STEPS,
    USUAL_RATE,
    Arguments,
    Faults,
    Idle,
    Keys,
    LearningRate,
    LoosePath,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Share,
    Usual,
    idle_with,
    only_with,
    only_with_any,
    rule,
)

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


Ascending = Annotated[tuple[float, ...], Field(strict=False)]  # a run file has lists


class CurriculumConfig(Section):
    """[curriculum]: skip prompts, or sample them more often, by their pass rates in this run."""

    solved_rest_epochs: Annotated[NonNegative, Usual(1, 1000, "it is in epochs of the dataset", zero=True)] = 0
    """Epochs for which a solved prompt is skipped before it is sampled again; 0: never skipped."""
    solved_at: Annotated[float, Field(gt=0, le=1), ANY_SIZE, only_with("curriculum.solved_rest_epochs")] = 1.0
    """A prompt is solved if the pass rate of its newest group is at least this."""
    hopeless_rest_epochs: Annotated[NonNegative, Usual(1, 1000, "it is in epochs of the dataset", zero=True)] = 0
    """Epochs for which a hopeless prompt is skipped before it is sampled again; 0: never skipped."""
    hopeless_at: Annotated[float, Field(ge=0, lt=1), only_with("curriculum.hopeless_rest_epochs")] = 0.0
    """A prompt is hopeless if the pass rate of its newest group is at most this."""
    target_pass_rate: Annotated[Annotated[float, Field(gt=0, lt=1)] | Literal["off"], ANY_SIZE] = "off"
    """Prompts are sampled less often the farther their pass rate is from this; new prompts always are."""
    min_chance: Annotated[float, Field(gt=0, le=1), ANY_SIZE, only_with("curriculum.target_pass_rate")] = 0.1
    """Probability that a prompt with the pass rate farthest from target_pass_rate is sampled when its turn comes."""
    newest_weight: Annotated[
        float, Field(gt=0, le=1), ANY_SIZE, only_with_any("curriculum.target_pass_rate", "curriculum.max_group_size")
    ] = 0.5
    """Weight of a prompt's newest group in its pass rate, by which target_pass_rate and max_group_size go; the groups
    before it share the rest."""
    max_group_size: Annotated[Positive | Literal["off"], Usual(1, 4096, "it is in rollouts of one prompt")] = "off"
    """Maximum rollouts of one prompt: a hard one, by its pass rate, gets more than admission.group_size; a new prompt
    gets admission.group_size."""
    pass_chance: Annotated[float, Field(gt=0, lt=1), ANY_SIZE, only_with("curriculum.max_group_size")] = 0.9
    """Enough rollouts that at least one passes with this probability."""
    stages: Annotated[Ascending, ANY_SIZE] = ()
    """Ascending bounds of difficulty: at first only prompts up to the first bound are sampled, then those up to the
    second too, …, finally all. Default: no stages."""
    difficulty_field: Annotated[str, only_with("curriculum.stages")] = "difficulty"
    """Field of the record that holds its difficulty, a number."""
    stage_pass_rate: Annotated[float, Field(gt=0, le=1), ANY_SIZE, only_with("curriculum.stages")] = 0.7
    """The next stage begins when the mean pass rate of the newest stage_groups groups of a stage has reached this."""
    stage_groups: Annotated[Positive, Usual(1, 1e6, GROUPS), only_with("curriculum.stages")] = 64
    """Minimum number of groups for that."""

    @property
    def leaves_out(self) -> bool:
        """Whether prompts may be skipped: the next prompt then depends on rollouts sampled before."""
        rests = self.solved_rest_epochs or self.hopeless_rest_epochs
        return bool(rests or self.stages or self.target_pass_rate != "off")

    @property
    def goes_by_memory(self) -> bool:
        """Whether the next prompt, or its number of rollouts, depends on rollouts sampled before."""
        return self.leaves_out or self.max_group_size != "off"

    @rule
    def stages_ascend(self, config: Config, key: Keys) -> Faults:
        """`stages`: ascend; each adds harder prompts."""
        if any(after <= before for before, after in pairwise(self.stages)):
            yield f"{key.stages} must ascend; each stage adds harder prompts"

    @rule
    def no_prompt_is_solved_and_hopeless(self, config: Config, key: Keys) -> Faults:
        """`hopeless_at`: below `solved_at`."""
        if self.hopeless_at >= self.solved_at:
            yield f"{key.hopeless_at} is not below {key.solved_at}"

    @rule
    def hard_prompts_get_more(self, config: Config, key: Keys) -> Faults:
        """`max_group_size`: above `admission.group_size`, which every prompt gets."""
        most, size = self.max_group_size, config.admission.group_size
        if most != "off" and most <= size:
            yield (
                f"{key.max_group_size} is not above {key.admission.group_size}, which every prompt gets; legal: "
                f"{size + 1} or more, or 'off'"
            )


class GuardConfig(Section):
    """[guard]: actions when figures of optimiser steps leave their bounds."""

    action: Literal["off", "warn", "tighten", "skip", "stop"] = "warn"
    """The strongest permitted action. Each includes those before it: "warn"; "tighten": admit with half of
    max_staleness, unless run.deterministic; "skip": all ranks skip steps that are out of bounds; "stop": end the
    run."""
    patience_steps: Annotated[Positive, Usual(1, 1e4, STEPS)] = 3
    """Out-of-bounds steps before the next stronger action is taken, as long as fewer than calm_steps lie between
    them."""
    calm_steps: Annotated[Positive, Usual(1, 1e5, STEPS)] = 20
    """Consecutive steps within bounds that end an alarm: admission returns to normal, and the next action is a
    warning."""
    max_mismatch_kl: Annotated[PositiveFloat, Usual(1e-4, 100, "it is in nats a token")] = 0.1
    """Bound of policy/mismatch_kl, nats: KL divergence of the sampler from the proximal policy."""
    min_ess: Share = 0.3
    """Bound of policy/ess, the effective sample size of the importance weights as a fraction."""
    min_entropy: Annotated[float, Field(ge=0), Usual(1e-7, 10, "it is in nats a token", zero=True)] = 0.001
    """Bound of trainer/entropy, nats: below it the policy always samples the same answer."""
    max_entropy: Annotated[
        PositiveFloat, Usual(0.01, 20, "it is in nats a token; a vocabulary of 150,000 has at most 12")
    ] = 5.0
    """Bound of trainer/entropy, nats: above it the policy samples noise, as if 150 tokens were equally likely
    everywhere."""
    grad_norm_deviations: Annotated[PositiveFloat, Usual(1, 1000, "it is in standard deviations")] = 8.0
    """Bound of trainer/grad_norm: standard deviations of its logarithm over the last 50 steps, robustly estimated and
    at least 0.2, above their median; with 8 that is 5 times the median or more."""

    @rule
    def entropy_has_a_range(self, config: Config, key: Keys) -> Faults:
        """`min_entropy`: below `max_entropy`."""
        if self.min_entropy >= self.max_entropy:
            yield f"{key.min_entropy} is not below max_entropy={self.max_entropy:g}"


ADVANTAGES = (
    "grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "gae", "distillation"
)  # fmt: skip
OVER_BATCH = ("reinforce_pp", "reinforce_pp_baseline")  # advantages normalised over the batch by definition
OF_REWARDS = ("reinforce_pp", "gae")  # advantages of the rewards themselves, not of differences within a group
DISTILLATION = "distillation"  # advantages of a teacher, and none of rewards
RowCredit: TypeAlias = Literal["rollout", "last"]
LOSSES = ("ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo", "dppo")


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names and not is_import_path(value):
            hint = did_you_mean(value, names)
            raise ValueError(f"legal: {', '.join(names)}, or package.module:name of your own{hint}")
        return value

    return check


OF_A_RATIO = "ratios of policies are near 1"
GAE = only_with("algorithm.advantage", "gae")
WITH_KL = only_with("algorithm.kl_coefficient")
BOUNDED = idle_with("algorithm.loss", "reinforce", "sapo", other="a loss with bounds")
OURS = only_with(
    "algorithm.loss",
    *LOSSES,
    why="it stands for ratio, clipping and importance weight together",
    other="a loss of rlhpc",
)
CLIPPED = Idle(
    {"algorithm.proximal": ("current", "recompute"), "algorithm.minibatches": (1,), "algorithm.epochs": (1,)},
    why="the ratio is 1 and nothing is clipped",
    other="algorithm.proximal='behaviour' or 'loglinear', or more algorithm.minibatches",
)
WEIGHTED = idle_with("algorithm.proximal", "behaviour", why="the importance weight is 1")
FOLLOWED = Idle(
    {"trainer.lr_schedule": ("constant",), "trainer.warmup_steps": (0,)}, why="there is no schedule to follow"
)


class AlgorithmConfig(Section):
    """[algorithm]: advantages, policy loss, off-policy corrections."""

    advantage: Annotated[str, AfterValidator(_one_of(ADVANTAGES))] = "grpo"
    """How rewards become advantages: "grpo", "grpo_no_std", "rloo", "opo", "pass_at_k", "reinforce_pp",
    "reinforce_pp_baseline", "gae" from a critic, "distillation" from a teacher alone (docs/algorithms.md has the
    formulas), or package.module:function of your own."""
    advantage_arguments: Annotated[
        Arguments,
        ANY_SIZE,
        idle_with("algorithm.advantage", *ADVANTAGES, other="an advantage of your own, package.module:name"),
    ] = Field(default={})
    """Keyword arguments of an estimator of your own, as { scale = 0.5 }."""
    discount: Annotated[
        float, Field(gt=0, le=1), Usual(0.5, 1, "it is per token: of a reward after 100 tokens, 0.95 leaves 0.6 %"), GAE
    ] = 1.0
    """γ, the discount of a reward per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1), GAE] = 1.0
    """λ; 1 uses rewards alone, 0 bootstraps from the critic's value of the next token."""
    pass_k: Annotated[int, Field(gt=1), ANY_SIZE, only_with("algorithm.advantage", "pass_at_k")] = 4
    """The k of pass@k."""
    distillation_coefficient: Annotated[
        float,
        Field(ge=0),
        Usual(1e-3, 10, "an advantage is about 1", zero=True),
        idle_with("algorithm.advantage", "distillation", why="that is all of the advantage"),
    ] = 0.0
    """On-policy distillation beside rewards: this times log π_teacher − log π_behaviour is added to the advantage of
    each token; 0: no teacher."""
    distillation_clip: Annotated[
        PositiveFloat | Literal["off"],
        Usual(0.1, 100, "it is in nats"),
        Idle({"algorithm.advantage": ("distillation",), "algorithm.distillation_coefficient": ()}, True),
    ] = 10.0
    """Bound of |log π_teacher − log π_behaviour| of a token in the advantage: what a teacher takes for impossible would
    outweigh all other tokens of a batch; "off": none."""
    forward_kl_coefficient: Annotated[float, Field(ge=0), Usual(1e-4, 10, "a loss is about 1", zero=True)] = 0.0
    """Coefficient in the loss of the divergence of the policy from the teacher, over the teacher's teacher_top_k most
    likely tokens in each place; 0: none."""
    teacher_top_k: Annotated[Positive, ANY_SIZE, only_with("algorithm.forward_kl_coefficient")] = 16
    """Number of these tokens; a server that others run may have a limit, as vLLM's max_logprobs."""
    advantage_normalization: Annotated[
        Literal["off", "batch", "task"],
        idle_with("algorithm.advantage", *OVER_BATCH, why="it is normalised over the batch"),
        idle_with("algorithm.advantage", DISTILLATION, why="it has no part of rewards, and only those are normalised"),
    ] = "off"
    """Normalise advantages of rewards to mean 0 and standard deviation 1 over the loss tokens of the batch, or of each
    task in it; a teacher's part is added afterwards."""
    loss: Annotated[str, AfterValidator(_one_of(LOSSES))] = "ppo"
    """Objective to maximise: "ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo", "dppo" (docs/algorithms.md has the
    formulas), or package.module:name of your own."""
    loss_arguments: Annotated[
        Arguments, ANY_SIZE, idle_with("algorithm.loss", *LOSSES, other="a loss of your own, package.module:name")
    ] = Field(default={})
    """Keyword arguments of a loss of your own, as { clip = 0.2 }."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """What has equal weight in the loss: tokens, completions, tokens over a constant (Dr. GRPO), prompts."""
    row_credit: Annotated[RowCredit, only_with("data.environment", "agent")] = "rollout"
    """Of a rollout in several rows (an agent has rewritten its history): "rollout": every row is trained, with the
    rollout's advantage; "last": only the last one that the policy has written in, which has the final answer."""
    minibatches: Annotated[Positive, Usual(1, 256, "optimiser steps for one pass over a batch")] = 1
    """Optimiser steps per pass over a batch, each on its part of the rollouts; the policy version rises once per
    batch."""
    epochs: Annotated[Positive, Usual(1, 32, "passes over the same batch")] = 1
    """Passes over each batch."""
    clip_low: Annotated[float, Field(gt=0, le=1), Usual(1e-5, 1, OF_A_RATIO), BOUNDED, OURS, CLIPPED] = 0.2
    """The lower bound of the clipped ratio is 1 − clip_low; 1: no bound.  loss = "dppo": of the change of a token's
    probability, −clip_low."""
    clip_high: Annotated[PositiveFloat, Usual(1e-5, 100, OF_A_RATIO), BOUNDED, OURS, CLIPPED] = 0.28
    """The upper bound of the clipped ratio is 1 + clip_high (clip-higher, DAPO).  loss = "dppo": of the change of a
    token's probability, clip_high."""
    dual_clip: Annotated[
        Annotated[float, Field(gt=1)] | Literal["off"],
        Usual(1, 100, OF_A_RATIO),
        only_with("algorithm.loss", "ppo"),
        CLIPPED,
    ] = "off"
    """Bound of the ratio where the advantage is negative, so that no token's loss is unbounded."""
    sapo_tau_positive: Annotated[
        PositiveFloat, Usual(0.01, 100, "the paper has 1.0 and 1.05"), only_with("algorithm.loss", "sapo"), CLIPPED
    ] = 1.0
    """Steepness of the gate where the advantage is positive."""
    sapo_tau_negative: Annotated[
        PositiveFloat, Usual(0.01, 100, "the paper has 1.0 and 1.05"), only_with("algorithm.loss", "sapo"), CLIPPED
    ] = 1.05
    """Steepness of the gate elsewhere."""
    importance_level: Annotated[Literal["token", "sequence", "geometric"], OURS, WEIGHTED] = "token"
    """The weight π_proximal / π_behaviour is per token, per sequence, or the sequence's geometric mean per token."""
    importance_cap: Annotated[
        PositiveFloat | Literal["off"],
        Usual(0.1, 1000, OF_A_RATIO),
        replace(OURS, accepts=("off",)),
        replace(WEIGHTED, accepts=("off",)),
    ] = 2.0
    """Truncated importance sampling: maximum weight; "off": no importance weight."""
    mask_below: Annotated[float, Field(ge=0, lt=1), OURS, WEIGHTED] = 0.0
    """Tokens whose weight is below this, before the cap, are masked (IcePop); 0: none."""
    mask_above: Annotated[Annotated[float, Field(gt=1)] | Literal["off"], Usual(1, 1e4, OF_A_RATIO), OURS, WEIGHTED] = (
        "off"
    )
    """Tokens whose weight is above this, before the cap, are masked (IcePop)."""
    veto_below: Annotated[float, Field(ge=0, lt=1), OURS, WEIGHTED] = 0.0
    """A sequence is masked if any of its tokens has become less likely by this factor; typical is 1e-4, 0: never."""
    veto_drift_above: Annotated[
        PositiveFloat | Literal["off"], Usual(1e-4, 10, "it is in nats a token"), OURS, WEIGHTED
    ] = "off"
    """A sequence of negative advantage is masked if the mean of log π_behaviour / π_proximal over its tokens is above
    this, in nats (off-policy sequence masking, DeepSeek-V3.2)."""
    max_token_age: Annotated[NonNegative | Literal["off"], ANY_SIZE, OURS] = "off"
    """Tokens sampled more than this many versions ago are masked; admission.max_staleness bounds whole rollouts."""
    kl_coefficient: Annotated[
        float, Field(ge=0), Usual(1e-6, 1, "from 1 on the policy hardly leaves its reference", zero=True)
    ] = 0.0
    """Coefficient of the KL term towards a reference policy; 0: none."""
    kl_reference: Annotated[Literal["initial", "teacher"], WITH_KL] = "initial"
    """The reference: the model at model.path, or the teacher of the dataset."""
    reference_every: Annotated[
        NonNegative,
        Usual(1, 1e6, "it is in policy versions", zero=True),
        WITH_KL,
        idle_with("algorithm.kl_reference", "teacher", why="the teacher is another model"),
    ] = 0
    """Policy versions after which the reference is replaced by the current policy; 0: the reference is frozen."""
    kl_in: Annotated[Literal["loss", "reward"], WITH_KL] = "loss"
    """Where the KL term goes: into the loss, or into token rewards, which needs advantage = "gae"."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], WITH_KL] = "k3"
    """KL estimator per token (docs/algorithms.md has the formulas). "k1" is for rewards: its gradient in a loss is zero
    in expectation."""
    kl_importance: Annotated[
        bool, WITH_KL, only_with("algorithm.kl_in", "loss", why="rewards are those of the sampler's tokens")
    ] = False
    """Multiply the KL term in the loss by π_current / π_behaviour, truncated at importance_cap, so that its mean is
    over the current policy's tokens (DeepSeek-V3.2, with kl_estimator = "k2")."""
    entropy_coefficient: Annotated[
        float, Field(ge=0), Usual(1e-7, 1, "from 1 on noise is worth more than rewards", zero=True)
    ] = 0.0
    """Coefficient of a bonus in the loss for the mean entropy over loss tokens; 0: none."""
    scale_rate_by_age: Annotated[bool, idle_with("admission.max_staleness", 0, 1, why="no token is older")] = False
    """Divide the learning rate of a batch by the mean age of its loss tokens, in versions, if that is above 1."""
    proximal: Annotated[
        Literal["current", "recompute", "loglinear", "behaviour"], replace(OURS, accepts=("recompute", "behaviour"))
    ] = "current"
    """Where the clipped ratio starts.  Decoupled PPO: the trainer's log-probabilities at the start of the batch, which
    with one optimiser step a batch are the current ones ("current"), or those of a separate forward pass
    ("recompute").  A-3PO: interpolated by staleness ("loglinear").  PPO: the sampler's ("behaviour")."""
    routing_replay: bool = False
    """Mixtures of experts: the policy's routers in the trainer take the experts that the engine chose for each token,
    with weights of their own (R3, docs/algorithms.md, Routing replay)."""

    @property
    def own_formulas(self) -> list[tuple[str, str]]:
        """(key, package.module:function) of the user's own loss and estimator."""
        named = (("loss", self.loss, LOSSES), ("advantage", self.advantage, ADVANTAGES))
        return [(f"algorithm.{key}", value) for key, value, built_in in named if value not in built_in]

    def arguments_of(self, key: str) -> Arguments:
        """Keyword arguments of the user's own loss or estimator; key: as of own_formulas."""
        return self.loss_arguments if key == "algorithm.loss" else self.advantage_arguments

    @property
    def asks_teachers(self) -> bool:
        """Whether a teacher's log-probabilities are needed of each completion."""
        return self.distillation_factor > 0 or self.has_teacher_reference or self.forward_kl_coefficient > 0

    @property
    def distillation_factor(self) -> float:
        """Factor of log π_teacher − log π_behaviour in the advantage of a token."""
        return 1.0 if self.advantage == DISTILLATION else self.distillation_coefficient

    @property
    def has_teacher_reference(self) -> bool:
        """Whether the KL term is towards the teacher, whose log-probabilities come with the samples."""
        return self.kl_coefficient > 0 and self.kl_reference == "teacher"

    @property
    def use_of_teacher(self) -> str:
        """The first setting that needs a teacher, as KEY=VALUE."""
        if self.advantage == DISTILLATION:
            return f"algorithm.advantage={self.advantage!r}"
        if self.distillation_coefficient:
            return f"algorithm.distillation_coefficient={self.distillation_coefficient:g}"
        if self.forward_kl_coefficient:
            return f"algorithm.forward_kl_coefficient={self.forward_kl_coefficient:g}"
        return f"algorithm.kl_reference={self.kl_reference!r}"

    @property
    def num_optimiser_steps(self) -> int:
        """Number of optimiser steps on one batch."""
        return self.minibatches * self.epochs

    def renews_reference(self, version: int) -> bool:
        """Whether the policy of this version becomes the reference before it is trained."""
        return version > 0 and self.reference_every > 0 and version % self.reference_every == 0

    @rule
    def sets_differ(self, config: Config, key: Keys) -> Faults:
        """`pass_k`: below `admission.group_size`; a group of k has only one set of k."""
        size = config.admission.group_size
        if self.advantage == "pass_at_k" and self.pass_k >= size:
            smaller = f"2 to {size - 1}, or " if size > 2 else ""
            yield (
                f"{key.pass_k} with {key.admission.group_size}: there is no more than one set of k, so every advantage "
                f"is zero; legal: {smaller}admission.group_size of {self.pass_k + 1} or more"
            )

    @rule
    def a_critic_knows_no_tasks(self, config: Config, key: Keys) -> Faults:
        """`advantage_normalization`: not `"task"` with `advantage` = `"gae"`; the trainer's rows do not say of which
        task they are.
        """
        if config.has_critic and self.advantage_normalization == "task":
            yield f"{key.advantage_normalization} with {key.advantage}; legal: 'batch', 'off'"

    @rule
    def sequence_ratios_have_bounds_of_their_own(self, config: Config, key: Keys) -> Faults:
        """`loss` = `"gspo"`: set `clip_low` and `clip_high`, if `proximal` is `"behaviour"` or `"loglinear"`; their
        defaults are for ratios of tokens, which vary more than the mean over a sequence.
        """
        is_bounded = self.proximal not in ("current", "recompute") or self.num_optimiser_steps > 1
        if self.loss == "gspo" and is_bounded and not {"clip_low", "clip_high"} <= self.model_fields_set:
            yield (
                f"{key.loss} with {key.clip_low}, {key.clip_high}, which are bounds for per-token ratios: set both; "
                "the paper uses 3e-4 and 4e-4"
            )

    @rule
    def the_ratio_starts_at_the_batch(self, config: Config, key: Keys) -> Faults:
        """`minibatches`, `epochs`: above 1 need a `proximal` other than `"current"`, or with `loss` = `"reinforce"`,
        which has no ratio, `"current"`
        ([several optimiser steps](../docs/decisions/022-several-optimiser-steps-on-one-batch.md)).
        """
        if self.num_optimiser_steps == 1 or (self.proximal == "current") == (self.loss == "reinforce"):
            return
        if self.proximal == "current":
            yield (
                f"{key.proximal} with {key.minibatches} and {key.epochs}: the ratio would be 1 in every optimiser "
                "step, and nothing would limit how far they move the policy together; legal: 'recompute', 'loglinear' "
                "or 'behaviour'"
            )
        else:
            yield (
                f"{key.loss} with {key.proximal} and {key.minibatches}, {key.epochs}: the importance weight would stay "
                "that of the batch's start, and the loss has no ratio that corrects for the steps since; legal: "
                "'current', or another algorithm.loss"
            )

    @rule
    def the_engine_tells_routes(self, config: Config, key: Keys) -> Faults:
        """`routing_replay`: with an engine, which tells the experts that it chose."""
        if self.routing_replay and config.generation.engine == "none":
            yield f"{key.routing_replay} with {key.generation.engine}, which tells no routes; legal: false"

    @rule
    def replayed_steps_are_the_same(self, config: Config, key: Keys) -> Faults:
        """`routing_replay`: not with `run.deterministic`; journals have no routes, and a step that is trained again
        after a crash would have other bits.
        """
        if self.routing_replay and config.run.deterministic:
            yield (
                f"{key.routing_replay} with {key.run.deterministic}: journals have no routes, so that a step that is "
                "trained again after a crash would have other bits; legal: false, or run.deterministic=false"
            )

    @rule
    def minibatches_have_samples(self, config: Config, key: Keys) -> Faults:
        """`minibatches`: at most the samples of a batch."""
        num_samples = config.admission.groups_per_step * config.admission.group_size
        if self.minibatches > num_samples:
            yield (
                f"{key.minibatches} with admission.groups_per_step · group_size = {num_samples} samples in a batch; "
                f"legal: 1 to {num_samples}"
            )

    @rule
    def the_divergence_has_a_gradient(self, config: Config, key: Keys) -> Faults:
        """`kl_estimator`: not `"k1"` with a `kl_coefficient` in the loss;
        [its gradient](../docs/algorithms.md#reference-and-entropy) does not depend on the reference.
        """
        if self.kl_coefficient > 0 and self.kl_estimator == "k1" and self.kl_in == "loss":
            yield (
                f"{key.kl_estimator} with {key.kl_coefficient}: in a loss its gradient is that of log π, whatever the "
                "reference is, and on average zero; legal: 'k2' or 'k3', or algorithm.kl_in='reward'"
            )

    @rule
    def tokens_have_rewards(self, config: Config, key: Keys) -> Faults:
        """`kl_in` = `"reward"`: needs `advantage` = `"gae"`, since others use one reward per completion, and names a
        `kl_estimator`, whose default is for losses.
        """
        if self.kl_in == "reward" and not config.has_critic:
            yield (
                f"{key.kl_in} with {key.advantage}, which knows no rewards of tokens; legal: 'loss', or "
                "algorithm.advantage='gae'"
            )
        if self.kl_in == "reward" and "kl_estimator" not in self.model_fields_set:
            yield (
                f"{key.kl_in} with {key.kl_estimator}, its default, which is exponential in what one token is less "
                "likely: say which; usual is 'k1', whose mean is the divergence; legal: 'k1', 'k2', 'k3'"
            )

    @rule
    def a_teacher_is_as_warm(self, config: Config, key: Keys) -> Faults:
        """`generation.temperature`: 1 with a teacher, as its log-probabilities are; at another one a policy would
        differ from a teacher that it agrees with.
        """
        if self.asks_teachers and config.generation.temperature != 1:
            yield (
                f"{key.generation.temperature} with a teacher ({self.use_of_teacher}): its log-probabilities are those "
                "at temperature 1, and compared with them a policy at another one would move away from a teacher that "
                "it agrees with; legal: generation.temperature=1"
            )

    @rule
    def a_critic_has_no_teacher(self, config: Config, key: Keys) -> Faults:
        """`distillation_coefficient`: 0 with `advantage` = `"gae"`, where a teacher's part is a reward of tokens:
        `kl_reference` = `"teacher"` with `kl_in` = `"reward"`.
        """
        if self.distillation_coefficient and config.has_critic:
            yield (
                f"{key.distillation_coefficient} with {key.advantage}: a critic's advantages are made of rewards; "
                "legal: 0, with algorithm.kl_reference='teacher', kl_in='reward' and kl_estimator='k1', whose "
                "kl_coefficient rewards each token with as much"
            )

    @rule
    def tokens_become_older(self, config: Config, key: Keys) -> Faults:
        """`max_token_age`: below `admission.max_staleness`; no token is older than its rollout."""
        age, bound = self.max_token_age, config.admission.max_staleness
        if age != "off" and age >= bound:
            other = f"up to {bound - 1}" if bound else "a larger admission.max_staleness"
            yield (
                f"{key.max_token_age} has no effect with {key.admission.max_staleness}, which bounds the age of every "
                f"token; legal: 'off', its default, or {other}"
            )


class CriticConfig(Section):
    """[critic]: the model that values tokens, where algorithm.advantage is "gae"."""

    whole_table = (GAE,)

    path: LoosePath | None = None
    """HF checkpoint that it is initialised from, with a new head; none: model.path."""
    learning_rate: Annotated[LearningRate, USUAL_RATE] = 1e-5
    """Learning rate of the critic; it shares the other optimiser settings of [trainer]."""
    follows_schedule: Annotated[bool, FOLLOWED] = False
    """Apply the warm-up and decay of trainer.learning_rate to it; False: constant."""
    head_start_steps: Annotated[NonNegative, Usual(1, 1e4, STEPS, zero=True)] = 0
    """Initial steps in which only the critic is trained."""
    value_clip: Annotated[PositiveFloat | Literal["off"], Usual(1e-3, 100, "values are as large as rewards")] = "off"
    """Clip range of values around those at the start of the batch."""


ADAPTED = only_with("lora.rank")


class LoraConfig(Section):
    """[lora]: train adapters of low rank beside frozen weights, instead of the weights themselves."""

    rank: Annotated[NonNegative, Usual(1, 1024, "it is in columns of an adapter", zero=True)] = 0
    """Rank of the adapters A and B of each adapted layer, whose output becomes W x + scale · B A x
    (Hu et al. 2021, arXiv:2106.09685); 0: all weights are trained."""
    alpha: Annotated[PositiveFloat, Usual(0.1, 4096, "16 and 32 are common"), ADAPTED] = 32.0
    """The scale is alpha / rank."""
    rslora: Annotated[bool, ADAPTED] = False
    """The scale is alpha / √rank instead (Kalajdzievski 2023, arXiv:2312.03732)."""
    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1), ADAPTED] = ("attention", "mlp")
    """Layers that get an adapter: all of "attention" or "mlp", each expert of a mixture ("experts"), the head as
    "output", or names of modules as PEFT has them, ["q_proj", "v_proj"]."""
    quantization: Annotated[Literal["off", "nf4"], ADAPTED] = "off"
    """How the frozen matrices of attention and MLP are kept in the trainer: "off" in model.dtype, or "nf4" in 4 bits
    (Dettmers et al. 2023, arXiv:2305.14314) by bitsandbytes, of the extra "nf4"; embedding, head and experts stay as
    they are. Engines hold the unpacked weights, in model.dtype."""
    initial: Annotated[LoosePath | None, ADAPTED] = None
    """Directory of a PEFT adapter of the same rank, alpha and layers to begin with; its dropout is ignored. Default:
    A is drawn with the variance 1 / (3 · in) of PEFT's default, and B is 0: the policy begins as model.path."""
    learning_rate: Annotated[
        float,
        Field(ge=0, le=1),
        Usual(1e-7, 1e-1, "ten times that of training all weights is common", zero=True),
        ADAPTED,
    ] = 0.0
    """Peak learning rate of adapters; 0: trainer.learning_rate."""

    @property
    def scale(self) -> float:
        """Factor on B A: alpha / rank, or alpha / √rank with rslora."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @rule
    def a_critic_has_no_adapters(self, config: Config, key: Keys) -> Faults:
        """`rank`: 0 with `algorithm.advantage` = `"gae"`; a critic's head has no adapter, and all of it is trained."""
        if self.rank and config.has_critic:
            yield f"{key.rank} with {key.algorithm.advantage}: a critic is trained whole; legal: another advantage"

    @rule
    def a_reference_is_the_base(self, config: Config, key: Keys) -> Faults:
        """`rank`: 0 with `algorithm.reference_every`; the reference of adapters is the model without them."""
        if self.rank and config.algorithm.reference_every:
            yield (
                f"{key.rank} with {key.algorithm.reference_every}: the reference is the model that the adapters are "
                "beside; legal: reference_every=0"
            )

    @rule
    def adapters_have_a_format(self, config: Config, key: Keys) -> Faults:
        """`rank`: 0 with `checkpoint.trainer_format` = `"megatron"`, which has no place for adapters."""
        if self.rank and config.checkpoint.trainer_format != "hf":
            yield f"{key.rank} with {key.checkpoint.trainer_format}: that format has no place for adapters; legal: 'hf'"

    @rule
    def four_bits_have_a_backend(self, config: Config, key: Keys) -> Faults:
        """`quantization`: `"nf4"` needs the backend `"reference"`, or `"deepspeed"` with `zero_stage` 1 or 2."""
        if self.quantization == "off":
            return
        trainer, quantization = config.trainer, key.quantization
        if trainer.backend == "megatron":
            yield f"{quantization} with {key.trainer.backend}; legal: 'reference', 'deepspeed'"
        if trainer.backend == "deepspeed" and trainer.zero_stage == 3:
            yield f"{quantization} with {key.trainer.zero_stage}: matrices of 4 bits are not shared out; legal: 1, 2"

    @rule
    def adapters_stay_on_the_gpu(self, config: Config, key: Keys) -> Faults:
        """`rank`: 0 with Megatron's `trainer.optimizer_offload`, which takes copies of bfloat16 parameters only."""
        if self.rank and config.trainer.optimizer_offload and config.trainer.backend == "megatron":
            yield (
                f"{key.rank} with {key.trainer.optimizer_offload}: Megatron offloads the state of bfloat16 parameters "
                "only, and adapters are float32; legal: optimizer_offload=false"
            )

    @rule
    def adapters_are_named_once(self, config: Config, key: Keys) -> Faults:
        """`targets`: each once."""
        if len(set(self.targets)) < len(self.targets):
            yield f"{key.targets}: one of them twice; legal: each once"


class ShapingConfig(Section):
    """[shaping]: changes to rewards before advantages are computed from them."""

    part_weights: Annotated[
        dict[str, float], Usual(-1e4, 1e4, "advantages that are not divided by a deviation grow with it")
    ] = Field(default={})
    """The reward is the weighted sum of the reward function's parts, as { answer = 1.0, format = 0.2 }; every verdict
    must have each of them. Default: the function's own reward."""
    overlong_tokens: Annotated[NonNegative, ANY_SIZE] = 0
    """Length of the interval before generation.max_completion_tokens in which a penalty grows linearly (DAPO); 0: no
    penalty."""
    overlong_penalty: Annotated[
        PositiveFloat, Usual(1e-4, 100, "the reward of a right answer is 1"), only_with("shaping.overlong_tokens")
    ] = 1.0
    """Penalty of a completion of maximum length."""
    length_weight: Annotated[float, Usual(-100, 100, "the reward of a right answer is 1")] = 0.0
    """Reward of a completion of generation.max_completion_tokens, proportional for shorter ones; below 0: a penalty."""
    truncated: Literal["scored", "masked"] = "scored"
    """A completion that was cut off is treated as any other, or masked out of the loss; its reward counts for its group
    either way."""
    variance: Annotated[
        Literal["reward", "shaped"],
        only_with_any("shaping.overlong_tokens", "shaping.length_weight", why="shaped rewards are the same"),
    ] = "reward"
    """Rewards by which active sampling decides whether a group has zero variance: before lengths count, or after."""

    @rule
    def the_cushion_leaves_room(self, config: Config, key: Keys) -> Faults:
        """`overlong_tokens`: below `generation.max_completion_tokens`; a penalty on every completion, however short, is
        what `length_weight` is for.
        """
        longest = config.generation.max_completion_tokens
        if self.overlong_tokens >= longest:
            yield (
                f"{key.overlong_tokens} with {key.generation.max_completion_tokens}: every completion would be "
                f"overlong; legal: 0 to {longest - 1}"
            )
