"""Where a rank computes, and how it leaves the others."""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from rlhpc.protocol.errors import ConfigError
from rlhpc.training.ranks import RankContext, close_process_group, device_of, open_process_group


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


@pytest.mark.parametrize(("backend", "has_left"), [("gloo", True), ("nccl", False)])
def test_a_rank_that_fails_alone_does_not_destroy_what_all_ranks_have_to_destroy_together(
    monkeypatch: pytest.MonkeyPatch, backend: str, has_left: bool
) -> None:
    open_process_group(RankContext(), torch.device("cpu"))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)  # a group of NCCL needs a GPU

    def fail() -> None:
        with ExitStack() as stack:
            stack.callback(close_process_group)
            raise ConfigError("here alone")

    with pytest.raises(ConfigError):
        fail()
    assert dist.is_initialized() is not has_left
    close_process_group()  # in the order of the program
    assert not dist.is_initialized()


def test_ranks_may_have_as_many_connections_as_the_node_allows() -> None:
    """Each group of gloo takes one for every other rank, and the usual limit is 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        open_process_group(RankContext(), torch.device("cpu"))
        close_process_group()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
