"""Keys that would have no effect beside others: refused, because who sets one expects something of it.

Input: Config.  Each rule raises ValueError with the key, its value and what would be legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.config.tables import AGENT

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


def loss_knows_its_keys(config: Config) -> None:
    """Some keys are of one loss, or of one kind of advantage."""
    algorithm = config.algorithm
    beside = f"algorithm.loss={algorithm.loss!r}"
    if algorithm.loss in ("reinforce", "sapo"):
        _refuse_without_effect(config, "algorithm.clip_low", beside, "a loss with bounds")
        _refuse_without_effect(config, "algorithm.clip_high", beside, "a loss with bounds")
    if algorithm.loss != "ppo":
        _refuse_without_effect(config, "algorithm.dual_clip", beside, "algorithm.loss='ppo'")
    if algorithm.loss != "sapo":
        _refuse_without_effect(config, "algorithm.sapo_tau_positive", beside, "algorithm.loss='sapo'")
        _refuse_without_effect(config, "algorithm.sapo_tau_negative", beside, "algorithm.loss='sapo'")
    beside = f"algorithm.advantage={algorithm.advantage!r}"
    if not config.has_critic:
        for key in ("algorithm.discount", "algorithm.gae_lambda"):
            _refuse_without_effect(config, key, beside, "algorithm.advantage='gae'")
        for key in ("path", "learning_rate", "follows_schedule", "head_start_steps", "value_clip"):
            _refuse_without_effect(config, f"critic.{key}", beside, "algorithm.advantage='gae'")
    if algorithm.advantage != "pass_at_k":
        _refuse_without_effect(config, "algorithm.pass_k", beside, "algorithm.advantage='pass_at_k'")
    if algorithm.advantage.startswith("reinforce_pp"):
        beside += ", which is normalised over the batch"
        _refuse_without_effect(config, "algorithm.advantage_normalization", beside, "another algorithm.advantage")


def arguments_have_their_function(config: Config) -> None:
    """What is built in takes no arguments of a run file."""
    algorithm = config.algorithm
    for key, named in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
        if ":" not in named:
            beside = f"algorithm.{key}={named!r}"
            _refuse_without_effect(config, f"algorithm.{key}_arguments", beside, "one of your own, package.module:name")


def own_loss_is_whole(config: Config) -> None:
    """A loss of one's own has no part of ours: it gets log-probabilities and corrects for staleness itself."""
    algorithm = config.algorithm
    if ":" not in algorithm.loss:
        return
    beside = f"algorithm.loss={algorithm.loss!r}, which stands for ratio, clipping and importance weight together"
    other = "a loss of rlhpc"
    masks = ("mask_below", "mask_above", "veto_below", "veto_drift_above", "max_token_age")
    for key in ("clip_low", "clip_high", "importance_level", *masks):
        _refuse_without_effect(config, f"algorithm.{key}", beside, other)
    if algorithm.importance_cap != "off":
        _refuse_without_effect(config, "algorithm.importance_cap", beside, f"'off', or {other}")
    if algorithm.proximal == "loglinear":
        _refuse_without_effect(config, "algorithm.proximal", beside, "'recompute'")


def environment_is_there(config: Config) -> None:
    """Without one there is one turn."""
    if not any(dataset.environment for dataset in config.data):
        for key in type(config.environment).model_fields:
            _refuse_without_effect(config, f"environment.{key}", "no data.environment", "a data.environment")
    if not any(dataset.environment == AGENT for dataset in config.data):
        beside, other = "no data.environment='agent'", "data.environment='agent'"
        for key in (*(f"agent.{key}" for key in type(config.agent).model_fields), "generation.endpoint"):
            _refuse_without_effect(config, key, beside, other)


def clip_has_a_ratio(config: Config) -> None:
    """One optimiser step a batch: where the ratio starts at the policy before the step, it is 1."""
    algorithm = config.algorithm
    if algorithm.proximal in ("current", "recompute") and algorithm.num_optimiser_steps == 1:
        beside = f"algorithm.proximal={algorithm.proximal!r}, where the ratio is 1 and nothing is clipped"
        other = "algorithm.proximal='behaviour' or 'loglinear', or more algorithm.minibatches"
        for key in ("clip_low", "clip_high", "dual_clip", "sapo_tau_positive", "sapo_tau_negative"):
            _refuse_without_effect(config, f"algorithm.{key}", beside, other)


def cap_has_a_weight(config: Config) -> None:
    """PPO around the sampler has no importance weight."""
    if config.algorithm.proximal == "behaviour":
        beside = "algorithm.proximal='behaviour', where the importance weight is 1"
        other = "another algorithm.proximal"
        for key in ("importance_level", "mask_below", "mask_above", "veto_below", "veto_drift_above"):
            _refuse_without_effect(config, f"algorithm.{key}", beside, other)
        if config.algorithm.importance_cap != "off":
            _refuse_without_effect(config, "algorithm.importance_cap", beside, f"'off', or {other}")


