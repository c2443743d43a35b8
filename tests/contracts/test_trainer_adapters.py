"""LoRA adapters in every backend that trains them, against PEFT and torch's AdamW, and against whole weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhpc.models.adapter import base_digest
from rlhpc.protocol.types import AdapterForm
from rlhpc.training.checkpoint_export import export_adapter
from tests.contracts.adapter_scenarios import (
    adapter_steps,
    close_a_version_early,
    describe_adapters,
    four_bit_steps,
    same_base,
    versions_after_steps,
)
from tests.contracts.average_scenarios import average_steps
from tests.contracts.reference_scenarios import ask_a_reference
from tests.contracts.trainer_layouts import (
    ADAPTER_LAYOUTS,
    EACH_WAY,
    EVERYDAY,
    LENGTHS,
    MIXTURE,
    MIXTURE_LAYOUTS,
    MODELS,
    marks_of,
    num_layers,
    packed,
)
from tests.contracts.trainer_scenarios import resume, save_midway
from tests.contracts.trainer_textbook import hf_logprobs, load_hf, torch_training, weights_on_disk
from tests.tiny_models import NUM_EXPERTS
from tests.unit.training.packed_rows import draw_samples

DENSE = ("qwen2-tied", "qwen3-untied", "llama-odd")
ALL = ["attention", "mlp"]
PARTS = ("lora_A", "lora_B")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEFT_NAMES = {"attention": MODULES[:4], "mlp": MODULES[4:], "output": ["lm_head"]}
EXPERTS = {"rank": 4, "alpha": 8.0, "targets": ["attention", "experts", "output"]}
# Rank, alpha, targets of each case; with rank 64 a matrix of these models is adapted in full.
CASES = [
    ("qwen2-tied", {"rank": 8, "alpha": 16.0, "targets": ALL}),
    ("qwen2-tied", {"rank": 1, "alpha": 4.0, "targets": ["attention", "output"]}),
    ("qwen3-untied", {"rank": 64, "alpha": 32.0, "rslora": True, "targets": [*ALL, "output"]}),
    ("llama-odd", {"rank": 8, "alpha": 8.0, "targets": ["mlp"]}),
]


def marks_of_adapters(layout: str, everyday: Collection[str]) -> tuple[pytest.MarkDecorator, ...]:
    """Each way in which A and B are kept is tried by `make test-all`, every layout by `make soak-matrix`."""
    is_rare = layout not in everyday and layout not in EACH_WAY
    return (*marks_of(layout in everyday), *((pytest.mark.soak,) if is_rare else ()))


def in_every_layout(*everyday: str) -> pytest.MarkDecorator:
    """For tests that take a cluster; everyday: those that `make test` holds, the rest is long."""
    cases = [pytest.param(name, marks=marks_of_adapters(name, everyday)) for name in ADAPTER_LAYOUTS]
    return pytest.mark.parametrize("cluster", cases, indirect=True)


of_every_kind = pytest.mark.parametrize(
    ("any_model", "lora"), CASES, ids=[f"{model}/r{lora['rank']}" for model, lora in CASES]
)


def draw(model: str, num_steps: int) -> list[Any]:
    return [draw_samples(LENGTHS, vocabulary=MODELS[model]["vocabulary"], seed=seed) for seed in range(num_steps)]


def scale_of(lora: dict[str, Any]) -> float:
    return float(lora["alpha"] / (lora["rank"] ** 0.5 if lora.get("rslora") else lora["rank"]))


class OneByOne(torch.nn.Module):
    """The experts of a layer, each with adapters of its own, computed one after the other: PEFT has none such.

    Parameters have the names that PEFT gives those of layers.
    """

    def __init__(self, experts: Any, stem: str, lora: dict[str, Any], adapters: dict[str, Tensor]) -> None:
        super().__init__()
        self.frozen, self.scale = [experts], scale_of(lora)
        for expert in range(NUM_EXPERTS):
            self.add_module(str(expert), torch.nn.ModuleDict())
            for last in MODULES[4:]:
                shapes = {part: adapters[f"{stem}.{expert}.{last}.{part}.weight"].shape for part in PARTS}
                pair = {part: torch.nn.Linear(into, out, bias=False) for part, (out, into) in shapes.items()}
                modules = {part: torch.nn.ModuleDict({"default": each}) for part, each in pair.items()}
                self.get_submodule(str(expert)).add_module(last, torch.nn.ModuleDict(modules))

    def product(self, expert: int, last: str, weight: Tensor, tokens: Tensor) -> Tensor:
        a, b = (self.get_parameter(f"{expert}.{last}.{part}.default.weight") for part in PARTS)
        return tokens @ weight.T + self.scale * (tokens @ a.T @ b.T)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        (experts,), found = self.frozen, torch.zeros_like(hidden)
        for expert in range(NUM_EXPERTS):
            places, slots = torch.where(chosen == expert)  # of no token, too: then gradients are zeros
            tokens, (gate, up) = hidden[places], experts.gate_up_proj[expert].chunk(2)
            gated = torch.nn.functional.silu(self.product(expert, "gate_proj", gate, tokens))
            inner = gated * self.product(expert, "up_proj", up, tokens)
            outer = self.product(expert, "down_proj", experts.down_proj[expert], inner)
            found = found.index_add(0, places, outer * weights[places, slots, None])
        return found


def with_peft(
    directory: Path, lora: dict[str, Any], adapters: dict[str, Tensor], dtype: torch.dtype, of: Any = None
) -> Any:
    """PEFT's model with these adapters.  of: the base, if it is not what is in the directory."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        use_rslora=lora.get("rslora", False),
        lora_dropout=0.0,
        target_modules=[name for target in lora["targets"] if target != "experts" for name in PEFT_NAMES[target]],
    )
    wrapped = peft.get_peft_model(load_hf(directory, dtype) if of is None else of, config)
    for layer in wrapped.get_submodule("base_model.model.model.layers") if "experts" in lora["targets"] else ():
        stem = f"model.layers.{layer.self_attn.layer_idx}.mlp.experts"
        layer.mlp.experts = OneByOne(layer.mlp.experts, stem, lora, adapters)
    own = dict(wrapped.named_parameters())
    assert sum(each.requires_grad for each in own.values()) == len(adapters)
    for name, tensor in adapters.items():
        own[in_peft(name)].data.copy_(tensor)
    return wrapped


