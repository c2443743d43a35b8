"""Keys of TRL, verl and prime-rl with their counterparts here: one table for messages and for a page.

Input: the name of an unknown key.  Output: our key or command, or why there is none.  The names are those of TRL's
GRPOConfig and scripts, of verl's ppo_trainer.yaml, and of prime-rl's rl.toml, whose sections are named from its root;
configs/other_systems.md has the tables (`python -m tests.unit.test_coming_from`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Our counterpart of another system's key."""

    ours: str  # key of the run file, or a command; "": no counterpart
    note: str = ""  # difference, or why there is no counterpart


def _none(why: str) -> Counterpart:
    return Counterpart("", why)


_LORA = Counterpart("lora.rank", "0: all weights are trained; a rank: adapters beside frozen weights")
_LORA_TARGETS = Counterpart("lora.targets", '["attention", "mlp"], or names of modules')
_WHOLE = _none("samples are drawn from the whole distribution: of another one the trainer's log-probabilities are not")
_PLAIN_ENGINE = _none("engines are started and filled with weights by the run itself, one for each replica")
_NO_RAY = _none("there is no Ray: a run is a few processes, placed by Slurm or `rlhpc run`")
_NO_HUB = _none("nothing is downloaded or uploaded: paths are local")
_MICRO = Counterpart("trainer.token_budget", "micro-batches are packed by tokens, and a step has as many as it needs")
_PROMPTS = Counterpart("admission.groups_per_step", "prompts of a step; each has admission.group_size rollouts")
_STEPS = Counterpart("run.num_steps", "optimiser steps; the prompts' order begins anew after each epoch")
_WANDB = Counterpart("`rlhpc metrics RUN_DIR --wandb DIR`", "or `--wandb --follow`; TensorBoard is always written")
_ROLLOUTS = Counterpart("`rlhpc rollouts RUN_DIR`", "every rollout is kept, with prompt, reward and log-probabilities")
_LOGS = _none("every step is written to TensorBoard, every process has a log (`rlhpc logs RUN_DIR`)")
_RESUME = Counterpart(
    "`rlhpc run RUN.toml --resume`", "or `rlhpc resume RUN_DIR`; `--step N` for an earlier checkpoint"
)
_EXPORT = Counterpart("`rlhpc export RUN_DIR OUT`")
_LONGER = "a longer prompt is refused before a run starts, not cut: `rlhpc data convert --max-tokens N` leaves it out"
_REWARD = Counterpart("data.task", "a built-in reward, or `module:function`; several: [composite.NAME]")
_REWARD_ARGUMENTS = Counterpart("rewards.task_arguments", 'as { "module:function" = { name = 0.5 } }')
_CRITIC_LR = Counterpart("critic.learning_rate")
_CODE = _none("models whose code comes with the checkpoint are not run")
_ADAM = _none("AdamW with float32 master weights")
_ASYNC = Counterpart("admission.max_staleness", "versions that a trained rollout may be behind; 0: synchronous")
_EVAL_STEPS = Counterpart("evaluation.every_steps", "of an [[evaluation]]; or `rlhpc evaluate RUN_DIR DATA --follow`")
_EVAL_SAMPLES = Counterpart("evaluation.samples")
_EVAL_TEMPERATURE = Counterpart("evaluation.temperature")
_STOP = Counterpart("generation.stop", "a list of texts; a completion is judged without the one that ends it")
_ENTROPY = Counterpart("algorithm.entropy_coefficient")
_CAP = Counterpart("algorithm.importance_cap", "the correction is on by default, at 2")
_ROUTES = Counterpart("algorithm.routing_replay", "the engine's experts in the policy's passes, not in a reference's")
_MULTIMODAL = _none("models of text alone")

