"""Tell generators to cancel groups that are no longer needed; with admission.oversample, decide which those are.

Input: groups of the buffer.  Output: CancelGroup.  If a message is lost, its sampling is wasted: nothing breaks.
"""

from __future__ import annotations

from contextlib import suppress

from rlhpc.buffer.resolved import DropReason
from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.config_sections import AdmissionConfig
from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelError
from rlhpc.messages import CancelGroup
from rlhpc.roles.controller.lease_dispatcher import LivePolicy
from rlhpc.roles.controller.rollout_sink import RolloutSink


class Cancelling:
    """Drops stragglers, and has what is dropped sampled no further."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        sink: RolloutSink,
        leases: ServerChannel,
        policy: LivePolicy,
        admission: AdmissionConfig,
    ) -> None:
        self._buffer, self._sink, self._leases, self._policy = buffer, sink, leases, policy
        self._admission = admission

    async def tell(self) -> None:
        """Cancel sampling of groups that were dropped."""
        while self._sink.cancelled:
            group_id = self._sink.cancelled.pop()
            for name in sorted(self._policy.ready_members):
                with suppress(ChannelError):  # it is gone, or too busy to receive: its work is wasted, nothing breaks
                    await self._leases.send(name, CancelGroup(group_id))

    async def cut(self) -> bool:
        """Drop the stragglers without which a batch is there, if it is; whether slots have become free."""
        admission = self._admission
        stragglers = self._buffer.in_the_way(admission.groups_per_step, admission.most_cut)
        for group_id in stragglers:
            self._sink.drop(group_id, DropReason.CUT)
        if stragglers:
            await self.tell()
        return bool(stragglers)
