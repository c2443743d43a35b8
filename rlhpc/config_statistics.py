"""Settings under which the statistics of a run would be wrong: refused, with the reason.

Input: Config.  Each rule raises ValueError with the keys, their values and what is legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.config_algorithm import OF_REWARDS

if TYPE_CHECKING:
    from rlhpc.config import Config


def group_has_reward_variance(config: Config) -> None:
    """Group-relative advantages need a group; the reward itself does not."""
    advantage = config.algorithm.advantage
    if config.admission.group_size > 1:
        return
    if advantage not in OF_REWARDS:
        raise ValueError(
            f"admission.group_size=1 with algorithm.advantage={advantage!r}: the rewards of a group of one have zero "
            "variance, so every advantage is zero; legal: 2 or more"
        )


def every_group_is_learnt_from(config: Config) -> None:
    """A critic that sees only groups with variance learns their mean, which is nearer to a half than its prompts'."""
    advantage = config.algorithm.advantage
    if advantage in OF_REWARDS and config.admission.active_sampling:
        raise ValueError(
            f"algorithm.advantage={advantage!r} with admission.active_sampling=true, its default: the advantages are "
            "not relative to the group, so that a group whose rewards are all equal teaches something, and without it "
            "the baseline would be that of the groups that are kept; legal: admission.active_sampling=false"
        )


def sets_differ(config: Config) -> None:
    """Of a group of k members there is one set of k."""
    algorithm, size = config.algorithm, config.admission.group_size
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= size:
        smaller = f"2 to {size - 1}, or " if size > 2 else ""
        raise ValueError(
            f"algorithm.pass_k={algorithm.pass_k} with admission.group_size={size}: there is no more than one set of "
            f"k, so every advantage is zero; legal: {smaller}admission.group_size of {algorithm.pass_k + 1} or more"
        )


def hard_prompts_get_more(config: Config) -> None:
    """The largest group is larger than others."""
    most, size = config.curriculum.max_group_size, config.admission.group_size
    if most != "off" and most <= size:
        raise ValueError(
            f"curriculum.max_group_size={most} is not above admission.group_size={size}, which every prompt gets; "
            f"legal: {size + 1} or more, or 'off'"
        )


def sequence_ratios_have_own_bounds(config: Config) -> None:
    """The mean over a sequence varies less than the ratio of a token, by the square root of its length and more."""
    algorithm = config.algorithm
    is_bounded = algorithm.proximal not in ("current", "recompute") or algorithm.num_optimiser_steps > 1
    if algorithm.loss == "gspo" and is_bounded and not {"clip_low", "clip_high"} <= algorithm.model_fields_set:
        raise ValueError(
            f"algorithm.loss='gspo' with algorithm.clip_low={algorithm.clip_low:g}, algorithm.clip_high="
            f"{algorithm.clip_high:g}, which are bounds for per-token ratios: set both; the paper uses 3e-4 and 4e-4"
        )


def cushion_leaves_room(config: Config) -> None:
    """A penalty on every completion, however short, is one on length: there is a key for that."""
    cushion, longest = config.shaping.overlong_tokens, config.generation.max_completion_tokens
    if cushion >= longest:
        raise ValueError(
            f"shaping.overlong_tokens={cushion} with generation.max_completion_tokens={longest}: every completion "
            f"would be overlong; legal: 0 to {longest - 1}"
        )


def ratio_starts_at_the_batch(config: Config) -> None:
    """With several optimiser steps the current policy is not that of the batch's start any more."""
    algorithm = config.algorithm
    if algorithm.loss == "reinforce":
        return  # no ratio: see weight_follows_the_steps
    if algorithm.num_optimiser_steps > 1 and algorithm.proximal == "current":
        raise ValueError(
            f"algorithm.proximal='current' with algorithm.minibatches={algorithm.minibatches} and algorithm.epochs="
            f"{algorithm.epochs}: the ratio would be 1 in every optimiser step, and nothing would limit how far "
            "they move the policy together; legal: 'recompute', 'loglinear' or 'behaviour'"
        )


def weight_follows_the_steps(config: Config) -> None:
    """REINFORCE has no ratio: what the steps on a batch change, only its importance weight can know."""
    algorithm = config.algorithm
    if algorithm.loss == "reinforce" and algorithm.num_optimiser_steps > 1 and algorithm.proximal != "current":
        raise ValueError(
            f"algorithm.loss='reinforce' with algorithm.proximal={algorithm.proximal!r} and algorithm.minibatches="
            f"{algorithm.minibatches}, algorithm.epochs={algorithm.epochs}: the importance weight would stay that of "
            "the batch's start, and the loss has no ratio that corrects for the steps since; legal: 'current', or "
            "another algorithm.loss"
        )


def divergence_has_a_gradient(config: Config) -> None:
    """The mean of ∇k1 = ∇log π over a policy's own samples is 0, and ∇k1 does not know the reference."""
    algorithm = config.algorithm
    if algorithm.kl_coefficient > 0 and algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        raise ValueError(
            f"algorithm.kl_estimator='k1' with algorithm.kl_coefficient={algorithm.kl_coefficient:g}: in a loss its "
            "gradient is that of log π, whatever the reference is, and on average zero; legal: 'k2' or 'k3', or "
            "algorithm.kl_in='reward'"
        )


def tokens_have_rewards(config: Config) -> None:
    """A group's advantages know one reward of each completion, a critic's one of each token."""
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and not config.has_critic:
        raise ValueError(
            f"algorithm.kl_in='reward' with algorithm.advantage={algorithm.advantage!r}, which knows no rewards of "
            "tokens; legal: 'loss', or algorithm.advantage='gae'"
        )
    if algorithm.kl_in == "reward" and "kl_estimator" not in algorithm.model_fields_set:
        raise ValueError(
            "algorithm.kl_in='reward' with algorithm.kl_estimator='k3', its default, which is exponential in what one "
            "token is less likely: say which; usual is 'k1', whose mean is the divergence; legal: 'k1', 'k2', 'k3'"
        )


def minibatches_have_samples(config: Config) -> None:
    """Each has one at least."""
    admission, minibatches = config.admission, config.algorithm.minibatches
    num_samples = admission.groups_per_step * admission.group_size
    if minibatches > num_samples:
        raise ValueError(
            f"algorithm.minibatches={minibatches} with admission.groups_per_step · group_size = {num_samples} samples "
            f"in a batch; legal: 1 to {num_samples}"
        )


STATISTICS = (
    group_has_reward_variance,
    every_group_is_learnt_from,
    sets_differ,
    hard_prompts_get_more,
    sequence_ratios_have_own_bounds,
    cushion_leaves_room,
    ratio_starts_at_the_batch,
    weight_follows_the_steps,
    divergence_has_a_gradient,
    tokens_have_rewards,
    minibatches_have_samples,
)