TRL: Mapping[str, Counterpart] = {
    "model_name_or_path": Counterpart("model.path", "a local directory"),
    "dtype": Counterpart("model.dtype"),
    "torch_dtype": Counterpart("model.dtype"),
    "bf16": Counterpart("model.dtype", '"bfloat16"; master weights are float32'),
    "fp16": Counterpart("model.dtype", "float32 or bfloat16"),
    "trust_remote_code": _CODE,
    "attn_implementation": _none("packed attention is chosen by the backend"),
    "model_init_kwargs": _none("a checkpoint is loaded as its config.json says"),
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_alpha": Counterpart("lora.alpha"),
    "lora_dropout": _none("there is no dropout: log-probabilities of two passes must agree"),
    "lora_target_modules": _LORA_TARGETS,
    "use_rslora": Counterpart("lora.rslora"),
    "dataset_name": Counterpart("data.path", "a JSONL, Parquet or Arrow file, or a directory of them"),
    "dataset_config": Counterpart("data.path"),
    "dataset_train_split": Counterpart("data.split"),
    "dataset_test_split": Counterpart("evaluation.split"),
    "shuffle_dataset": Counterpart("data.shuffle"),
    "chat_template_kwargs": Counterpart("model.chat_template_kwargs"),
    "remove_unused_columns": _none("a reward sees the record's reference, or the whole record (data.reference_field)"),
    "max_prompt_length": Counterpart("generation.max_prompt_tokens", _LONGER),
    "max_completion_length": Counterpart("generation.max_completion_tokens"),
    "reward_funcs": _REWARD,
    "reward_model_name_or_path": Counterpart(
        "judge.endpoint", "a model behind an endpoint judges; or a function of yours"
    ),
    "reward_weights": Counterpart("composite.NAME.weights", "or shaping.part_weights, of the parts of one reward"),
    "multi_objective_aggregation": _none("rewards are summed by their weights"),
    "num_generations": Counterpart("admission.group_size"),
    "num_generations_eval": _EVAL_SAMPLES,
    "per_device_train_batch_size": _PROMPTS,
    "per_device_eval_batch_size": _none("an engine fills itself"),
    "gradient_accumulation_steps": _MICRO,
    "generation_batch_size": _PROMPTS,
    "steps_per_generation": Counterpart("algorithm.minibatches", "optimiser steps for each batch of prompts"),
    "num_iterations": Counterpart("algorithm.epochs"),
    "num_train_epochs": _STEPS,
    "max_steps": _STEPS,
    "learning_rate": Counterpart("trainer.learning_rate"),
    "lr_scheduler_type": Counterpart("trainer.lr_schedule"),
    "warmup_steps": Counterpart("trainer.warmup_steps"),
    "warmup_ratio": Counterpart("trainer.warmup_steps", "a number of steps"),
    "weight_decay": Counterpart("trainer.weight_decay"),
    "adam_beta1": Counterpart("trainer.adam_beta1"),
    "adam_beta2": Counterpart("trainer.adam_beta2"),
    "adam_epsilon": Counterpart("trainer.adam_eps"),
    "max_grad_norm": Counterpart("trainer.max_grad_norm"),
    "optim": _ADAM,
    "gradient_checkpointing": Counterpart("trainer.recompute_activations"),
    "deepspeed": Counterpart("trainer.backend", '"deepspeed", with trainer.zero_stage; or "megatron"'),
    "fsdp": Counterpart("trainer.backend", '"deepspeed" with trainer.zero_stage = 3, or "megatron"'),
    "use_liger_kernel": _none("log-probabilities of the head are computed in chunks by kernels of our own"),
    "torch_compile": _none("what pays is compiled already"),
    "disable_dropout": _none("dropout is off"),
    "router_aux_loss_coef": _none("no load-balancing loss"),
    "temperature": Counterpart("generation.temperature"),
    "top_p": _WHOLE,
    "top_k": _WHOLE,
    "min_p": _WHOLE,
    "repetition_penalty": _WHOLE,
    "stop": _STOP,
    "stop_strings": _STOP,
    "generation_kwargs": _WHOLE,
    "use_vllm": Counterpart("generation.engine"),
    "vllm_mode": _PLAIN_ENGINE,
    "vllm_server_host": _PLAIN_ENGINE,
    "vllm_server_port": _PLAIN_ENGINE,
    "vllm_server_base_url": _PLAIN_ENGINE,
    "vllm_enable_sleep_mode": _none("engines and trainer have GPUs of their own"),
    "vllm_gpu_memory_utilization": Counterpart("generation.gpu_memory_utilization"),
    "vllm_max_model_length": _none("it is max_prompt_tokens + max_completion_tokens"),
    "vllm_tensor_parallel_size": Counterpart("generation.tensor_parallel"),
    "beta": Counterpart("algorithm.kl_coefficient"),
    "epsilon": Counterpart("algorithm.clip_low"),
    "epsilon_high": Counterpart("algorithm.clip_high"),
    "delta": Counterpart("algorithm.dual_clip"),
    "loss_type": Counterpart(
        "algorithm.loss", "what has equal weight in it (grpo, dapo, dr_grpo): algorithm.aggregation"
    ),
    "sapo_temperature_pos": Counterpart("algorithm.sapo_tau_positive"),
    "sapo_temperature_neg": Counterpart("algorithm.sapo_tau_negative"),
    "importance_sampling_level": Counterpart("algorithm.importance_level"),
    "scale_rewards": Counterpart("algorithm.advantage", '"grpo" divides by the group\'s deviation, others do not'),
    "mask_truncated_completions": Counterpart("shaping.truncated", '"masked"'),
    "sync_ref_model": Counterpart("algorithm.reference_every", "the reference is replaced, not mixed"),
    "ref_model_sync_steps": Counterpart("algorithm.reference_every"),
    "ref_model_mixup_alpha": _none("the reference is replaced, not mixed"),
    "top_entropy_quantile": _none("all tokens of a completion are trained"),
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _none("the coefficient is constant; [guard] can stop a run at an entropy"),
    "max_tool_calling_iterations": Counterpart("environment.max_turns"),
    "vllm_importance_sampling_correction": _CAP,
    "vllm_importance_sampling_mode": Counterpart("algorithm.importance_level", "masks: algorithm.mask_above"),
    "vllm_importance_sampling_cap": _CAP,
    "vllm_importance_sampling_clip_max": _CAP,
    "vllm_importance_sampling_clip_min": Counterpart("algorithm.mask_below"),
    "off_policy_mask_threshold": Counterpart("algorithm.veto_drift_above"),
    "use_bias_correction_kl": Counterpart("algorithm.kl_importance"),
    "seed": Counterpart("run.seed"),
    "full_determinism": Counterpart("run.deterministic"),
    "output_dir": Counterpart("run.directory", "default: runs/NAME"),
    "run_name": Counterpart("run.name"),
    "report_to": _WANDB,
    "logging_steps": _LOGS,
    "log_completions": _ROLLOUTS,
    "save_steps": Counterpart("checkpoint.every_steps"),
    "save_strategy": Counterpart("checkpoint.every_steps"),
    "save_total_limit": Counterpart("checkpoint.keep"),
    "eval_steps": _EVAL_STEPS,
    "eval_strategy": _EVAL_STEPS,
    "resume_from_checkpoint": _RESUME,
    "push_to_hub": _NO_HUB,
    "dataloader_num_workers": _none("prompts are read once, by the controller"),
}

