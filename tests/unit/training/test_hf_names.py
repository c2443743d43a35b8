from __future__ import annotations

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.models.shape import ModelShape
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.hf_model import on_disk, views_on_disk
from tests.tiny_models import FAMILIES, make_tiny_checkpoint
from tests.unit.launch.public_models import ODD_CONFIGS


def spec_of(name, parameter):
    return TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_and_bits_are_those_that_transformers_writes(family, dtype, tmp_path):
    make_tiny_checkpoint(tmp_path, family=family, hidden=32, dtype=dtype)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    module.save_pretrained(tmp_path / "again")
    written = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    found = {}
    for name, parameter in module.named_parameters():
        for spec, view in zip(on_disk(spec_of(name, parameter)), views_on_disk(name, parameter), strict=True):
            assert (spec.shape, spec.dtype) == (tuple(view.shape), str(view.dtype).removeprefix("torch."))
            found[spec.name] = view
    assert found.keys() == written.keys()
    assert [name for name in found if not torch.equal(found[name], written[name])] == []


def test_what_is_written_to_a_view_is_in_the_parameter():
    fused = torch.zeros(3, 4, 5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for number, view in enumerate(views_on_disk(name, fused)):
        view.fill_(number)
    assert fused[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]


def test_a_parameter_that_is_no_experts_keeps_its_name():
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        tensor = torch.zeros(2, 3)
        assert on_disk(spec_of(name, tensor)) == (spec_of(name, tensor),)
        assert [view.data_ptr() for view in views_on_disk(name, tensor)] == [tensor.data_ptr()]


@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_the_tensors_that_a_check_expects_are_those_of_transformers(name):
    document = ODD_CONFIGS[name]
    settings = {key: value for key, value in document.items() if key != "model_type"}
    config = AutoConfig.for_model(document["model_type"], **settings)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    expected = {}
    for name, parameter in module.named_parameters():
        expected |= {spec.name: spec.shape for spec in on_disk(spec_of(name, parameter))}
    assert ModelShape.of(document).tensors == expected
