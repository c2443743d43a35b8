"""Our parts of vLLM's worker and core processes: the worker's extension, and an executor that heeds the generator.

In this file: a count of preemptions; the lifetime of an engine's processes; the extension that vLLM mixes into its
worker's class; the executor of several workers.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rlhpc.base.processes import end_with_parent
from rlhpc.generation.adapter_slot import AdapterSlot
from rlhpc.generation.reload_plan import WeightReload
from rlhpc.generation.route_record import RouteRecord
from rlhpc.generation.weight_updates import WeightUpdateExtension, WholeLoads

# ----------------------------------------------------------------------------------------------------- preemption count
#
# Count requests that vLLM's scheduler preempts for lack of KV cache.
#
# Input: the scheduler's output for a model runner before each step.  vLLM's own statistics have the number, too, but
# cost its front end 14 % of its time on a small model, since they process every token of every request.


class PreemptionCount:
    """Observes a model runner."""

    def __init__(self, model_runner: Any) -> None:
        """Wrap execute_model of the worker's model runner."""
        self.total = 0
        execute = model_runner.execute_model

        @functools.wraps(execute)
        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.total += len(getattr(scheduler_output, "preempted_req_ids", None) or ())
            return execute(scheduler_output, *args, **kwargs)

        model_runner.execute_model = counted


# -------------------------------------------------------------------------------------------------------- signal shield
#
# Tie the lifetime of an engine process to its generator: it ends neither before it nor after it.
#
# Slurm signals every process of a job step: an engine that reacted would be gone before the generator has handed back
# its partial rollouts.


NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class SignalShield:
    """Signal handling of one process; its methods have no effect outside the main thread."""

    def __init__(self) -> None:
        """Ignore nothing yet."""
        self._handlers: dict[signal.Signals, Any] = {}

    def follow(self, generator_pid: int) -> None:
        """Ignore the scheduler's signals, which the generator handles; in its direct child, also end when it ends.

        vLLM ends an engine's other processes with their parent.
        """
        if threading.current_thread() is threading.main_thread():
            self._handlers = {notice: signal.signal(notice, signal.SIG_IGN) for notice in NOTICES}
        if os.getppid() == generator_pid:
            end_with_parent()

    def heed(self) -> None:
        """Restore the signals that follow() ignores, so that vLLM can end its processes."""
        for notice, handler in self._handlers.items():
            signal.signal(notice, handler)


# ----------------------------------------------------------------------------------------------------- worker extension


class VllmWorkerExtension(WeightUpdateExtension):
    """Methods added to vLLM's worker class.  The attributes in the first block are the worker's."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: Any
        model_config: Any
        vllm_config: Any

    _rlhpc_preemptions: PreemptionCount | None = None
    _rlhpc_shield: SignalShield | None = None
    _rlhpc_routes: RouteRecord | None = None

    def rlhpc_record_routes(self) -> str:
        """Record routes from now on, on the first worker alone: all have the same; return why not, "" if it does."""
        if self.device.type != "cpu":  # vLLM does it, by the newer of its two model runners
            has_it = getattr(self.model_runner, "aux_output_connector", None) is not None
            return "" if has_it else f"vLLM's {type(self.model_runner).__module__} tells no routes"
        if self.rank == 0:
            try:
                self._rlhpc_routes = RouteRecord(self.model_runner)
            except (ValueError, AttributeError) as error:
                return str(error)
        return ""

    def rlhpc_take_routes(self, request_id: str, num_tokens: int) -> list[Any]:
        """Return tokens, mixtures, experts a token, and the ids as int16; nothing: they are not known here."""
        ids = None if self._rlhpc_routes is None else self._rlhpc_routes.take(request_id, num_tokens)
        return [] if ids is None else [*ids.shape, ids.tobytes()]

    def rlhpc_follow_parent(self, parent_pid: int) -> None:
        """Follow the generator, which has this pid, and start counting; the core of several workers follows, too."""
        self._rlhpc_preemptions = PreemptionCount(self.model_runner)
        self._rlhpc_shield = SignalShield()
        self._rlhpc_shield.follow(parent_pid)

    def rlhpc_hold_adapters(self, rank: int, modules: list[str], base: str, num_adapters: int) -> None:
        """See WeightUpdateExtension."""
        self._rlhpc_slot = AdapterSlot(
            self.model_runner, rank=rank, modules=modules, base=base, num_adapters=num_adapters
        )

    def rlhpc_heed_signals(self) -> None:
        """Restore the signals that rlhpc_follow_parent ignores, so that vLLM can end its processes."""
        if self._rlhpc_shield is not None:
            self._rlhpc_shield.heed()

    def rlhpc_num_preemptions(self) -> int:
        """See WeightUpdateExtension."""
        return self._rlhpc_preemptions.total if self._rlhpc_preemptions is not None else 0

    def _rlhpc_parameters(self) -> Iterator[Tensor]:
        parameters: Iterator[Tensor] = self.model_runner.get_model().parameters()
        return parameters

    def _rlhpc_whole_loads(self) -> WholeLoads:
        return WeightReload(self.model_runner.get_model(), self.vllm_config, self.model_config, self.device)


# ---------------------------------------------------------------------------------------------------- shielded executor
#
# vLLM's multi-worker executor, in a core process whose lifetime is tied to the generator, like its workers.
#
# With one worker, worker and core are one process, and the worker extension serves both.


class ShieldedExecutor(MultiprocExecutor):
    """Executor for vLLM's distributed_executor_backend; forwards calls of the worker extension."""

    _rlhpc_shield: SignalShield | None = None

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Call vLLM's, on the core's main thread; the two calls about the generator are also executed here."""
        if method == "rlhpc_follow_parent":
            self._rlhpc_shield = SignalShield()
            self._rlhpc_shield.follow(*args)
        elif method == "rlhpc_heed_signals" and self._rlhpc_shield is not None:
            self._rlhpc_shield.heed()
        return super().collective_rpc(method, timeout, args, kwargs, **options)
