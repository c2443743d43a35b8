"""What a controller has in memory when it ends reaches the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.controller import context_of, settings
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.config.file import write_resolved
from rlhpc.protocol.messages import BATCHES, CONTROL, LEASES
from rlhpc.protocol.types import RolloutGroup
from rlhpc.roles.controller.controller import assemble
from tests.engines.memory_channel import MemoryServer
from tests.unit.roles.small_ring import scored


async def refuse() -> None:
    raise OSError("the disk of metrics hangs")


async def test_metrics_that_cannot_be_written_keep_no_rollouts_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = settings(tmp_path, num_tokens=8, num_generators=1), RunLayout(tmp_path / "run")
    for path in (layout.root, layout.rollouts, layout.checkpoints):
        path.mkdir()
    write_resolved(config, layout, "")
    channels = [MemoryServer(spec) for spec in (CONTROL, LEASES, BATCHES)]
    controller = assemble(context_of("controller", 0, layout, config), *channels)
    member = scored(7, 0)
    group = RolloutGroup(7, member.rollout.prompt, 0, (member,))
    controller.state.segments.add(ResolvedGroup(group, consumed_step=0, trained_version=0, applied=True))
    monkeypatch.setattr(controller.recorder, "close", refuse)
    with pytest.raises(OSError, match="metrics hangs"):
        await controller.close()
    assert [resolved.group.group_id for resolved in read_rollouts_directory(layout.rollouts)] == [7]
