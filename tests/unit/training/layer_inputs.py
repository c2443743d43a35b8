"""Random inputs of layer_functions, on any device, and the split and the norms of heads written plainly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
SHAPES = [(5, 2, 2, 16), (4, 3, 1, 12), (3, 1, 7, 8), (1, 1, 1, 2)]  # tokens, groups, queries of a group, head size


def draw_hidden(
    dtype: torch.dtype, size: int = 48, rows: int = 7, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [rows, 1, size] and a weight, both leaves, and a gradient."""
    generator = torch.Generator(device).manual_seed(size)
    hidden, gradient = torch.randn(2, rows, 1, size, device=device, generator=generator).to(dtype)
    weight = 1 + 0.3 * torch.randn(size, device=device, generator=generator)
    return hidden.requires_grad_(), weight.to(dtype).requires_grad_(), gradient


def draw_heads(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, has_norm: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Mixed heads, a leaf; angles; and the weights of the two norms."""
    tokens, groups, queries, size = shape
    generator = torch.Generator(device).manual_seed(tokens)
    mixed = torch.randn(tokens, groups, queries + 2, size, device=device, generator=generator).to(dtype)
    angles = 40 * torch.rand(tokens, size // 2, device=device, generator=generator)
    query, key = (1 + 0.3 * torch.randn(2, size, device=device, generator=generator)).to(dtype)
    return mixed.requires_grad_(), angles, (query.requires_grad_(), key.requires_grad_()) if has_norm else None


def plain_heads(mixed: Tensor, weights: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, normed if there are weights, not rotated."""
    query, key, value = mixed.split([mixed.shape[2] - 2, 1, 1], 2)
    query, key, value = (part.reshape(len(mixed), -1, mixed.shape[3]) for part in (query, key, value))
    if weights is not None:
        query, key = (
            weight * functional.rms_norm(part, part.shape[-1:], None, EPS)
            for part, weight in zip((query, key), weights, strict=True)
        )
    return query, key, value
