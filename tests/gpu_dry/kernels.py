"""Compile our Triton kernels for cards that are not here: every launch of each module, as a model would make it.

    python -m tests.gpu_dry.kernels

Launches on CPU tensors are written down in the place of being run; what they would compile is compiled for every
architecture, down to the card's machine code.  Fails where Triton refuses a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rlhpc.training import head_kernels, layer_kernels, logit_kernels

CAPABILITIES = (80, 86, 89, 90, 100, 120)  # A100, RTX 30, L40S, H100 and H200, B200, RTX 50
DTYPES = (torch.bfloat16, torch.float32)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", int: "i32", float: "fp32"}
OPTIONS = ("num_warps", "enable_fp_fusion")
# Tokens, key heads, queries of a key head, head size: Qwen3 0.6B, Qwen2.5 7B, Llama 3 8B and 70B; hidden and inner size
# beside.
SHAPES = ((64, 8, 2, 128), (64, 4, 7, 128), (64, 8, 4, 128), (64, 8, 8, 128), (64, 16, 1, 80))
Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]


def main() -> int:
    """Print a line a kernel and dtype; 1 if one does not compile."""
    failures = 0
    for dtype in DTYPES:
        for function, arguments, keywords in launches(dtype):
            for capability in CAPABILITIES:
                try:
                    compile_for(capability, function, arguments, keywords)
                except (triton.TritonError, RuntimeError, ValueError) as error:
                    failures += 1
                    print(f"gpu-dry: {function.__name__} {dtype} {keywords} on {capability}: {error}")
    print(f"gpu-dry: kernels by Triton {triton.__version__} for {CAPABILITIES}: {failures} failures")
    return int(failures > 0)


def launches(dtype: torch.dtype) -> list[Launch]:
    """What the kernels' modules launch, each kind once."""
    seen: dict[str, Launch] = {}

    def write_down(function: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        seen.setdefault(f"{function.__name__} {keywords}", (function, arguments, keywords))

    real, JITFunction.run = JITFunction.run, write_down  # type: ignore[method-assign]
    try:
        logit_kernels.try_out(torch.device("cpu"), torch.float32)
        for shape in SHAPES:
            _launch_layer(shape, dtype)
    finally:
        JITFunction.run = real  # type: ignore[method-assign]
    return list(seen.values())


def _launch_layer(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, groups, queries, size = shape
    hidden = torch.zeros(tokens, groups * queries * size, dtype=dtype)
    layer_kernels.rms_norm_gradient(hidden, hidden[0], 1e-6, layer_kernels.rms_norm(hidden, hidden[0], 1e-6))
    layer_kernels.gated_silu_gradient(hidden, layer_kernels.gated_silu(hidden))
    factors = torch.zeros(tokens)
    layer_kernels.weighted_gated_silu_gradient(hidden, factors, layer_kernels.gated_silu(hidden, factors))
    mixed, rotation = hidden.new_zeros(tokens, groups, queries + 2, size), hidden.new_zeros(2, tokens, size // 2)
    for weights in (None, (hidden[0, :size], hidden[0, :size])):
        heads = head_kernels.rotated_heads(mixed, rotation, weights, 1e-6)
        head_kernels.rotated_heads_gradient(mixed, rotation, weights, 1e-6, heads)


def compile_for(capability: int, function: JITFunction[Any], arguments: tuple[Any, ...], keywords: Any) -> None:
    """Raises whatever Triton raises."""
    signature, constants, attributes = {}, {}, {}
    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    for index, (name, value) in enumerate(_named(function, arguments, keywords)):
        if name in keywords or (isinstance(value, int) and value == 1):  # Triton makes a constant of every 1
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _named(
    function: JITFunction[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    for index, name in enumerate(function.arg_names):
        yield name, arguments[index] if index < len(arguments) else keywords[name]


if __name__ == "__main__":
    sys.exit(main())