def reference_is_asked(config: Config) -> None:
    """Without a coefficient nothing is held."""
    if not config.algorithm.kl_coefficient:
        beside, other = "algorithm.kl_coefficient=0", "algorithm.kl_coefficient above 0"
        _refuse_without_effect(config, "algorithm.kl_estimator", beside, other)
        _refuse_without_effect(config, "algorithm.kl_in", beside, other)
        _refuse_without_effect(config, "algorithm.kl_importance", beside, other)
        _refuse_without_effect(config, "algorithm.reference_every", beside, other)
        _refuse_without_effect(config, "trainer.reference_memory", beside, other)
    elif config.algorithm.kl_in == "reward":
        beside = "algorithm.kl_in='reward': rewards are those of the sampler's tokens"
        _refuse_without_effect(config, "algorithm.kl_importance", beside, "algorithm.kl_in='loss'")
    if config.algorithm.kl_coefficient and config.trainer.parameter_offload:
        beside = "trainer.parameter_offload=true: the reference is held as the parameters are, in host memory"
        _refuse_without_effect(config, "trainer.reference_memory", beside, "trainer.parameter_offload=false")


def tokens_become_older(config: Config) -> None:
    """No token is older than its rollout."""
    age, bound = config.algorithm.max_token_age, config.admission.max_staleness
    if age != "off" and age >= bound:
        beside = f"admission.max_staleness={bound}, which bounds the age of every token"
        other = f"up to {bound - 1}" if bound else "a larger admission.max_staleness"
        _refuse_without_effect(config, "algorithm.max_token_age", beside, other)


def tokens_have_an_age(config: Config) -> None:
    """Where no rollout is older than a version, nothing is divided."""
    if config.admission.max_staleness <= 1:
        beside = f"admission.max_staleness={config.admission.max_staleness}: no token is older than that"
        _refuse_without_effect(config, "algorithm.scale_rate_by_age", beside, "admission.max_staleness of 2 or more")


def something_is_shaped(config: Config) -> None:
    """Without a term for lengths there is nothing to choose."""
    shaping = config.shaping
    if not shaping.overlong_tokens:
        beside = "shaping.overlong_tokens=0"
        _refuse_without_effect(config, "shaping.overlong_penalty", beside, "shaping.overlong_tokens of 1 or more")
        if not shaping.length_weight:
            beside += " and shaping.length_weight=0: shaped rewards vary as the others do"
            _refuse_without_effect(config, "shaping.variance", beside, "either")


def curriculum_asks_for_its_keys(config: Config) -> None:
    """Each rule of a curriculum has keys of its own."""
    curriculum = config.curriculum
    for kind in ("solved", "hopeless"):
        key = f"curriculum.{kind}_rest_epochs"
        if not getattr(curriculum, f"{kind}_rest_epochs"):
            _refuse_without_effect(config, f"curriculum.{kind}_at", f"{key}=0: none rests", f"{key} of 1 or more")
    if curriculum.target_pass_rate == "off":
        beside, other = "curriculum.target_pass_rate='off'", "a curriculum.target_pass_rate"
        _refuse_without_effect(config, "curriculum.min_chance", beside, other)
        if curriculum.max_group_size == "off":
            beside += " and no max_group_size: only these go by an average"
            _refuse_without_effect(config, "curriculum.newest_weight", beside, "one of them")
    if curriculum.max_group_size == "off":
        beside, other = "curriculum.max_group_size='off'", "a curriculum.max_group_size"
        _refuse_without_effect(config, "curriculum.pass_chance", beside, other)
    if not curriculum.stages:
        for key in ("difficulty_field", "stage_pass_rate", "stage_groups"):
            _refuse_without_effect(config, f"curriculum.{key}", "no curriculum.stages", "some curriculum.stages")


def utilization_decides(config: Config) -> None:
    """A KV cache of a given size leaves nothing to measure."""
    if config.generation.kv_cache_bytes is not None:
        beside = f"generation.kv_cache_bytes={config.generation.kv_cache_bytes}, which says how much the engine takes"
        _refuse_without_effect(config, "generation.gpu_memory_utilization", beside, "no generation.kv_cache_bytes")


def something_is_sampled_at_an_update(config: Config) -> None:
    """Synchronous: all slots belong to the batch that was trained."""
    if config.admission.max_staleness == 0:
        beside = "admission.max_staleness=0: nothing is being sampled when weights are updated"
        _refuse_without_effect(config, "generation.recompute_kv", beside, "admission.max_staleness of 1 or more")


def samples_may_differ(config: Config) -> None:
    """A deterministic run seeds every sample, and updates weights only between rollouts."""
    if config.run.deterministic:
        beside = "run.deterministic=true, which seeds every sample"
        _refuse_without_effect(config, "generation.seeded_samples", beside, "no run.deterministic")
        beside = "run.deterministic=true: nothing is being sampled when weights are updated"
        _refuse_without_effect(config, "generation.recompute_kv", beside, "no run.deterministic")


