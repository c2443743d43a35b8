"""What lets Megatron run without CUDA: Megatron sees the CPU, nobody else sees a difference."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import _get_current_function_mode_stack

from rlhpc.training.megatron.cpu import prepare_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")


def test_torch_itself_stays_as_it_is():
    before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))
    prepare_cpu()
    assert (dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))) == before
    assert _get_current_function_mode_stack() == []
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_megatron_allocates_on_the_cpu_in_any_thread():
    prepare_cpu()
    with ThreadPoolExecutor(1) as thread:
        buffer = thread.submit(megatron_utils.GlobalMemoryBuffer().get_tensor, [3], torch.float32, "test").result()
    assert buffer.device.type == "cpu"


def test_preparing_twice_changes_nothing_more():
    prepare_cpu()
    once = megatron_utils.torch, megatron_optimizer.clip_grad_by_total_norm_fp32
    prepare_cpu()
    assert (megatron_utils.torch, megatron_optimizer.clip_grad_by_total_norm_fp32) == once


def test_gradients_on_the_cpu_pass_megatrons_check_of_their_type():
    prepare_cpu()
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 2.0)
    megatron_optimizer.clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=4.0)
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5), atol=1e-5, rtol=0)


def test_recomputation_leaves_nothing_queued_for_a_gpu_that_never_comes():
    prepare_cpu()
    queued = len(torch.cuda._queued_calls)
    weight = torch.ones(3, requires_grad=True)
    megatron_random.model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=True, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True
    )
    megatron_random.checkpoint(torch.square, False, weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 3
    assert len(torch.cuda._queued_calls) == queued


def test_where_there_is_cuda_megatron_keeps_the_torch_it_imported(monkeypatch):
    prepare_cpu()
    monkeypatch.setattr(megatron_utils, "torch", torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare_cpu()
    assert megatron_utils.torch is torch


@pytest.mark.starts
def test_functions_that_megatron_hands_to_a_compiler_stay_as_written_and_none_is_loaded():
    code = (
        "import sys, torch\n"
        "compiler = torch.compile\n"
        "import rlhpc.training.megatron.backend\n"
        "assert torch.compile is compiler\n"
        "from megatron.core.jit import jit_fuser\n"
        "assert jit_fuser(len) is jit_fuser(dynamic=True)(len) is len\n"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
