"""Where a rank computes."""

from __future__ import annotations

import pytest
import torch

from rlhpc.errors import ConfigError
from rlhpc.training.process_group import device_of


def test_a_rank_computes_on_the_cpu_where_it_shall_or_must() -> None:
    assert device_of("cpu", 3) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert device_of("auto", 3) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_wanted_and_not_seen_is_a_fault_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"trainer\.device='cuda': .* sees no GPU on .*\(CUDA_VISIBLE_DEVICES='7'\)"):
        device_of("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rank_whose_gpu_does_not_work_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for it on theirs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with a GPU, too
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_of("auto", 0) == torch.device("cpu")  # a torch for CPU, and what somebody's shell has set
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"trainer\.device='auto': .* sees no GPU on .*legal here: 'cpu'"):
        device_of("auto", 0)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device_of("auto", 0) == torch.device("cpu")
