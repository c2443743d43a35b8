"""Megatron's process groups: opened for a layout and closed again, any number of times in a process.

Input: a ParallelLayout and the default process group, which must be initialised and have exactly the layout's ranks,
even if that is one.  Megatron keeps the groups in its own module, so that one process can have one layout at a time.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlhpc.parallel_layout import ParallelLayout
from rlhpc.training.megatron.cpu import prepare_cpu

SEED = 1  # unused: weights are loaded, and there is no dropout


def open_groups(layout: ParallelLayout, *, rank: int, device: torch.device) -> None:
    """Make the groups of tensor, context, data, pipeline and expert parallelism; a collective.

    Leaves megatron.core.parallel_state initialised, on a machine without CUDA prepared by prepare_cpu().
    """
    prepare_cpu()
    assert torch.distributed.get_world_size() == layout.num_ranks, "the default process group must hold the layout"
    assert torch.distributed.get_rank() == rank
    if parallel_state.model_parallel_is_initialized():
        close_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # Without a GPU there are no GPU generators to keep apart: use Megatron's tracker that tracks nothing.
    model_parallel_cuda_manual_seed(SEED, inference_rng_tracker=device.type != "cuda", force_reset_rng=True)


def close_groups() -> None:
    """Forget the groups; idempotent.  They end with the default process group."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