def in_peft(name: str) -> str:
    return "base_model.model." + name.replace(".weight", ".default.weight")


def merged_in_float64(directory: Path, lora: dict[str, Any], adapters: dict[str, Tensor]) -> Any:
    """HF's model in float64 with W + scale · B A, of a tied head a copy of its own."""
    hf = load_hf(directory, torch.float64)
    modules, of_experts = dict(hf.named_modules()), weights_on_disk(hf)
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        a, b = adapters[name].double(), adapters[name.replace("lora_A", "lora_B")].double()
        added, module = scale_of(lora) * b @ a, name.removesuffix(".lora_A.weight")
        if ".experts." in name:
            of_experts[f"{module}.weight"] += added  # views
        else:
            modules[module].weight = torch.nn.Parameter(modules[module].weight.detach() + added)
    return hf


@in_every_layout("reference-dp1", "megatron-tp2_dp2", "deepspeed-zero3")
@of_every_kind
def test_five_steps_are_those_of_peft_and_torchs_adamw(cluster, any_model, lora, model_for, tmp_path):
    assert_course_of_peft(cluster, any_model, lora, model_for, tmp_path)


in_layouts_of_mixtures = pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(name, marks=marks_of_adapters(name, EVERYDAY))
        for name in (*MIXTURE_LAYOUTS, "deepspeed-zero1", "megatron-sp", "megatron-pp2")
    ],
    indirect=True,
)


@in_layouts_of_mixtures
def test_five_steps_of_experts_are_those_of_each_by_itself_and_torchs_adamw(cluster, model_for, tmp_path):
    assert_course_of_peft(cluster, MIXTURE, EXPERTS, model_for, tmp_path)


