"""Load HF-named tensors into vLLM's running model; a partial load never counts.

Input: a vLLM worker's model and an iterator of tensors, which may still be arriving; vLLM's layerwise reload does the
rest: a layer is put together from meta tensors when its last tensor has come, and copied to where its kernels look.
Guarantee: whatever is raised, the model has tensors of the right shapes everywhere afterwards (some new, some old), so
that a later version can be loaded.  What it would sample until then is not from any policy: the caller must prevent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlhpc.generation.expert_stacks import ExpertStacks


def reload_weights(
    model: Any, vllm_config: Any, model_config: Any, device: torch.device, weights: Iterator[tuple[str, Tensor]]
) -> None:
    """Bare model.load_weights would fail on CPU, where linear weights were repacked and the originals emptied."""
    with set_current_vllm_config(vllm_config), torch.device(device), torch.no_grad():
        try:
            stacks = ExpertStacks(model, device)  # looks at layers, so before they are taken apart
            initialize_layerwise_reload(model)
            model.load_weights(stacks.taken_from(weights))
        except BaseException:  # survived: nothing; layers that were taken apart are put together first
            _forget_unfinished_layers(model)
            finalize_layerwise_reload(model, model_config)
            raise
        finalize_layerwise_reload(model, model_config)
        _repack_tied_head(model)
        _repack_experts(model)


def _forget_unfinished_layers(model: Any) -> None:
    """Make vLLM put back the tensors that a layer had, instead of those that came for it.

    The latter are views of blocks that are freed; and a layer that has got some of them would be called finished.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = info.load_numel_total = 0


def _repack_tied_head(model: Any) -> None:
    """On CPU a tied lm_head keeps a repacked copy of the old embedding: the reload never sees a tensor for it."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any) -> None:
    """On CPU the kernel of a mixture repacks its weights when it is made, and a reload keeps the kernel."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
