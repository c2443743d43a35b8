"""Layers of a vLLM model between two states: taken apart for a reload, and as its kernels read them.

What vLLM's layerwise reload leaves to be done: a reload that stops half-way is undone, and on a CPU two kinds of layers
that keep repacked copies of weights, and that no tensor comes for, are repacked.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def put_back(model: Any, model_config: Any) -> None:
    """After initialize_layerwise_reload: give layers that are not finished the tensors that they had.

    Those that came for them are views of blocks that are freed; and a layer that has got some of its tensors would be
    called finished.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = info.load_numel_total = 0
    finalize_layerwise_reload(model, model_config)


def repack(model: Any) -> None:
    """On CPU: a tied lm_head keeps a copy of the old embedding, and the kernel of a mixture one of its experts."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def unwrap_loaders(model: Any) -> None:
    """After initialize_layerwise_reload: let loaders fill parameters at once, and not layers when they are whole."""
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            loader: Any = getattr(parameter, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
                parameter.weight_loader = loader
