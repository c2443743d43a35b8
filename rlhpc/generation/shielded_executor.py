"""vLLM's multi-worker executor, in a core process whose lifetime is tied to the generator, like its workers.

An engine with one worker has it in the core's process, where the worker extension serves both.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rlhpc.generation.signal_shield import SignalShield


class ShieldedExecutor(MultiprocExecutor):
    """Named to vLLM by distributed_executor_backend; it passes on what the worker extension is asked."""

    _rlhpc_shield: SignalShield | None = None

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """As vLLM's, on the core's main thread; the two calls about the generator are obeyed here as well."""
        if method == "rlhpc_follow_parent":
            self._rlhpc_shield = SignalShield()
            self._rlhpc_shield.follow(*args)
        elif method == "rlhpc_heed_signals" and self._rlhpc_shield is not None:
            self._rlhpc_shield.heed()
        return super().collective_rpc(method, timeout, args, kwargs, **options)
