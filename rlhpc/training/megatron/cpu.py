"""Let Megatron-Core run on a machine without CUDA: every assumption it makes about a GPU is replaced for the CPU.

The only file that patches another package, and only attributes of megatron.core's own modules: torch is unchanged for
all other code, except while Megatron is being imported.  Does nothing where there is CUDA.

Megatron 0.16.1 names the GPU in three ways, and each has one remedy:
    torch.cuda.x() and device="cuda"   the modules below see TorchOnCpu under the name `torch`
    Tensor.type(), Tensor.cuda()       the functions below run inside TensorsAsOnCuda
    a few functions of its own         replaced
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
FACTORIES = ("empty", "full", "ones", "tensor", "zeros")

MODULES_THAT_NAME_CUDA = (
    "megatron.core.distributed.param_and_grad_buffer",  # current_device: gradient buffers
    "megatron.core.optimizer.clip_grads",  # device="cuda": norms
    "megatron.core.optimizer.distrib_optimizer",  # current_device: buffers of its checkpoints
    "megatron.core.optimizer.optimizer",  # device="cuda": scale and flag of bfloat16
    "megatron.core.pipeline_parallel.p2p_communication",  # current_device: shapes, receive buffers; synchronize
    "megatron.core.pipeline_parallel.schedules",  # device="cuda": count of tokens
    "megatron.core.tensor_parallel.layers",  # current_device: gather buffers, weights
    "megatron.core.tensor_parallel.mappings",  # current_device: gather buffers
    "megatron.core.tensor_parallel.random",  # state of the GPU's generators, around recomputation
    "megatron.core.transformer.moe.router",  # current_device: weights
    "megatron.core.transformer.moe.token_dispatcher",  # streams
    "megatron.core.utils",  # current_device: memory kept for gathering
)
FUNCTIONS_THAT_ASK_A_TENSOR = (
    ("megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
)


def load_megatron() -> None:
    """Import megatron.core; without CUDA its fused functions are not compiled.

    It passes some forty functions to torch.compile on import, which loads a compiler for them: a fifth of a trainer's
    imports.  A run on CPU calls one of them, the router's for expert biases, of which there are none.
    """
    if torch.cuda.is_available():
        importlib.import_module("megatron.core")
        return
    compiler: Any = torch.compile
    torch.compile = cast("Any", _as_written)
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


def prepare_cpu() -> None:
    """Call before anything of Megatron is used; idempotent, and for all threads."""
    if torch.cuda.is_available():
        return
    for name in MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(name)
        if module.torch is torch:
            module.torch = TorchOnCpu()
    for name, path in FUNCTIONS_THAT_ASK_A_TENSOR:
        owner: Any = importlib.import_module(name)
        *classes, attribute = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        function = getattr(owner, attribute)
        if not hasattr(function, "answers_as_on_cuda"):
            setattr(owner, attribute, _as_on_cuda(function))
    _replace_functions()


class TorchOnCpu(ModuleType):
    """The torch that Megatron's modules see: `cuda` does nothing, and "cuda" as a device means the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = CudaOnCpu()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class CudaOnCpu(ModuleType):
    """torch.cuda without a GPU: one device, the CPU, and one stream, the order of the program."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.Stream = Stream
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """Megatron passes it on as device= only."""
        return CPU

    def current_stream(self) -> Stream:
        """Any stream: they are all the same."""
        return Stream()

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """No effect: everything runs in order."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """No effect: nothing is pending."""

    def manual_seed(self, seed: int) -> None:
        """No generator to seed; torch.cuda would queue the call and never run it."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """No generator either: an empty state."""
        return torch.empty(0, dtype=torch.uint8)


class Stream:
    """A CUDA stream, and an event on it, where everything is done at once."""

    def wait_stream(self, stream: Stream) -> None:
        """Already done."""

    def record_event(self) -> Stream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Already done."""


class TensorsAsOnCuda(TorchFunctionMode):
    """Makes type() of a tensor name the CUDA type, which Megatron compares with literals; cuda() moves nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Two answers differ from torch's."""
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs or {})


def _as_written(function: Any = None, **_: Any) -> Any:
    return _as_written if function is None else function


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return made_on_cpu


def _as_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with TensorsAsOnCuda():
            return function(*args, **kwargs)

    inside.__dict__["answers_as_on_cuda"] = True
    return inside


def _replace_functions() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    random._set_cuda_rng_state = _keep_rng_state
    dispatcher.maybe_move_tensor_to_cpu = _as_on_host


def _keep_rng_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
    """No GPU's generator to restore; Megatron's own would queue a callback in torch.cuda that never runs."""


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's own makes an array only of GPU tensors, but its callers always need one."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
