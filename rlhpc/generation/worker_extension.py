"""The worker extension that vLLM mixes into each worker: receive weights during decoding, load them while paused.

Called by name over collective_rpc, with JSON for arguments (tensors do not survive vLLM's msgpack).  Every name starts
with rlhpc_, since vLLM refuses an extension whose names collide with the worker's.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rlhpc.errors import GroupFailed
from rlhpc.generation.preemption_count import PreemptionCount
from rlhpc.generation.signal_shield import SignalShield
from rlhpc.generation.weight_link import FAILED, WeightLink
from rlhpc.generation.weight_reload import WeightReload
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.device_id import device_id
from rlhpc.weights.device_scope import DeviceScope, indexed
from rlhpc.weights.factory import make_receiver
from rlhpc.weights.held_checksum import checksum_of
from rlhpc.weights.shadow import HostShadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    _rlhpc_counter: Callable[[], dict[str, int]] | None = None
    _rlhpc_link: WeightLink | None = None
    _rlhpc_scope: DeviceScope | None = None  # this and the next three are made once, at the first join
    _rlhpc_shadow: HostShadow
    _rlhpc_loading: threading.Lock
    _rlhpc_reload: WeightReload
    _rlhpc_shield: SignalShield | None = None

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Follow the generator, which has this pid (signal_shield.py); start counting.

        Where it has several workers their core obeys, too (shielded_executor.py).
        """
        self._rlhpc_preemptions = PreemptionCount(self.model_runner)
        self._rlhpc_shield = SignalShield()
        self._rlhpc_shield.follow(parent_pid)

    def rlhpc_heed_signals(self) -> None:
        """Restore the signals that rlhpc_follow_parent ignores, so that vLLM can end its processes."""
        if self._rlhpc_shield is not None:
            self._rlhpc_shield.heed()

    def rlhpc_device_id(self) -> str:
        """Unique name of this worker's GPU; "" on CPU."""
        return device_id(self.device)

    def rlhpc_num_preemptions(self) -> int:
        """Requests that were thrown out of the KV cache since rlhpc_follow_parent."""
        return self._rlhpc_preemptions.total if self._rlhpc_preemptions is not None else 0

    def rlhpc_counts_tokens(self) -> bool:
        """True if rlhpc_load can say how many tokens each request had."""
        return isinstance(getattr(self.model_runner, "requests", None), dict)

    def rlhpc_count_with(self, counter: Callable[[], dict[str, int]]) -> None:
        """Set who counts tokens: what steps this worker in its own process knows all requests, also those not begun."""
        self._rlhpc_counter = counter

    def rlhpc_begin_join(self, group_json: str, member: str, timeout_s: float) -> tuple[str, str]:
        """Start joining a membership epoch, after leaving the previous one.  Returns what rlhpc_poll would."""
        self.rlhpc_leave()
        group = msgspec.json.decode(group_json, type=WeightGroup)
        if self._rlhpc_scope is None:
            self._rlhpc_scope = DeviceScope(indexed(self.device))
            self._rlhpc_shadow = HostShadow(is_pinned=self._rlhpc_scope.device.type == "cuda")
            self._rlhpc_loading = threading.Lock()
            model = self.model_runner.get_model()
            self._rlhpc_reload = WeightReload(model, self.vllm_config, self.model_config, self.device)
        receiver = make_receiver(group.transport, device=str(self._rlhpc_scope.device), timeout_s=timeout_s)
        self._rlhpc_link = WeightLink(receiver, self._rlhpc_scope, self._rlhpc_shadow, permit_s=timeout_s)
        return self._rlhpc_link.begin_join(group, group.first_rank(member) + self.rank)

    def rlhpc_begin_receive(self, manifest_json: str, staging: str) -> tuple[str, str]:
        """Start receiving, into a "shadow" or "paused" (weight_link.py).  Returns what rlhpc_poll would."""
        if self._rlhpc_link is None:
            return NO_GROUP
        manifest = msgspec.json.decode(manifest_json, type=WeightManifest)
        if staging == "shadow":
            return self._rlhpc_link.begin_shadow(manifest)
        return self._rlhpc_link.begin_paused(manifest, self._rlhpc_load_arriving)

    def rlhpc_poll(self) -> tuple[str, str]:
        """State and message of what was begun last (weight_link.py)."""
        return NO_GROUP if self._rlhpc_link is None else self._rlhpc_link.poll()

    def rlhpc_load(self) -> tuple[float, dict[str, int] | None]:
        """Load the shadow.  Must run between two steps; if it raises the model is neither old nor new.

        Returns the seconds it took, and vLLM's request id → number of tokens sampled so far (None where unknown):
        tokens from that number on are the new weights'.
        """
        began = time.monotonic()
        if self._rlhpc_link is None:
            raise GroupFailed(NO_GROUP[1])
        weights = self._rlhpc_link.take()
        counts = self._rlhpc_num_tokens()
        with self._rlhpc_loading:
            self._rlhpc_reload.load(weights)
        self._rlhpc_finish_kernels()
        return time.monotonic() - began, counts

    def rlhpc_way_of_loading(self) -> str:
        """How versions are loaded that come whole; "" before the first."""
        return self._rlhpc_reload.way

    def rlhpc_permit(self) -> dict[str, int] | None:
        """Sampling has stopped: load what is ready as it arrives.  Returns the counts of rlhpc_load."""
        self._rlhpc_finish_kernels()
        if self._rlhpc_link is not None:
            self._rlhpc_link.permit()
        return self._rlhpc_num_tokens()

    def rlhpc_give_up(self) -> None:
        """Another worker of this engine failed: let the rest of the version pass."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.give_up()

    def _rlhpc_num_tokens(self) -> dict[str, int] | None:
        if self._rlhpc_counter is not None:
            return self._rlhpc_counter()
        if not self.rlhpc_counts_tokens():
            return None
        return {key: len(state.output_token_ids) for key, state in self.model_runner.requests.items()}

    def _rlhpc_load_arriving(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with self._rlhpc_loading:  # an abandoned task may not have ended: the next one waits for it
            self._rlhpc_reload.load_arriving(weights)

    def _rlhpc_finish_kernels(self) -> None:
        """Decoding and loading are on different streams: neither may begin before the other has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rlhpc_held_checksum(self) -> tuple[int, dict[str, int]]:
        """Checksum of this worker's parameters, and numbers of each dtype (weights/held_checksum.py)."""
        return checksum_of(parameter.detach() for parameter in self.model_runner.get_model().parameters())

    def rlhpc_leave(self) -> None:
        """Leave the membership epoch, if any."""
        if self._rlhpc_link is not None:
            self._rlhpc_link.leave()
        self._rlhpc_link = None
