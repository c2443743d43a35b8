"""Every family of models that the reference and DeepSpeed backends train: packed as alone, and out as it came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.models.shape import INNER
from rlhpc.training.checkpoint_export import export_hf
from rlhpc.training.factory import open_backend
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.ranks import RankContext
from tests.tiny_models import FAMILIES, make_tiny_checkpoint
from tests.unit.training.packed_rows import (
    clipped_loss,
    draw_samples,
    num_loss_tokens,
    pack_row,
    packed_logprobs,
    plain_logprobs,
    plain_model,
    tiny_config,
)

CPU = torch.device("cpu")
TOLERANCE = 1e-5
LENGTHS = (9, 2, 30, 17, 8)  # shorter and longer than a window, of several buckets of padding


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_one_by_one_have_the_same_logprobs_and_gradients(family: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path, family, hidden=32)
    generator = torch.Generator().manual_seed(0)
    segments = [torch.randint(4, 100, (length,), generator=generator) for length in LENGTHS]
    model, plain = load_causal_lm(directory, device=CPU), plain_model(directory)
    found, expected = packed_logprobs(model, segments), plain_logprobs(plain, segments)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    weights = torch.randn(len(found), generator=generator) / len(
        found
    )  # as advantages; a sum is larger with each token
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    others = dict(plain.named_parameters())
    # Alone, a language model has shorter names than inside a larger one.
    found_names = [name.removesuffix("@").replace(f".{INNER}.", ".") for name in model.parameters]
    assert found_names == list(others)
    for name, parameter in zip(found_names, model.parameters.values(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, others[name].grad, atol=TOLERANCE, rtol=0, msg=name)
        assert parameter.grad.abs().max() > 10 * TOLERANCE, f"{name} has too small a gradient to be compared"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_byte_for_byte_what_came_in_but_for_what_was_trained(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", family, hidden=32, dtype=dtype)
    backend = open_backend(tiny_config(model), RankContext())
    backend.save(tmp_path / "before").result()
    row = pack_row(draw_samples((20, 37, 8, 33)))
    backend.step(
        [row], clipped_loss, proximal=None, num_loss_tokens=num_loss_tokens([row]),
        learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    backend.save(tmp_path / "after").result()
    trained = {spec.name for spec in backend.tensor_specs()}
    backend.close()
    came = tensors_of(model)
    untouched, moved = (exported(tmp_path / name, model, tmp_path / f"{name}-hf") for name in ("before", "after"))
    assert untouched.keys() == moved.keys() == came.keys()
    for name, tensor in came.items():
        assert same_bytes(untouched[name], tensor), name
        assert (moved[name].dtype, moved[name].shape) == (tensor.dtype, tensor.shape), name
    changed = {name for name, tensor in came.items() if not same_bytes(moved[name], tensor)}
    assert changed <= trained
    assert len(changed) > len(trained) / 2  # the others are experts without tokens, and biases of keys
    for file in sorted(model.iterdir()):
        if file.suffix != ".safetensors":
            assert (tmp_path / "after-hf" / file.name).read_bytes() == file.read_bytes(), file.name


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def exported(checkpoint: Path, model: Path, out: Path) -> dict[str, torch.Tensor]:
    export_hf(checkpoint, model, out)
    return tensors_of(out)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same: Any = one.dtype == other.dtype and one.shape == other.shape
    return bool(same and torch.equal(one.view(torch.uint8), other.view(torch.uint8)))
