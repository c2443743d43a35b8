"""What vLLM mixes into each of its workers: receive weights beside decoding, load them between two steps.

Called by name over collective_rpc, with JSON for arguments (tensors do not survive vLLM's msgpack).  Every name starts
with rlhpc_, since vLLM refuses an extension whose names collide with the worker's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rlhpc.errors import GroupFailed
from rlhpc.generation.preemption_count import PreemptionCount
from rlhpc.generation.weight_link import FAILED, WeightLink
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.device_id import device_id
from rlhpc.weights.make import make_receiver

if TYPE_CHECKING:
    from rlhpc.generation.weight_link import NamedTensors

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
NO_GROUP = (FAILED, "this worker is in no weight group")


class WeightUpdateExtension:
    """Methods of a vLLM worker process.  The attributes below are the worker's."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: Any
        model_config: Any
        vllm_config: Any

    _rlhpc_preemptions: PreemptionCount | None = None
    _rlhpc_link: WeightLink | None = None
    _rlhpc_handlers: dict[signal.Signals, Any] | None = None

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Leave notices of the scheduler to the generator, end when it ends, however that happens; begin to count.

        Slurm signals every process of a step: an engine that heeded it would be gone before the generator has handed
        its partial rollouts back.  Only a direct child dies with its parent: vLLM's executor ends the others itself.
        """
        self._rlhpc_preemptions = PreemptionCount(self.model_runner)
        if threading.current_thread() is threading.main_thread():
            self._rlhpc_handlers = {notice: signal.signal(notice, signal.SIG_IGN) for notice in NOTICES}
        if os.getppid() == parent_pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def rlhpc_heed_signals(self) -> None:
        """Undo rlhpc_follow_parent's deafness, so that vLLM can end its processes."""
        for notice, handler in (self._rlhpc_handlers or {}).items():
            signal.signal(notice, handler)

    def rlhpc_device_id(self) -> str:
        """Which GPU this worker has, as no other has it; "" on CPU."""
        return device_id(self.device)

    def rlhpc_num_preemptions(self) -> int:
        """Requests that were thrown out of the KV cache since rlhpc_follow_parent."""
        return self._rlhpc_preemptions.total if self._rlhpc_preemptions is not None else 0

    def rlhpc_counts_tokens(self) -> bool:
        """True if rlhpc_load can say how many tokens each request had."""
        return isinstance(getattr(self.model_runner, "requests", None), dict)

    def rlhpc_begin_join(self, group_json: str, member: str, timeout_s: float) -> tuple[str, str]:
        """Start joining a membership epoch, after leaving the previous one.  Returns what rlhpc_poll would."""
        self.rlhpc_leave()
        group = msgspec.json.decode(group_json, type=WeightGroup)
        self._rlhpc_link = WeightLink(make_receiver(group.transport, device=str(self.device), timeout_s=timeout_s))
        return self._rlhpc_link.begin_join(group, group.first_rank(member) + self.rank)

    def rlhpc_begin_receive(self, manifest_json: str) -> tuple[str, str]:
        """Start receiving into a shadow copy of the model.  Returns what rlhpc_poll would."""
        if self._rlhpc_link is None:
            return NO_GROUP
        return self._rlhpc_link.begin_receive(msgspec.json.decode(manifest_json, type=WeightManifest))

    def rlhpc_poll(self) -> tuple[str, str]:
        """State and message of what was begun last (weight_link.py)."""
        return NO_GROUP if self._rlhpc_link is None else self._rlhpc_link.poll()

    def rlhpc_load(self) -> tuple[float, dict[str, int] | None]:
        """Load the shadow copy.  Must run between two steps; if it raises the model is half-loaded.

        Returns the seconds it took, and vLLM's request id → number of tokens sampled so far (None where unknown):
        tokens from that number on are the new weights'.
        """
        began = time.monotonic()
        if self._rlhpc_link is None:
            raise GroupFailed(NO_GROUP[1])
        weights = self._rlhpc_link.take()
        counts = None
        if self.rlhpc_counts_tokens():
            counts = {key: len(state.output_token_ids) for key, state in self.model_runner.requests.items()}
        _reload(self.model_runner.get_model(), self.vllm_config, self.model_config, self.device, weights)
        return time.monotonic() - began, counts

    def rlhpc_leave(self) -> None:
        """Leave the membership epoch, if any."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.leave()
        self._rlhpc_link = None


def _reload(model: Any, vllm_config: Any, model_config: Any, device: torch.device, weights: NamedTensors) -> None:
    """Load HF-named tensors into a running model, by vLLM's layerwise reload.

    Bare model.load_weights fails on CPU, where linear weights were repacked and the originals emptied.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(vllm_config), torch.device(device):
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights))
        finalize_layerwise_reload(model, model_config)
        _repack_tied_head(model)
        _repack_experts(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repack_tied_head(model: Any) -> None:
    """On CPU a tied lm_head keeps a repacked copy of the old embedding: the reload never sees a tensor for it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any) -> None:
    """On CPU the kernel of a mixture repacks its weights when it is made, and a reload keeps the kernel."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
