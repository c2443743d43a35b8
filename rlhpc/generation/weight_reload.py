"""Load HF-named tensors into vLLM's running model; a partial load never counts.

Input: a vLLM worker's model and tensors, which may still be arriving.  The first version goes through vLLM's layerwise
reload: a layer is put together from meta tensors when its last tensor has come, and copied to where its kernels look.
Later ones are copied straight there, if they are whole and the model allows a plan (reload_plan.py) that has been
checked on the first.
Guarantee: whatever is raised, the model has tensors of the right shapes everywhere afterwards (some new, some old), so
that a later version can be loaded.  What it would sample until then is not from any policy: the caller must prevent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhpc.generation.expert_stacks import ExpertStacks
from rlhpc.generation.reload_plan import ReloadPlan, find_plan
from rlhpc.generation.reload_trace import NoPlan
from rlhpc.generation.vllm_layers import put_back, repack
from rlhpc.weights.shadow import NamedTensors


class WeightReload:
    """Of one worker's model."""

    def __init__(self, model: Any, vllm_config: Any, model_config: Any, device: torch.device) -> None:
        self._model, self._vllm_config, self._model_config = model, vllm_config, model_config
        self._device = device
        self._plan: ReloadPlan | None = None
        self.way = ""  # how whole versions are loaded; "" before the first

    def load(self, weights: NamedTensors) -> None:
        """Load a version that is there as a whole.  On CUDA copies may still be under way on the current stream."""
        if self._plan is not None and self._plan.fits(weights):
            with self._loading():
                self._plan.load(weights)
                repack(self._model)
            return
        self.load_arriving(weights)
        if not self.way:
            self._look_for_plan(weights)

    def load_arriving(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors as they come, by vLLM's own reload.

        Bare model.load_weights would fail on CPU, where linear weights were repacked and the originals emptied.
        """
        model = self._model
        with self._loading(), torch.device(self._device):
            try:
                stacks = ExpertStacks(model, self._device)  # looks at layers, so before they are taken apart
                initialize_layerwise_reload(model)
                model.load_weights(stacks.taken_from(iter(weights)))
            except BaseException:  # survived: nothing; layers that were taken apart are put together first
                put_back(model, self._model_config)
                raise
            finalize_layerwise_reload(model, self._model_config)
            repack(model)

    def _look_for_plan(self, weights: NamedTensors) -> None:
        """The model holds these weights."""
        plan = None
        try:
            with self._loading(), torch.device(self._device):
                plan = find_plan(self._model, self._model_config, weights)
            with self._loading():
                plan.prove(weights)
                repack(self._model)
        except (NoPlan, torch.OutOfMemoryError) as reason:  # the check holds a piece of a tensor on the GPU twice
            self.way = f"vLLM's layerwise reload, for each version: {reason}"
            if plan is not None:
                self.load_arriving(weights)  # the check has loaded them by the plan that is refused
        else:
            self._plan = plan
            self.way = f"copies to where kernels read, from the second version on: {plan}"

    @contextmanager
    def _loading(self) -> Iterator[None]:
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            yield