def assert_course_of_peft(cluster: Any, any_model: str, lora: dict[str, Any], model_for: Any, tmp_path: Path) -> None:
    directory, steps = model_for(any_model, cluster.name), draw(any_model, 5)
    rows = [packed(samples) for samples in steps]
    answers = cluster.run(adapter_steps, tmp_path, model=directory, steps=rows, lora=lora, temperature=0.7)
    results, before, after, _ = answers[0]
    wrapped = with_peft(directory, lora, before, torch.float32)
    history = torch_training(wrapped, steps, temperature=0.7)
    for result, (loss, norm) in zip(results, history, strict=True):
        assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-4)  # a sum over 115 tokens of either sign
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    expected = dict(wrapped.named_parameters())
    for name, tensor in after.items():
        wanted = expected[in_peft(name)].detach()
        assert not torch.equal(tensor, before[name])
        assert (tensor - wanted).norm() <= 1e-5 * wanted.norm(), name


@in_every_layout("reference-dp1")
@of_every_kind
def test_log_probabilities_are_those_of_weights_merged_in_float64(cluster, any_model, lora, model_for, tmp_path):
    assert_log_probabilities_of_a_merge(cluster, any_model, lora, model_for, tmp_path)


@in_layouts_of_mixtures
def test_log_probabilities_of_experts_are_those_of_weights_merged_in_float64(cluster, model_for, tmp_path):
    assert_log_probabilities_of_a_merge(cluster, MIXTURE, EXPERTS, model_for, tmp_path)


def assert_log_probabilities_of_a_merge(
    cluster: Any, any_model: str, lora: dict[str, Any], model_for: Any, tmp_path: Path
) -> None:
    directory, steps = model_for(any_model, cluster.name), draw(any_model, 2)
    rows = [packed(samples) for samples in steps]
    answers = cluster.run(adapter_steps, tmp_path, model=directory, steps=rows, lora=lora, temperature=0.7)
    hf = merged_in_float64(directory, lora, answers[0][2])
    with torch.no_grad():
        expected = torch.cat([hf_logprobs(hf, sample, 0.7) for sample in steps[-1]])
    of_replicas = dict(each[3] for each in answers)
    found = [row for share in zip(*(of_replicas[i] for i in sorted(of_replicas)), strict=True) for row in share]
    torch.testing.assert_close(torch.cat(found[: len(rows[-1])]), expected, atol=1e-5, rtol=0)


@in_every_layout("reference-dp1", "megatron-cp2")
def test_a_version_is_a_and_b_of_each_layer_and_the_manifest_says_the_scale(cluster, model_for, tmp_path):
    lora = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
    directory = model_for("qwen2-tied", cluster.name)
    answers = cluster.run(
        describe_adapters, tmp_path, model=directory, rows=packed(draw("qwen2-tied", 1)[0]), lora=lora
    )
    names = [
        f"model.layers.{layer}.{module}.lora_{part}.weight"
        for layer in range(num_layers(cluster.name))
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for part in "AB"
    ]
    for rank, (specs, form, version) in enumerate(answers):
        assert form == AdapterForm(rank=4, scale=1.5, base=base_digest(directory))
        assert [spec.name for spec in specs] == names
        assert [spec.shape for spec in specs] == [(4, 32), (32, 4), (4, 64), (32, 4)] * num_layers(cluster.name)
        assert {spec.dtype for spec in specs} == {"float32"}
        assert [(name, tuple(tensor.shape)) for name, tensor in version] == (
            [(spec.name, spec.shape) for spec in specs] if rank == 0 else []
        )
    kept = json.loads((tmp_path / "state" / "trainer.json").read_text())["manifest"]
    assert [name for name, _ in kept["tensors"]] == names


@in_every_layout("reference-dp1", "megatron-tp2_dp2", "deepspeed-zero3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_version_is_the_base_and_the_adapters_whatever_was_published_before(
    cluster, dtype, model_for, tmp_path
):
    """Rounded once from float32: the error of the last version is that of the first."""
    lora = {"rank": 8, "alpha": 16.0, "targets": [*ALL, "output"]}
    assert_merged(cluster, "qwen3-untied", dtype, lora, model_for, tmp_path)


