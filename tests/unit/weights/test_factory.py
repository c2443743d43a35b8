from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.errors import ConfigError, GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.factory import make_publisher, make_receiver
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("transport", ["auto", "pigeon"])
def test_a_publisher_is_of_a_transport_that_was_chosen(transport: str, tmp_path: Path) -> None:
    weights = WeightsConfig().model_copy(update={"transport": transport})
    with pytest.raises(ConfigError, match=rf"weights\.transport='{transport}'; legal: gloo, nccl, ipc"):
        make_publisher(weights, directory=tmp_path, device="cpu")


def test_an_unknown_transport_has_no_receiver() -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        make_receiver("pigeon", device="cpu", timeout_s=1.0)


@pytest.mark.parametrize("address", ["", "http://x", "tcp://nowhere", "file:///does/not/exist/x"])
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_meeting_place_that_is_not_there_is_a_failed_group(transport: str, address: str) -> None:
    receiver = make_receiver(transport, device="cpu", timeout_s=0.2)
    with pytest.raises(GroupFailed):
        receiver.join(WeightGroup(1, transport, address, ("g",), (1,)), 1)
    receiver.leave()


def test_a_run_directory_may_lie_deep(tmp_path: Path) -> None:
    """A unix socket's address holds 107 bytes."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    publisher = make_publisher(WeightsConfig(transport="ipc", timeout_s=PATIENCE_S), directory=deep, device="cpu")
    group = publisher.open(WeightGroup(1, "ipc", "", ("g",), (1,)))
    receiver = make_receiver("ipc", device="cpu", timeout_s=PATIENCE_S)
    receiver.join(group, 1)
    publisher.form()
    publisher.dissolve()
