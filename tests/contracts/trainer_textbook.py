"""What every backend is measured by: plain HF on unpacked samples, full logits, torch's own clipping and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.types import TensorSpec, TrainingSample
from rlhpc.training.logprob import token_row
from rlhpc.weights.hf_names import name_of, on_disk, views_on_disk
from tests.contracts.trainer_scenarios import STEP
from tests.unit.training.packed_rows import clipped_surrogate, num_loss_tokens, pack_row


def load_hf(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """HF's own classes with its plainest attention and experts."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def hf_logprobs(hf: Any, sample: TrainingSample, temperature: float) -> Tensor:
    """float32 [L], 0 on the first token, from full logits of one unpacked sample."""
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = hf(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def hf_training(
    directory: Path, steps: list[list[TrainingSample]], temperature: float
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Return (loss, gradient norm) of every step and the weights after the last, by their names on disk."""
    hf = load_hf(directory)
    return torch_training(hf, steps, temperature), weights_on_disk(hf)


def torch_training(hf: Any, steps: list[list[TrainingSample]], temperature: float) -> list[tuple[float, float]]:
    """Train what requires gradients, in place; (loss, gradient norm) of every step."""
    trained = [p for p in hf.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": STEP["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=STEP["learning_rate"], betas=(0.9, 0.95), eps=1e-3)
    history = []
    for samples in steps:
        current = torch.cat([hf_logprobs(hf, sample, temperature) for sample in samples])
        row = pack_row(samples)
        behaviour, mask = torch.from_numpy(row.behaviour_logprobs), torch.from_numpy(row.loss_mask)
        loss, _ = clipped_surrogate(
            current,
            behaviour=behaviour,
            proximal=current.detach() * mask,
            advantages=torch.from_numpy(row.advantages),
            loss_mask=mask,
        )
        optimizer.zero_grad()
        (loss / num_loss_tokens([row])).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, STEP["max_grad_norm"])
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


def weights_on_disk(hf: Any) -> dict[str, Tensor]:
    """Parameters by the names of a checkpoint, a tied head under the embedding's alone."""
    fused = dict(hf.named_parameters()) if hf.config.model_type == "gpt_oss" else {}  # experts on disk as in memory
    named = [(name_of(name, fused), parameter) for name, parameter in hf.named_parameters()]
    return {
        spec.name: view.detach()
        for name, parameter in named
        for spec, view in zip(
            on_disk(TensorSpec(name, "float32", tuple(parameter.shape))), views_on_disk(name, parameter), strict=True
        )
    }


def hf_losses(
    directory: Path,
    samples: list[TrainingSample],
    algorithms: list[dict[str, object]],
    *,
    policy_version: int,
    temperature: float,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) by each kind of loss, from log-probabilities of one sample after the other."""
    hf, found = load_hf(directory), []
    row = pack_row(samples)
    for algorithm in algorithms:
        current = torch.cat([hf_logprobs(hf, sample, temperature) for sample in samples])
        loss_of = make_policy_loss(AlgorithmConfig.model_validate(algorithm), policy_version)
        loss, _ = loss_of(current, token_row(row, torch.zeros(len(row.token_ids)), proximal=None))
        hf.zero_grad()
        (loss / num_loss_tokens([row])).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in hf.parameters() if p.grad is not None])
        found.append((loss.item(), norm.item()))
    return found


def hf_cross_entropy(directory: Path, samples: list[TrainingSample]) -> tuple[float, dict[str, Tensor]]:
    """Cross-entropy with the loss tokens, and the gradients of its mean, in float64, of one sample after the other."""
    hf, total = load_hf(directory, torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in samples:
        total = total + _nll(hf, sample)
    return _with_gradients(hf, total, num_loss_tokens([pack_row(samples)]))


def hf_preferences(
    directory: Path, samples: list[TrainingSample], beta: float, reference_of: Callable[[NDArray[np.int32]], Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The loss of TRL's DPOTrainer, "sigmoid" without smoothing, and its gradients; pairs are neighbours.  As above.

    A pair's loss counts as often as there are loss tokens for each pair: the backend divides by all of them.
    """
    hf, total = load_hf(directory, torch.float64), torch.zeros((), dtype=torch.float64)
    num_tokens = num_loss_tokens([pack_row(samples)])
    for place in range(0, len(samples), 2):
        pair = samples[place : place + 2]
        logps = [-_nll(hf, each) for each in pair]
        ref_logps = [reference_of(each.token_ids).double()[torch.from_numpy(each.loss_mask)].sum() for each in pair]
        logits = (logps[0] - logps[1]) - (ref_logps[0] - ref_logps[1])
        total = total - torch.nn.functional.logsigmoid(beta * logits) * num_tokens / (len(samples) // 2)
    return _with_gradients(hf, total, num_tokens)


def _nll(hf: Any, sample: TrainingSample) -> Tensor:
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    labels = torch.where(torch.from_numpy(sample.loss_mask), tokens, -100)[1:]
    logits = hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def _with_gradients(hf: Any, total: Tensor, num_tokens: int) -> tuple[float, dict[str, Tensor]]:
    (total / num_tokens).backward()
    for parameter in hf.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return total.item(), weights_on_disk(hf)