@in_layouts_of_mixtures
def test_a_merged_version_has_experts_of_the_base_and_their_adapters(cluster, model_for, tmp_path):
    assert_merged(cluster, MIXTURE, "bfloat16", EXPERTS, model_for, tmp_path)


def assert_merged(
    cluster: Any, any_model: str, dtype: str, lora: dict[str, Any], model_for: Any, tmp_path: Path
) -> None:
    directory = model_for(any_model, cluster.name)
    arguments = {"model": directory, "steps": [packed(s) for s in draw(any_model, 4)], "lora": lora}
    adapters, merged = (
        cluster.run(versions_after_steps, tmp_path / form, form=form, dtype=dtype, **arguments)[0]
        for form in ("adapter", "merged")
    )
    kind = getattr(torch, dtype)
    for ours, whole in zip(adapters, merged, strict=True):
        expected = weights_on_disk(merged_in_float64(directory, lora, ours))
        base = weights_on_disk(load_hf(directory, kind))
        assert whole.keys() == base.keys()
        for name, tensor in whole.items():
            if name.removesuffix(".weight") + ".lora_A.weight" not in ours:
                assert torch.equal(tensor, base[name].float())
            elif dtype == "float32":
                torch.testing.assert_close(tensor.double(), expected[name], atol=1e-7, rtol=1e-6)
            else:
                a, b = (ours[name.replace(".weight", f".lora_{part}.weight")] for part in "AB")
                wanted = (base[name].float() + 2.0 * b @ a).to(kind).float()
                apart = (tensor - wanted).abs() / wanted.abs().clamp(min=1e-3)
                assert apart.max() <= 2**-7  # a product that lies between two numbers goes either way
                assert (apart == 0).float().mean() > 0.99


@in_every_layout("deepspeed-zero3")
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_version_that_rank_0_closes_early_leaves_the_ranks_in_step(cluster, form, model_for, tmp_path):
    lora = {"rank": 4, "targets": ALL}
    directory, rows = model_for("qwen2-tied", cluster.name), packed(draw("qwen2-tied", 1)[0])
    arguments = {"model": directory, "rows": rows, "form": form, "lora": lora}
    before, after = cluster.run(close_a_version_early, tmp_path, **arguments)[0]
    assert before
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@in_every_layout("reference-dp1")
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_two_hundred_versions_leave_every_bit_of_the_base(cluster, form, model_for, tmp_path):
    directory, rows = model_for("qwen2-tied", cluster.name), packed(draw("qwen2-tied", 1)[0][:3])
    lora = {"rank": 2, "targets": ALL}
    arguments = {"model": directory, "rows": rows, "num_versions": 200, "lora": lora, "dtype": "bfloat16"}
    assert cluster.run(same_base, tmp_path, form=form, **arguments) == [[]] * cluster.num_ranks