_PACKED = _none("rows are always packed, up to trainer.token_budget tokens, without padding")
_ALWAYS = _none("it is always so: the assistant's turns, or the completion, are learnt, and nothing else")
_NEVER_CUT = "a longer conversation is refused, or left out by sft.too_long, never cut"
_FROZEN = _none("the reference of preferences is the model that the stage begins with")
_SIGMOID = _none('sft.loss = "dpo" is the sigmoid loss alone')
_TEMPLATE = _none("the chat template is the tokenizer's own; put yours into the checkpoint")

# Names with another meaning beside [[demonstrations]]: of TRL's SFTConfig and DPOConfig, and of habit.
SUPERVISED: Mapping[str, Counterpart] = {
    "dataset_name": Counterpart("demonstrations.path", "a file, or a directory of them"),
    "dataset_train_split": Counterpart("demonstrations.split"),
    "dataset_test_split": Counterpart("demonstrations.held_out", "of a table [[demonstrations]] of its own"),
    "dataset_text_field": _none("there is no loss on plain text: conversations, or a prompt and its completion"),
    "formatting_func": Counterpart("demonstrations.prompt_template"),
    "tools": Counterpart("demonstrations.tools_field"),
    "chat_template_path": _TEMPLATE,
    "eos_token": _TEMPLATE,
    "max_length": Counterpart("sft.max_tokens", _NEVER_CUT),
    "max_seq_length": Counterpart("sft.max_tokens", _NEVER_CUT),
    "max_prompt_length": Counterpart("sft.max_tokens", _NEVER_CUT),
    "max_completion_length": Counterpart("sft.max_tokens", _NEVER_CUT),
    "truncation_mode": Counterpart("sft.too_long", _NEVER_CUT),
    "packing": _PACKED,
    "packing_strategy": _PACKED,
    "padding_free": _PACKED,
    "group_by_length": _PACKED,
    "assistant_only_loss": _ALWAYS,
    "completion_only_loss": _ALWAYS,
    "per_device_train_batch_size": Counterpart("sft.batch_size", "conversations of an optimiser step, of all ranks"),
    "train_batch_size": Counterpart("sft.batch_size", "conversations of an optimiser step, of all ranks"),
    "per_device_eval_batch_size": Counterpart("sft.batch_size", "that of a step"),
    "num_train_epochs": Counterpart("sft.epochs"),
    "num_epochs": Counterpart("sft.epochs"),
    "max_steps": Counterpart("sft.num_steps"),
    "lr": Counterpart("sft.learning_rate"),
    "lr_scheduler_type": Counterpart("sft.lr_schedule"),
    "warmup_ratio": Counterpart("sft.warmup_steps", "a number of steps"),
    "eval_strategy": Counterpart("sft.held_out", "a share of the conversations"),
    "eval_steps": Counterpart("sft.evaluate_every"),
    "load_best_model_at_end": Counterpart("sft.early_stop"),
    "early_stopping_patience": Counterpart("sft.early_stop"),
    "neftune_noise_alpha": _none("there is no noise on embeddings"),
    "loss_type": Counterpart("sft.loss", '"dpo"; of the losses of pairs there is the sigmoid one alone'),
    "label_smoothing": _SIGMOID,
    "f_divergence_type": _SIGMOID,
    "rpo_alpha": _SIGMOID,
    "ld_alpha": _SIGMOID,
    "reference_free": _FROZEN,
    "sync_ref_model": _FROZEN,
    "precompute_ref_log_probs": Counterpart("trainer.reference_memory", "the reference computes in every step"),
}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL: Mapping[str, Counterpart] = {
    "data.train_files": Counterpart("data.path", "several: a [[data]] for each, mixed by data.weight"),
    "data.val_files": Counterpart("evaluation.path"),
    "data.prompt_key": Counterpart("data.prompt_field"),
    "data.reward_fn_key": Counterpart("data.task_field"),
    "data.train_batch_size": _PROMPTS,
    "data.val_batch_size": _none("an engine fills itself"),
    "data.max_prompt_length": Counterpart("generation.max_prompt_tokens", _LONGER),
    "data.max_response_length": Counterpart("generation.max_completion_tokens"),
    "data.filter_overlong_prompts": _none(_LONGER),
    "data.truncation": _none(_LONGER),
    "data.shuffle": Counterpart("data.shuffle"),
    "data.seed": Counterpart("run.seed"),
    "data.image_key": _MULTIMODAL,
    "data.apply_chat_template_kwargs": Counterpart("model.chat_template_kwargs"),
    "data.sampler.class_name": Counterpart(
        "curriculum.stages", "[curriculum] chooses prompts by what is known of them"
    ),
    "actor_rollout_ref.model.path": Counterpart("model.path"),
    "actor_rollout_ref.model.tokenizer_path": Counterpart("model.path", "the tokenizer lies with the model"),
    "actor_rollout_ref.model.trust_remote_code": _CODE,
    "actor_rollout_ref.model.custom_chat_template": _none("the tokenizer's own; put yours into the checkpoint"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Counterpart("trainer.recompute_activations"),
    "actor_rollout_ref.model.lora_rank": _LORA,
    "actor_rollout_ref.model.lora_alpha": Counterpart("lora.alpha"),
    "actor_rollout_ref.model.lora_adapter_path": Counterpart("lora.initial"),
    "actor_rollout_ref.model.target_modules": _LORA_TARGETS,
    "actor_rollout_ref.model.use_remove_padding": _none("rows are packed, without padding"),
    "actor_rollout_ref.model.use_liger": _none("log-probabilities of the head are computed by kernels of our own"),
    "actor_rollout_ref.hybrid_engine": _none("engines and trainer have GPUs of their own, and work at the same time"),
    f"{_ACTOR}.strategy": Counterpart("trainer.backend"),
    f"{_ACTOR}.optim.lr": Counterpart("trainer.learning_rate"),
    f"{_ACTOR}.optim.lr_warmup_steps": Counterpart("trainer.warmup_steps"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Counterpart("trainer.warmup_steps", "a number of steps"),
    f"{_ACTOR}.optim.min_lr_ratio": Counterpart("trainer.min_learning_rate", "a learning rate"),
    f"{_ACTOR}.optim.lr_scheduler_type": Counterpart("trainer.lr_schedule"),
    f"{_ACTOR}.optim.weight_decay": Counterpart("trainer.weight_decay"),
    f"{_ACTOR}.optim.optimizer": _ADAM,
    f"{_ACTOR}.grad_clip": Counterpart("trainer.max_grad_norm"),
    f"{_ACTOR}.ppo_mini_batch_size": Counterpart("algorithm.minibatches", "a number of parts of the batch"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _MICRO,
    f"{_ACTOR}.use_dynamic_bsz": _none("always: micro-batches are packed by tokens"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Counterpart("trainer.token_budget"),
    f"{_ACTOR}.ppo_epochs": Counterpart("algorithm.epochs"),
    f"{_ACTOR}.clip_ratio": Counterpart("algorithm.clip_low", "and algorithm.clip_high"),
    f"{_ACTOR}.clip_ratio_low": Counterpart("algorithm.clip_low"),
    f"{_ACTOR}.clip_ratio_high": Counterpart("algorithm.clip_high"),
    f"{_ACTOR}.clip_ratio_c": Counterpart("algorithm.dual_clip"),
    f"{_ACTOR}.loss_agg_mode": Counterpart("algorithm.aggregation"),
    f"{_ACTOR}.policy_loss.loss_mode": Counterpart("algorithm.loss"),
    f"{_ACTOR}.entropy_coeff": _ENTROPY,
    f"{_ACTOR}.use_kl_loss": Counterpart("algorithm.kl_coefficient", "above 0"),
    f"{_ACTOR}.kl_loss_coef": Counterpart("algorithm.kl_coefficient"),
    f"{_ACTOR}.kl_loss_type": Counterpart("algorithm.kl_estimator"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": Counterpart("trainer.context_parallel", "Megatron"),
    f"{_ACTOR}.fsdp_config.param_offload": Counterpart("trainer.parameter_offload"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": Counterpart("trainer.optimizer_offload"),
    f"{_ACTOR}.fsdp_config.fsdp_size": Counterpart("trainer.zero_stage"),
    f"{_ACTOR}.checkpoint.async_save": _none("checkpoints are written while training goes on"),
    f"{_ROLLOUT}.name": Counterpart("generation.engine"),
    f"{_ROLLOUT}.mode": _none("always asynchronous; admission.max_staleness bounds by how much"),
    f"{_ROLLOUT}.n": Counterpart("admission.group_size"),
    f"{_ROLLOUT}.temperature": Counterpart("generation.temperature"),
    f"{_ROLLOUT}.top_p": _WHOLE,
    f"{_ROLLOUT}.top_k": _WHOLE,
    f"{_ROLLOUT}.prompt_length": Counterpart("generation.max_prompt_tokens"),
    f"{_ROLLOUT}.response_length": Counterpart("generation.max_completion_tokens"),
    f"{_ROLLOUT}.gpu_memory_utilization": Counterpart("generation.gpu_memory_utilization"),
    f"{_ROLLOUT}.tensor_model_parallel_size": Counterpart("generation.tensor_parallel"),
    f"{_ROLLOUT}.max_num_seqs": Counterpart("generation.max_num_seqs"),
    f"{_ROLLOUT}.max_num_batched_tokens": Counterpart("generation.max_num_batched_tokens"),
    f"{_ROLLOUT}.max_model_len": _none("it is max_prompt_tokens + max_completion_tokens"),
    f"{_ROLLOUT}.enforce_eager": Counterpart("generation.enforce_eager"),
    f"{_ROLLOUT}.free_cache_engine": _none("engines and trainer have GPUs of their own"),
    f"{_ROLLOUT}.enable_prefix_caching": Counterpart("generation.prefix_caching"),
    f"{_ROLLOUT}.over_sample_rate": _none("a batch passes stragglers as far as admission.max_staleness allows"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": _ROUTES,
    f"{_ACTOR}.router_replay.mode": Counterpart("algorithm.routing_replay", "true for R3; R2 has no counterpart"),
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": Counterpart("environment.max_turns"),
    f"{_ROLLOUT}.multi_turn.tool_config_path": Counterpart("environment.tools"),
    f"{_ROLLOUT}.val_kwargs.temperature": _EVAL_TEMPERATURE,
    f"{_ROLLOUT}.val_kwargs.n": _EVAL_SAMPLES,
    "algorithm.adv_estimator": Counterpart("algorithm.advantage"),
    "algorithm.gamma": Counterpart("algorithm.discount"),
    "algorithm.lam": Counterpart("algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": Counterpart("algorithm.advantage", '"grpo" divides by the group\'s deviation'),
    "algorithm.use_kl_in_reward": Counterpart("algorithm.kl_in", '"reward"'),
    "algorithm.kl_ctrl.kl_coef": Counterpart("algorithm.kl_coefficient"),
    "algorithm.kl_ctrl.target_kl": _none("the coefficient is constant"),
    "algorithm.kl_penalty": Counterpart("algorithm.kl_estimator"),
    "algorithm.filter_groups.enable": Counterpart("admission.active_sampling"),
    "algorithm.rollout_correction.rollout_is_threshold": _CAP,
    "algorithm.rollout_correction.rollout_rs_threshold": Counterpart("algorithm.mask_above"),
    "critic.optim.lr": _CRITIC_LR,
    "critic.model.path": Counterpart("critic.path"),
    "critic.cliprange_value": Counterpart("critic.value_clip"),
    "trainer.critic_warmup": Counterpart("critic.head_start_steps"),
    "reward_model.reward_manager": _REWARD,
    "reward_model.model.path": Counterpart("judge.endpoint", "a model behind an endpoint judges"),
    "reward_model.sandbox_fusion.url": Counterpart("sandbox.languages", "programs run in a sandbox of our own"),
    "custom_reward_function.path": _REWARD,
    "custom_reward_function.name": _REWARD,
    "custom_reward_function.reward_kwargs": _REWARD_ARGUMENTS,
    "trainer.total_epochs": _STEPS,
    "trainer.total_training_steps": _STEPS,
    "trainer.project_name": Counterpart("run.name"),
    "trainer.experiment_name": Counterpart("run.name"),
    "trainer.logger": _WANDB,
    "trainer.log_val_generations": _none("an evaluation keeps every sample, beside its summary"),
    "trainer.rollout_data_dir": _ROLLOUTS,
    "trainer.nnodes": _none("a site file says where processes run: `rlhpc submit RUN.toml SITE.toml`"),
    "trainer.n_gpus_per_node": Counterpart("trainer.num_ranks", "and generation.num_replicas; nodes: the site file"),
    "trainer.save_freq": Counterpart("checkpoint.every_steps"),
    "trainer.test_freq": _EVAL_STEPS,
    "trainer.val_before_train": _none("an [[evaluation]] evaluates the first checkpoint too; before: `rlhpc evaluate`"),
    "trainer.val_only": Counterpart("`rlhpc evaluate MODEL DATA`"),
    "trainer.resume_mode": _RESUME,
    "trainer.resume_from_path": _RESUME,
    "trainer.default_local_dir": Counterpart("run.directory"),
    "trainer.max_actor_ckpt_to_keep": Counterpart("checkpoint.keep"),
    "trainer.balance_batch": _none("always: rows are shared out by their cost"),
    "ray_kwargs.ray_init.num_cpus": _NO_RAY,
}

PRIME_RL: Mapping[str, Counterpart] = {
    "output_dir": Counterpart("run.directory"),
    "run.name": Counterpart("run.name"),
    "clean": Counterpart("`rlhpc run RUN.toml --fresh`"),
    "max_steps": _STEPS,
    "seq_len": _none("it is max_prompt_tokens + max_completion_tokens; a micro-batch: trainer.token_budget"),
    "model.name": Counterpart("model.path", "a local directory"),
    "tokenizer.chat_template": _none("the tokenizer's own; put yours into the checkpoint"),
    "ckpt.interval": Counterpart("checkpoint.every_steps"),
    "ckpt.keep_last": Counterpart("checkpoint.keep"),
    "ckpt.keep_interval": _none("`rlhpc export` keeps a step for good"),
    "ckpt.output_dir": _none("checkpoints lie in the run directory"),
    "resume.step": _RESUME,
    "resume.dir": _RESUME,
    "monitors.wandb": _WANDB,
    "monitors.file": _LOGS,
    "log.level": _LOGS,
    "weight_broadcast.type": Counterpart("weights.transport"),
    "weight_broadcast.timeout": Counterpart("weights.timeout_s"),
    "weight_broadcast.port": _none("ports are free ones, found through the run directory"),
    "rollout_transport.type": Counterpart("transport.kind"),
    "deployment.num_train_gpus": Counterpart("trainer.num_ranks"),
    "deployment.num_infer_gpus": Counterpart("generation.num_replicas", "times generation.tensor_parallel"),
    "deployment.gpus_per_node": _none("a site file says where processes run"),
    "deployment.num_train_nodes": _none("a site file says where processes run"),
    "slurm.partition": _none("of the site file: `rlhpc submit RUN.toml SITE.toml`"),
    "slurm.account": _none("of the site file"),
    "slurm.time": _none("of the site file"),
    "dry_run": Counterpart("`rlhpc plan RUN.toml SITE.toml`"),
    "trainer.model.ac": Counterpart("trainer.recompute_activations"),
    "trainer.model.compile": _none("what pays is compiled already"),
    "trainer.model.attn": _none("packed attention is chosen by the backend"),
    "trainer.model.cp": Counterpart("trainer.context_parallel"),
    "trainer.model.ep": Counterpart("trainer.expert_parallel"),
    "trainer.model.dp_replicate": _none("what is left of num_ranks is data parallel"),
    "trainer.model.fsdp_cpu_offload": Counterpart("trainer.parameter_offload"),
    "trainer.model.optim_cpu_offload": Counterpart("trainer.optimizer_offload"),
    "trainer.model.lora": _LORA,
    "trainer.model.optimization_dtype": _none("master weights are float32"),
    "trainer.model.fused_lm_head_token_chunk_size": _none("chosen by itself"),
    "trainer.optim.type": _ADAM,
    "trainer.optim.lr": Counterpart("trainer.learning_rate"),
    "trainer.optim.weight_decay": Counterpart("trainer.weight_decay"),
    "trainer.optim.max_norm": Counterpart("trainer.max_grad_norm"),
    "trainer.optim.betas1": Counterpart("trainer.adam_beta1"),
    "trainer.optim.betas2": Counterpart("trainer.adam_beta2"),
    "trainer.scheduler.type": Counterpart("trainer.lr_schedule"),
    "trainer.scheduler.warmup_steps": Counterpart("trainer.warmup_steps"),
    "trainer.scheduler.decay_steps": Counterpart("trainer.decay_steps", "the step at which the decay ends"),
    "trainer.scheduler.min_lr": Counterpart("trainer.min_learning_rate"),
    "trainer.loss.type": Counterpart("algorithm.loss"),
    "trainer.loss.import_path": Counterpart("algorithm.loss", "`module:name` of your own"),
    "trainer.loss.dppo_mask_low": Counterpart("algorithm.clip_low", 'of loss = "dppo"'),
    "trainer.loss.dppo_mask_high": Counterpart("algorithm.clip_high", 'of loss = "dppo"'),
    "trainer.loss.kl_tau": Counterpart("algorithm.kl_coefficient", "of the KL from a reference"),
    "trainer.dist_timeout_seconds": Counterpart("weights.timeout_s", "silence of a process: transport.dead_after_s"),
    "trainer.enable_router_replay": _ROUTES,
    "orchestrator.batch_size": Counterpart(
        "admission.groups_per_step", "theirs counts rollouts: group_size times ours"
    ),
    "orchestrator.token_batch_size": _none("a step has a number of groups"),
    "orchestrator.group_size": Counterpart("admission.group_size"),
    "orchestrator.max_off_policy_steps": _ASYNC,
    "orchestrator.concurrency.max_inflight": _none("it follows from admission.max_staleness"),
    "orchestrator.train.sampling.temperature": Counterpart("generation.temperature"),
    "orchestrator.train.sampling.max_completion_tokens": Counterpart("generation.max_completion_tokens"),
    "orchestrator.train.env": Counterpart("data.environment", 'verifiers environments: "verifiers", environment.id'),
    "orchestrator.train.filter_zero_advantages": Counterpart("admission.active_sampling"),
    "orchestrator.algo": Counterpart("algorithm.advantage"),
    "orchestrator.algo.length_penalty": Counterpart("shaping.length_weight"),
    "orchestrator.train.curriculum": Counterpart("curriculum.solved_rest_epochs", "and the other keys of [curriculum]"),
    "orchestrator.eval.interval": _EVAL_STEPS,
    "orchestrator.eval.num_examples": Counterpart("evaluation.prompts"),
    "orchestrator.eval.group_size": _EVAL_SAMPLES,
    "orchestrator.eval.sampling.temperature": _EVAL_TEMPERATURE,
    "inference.vllm.tensor_parallel_size": Counterpart("generation.tensor_parallel"),
    "inference.vllm.data_parallel_size": Counterpart("generation.num_replicas"),
    "inference.vllm.gpu_memory_utilization": Counterpart("generation.gpu_memory_utilization"),
    "inference.vllm.max_model_len": _none("it is max_prompt_tokens + max_completion_tokens"),
    "inference.vllm.enforce_eager": Counterpart("generation.enforce_eager"),
    "inference.vllm.enable_prefix_caching": Counterpart("generation.prefix_caching"),
    "inference.vllm.dtype": Counterpart("model.dtype"),
    "inference.vllm.seed": Counterpart("run.seed"),
    "inference.vllm.enable_lora": Counterpart("weights.form", "what is sent of adapters, where lora.rank is set"),
    "inference.server.port": _PLAIN_ENGINE,
}

SYSTEMS: Mapping[str, Mapping[str, Counterpart]] = {"TRL": TRL, "verl": VERL, "prime-rl": PRIME_RL}
# Other names in use for our keys: from other libraries, older versions, or habit.
USUAL: Mapping[str, Counterpart] = {
    "lr": Counterpart("trainer.learning_rate"),
    "rollouts_per_example": Counterpart("admission.group_size"),
    "rollouts_per_prompt": Counterpart("admission.group_size"),
    "async_level": _ASYNC,
    "max_async_level": _ASYNC,
    "batch_size": _PROMPTS,
    "train_batch_size": _PROMPTS,
    "micro_batch_size": _MICRO,
    "rollout_n": Counterpart("admission.group_size"),
    "kl_coef": Counterpart("algorithm.kl_coefficient"),
    "clip_eps": Counterpart("algorithm.clip_low", "and algorithm.clip_high"),
    "gamma": Counterpart("algorithm.discount"),
    "lam": Counterpart("algorithm.gae_lambda"),
    "max_tokens": Counterpart("generation.max_completion_tokens"),
    "max_new_tokens": Counterpart("generation.max_completion_tokens"),
    "num_epochs": _STEPS,
    **dict.fromkeys(("wandb", "use_wandb", "wandb_project", "wandb_entity", "wandb_name", "wandb_run_name"), _WANDB),
    "mlflow": Counterpart("`rlhpc metrics RUN_DIR --out FILE`", "and MLflow's own client"),
    "tensorboard": Counterpart("`rlhpc tensorboard RUN_DIR`", "it is always written"),
    "lora": _LORA,
    "lora_rank": _LORA,
    "peft": _LORA,
    "target_modules": _LORA_TARGETS,
    "hub_model_id": _NO_HUB,
    "save_model": _EXPORT,
    "reward_fn": _REWARD,
    "staleness": _ASYNC,
}
_TOO_COMMON = ("name", "type", "path", "dtype", "time", "step", "dir", "port", "file", "level", "seed", "model")
_OF_STAGE = ("sft", "demonstrations")  # tables of supervised fine-tuning
MOST_NAMED = 12  # keys of a foreign section that one message explains


def counterpart_of(key: str, *, is_supervised: bool = False) -> Counterpart | None:
    """Return the counterpart of an unknown key; None if no system has the key.

    key: with its section, as written in the run file.  Searches for the whole name, then for its end, then for its last
    word.  is_supervised: the file is of supervised fine-tuning alone.
    """
    parts = key.split(".")
    if (is_supervised or parts[0] in _OF_STAGE) and parts[-1] in SUPERVISED:
        return SUPERVISED[parts[-1]]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in _TOO_COMMON and start:
            return None
        if (found := USUAL.get(name)) is not None or (found := _named(name)) is not None:
            return found
    return SUPERVISED.get(parts[-1])


def is_theirs(key: str) -> bool:
    """Whether another system has a key of this whole name, or its last word is a habitual name."""
    section, _, name = key.rpartition(".")
    return (
        any(key in table for table in SYSTEMS.values())
        or name in USUAL
        or (section in _OF_STAGE and name in SUPERVISED)
    )


def section_in_words(key: str, table: Mapping[str, object]) -> str:
    """Describe our counterpart of each key of a foreign section; "" if no key is known."""
    found = {name: counterpart_of(name) for name in _leaves(key, table)}
    said = [f"{name}: {in_words(each)}" for name, each in found.items() if each is not None]
    more = f"; and {len(said) - MOST_NAMED} more" if len(said) > MOST_NAMED else ""
    others = [name for name, each in found.items() if each is None]
    not_known = f"; not known: {', '.join(others[:MOST_NAMED])}" if others else ""
    return "; ".join(said[:MOST_NAMED]) + more + not_known if said else ""


def in_words(counterpart: Counterpart) -> str:
    """Describe a counterpart: our key or command, or that there is none and why."""
    return counterpart.ours or f"no counterpart, because {counterpart.note}"


def _named(name: str) -> Counterpart | None:
    """Counterpart of the other systems' key of this name, or of the shortest name that ends with it."""
    everywhere = [(theirs, found) for table in SYSTEMS.values() for theirs, found in table.items()]
    ending = [(theirs, found) for theirs, found in everywhere if f".{theirs}".endswith(f".{name}")]
    return min(ending, key=lambda each: each[0].count("."))[1] if ending else None


def _leaves(key: str, table: Mapping[str, object]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{key}.{name}", value)
        else:
            yield f"{key}.{name}"
