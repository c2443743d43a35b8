"""Set the journal aside when a resume is not to repeat its steps; their rollouts are sampled again.

A resume trains the steps after its checkpoint again, from the journal.  A user who goes back on purpose, or has changed
how the policy is trained or sampled, wants different steps; who has changed by how many processes, where or how fast,
wants the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.run_directory.checkpoint_choice import ResumePoint, Tell
from rlhpc.errors import RunDirectoryError
from rlhpc.files import matching, move_durably
from rlhpc.run_layout import RunLayout

FILES = ("journal_*.h5", "events_*.jsonl", "partials_*.bin")
SHAPES_STEPS = (
    "algorithm.",
    "critic.",
    "trainer.",
    "generation.",
    "environment.",
    "curriculum.",
    "admission.",
    "composite.",
    "instructions.",
    "shaping.",
)  # a repeated step would differ; without the curriculum, the prompts that it left out would be missed
# Of these sections: a step is the same, but for rounding.
SHAPES_NOTHING = {
    "trainer": (
        "num_ranks", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "chunks_per_stage",
        "context_parallel", "expert_parallel", "distributed_optimizer", "overlap_grad_reduce", "transformer_engine",
        "zero_stage", "optimizer_offload", "parameter_offload", "reference_memory", "ema_memory", "device",
        "token_budget", "recompute_activations",
    ),
    "generation": (
        "num_replicas", "tensor_parallel", "endpoint", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes",
        "gpu_memory_utilization", "enforce_eager", "recompute_kv", "prefix_caching",
    ),
    "admission": ("step_parts", "lease_deadline_s", "max_attempts", "max_groups_without_spread"),
}  # fmt: skip


def set_journal_aside(
    layout: RunLayout, resume_from: ResumePoint, changed: Sequence[str], attempt: int, tell: Tell
) -> None:
    """Move the journal to lost_attempt_N/ if this resume is not to repeat its steps.  N: the attempt that begins.

    changed: settings that differ from the attempt before, "key: old → new".  Raises RunDirectoryError.
    """
    why = _why_not(resume_from, changed)
    files = [path for pattern in FILES for path in matching(layout.rollouts, pattern)]
    if not why or not files:
        return
    target = layout.rollouts / f"lost_attempt_{attempt}"
    try:
        move_durably(files, target)
    except OSError as error:
        raise RunDirectoryError(f"{layout.rollouts}: its journal cannot be set aside: {error}") from error
    tell(f"{why}: steps after the checkpoint are not repeated, and their rollouts are set aside in {target.name}")


def _why_not(resume_from: ResumePoint, changed: Sequence[str]) -> str:
    """In words; "": steps are repeated."""
    if resume_from.from_start:
        return "--from-start"
    if resume_from.step is not None:
        return f"--step {resume_from.step}"
    if resume_from.no_replay:
        return "--no-replay"
    keys = [text.partition(":")[0] for text in changed if text.startswith(SHAPES_STEPS)]
    shaping = [key for key in keys if not _shapes_nothing(key)]
    return f"{', '.join(shaping)} changed" if shaping else ""


def _shapes_nothing(key: str) -> bool:
    section, _, name = key.partition(".")
    return name in SHAPES_NOTHING.get(section, ())
