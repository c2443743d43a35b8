"""Every family of models that the reference and DeepSpeed backends train: packed as alone, and out as it came in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.models import shape
from rlhpc.models.shape import INNER
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.checkpoint_export import export_hf
from rlhpc.training.factory import open_backend
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.ranks import RankContext
from rlhpc.weights.four_bits import from_mxfp4
from tests.tiny_models import FAMILIES, OTHERS, make_tiny_checkpoint, pack_experts
from tests.unit.doc_pages import ROOT, section
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


@pytest.mark.parametrize("family", OTHERS)
def test_adapters_of_attention_are_merged_into_its_matrices_and_nothing_else_is_changed(
    family: str, tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", family, hidden=32, dtype=torch.bfloat16)
    lora = {"rank": 4, "targets": ["attention"]}
    backend = open_backend(tiny_config(model, lora=lora, form="merged", dtype="bfloat16"), RankContext())
    row = pack_row(draw_samples((20, 37, 8, 33)))
    for _ in range(2):  # B is zero in the first, and A learns nothing
        backend.step(
            [row], clipped_loss, proximal=None, num_loss_tokens=num_loss_tokens([row]),
            learning_rate=0.1, weight_decay=0.0, max_grad_norm=1.0,
        )  # fmt: skip
    version = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.save(tmp_path / "saved").result()
    backend.close()
    came, out = tensors_of(model), exported(tmp_path / "saved", model, tmp_path / "out")
    assert out.keys() == came.keys()
    assert all(same_bytes(version[name], out[name]) for name in version)
    changed = {name for name, tensor in came.items() if not same_bytes(out[name], tensor)}
    of_attention = {name for name, tensor in came.items() if ".self_attn." in name and tensor.dim() == 2}
    assert changed == of_attention


def test_experts_in_mxfp4_are_read_and_exported_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    packed = pack_experts(make_tiny_checkpoint(tmp_path / "packed", "gpt_oss", hidden=32, dtype=torch.bfloat16))
    stored, found = tensors_of(packed), load_causal_lm(packed, device=CPU).parameters
    name, exponents = "model.layers.1.mlp.experts.down_proj", stored["model.layers.1.mlp.experts.down_proj_scales"]
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for expert, row, column in ((0, 0, 0), (3, 17, 1), (7, 31, 63)):  # by the standard's words
        byte = int(stored[f"{name}_blocks"][expert, row, column // 32, column % 32 // 2])
        bits = byte >> 4 if column % 2 else byte & 15
        number = (-1) ** (bits >> 3) * values[bits & 7] * 2.0 ** (int(exponents[expert, row, column // 32]) - 127)
        assert float(found[f"{name}@"][expert, column, row].detach()) == number
    for each in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{each}"
        by_ours = from_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found[f"{name}@"], by_ours.float())
    backend = open_backend(tiny_config(packed), RankContext())
    backend.save(tmp_path / "saved").result()
    backend.close()
    whole = exported(tmp_path / "saved", packed, tmp_path / "whole")
    assert whole.keys() == {name.removesuffix("_scales").removesuffix("_blocks") for name in stored}
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    again = load_causal_lm(tmp_path / "whole", device=CPU).parameters
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    with pytest.raises(ConfigError, match=r"lora\.rank=8 with model\.path=.*MXFP4.*legal: this model in bfloat16"):
        open_backend(tiny_config(packed, lora={"rank": 8}), RankContext())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def exported(checkpoint: Path, model: Path, out: Path) -> dict[str, torch.Tensor]:
    export_hf(checkpoint, model, out)
    return tensors_of(out)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same: Any = one.dtype == other.dtype and one.shape == other.shape
    return bool(same and torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def test_the_table_of_models_says_what_the_code_trains() -> None:
    """Families of tests are in it, once each, and Megatron's are those that its check lets pass."""
    rows = [line.split("|")[1:-1] for line in section(ROOT / "docs" / "training.md", "Models").splitlines()]
    said = [(name, row) for row in rows if len(row) == 6 for name in re.findall(r"`(\w+)`", row[0])][1:]
    assert sorted(name for name, _ in said) == sorted(FAMILIES)
    assert {name for name, row in said if row[3].strip() == "yes"} == {*shape.FAMILIES}
    assert {row[2].strip() for _, row in said} == {"yes"}