@in_every_layout("reference-dp1", "megatron-cp2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_policy_as_it_was_held_and_asking_it_changes_no_bit(cluster, dtype, model_for, tmp_path):
    assert_reference(cluster, "qwen2-tied", dtype, {"rank": 4, "targets": [*ALL, "output"]}, model_for, tmp_path)


@in_layouts_of_mixtures
def test_the_reference_of_experts_is_the_base_bit_for_bit(cluster, model_for, tmp_path):
    assert_reference(cluster, MIXTURE, "bfloat16", EXPERTS, model_for, tmp_path)


def assert_reference(
    cluster: Any, any_model: str, dtype: str, lora: dict[str, Any], model_for: Any, tmp_path: Path
) -> None:
    directory, rows = model_for(any_model, cluster.name), packed(draw(any_model, 1)[0])
    arguments = {"model": directory, "rows": rows, "dtype": dtype}
    answers = cluster.run(ask_a_reference, tmp_path / "a", memory="host", lora=lora, **arguments)
    base = cluster.run(ask_a_reference, tmp_path / "b", memory="host", **arguments)
    for seen, whole in zip(answers, base, strict=True):
        for name in ("reference", "reference again"):
            assert all(map(torch.equal, seen[name], seen["start"]))
            assert all(map(torch.equal, seen[name], whole["start"]))  # the base itself
        assert all(map(torch.equal, seen["policy again"], seen["policy"]))
        assert not all(map(torch.equal, seen["policy"], seen["start"]))
    names = sorted(path.name for path in (tmp_path / "a" / "before").iterdir())
    for name in names:
        assert (tmp_path / "a" / "before" / name).read_bytes() == (tmp_path / "a" / "after" / name).read_bytes(), name
    assert set(load_file(tmp_path / "a" / "before" / "weights-00001.safetensors")) == names_of(directory)


@pytest.mark.parametrize(
    ("source", "target", "any_model"),
    [
        pytest.param(*pair, model, marks=marks_of(set(pair) <= EVERYDAY.keys()), id=f"{pair[0]}-to-{pair[1]}")
        for model, pairs in {
            "qwen3-untied": [
                *((name, name) for name in ADAPTER_LAYOUTS),
                ("megatron-tp2_dp2", "reference-dp1"),
                ("megatron-tp2_dp2", "megatron-dp2"),
                ("megatron-tp2_dp2", "megatron-sp"),
                ("megatron-vpp2", "deepspeed-zero3"),
                ("megatron-vpp2", "reference-dp2"),
                ("reference-dp1", "megatron-cp2"),
                ("reference-dp2", "megatron-vpp2"),
                ("deepspeed-zero2", "megatron-tp2_pp2"),
                ("deepspeed-zero3", "reference-dp1"),
            ],
            MIXTURE: [
                ("megatron-sp_ep2", "reference-dp1"),
                ("megatron-sp_ep2", "megatron-sp_ep2"),
                ("reference-dp2", "megatron-ep2"),
                ("deepspeed-zero3", "megatron-sp_ep2"),
                ("megatron-ep2", "deepspeed-zero3"),
            ],
        }.items()
        for pair in pairs
    ],
)
def test_saved_adapters_continue_in_the_same_layout_bit_for_bit_and_alike_in_others(
    source, target, any_model, start, model_for, tmp_path
):
    lora = EXPERTS if any_model == MIXTURE else {"rank": 4, "alpha": 8.0, "targets": [*ALL, "output"]}
    directory = model_for(any_model, "megatron-vpp2")  # enough layers for all of them
    arguments = {
        "model": directory,
        "steps": [packed(samples) for samples in draw(any_model, 4)],
        "directory": tmp_path / "state",
        "lora": lora,
    }
    _, results, weights = start(source).run(save_midway, tmp_path / "a", **arguments)[0]
    others, found = start(target).run(resume, tmp_path / "b", **arguments)[0]
    if source == target:
        assert others == results
        assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    for there, here in zip(results, others, strict=True):
        assert here.grad_norm == pytest.approx(there.grad_norm, rel=1e-5)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@in_every_layout("reference-dp1", "deepspeed-zero3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_an_adapter_to_begin_with_is_the_policy_with_it(cluster, dtype, model_for, tmp_path):
    lora = {"rank": 4, "alpha": 8.0, "targets": ALL}
    directory, rows = model_for("qwen2-tied", cluster.name), packed(draw("qwen2-tied", 1)[0])
    cluster.run(describe_adapters, tmp_path / "a", model=directory, rows=rows, lora=lora)
    export_adapter(tmp_path / "a" / "state", directory, tmp_path / "initial")
    begun = {"model": directory, "rows": rows, "dtype": dtype, "lora": {**lora, "initial": tmp_path / "initial"}}
    for memory in ("host", "device"):
        for seen in cluster.run(ask_a_reference, tmp_path / memory, memory=memory, **begun):
            assert all(map(torch.equal, seen["reference again"], seen["start"]))
            assert all(map(torch.equal, seen["policy again"], seen["policy"]))
            assert not all(map(torch.equal, seen["policy"], seen["start"]))


@in_every_layout("reference-dp1", "deepspeed-zero3")
def test_the_average_is_of_adapters_alone_and_goes_on_bit_for_bit(cluster, model_for, tmp_path):
    lora, directory = {"rank": 4, "targets": ["attention"]}, model_for("qwen2-tied", cluster.name)
    steps = [packed(samples) for samples in draw("qwen2-tied", 3)]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    arguments = {"model": directory, "decay": 0.75, "lora": lora, "dtype": "bfloat16"}
    cluster.run(average_steps, whole, steps=steps, memory="host", **arguments)
    cluster.run(average_steps, resumed, steps=steps[2:], memory="device", saved=whole / "2", **arguments)
    states = [
        {kind: load_file(whole / str(number) / f"{kind}-00001.safetensors") for kind in ("weights", "average")}
        for number in (1, 2, 3)
    ]
    for before, after in pairwise(states):
        assert all("lora_" in name for name in after["average"])
        for name, tensor in after["weights"].items():
            expected = 0.75 * before["average"][name].double() + 0.25 * tensor.double()
            torch.testing.assert_close(after["average"][name].double(), expected, atol=1e-7, rtol=1e-6)
    for name in ("weights", "exp_avg", "exp_avg_sq", "average"):
        file = f"{name}-00001.safetensors"
        assert (resumed / "1" / file).read_bytes() == (whole / "3" / file).read_bytes(), name


def names_of(directory: Path) -> set[str]:
    """Of A and B of every layer and the head."""
    layers = {name.removesuffix(".weight") for name in weights_on_disk(load_hf(directory))}
    layers = {name for name in layers if name.rpartition(".")[2] in MODULES} | {"lm_head"}
    return {f"{name}.{part}.weight" for name in layers for part in PARTS}


# ---------------------------------------------------------------------------------------------------------- four bits


def in_four_bits(directory: Path) -> Any:
    """HF's model in float32 whose matrices of attention and MLP went through 4 bits."""
    functional = pytest.importorskip("bitsandbytes.functional")
    hf = load_hf(directory, torch.float32)
    for name, layer in hf.named_modules():
        if name.split(".")[-1] in MODULES:
            packed, scales = functional.quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
            layer.weight.data = functional.dequantize_4bit(packed, scales)
    return hf


@pytest.mark.parametrize("cluster", ["reference-dp1", "reference-dp2", "deepspeed-zero2"], indirect=True)
@pytest.mark.parametrize("model", ["qwen2-tied", "qwen3-untied"])
def test_a_base_in_four_bits_is_trained_beside_and_sent_as_the_weights_that_it_unpacks_to(
    cluster, model, model_for, tmp_path
):
    lora = {"rank": 8, "alpha": 16.0, "targets": ALL, "quantization": "nf4"}
    directory, steps = model_for(model, cluster.name), draw(model, 5)
    quantised, rows = in_four_bits(directory), [packed(samples) for samples in steps]
    answers = cluster.run(
        four_bit_steps, tmp_path, model=directory, steps=rows, lora=lora, form="merged", temperature=0.7
    )
    before, after, version, _, _, _ = answers[0]
    base = weights_on_disk(quantised)
    assert any(not torch.equal(base[name], tensor) for name, tensor in weights_on_disk(load_hf(directory)).items())
    with torch.no_grad():
        expected = torch.cat([hf_logprobs(quantised, sample, 0.7) for sample in steps[-1]])
    for place, atol in ((3, 1e-3), (4, 1e-5)):  # those of the policy have moved from the base's
        lengths = len(rows[-1])
        found = [row for share in zip(*(each[place] for each in answers), strict=True) for row in share][:lengths]
        apart = (torch.cat(found) - expected).abs().max()
        assert (apart <= atol) == (place == 4)
    assert all(each[5] for each in answers)

    wrapped = with_peft(directory, lora, before, torch.float32, of=quantised)
    torch_training(wrapped, steps, temperature=0.7)
    wanted = dict(wrapped.named_parameters())
    for name, tensor in after.items():
        apart = tensor - wanted[in_peft(name)].detach()
        assert not torch.equal(tensor, before[name])
        assert apart.norm() <= 1e-5 * tensor.norm(), name
    for name, tensor in version.items():
        a, b = (after.get(name.replace(".weight", f".lora_{part}.weight")) for part in "AB")
        merged = base[name] if a is None or b is None else base[name] + 2.0 * b @ a
        torch.testing.assert_close(tensor, merged, atol=1e-6, rtol=1e-6)