def average_is_kept(config: Config) -> None:
    """Without a decay nothing is held."""
    if config.trainer.ema_decay == "off":
        beside, other = "trainer.ema_decay='off'", "a trainer.ema_decay such as 0.99"
        _refuse_without_effect(config, "trainer.ema_memory", beside, other)


def deltas_are_sent(config: Config) -> None:
    """Where every version is sent whole, the interval says nothing."""
    weights = config.weights
    other = "weights.delta='auto' with 16-bit weights over gloo"
    for beside in (
        "weights.delta='off'" if weights.delta == "off" else "",
        f"weights.transport={weights.transport!r}" if weights.transport in ("nccl", "ipc") else "",
        "model.dtype='float32'" if config.model.dtype == "float32" else "",
    ):
        if beside:
            beside += ": every version is sent whole"
            _refuse_without_effect(config, "weights.full_every", beside, other)


def schedule_has_an_end(config: Config) -> None:
    """A constant rate goes nowhere."""
    if config.trainer.lr_schedule == "constant":
        beside, other = "trainer.lr_schedule='constant'", "trainer.lr_schedule='linear' or 'cosine'"
        for key in ("min_learning_rate", "decay_steps", "decay_tokens", "decay_hours"):
            _refuse_without_effect(config, f"trainer.{key}", beside, other)
        if not config.trainer.warmup_steps:
            beside += " without trainer.warmup_steps: there is no schedule to follow"
            _refuse_without_effect(config, "critic.follows_schedule", beside, other)


def gradients_are_summed(config: Config) -> None:
    """One rank has nobody to sum with."""
    trainer = config.trainer
    if trainer.num_ranks == trainer.pipeline_parallel:
        beside = (
            f"one rank in a pipeline stage (trainer.num_ranks={trainer.num_ranks}): no gradients are summed over ranks"
        )
        _refuse_without_effect(config, "trainer.overlap_grad_reduce", beside, "more trainer.num_ranks")


def reports_renew_leases(config: Config) -> None:
    """Some reports may be lost."""
    if config.buffer.partial_interval_s > (longest := config.admission.longest_report_interval_s):
        beside = f"admission.lease_deadline_s={config.admission.lease_deadline_s:g}, which reports renew"
        _refuse_without_effect(config, "buffer.partial_interval_s", beside, f"up to {longest:g}")


def somebody_asks_the_judge(config: Config) -> None:
    """One task does."""
    if "llm_judge" not in config.judging_tasks:
        beside = f"the tasks {', '.join(map(repr, config.judging_tasks))}"
        for key in type(config.judge).model_fields:
            _refuse_without_effect(config, f"judge.{key}", beside, "the task 'llm_judge'")


def tables_have_their_task(config: Config) -> None:
    """[instructions], [math] and [text] say how certain tasks judge."""
    for table, tasks in (
        ("instructions", ("instruction_following",)),
        ("math", ("math_answer",)),
        ("text", ("exact_match", "token_f1")),
    ):
        if not {*tasks} & {*config.judging_tasks}:
            beside = f"the tasks {', '.join(map(repr, config.judging_tasks))}"
            for key in type(getattr(config, table)).model_fields:
                _refuse_without_effect(config, f"{table}.{key}", beside, f"the task {' or '.join(map(repr, tasks))}")


def composites_judge(config: Config) -> None:
    """One that no dataset names does nothing."""
    named = {*config.data_tasks, *(each.task for each in config.evaluation)}
    for name in config.composite:
        if name not in named:
            raise ValueError(
                f"composite.{name} has no effect: no dataset has the task {name!r}; legal: to leave it out, or "
                f"data.task={name!r}"
            )


def as_toml(value: object) -> str:
    """The value of a key as a run file or an override has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_without_effect(config: Config, name: str, beside: str, other: str) -> None:
    """other: what else would be legal."""
    section, _, key = name.partition(".")
    table = getattr(config, section)
    value, default = getattr(table, key), type(table).model_fields[key].default
    if value != default:
        plain = "to leave it out" if default in (None, "") else f"{as_toml(default)}, its default"
        raise ValueError(f"{name}={as_toml(value)} has no effect with {beside}; legal: {plain}, or {other}")


EFFECTS = (
    deltas_are_sent,
    environment_is_there,
    somebody_asks_the_judge,
    composites_judge,
    tables_have_their_task,
    loss_knows_its_keys,
    arguments_have_their_function,
    own_loss_is_whole,
    clip_has_a_ratio,
    cap_has_a_weight,
    reference_is_asked,
    tokens_become_older,
    tokens_have_an_age,
    something_is_shaped,
    curriculum_asks_for_its_keys,
    utilization_decides,
    something_is_sampled_at_an_update,
    samples_may_differ,
    average_is_kept,
    schedule_has_an_end,
    gradients_are_summed,
    reports_renew_leases,
)
