"""Small packed rows and a clipped loss, drawn from a seed; a model on packed segments, and transformers' own on each
alone; inputs of layer functions; bytes of tensors that live.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import TokenRow
from rlhpc.protocol.types import PackedMicrobatch, TrainingSample
from rlhpc.training.hf_model import CausalLM
from rlhpc.training.packed_attention import SegmentPlan


def draw_samples(lengths: Sequence[int], *, vocabulary: int = 100, seed: int = 0) -> list[TrainingSample]:
    """One sample of each length; about a third of it is prompt, at least one token."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        loss_mask = np.arange(length) >= max(1, length // 3)
        samples.append(
            TrainingSample(
                group_id=index,
                sample_index=0,
                token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=loss_mask,
                behaviour_logprobs=np.where(loss_mask, rng.normal(-4, 1, length), 0).astype(np.float32),
                advantages=np.where(loss_mask, rng.normal(0, 1), 0).astype(np.float32),
                versions=np.where(loss_mask, 0, -1).astype(np.int32),
            )
        )
    return samples


def pack_row(samples: Sequence[TrainingSample]) -> PackedMicrobatch:
    """Lay samples end to end."""
    return PackedMicrobatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        position_ids=np.concatenate([np.arange(len(s.token_ids)) for s in samples]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(len(s.token_ids) for s in samples)]).astype(np.int32),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        behaviour_logprobs=np.concatenate([s.behaviour_logprobs for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        versions=np.concatenate([s.versions for s in samples]),
        loss_weights=np.array([s.loss_weight for s in samples], np.float32),
        **{
            name: np.concatenate([getattr(s, name) for s in samples])
            for name in ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
            if getattr(samples[0], name) is not None
        },
        routes=tuple(s.routes for s in samples),
    )


def with_top_tokens(sample: TrainingSample, k: int, vocabulary: int) -> TrainingSample:
    """A sample with k tokens that a teacher finds likely in the place of each loss token; their sum is below 1."""
    rng = np.random.default_rng(len(sample.token_ids))
    num_tokens = int(sample.loss_mask.sum())
    ids = np.stack([rng.permutation(vocabulary)[:k] for _ in range(num_tokens)])
    shares = rng.dirichlet(np.ones(k + 1), num_tokens)[:, :k]
    return replace(
        sample,
        teacher_top_ids=ids.astype(np.int32).ravel(),
        teacher_top_logprobs=np.log(-np.sort(-shares, axis=1)).astype(np.float32).ravel(),
    )


def dummy_row() -> PackedMicrobatch:
    """What a rank gets that has fewer rows than the others."""
    return pack_row(
        [
            TrainingSample(
                group_id=-1,
                sample_index=0,
                token_ids=np.zeros(1, np.int32),
                loss_mask=np.zeros(1, np.bool_),
                behaviour_logprobs=np.zeros(1, np.float32),
                advantages=np.zeros(1, np.float32),
                versions=np.full(1, -1, np.int32),
            )
        ]
    )


def num_loss_tokens(rows: Sequence[PackedMicrobatch]) -> int:
    return sum(int(row.loss_mask.sum()) for row in rows)


def clipped_loss(current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate times a capped importance weight, written down again so that these tests need no algorithms/."""
    return clipped_surrogate(current, row.behaviour, row.proximal, row.advantages, row.loss_mask)


def clipped_surrogate(
    current: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (current - proximal).exp()
    weight = (proximal - behaviour).exp().clamp(max=2.0)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * weight
    return -gain[loss_mask].sum(), {"ratio": ratio.detach()[loss_mask].sum()}


def tiny_config(model: Path, **trainer: object) -> Config:
    """A run file for one tiny model; `trainer` overrides its table; temperature, dtype, lora and form their own.

    routing_replay is of [algorithm].
    """
    temperature, dtype = trainer.pop("temperature", 1.0), trainer.pop("dtype", "float32")
    algorithm = {"routing_replay": trainer.pop("routing_replay", False)}
    lora, form = trainer.pop("lora", {}), trainer.pop("form", "adapter")
    return Config.model_validate(
        {
            "run": {"name": "test", "num_steps": 10},
            "model": {"path": model, "dtype": dtype},
            "data": {"path": model, "task": "none"},
            "generation": {"max_prompt_tokens": 32, "max_completion_tokens": 64, "temperature": temperature},
            "admission": {"groups_per_step": 2, "group_size": 2},
            "algorithm": algorithm,
            "lora": lora,
            "weights": {"form": form},
            "trainer": {
                "backend": "reference",
                "token_budget": 4096,
                "device": "cpu",
                "adam_eps": 1e-3,  # large, so that round-off in tiny gradients does not decide the sign of a step
                **trainer,
            },
        }
    )


# ------------------------------------------------------------ A model on packed segments, and transformers' own on each


def packed_logprobs(model: CausalLM, segments: Sequence[Tensor], *, chunk_tokens: int = 4) -> Tensor:
    """Of every token that has one before it, by one packed row, with gradients."""
    row = torch.cat(list(segments))
    borders = np.cumsum([0, *map(len, segments)], dtype=np.int32)
    positions = torch.cat([torch.arange(len(segment)) for segment in segments])
    hidden = model.hidden_states(row, positions, SegmentPlan.of(borders, row.device))
    tokens = torch.cat([torch.arange(first + 1, last) for first, last in pairwise(borders)])
    found, _, _ = model.head(
        hidden[tokens - 1], model.head_weight, row[tokens], temperature=1.0, chunk_tokens=chunk_tokens
    )
    return found


def logprobs_of_packed(model: CausalLM, segments: Sequence[Tensor]) -> Tensor:
    """packed_logprobs without gradients."""
    model.module.eval()
    with torch.no_grad():
        return packed_logprobs(model, segments, chunk_tokens=64)


def gradients_of_packed(model: CausalLM, segments: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Of the sum of packed_logprobs, by parameter."""
    packed_logprobs(model, segments).sum().backward()
    return {name: parameter.grad for name, parameter in model.parameters.items()}


def plain_model(directory: Path) -> Any:
    """As transformers loads and computes it, by its plainest functions."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def plain_logprobs(hf: Any, segments: Sequence[Tensor]) -> Tensor:
    """As packed_logprobs, of each segment alone."""
    answers = [hf(input_ids=segment[None], use_cache=False).logits[0].log_softmax(-1) for segment in segments]
    chosen = [each[:-1].gather(1, segment[1:, None])[:, 0] for each, segment in zip(answers, segments, strict=True)]
    return torch.cat(chosen)


def gradients_of_plain(directory: Path, segments: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """As gradients_of_packed."""
    hf = plain_model(directory)
    plain_logprobs(hf, segments).sum().backward()
    return {name: parameter.grad for name, parameter in hf.named_parameters()}


# ------------------------------------------------------------------------------------- Random inputs of layer_functions

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


# ----------------------------------------------------- How many bytes of tensors live at once while some operations run


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, and how many bytes of them live at once."""

    def __init__(self, *inputs: Tensor | torch.UntypedStorage) -> None:
        """inputs: what was there before."""
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen = {(each.untyped_storage() if isinstance(each, Tensor) else each).data_ptr() for each in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        if storage.data_ptr() in self._seen or not storage.nbytes():
            return
        self._seen.add(storage.data_ptr())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())

    def _forget(self, pointer: int, num_bytes: int) -> None:
        self._seen.discard(pointer)
        self.live -= num_bytes
