"""The stable names of the metrics that a run writes, with unit and meaning.

A frozen table.  A name is never reused for something else.  `rlhpc schema metrics` prints the table.
A name that ends in "/*" is a family; the user chooses the last part, which may have slashes.
Shares are 0–1.  "Batch" is the batch of the optimiser step at which the value is written; "Recently finished" is since
the previous step, zero-variance groups included: the policy's present ability, not the data it is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    unit: str
    meaning: str


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        # Success of the policy.
        "reward/mean": Metric("reward", "mean over recently finished rollouts"),
        "reward/std": Metric("reward", "standard deviation over recently finished rollouts"),
        "reward/shaped_mean": Metric("reward", "the same after [shaping]: what advantages are computed from"),
        "reward/correct_share": Metric("share", "recently finished rollouts with verdict correct"),
        "reward/verifier_error_share": Metric("share", "verifier errors among the latest verdicts; never trained on"),
        "reward/zero_variance_share": Metric("share", "recently finished groups whose rewards were all equal"),
        "reward/queued": Metric("completions", "at reward services: waiting for a worker, or being judged"),
        "reward/worker_restarts": Metric("workers", "replaced by the current reward services: a verifier hung or died"),
        "reward/retries": Metric("requests", "resent by the current generators: a service did not reply in time"),
        "verifier_judged/*": Metric("completions", "of this task, judged by the current reward services"),
        "verifier_raised/*": Metric("completions", "of them, without a verdict: the verifier raised something"),
        "verifier_invalid/*": Metric("completions", "the same: it returned no finite number, or no reward"),
        "verifier_timed_out/*": Metric("completions", "the same: it was killed at its timeout"),
        "verifier_died/*": Metric("completions", "the same: its worker process ended"),
        "verifier_out_of_memory/*": Metric("completions", "the same: MemoryError; its worker was replaced"),
        "verifier_unsent/*": Metric("completions", "the same: not valid text, or 64 MiB or more of it"),
        "verifier_batch_failed/*": Metric("batches", "without a verdict; their completions were judged again alone"),
        "verifier_forked/*": Metric("processes", "that the verifier left behind, and that were killed"),
        "verifier_waiting/*": Metric("completions", "with a worker for 10 s or more now: perhaps a service is down"),
        "verifier_mean_s/*": Metric("s", "to judge one completion of this task, without waiting for a worker"),
        "verifier_judge_requests/*": Metric("requests", "to the model that judges this task, retries included"),
        "verifier_judge_retries/*": Metric("requests", "of these, because the previous one gave no grade"),
        "verifier_judge_cached/*": Metric("completions", "whose grade was cached: no request"),
        "verifier_judge_prompt_tokens/*": Metric("tokens", "read by the judge"),
        "verifier_judge_completion_tokens/*": Metric("tokens", "written by the judge"),
        "verifier_judge_s/*": Metric("s", "waiting for the judge, all requests together"),
        "verifier_rows_branch/*": Metric("rows", "that agents opened behind a turn which another row goes on from"),
        "verifier_rows_rewritten/*": Metric("rows", "the same: they share no turn (a summary, a sub-agent)"),
        "verifier_rows_tools/*": Metric("rows", "the same: their tools are others"),
        "reward_part/*": Metric("reward", "mean of a named part of the reward, recently finished rollouts"),
        # Models beside the policy ([[service]]), by the name of the service; summed over its living processes.
        "service_requests_running/*": Metric("requests", "that this service computes"),
        "service_requests_waiting/*": Metric("requests", "that wait at this service"),
        "service_requests_per_s/*": Metric("requests/s", "answered by this service since the previous step"),
        "service_tokens_per_s/*": Metric("tokens/s", "of its requests and replies, since the previous step"),
        # Groups.
        "group/all_correct_share": Metric("share", "recently finished groups, rewards equal and answers correct"),
        "group/all_wrong_share": Metric("share", "recently finished groups, rewards equal and answers wrong"),
        "group/dropped_total": Metric("groups", "dropped since the start, for any reason"),
        "group/replaced_total": Metric("groups", "replaced since the start because their rewards had zero variance"),
        "group/regranted_total": Metric("groups", "granted again since the start: a lease was lost or expired"),
        # Prompts of the dataset ([curriculum]).
        "prompt/known_share": Metric("share", "prompts with a known pass rate: at least one finished group"),
        "prompt/pass_rate_mean": Metric("share", "mean pass rate of these, that of their newest groups"),
        "prompt/solved_share": Metric("share", "those whose newest group has curriculum.solved_at or more"),
        "prompt/hopeless_share": Metric("share", "those whose newest group has curriculum.hopeless_at or less"),
        "prompt/left_out_total": Metric("prompts", "skipped since the start when their turn came"),
        "prompt/stage": Metric("number", "of the stage in curriculum.stages, from 0; the lowest of all datasets"),
        # One value for each of several datasets, by its name.
        "dataset_share/*": Metric("share", "recently finished groups of this dataset"),
        "dataset_reward/*": Metric("reward", "reward/mean of this dataset"),
        "dataset_correct_share/*": Metric("share", "reward/correct_share of this dataset"),
        "dataset_length/*": Metric("tokens", "length/completion_mean of this dataset"),
        "dataset_truncated_share/*": Metric("share", "length/truncated_share of this dataset"),
        "dataset_teacher_kl/*": Metric("nats", "teacher/kl of this dataset, whose teacher may be its own"),
        "dataset_known_share/*": Metric("share", "prompt/known_share of this dataset"),
        "dataset_pass_rate_mean/*": Metric("share", "prompt/pass_rate_mean of this dataset"),
        "dataset_solved_share/*": Metric("share", "prompt/solved_share of this dataset"),
        "dataset_hopeless_share/*": Metric("share", "prompt/hopeless_share of this dataset"),
        "dataset_left_out_total/*": Metric("prompts", "prompt/left_out_total of this dataset"),
        "dataset_stage/*": Metric("number", "prompt/stage of this dataset"),
        # Lengths.
        "length/prompt_mean": Metric("tokens", "mean over recently finished rollouts"),
        "length/completion_mean": Metric("tokens", "mean over recently finished rollouts"),
        "length/completion_max": Metric("tokens", "longest of the recently finished rollouts"),
        "length/truncated_share": Metric("share", "recently finished rollouts cut off by a limit on tokens or turns"),
        "length/rows_mean": Metric("rows", "mean over recently finished rollouts; 1 if no agent rewrites its history"),
        "length/rows_max": Metric("rows", "of a recently finished rollout"),
        "length/turns_mean": Metric("turns", "mean over recently finished rollouts; 1 without environments"),
        "length/read_share": Metric("share", "tokens of completions that came from an environment"),
        # Staleness.
        "staleness/mean": Metric("versions", "version trained minus version at admission, mean over rollouts"),
        "staleness/max": Metric("versions", "largest of the batch; never above staleness/bound"),
        "staleness/bound": Metric("versions", "upper bound that the ledger guarantees"),
        "staleness/token_mean": Metric("versions", "version trained minus version that sampled the token, mean"),
        "rollout/routed_share": Metric("share", "tokens of the batch whose experts are those of the engine"),
        "rollout/spanning_update_share": Metric("share", "rollouts whose tokens were sampled by several versions"),
        "rollout/num_versions_max": Metric("versions", "most versions that sampled one rollout of the batch"),
        # The optimiser step.
        "trainer/loss": Metric("nats", "with KL term and entropy bonus, mean over loss tokens"),
        "trainer/grad_norm": Metric("norm", "global norm before clipping; not finite if the step was skipped"),
        "trainer/learning_rate": Metric("1", "of this step"),
        # Supervised fine-tuning.
        "sft/epoch": Metric("epochs", "passes over the demonstrations so far"),
        "sft/held_out_loss": Metric("nats", "mean of what is held out, where it was computed: −log p of loss tokens"),
        "sft/preference_accuracy": Metric("share", "pairs whose preferred answer gained more on the reference"),
        "sft/preference_margin": Metric("nats", "mean over pairs of beta times that gain over the other's"),
        "sft/held_out_preference_accuracy": Metric("share", "the same of held-out pairs"),
        "sft/held_out_preference_margin": Metric("nats", "the same of held-out pairs"),
        # The critic, where algorithm.advantage is "gae".
        "critic/learning_rate": Metric("1", "of this step"),
        "critic/loss": Metric("reward²", "half the squared error of values, mean over loss tokens"),
        "critic/grad_norm": Metric("norm", "global norm before clipping, mean over the optimiser steps"),
        "critic/clipped_share": Metric("share", "loss tokens whose value moved beyond critic.value_clip"),
        "critic/explained_variance": Metric("share", "1 − Var(return − value) / Var(return) over loss tokens"),
        "critic/value_mean": Metric("reward", "mean over loss tokens, before the critic learns from the batch"),
        "critic/return_mean": Metric("reward", "mean return, the target of the values"),
        "critic/advantage_std": Metric("reward", "standard deviation before normalisation"),
        "trainer/entropy": Metric("nats", "of the current policy, mean over loss tokens"),
        "trainer/tokens_per_s": Metric("tokens/s", "trained, prompts included, over the last steps"),
        "trainer/idle_ratio": Metric("ratio", "share of wall time in which the trainer had no batch"),
        "trainer/step_s": Metric("s", "from a batch's arrival to the end of its step; of a step in parts, their sum"),
        "trainer/step_parts": Metric("parts", "in which the step was trained; 1: as a whole"),
        "trainer/skipped_steps": Metric("steps", "not applied since the start: not finite, or refused by the guard"),
        # How far the policy moves, and how far sampler and trainer disagree.
        "policy/clip_low_share": Metric("share", "loss tokens whose ratio was clipped from below"),
        "policy/clip_high_share": Metric("share", "loss tokens whose ratio was clipped from above; above 0.3: trouble"),
        "policy/ratio_mean": Metric("ratio", "current over proximal probability, mean over loss tokens"),
        "policy/importance_weight_mean": Metric("ratio", "proximal over behaviour probability, capped; healthy 0.5–2"),
        "policy/importance_capped_share": Metric("share", "loss tokens whose importance weight was capped"),
        "policy/ess": Metric("ratio", "effective sample size of importance weights, as a share; below 0.3: trouble"),
        "policy/kl_k1": Metric("nats", "KL of behaviour from current policy, estimator k1 (may be negative)"),
        "policy/kl_k3": Metric("nats", "KL of behaviour from current policy, estimator k3; healthy up to 0.1"),
        "policy/importance_masked_share": Metric("share", "loss tokens excluded by weight, veto or age"),
        "policy/kl_k2": Metric("nats", "KL of behaviour from current policy, estimator k2"),
        "policy/mismatch_abs_mean": Metric("nats", "|proximal − sampler log-probability|: arithmetic and age"),
        "policy/mismatch_kl": Metric("nats", "KL of sampler from proximal policy; up to 0.001 at staleness 0"),
        "policy/mismatch_k1": Metric("nats", "as mismatch_kl, estimator k1 (may be negative)"),
        "policy/mismatch_chi2": Metric("1", "χ² divergence of proximal policy from sampler: variance of the weights"),
        "policy/mismatch_log_perplexity": Metric("nats", "|mean of proximal − sampler log-probability| of a rollout"),
        "policy/kl_reference": Metric("nats", "KL of current policy from the reference, estimator k3"),
        "teacher/kl": Metric("nats", "KL of sampler from teacher: mean of log π_sampler − log π_teacher, recent"),
        "teacher/waiting": Metric("rollouts", "that wait for a teacher's answer now"),
        "teacher/request_s": Metric("s", "until a teacher has answered, mean since generators started"),
        "teacher/retries": Metric("requests", "to teachers that were sent again, since generators started"),
        "teacher/failed": Metric("rollouts", "about which no teacher said anything, since generators started"),
        "policy/forward_kl": Metric("nats", "KL of teacher from current policy over the teacher's top k, mean"),
        "own_loss/*": Metric("-", "reported by a custom algorithm.loss, mean over loss tokens"),
        # The same for the loss tokens of one age: versions between sampling and training; 4 includes all above.
        "age_tokens_share/*": Metric("share", "loss tokens of this age"),
        "age_importance_weight/*": Metric("ratio", "as policy/importance_weight_mean, tokens of this age"),
        "age_ess/*": Metric("ratio", "as policy/ess, tokens of this age"),
        "age_mismatch_kl/*": Metric("nats", "as policy/mismatch_kl, tokens of this age"),
        "age_kl_k3/*": Metric("nats", "as policy/kl_k3, tokens of this age"),
        "age_clipped_share/*": Metric("share", "tokens of this age at a bound of the clipped ratio"),
        "guard/action": Metric("action", "of the guard: 0 none, 1 warn, 2 tighten, 3 skip, 4 stop"),
        "guard/alarm_steps": Metric("steps", "out of bounds in the current alarm; 0: no alarm"),
        # Generators, summed or averaged over replicas.
        "generator/tokens_per_s": Metric("tokens/s", "sampled by all generators over the last steps"),
        "generator/idle_ratio": Metric("ratio", "share of wall time without a request, all generators"),
        "generator/running": Metric("rollouts", "being decoded"),
        "generator/decoded_together": Metric("rollouts", "decoded at once by one generator, mean over time with any"),
        "generator/token_s": Metric("s", "between two tokens of a rollout, mean over recently sampled tokens"),
        "generator/waiting": Metric("rollouts", "accepted by an engine, not yet started"),
        "generator/kv_usage": Metric("share", "KV cache in use, mean over generators; 0: not known"),
        "generator/preemptions": Metric("rollouts", "evicted from the KV cache and recomputed, since each began"),
        "generator/tokens_unreported": Metric("tokens", "of running rollouts, not yet reported to the controller"),
        "generator/tokens_lost_total": Metric("tokens", "lost with dead generators since the start: sampled again"),
        "generator/live": Metric("generators", "with a recent heartbeat"),
        # Weight updates.
        "weights/publish_s": Metric("s", "trainer: export and broadcast"),
        "weights/sent_share": Metric("share", "bytes sent over bytes of the weights; below 1: only changes were sent"),
        "weights/receive_s": Metric("s", "slowest generator: from request to last verified byte; decoding continues"),
        "weights/pause_s": Metric("s", "slowest generator: time in which it could not sample"),
        "weights/canary_logratio": Metric("nats", "mean absolute log-ratio of engine and trainer, worst of the latest"),
        "weights/canary_failed_total": Metric("canaries", "failed since the start: the generator was quarantined"),
        "weights/checksums_differed": Metric("times", "a generator had other weights than others, this attempt"),
        "weights/version": Metric("version", "policy version live on all members"),
        "weights/epoch": Metric("epoch", "membership epoch"),
        "weights/members": Metric("generators", "that receive broadcasts"),
        # Packing.
        "packing/fill": Metric("ratio", "tokens over token budget, mean over micro-batches"),
        "packing/lockstep_slowdown": Metric("ratio", "work of the slowest rank over the mean; 1 is perfect"),
        "packing/num_microbatches": Metric("micro-batches", "of one rank"),
        # Queues.
        "queue/slots_free": Metric("groups", "that may be admitted now"),
        "queue/in_flight": Metric("groups", "leased and not finished"),
        "queue/finished": Metric("groups", "finished and not in a batch"),
        "queue/taken": Metric("groups", "in a batch and not released"),
        # Where a step's time goes, in the controller unless the name says otherwise.
        "time/step_s": Metric("s", "between two step reports"),
        "time/wait_for_batch_s": Metric("s", "trainer waited for its batch"),
        "time/wait_for_weights_s": Metric("s", "from step report until the new version was live everywhere"),
        "time/wait_for_groups_s": Metric("s", "controller waited for enough finished groups"),
        "time/pack_s": Metric("s", "advantages and packing"),
        "time/checkpoint_s": Metric("s", "training blocked by the last checkpoint"),
        "time/checkpoint_write_s": Metric("s", "to write the last complete checkpoint, while training continued"),
        "checkpoint/failed_total": Metric("checkpoints", "skipped since the start: they could not be written"),
        "transport/lost_total": Metric("messages", "sent to the controller and lost with a connection, this attempt"),
        "transport/rejected_total": Metric("messages", "that the controller could not decode or accept, this attempt"),
        "transport/denied_total": Metric("handshakes", "with a key that does not belong to this run, this attempt"),
        "event_loop/lag_s": Metric("s", "worst lag of the controller's event loop since the last step"),
        # Axes.
        "tokens/generated_total": Metric("tokens", "completion tokens that reached the controller since the start"),
        "tokens/trained_total": Metric("tokens", "prompt and completion tokens trained since the start"),
        "wall_s": Metric("s", "wall time of all attempts of the run"),
    }
)  # fmt: skip

HISTOGRAMS: Mapping[str, Metric] = MappingProxyType(
    {
        "reward/histogram": Metric("reward", "of the rollouts of the batch"),
        "length/completion_histogram": Metric("tokens", "of the rollouts of the batch"),
        "staleness/histogram": Metric("versions", "of the rollouts of the batch"),
    }
)


def find_metric(name: str) -> Metric:
    """Return the row of a name, or of the family it belongs to.  Raises KeyError with the name."""
    found = METRICS.get(name) or METRICS.get(f"{name.partition('/')[0]}/*")
    if found is None:
        raise KeyError(f"metric {name!r} is not in rlhpc/metrics/names.py")
    return found


def table_markdown() -> str:
    """Return both tables as `rlhpc schema metrics` prints them."""
    rows = ["| name | unit | meaning |", "|---|---|---|"]
    for name, metric in (*METRICS.items(), *HISTOGRAMS.items()):
        # A bar would end the cell.
        rows.append(f"| `{name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)
