"""Adapters: which layers have one, PEFT directories read and written, checkpoints of them refused elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rlhpc.config.rules import with_values
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.models.adapter import base_digest, chosen_layers, matrices_of, refuse_unserved_adapters
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.contracts import StepResult, TrainerBackend
from rlhpc.protocol.errors import CheckpointError, ConfigError
from rlhpc.training.checkpoint_export import export_adapter, export_hf
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.contracts.trainer_textbook import hf_logprobs
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import clipped_loss, draw_samples, num_loss_tokens, pack_row, tiny_config

LORA = {"rank": 4, "alpha": 6.0, "targets": ["attention", "mlp"]}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(model directory, checkpoint, versions in both forms) of a run that trains adapters."""
    root = tmp_path_factory.mktemp("adapted")
    make_tiny_checkpoint(root / "model", hidden=32, dtype=torch.bfloat16)
    versions = {}
    for form in ("adapter", "merged"):
        config = tiny_config(root / "model", dtype="bfloat16", lora=LORA, form=form)
        backend = open_backend(config, RankContext())
        backend.hold_average("host")
        train_once(backend)
        backend.move_average(0.5)
        backend.save(root / form / "trainer").result()
        versions[form] = {name: tensor.clone() for name, tensor in backend.weights()}
        backend.close()
    return root / "model", root / "adapter", versions


def test_adapters_are_exported_into_the_weights_that_were_published(adapted, tmp_path):
    model_dir, checkpoint, versions = adapted
    assert export_hf(checkpoint, model_dir, tmp_path / "out") == "bfloat16"
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in versions["merged"].items())


def test_adapters_beside_four_bits_are_exported_into_the_weights_that_were_published(adapted, tmp_path):
    pytest.importorskip("bitsandbytes")
    lora = LORA | {"quantization": "nf4"}
    config = tiny_config(adapted[0], dtype="bfloat16", lora=lora, form="merged")
    backend = open_backend(config, RankContext())
    train_once(backend)
    backend.save(tmp_path / "state" / "trainer").result()
    export_hf(tmp_path / "state", adapted[0], tmp_path / "out")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in backend.weights():
        assert torch.equal(state[name], tensor), name
    backend.close()
    said = 'lora.quantization="off": .*trainer.json was written with "nf4"; legal: "nf4"'
    assert_refused(tmp_path / "state", tiny_config(adapted[0], dtype="bfloat16", lora=LORA, form="merged"), said)


def test_peft_loads_the_exported_adapter_and_its_log_probabilities_are_the_trainers(adapted, tmp_path):
    model_dir, checkpoint, versions = adapted
    assert export_adapter(checkpoint, model_dir, tmp_path / "out") == "float32"
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    own = dict(wrapped.named_parameters())
    for name, tensor in versions["adapter"].items():
        assert torch.equal(own["base_model.model." + name.replace(".weight", ".default.weight")], tensor)
    assert sum("lora_" in name for name in own) == len(versions["adapter"])
    config = tiny_config(model_dir, lora={**LORA, "initial": tmp_path / "out"})
    backend = open_backend(config, RankContext())
    (sample,) = draw_samples((24,))
    found = backend.logprobs([pack_row([sample])])[0]
    backend.close()
    with torch.no_grad():
        torch.testing.assert_close(found, hf_logprobs(wrapped, sample, 1.0), atol=1e-5, rtol=0)


def test_an_adapter_beside_other_weights_is_not_exported(adapted, tmp_path):
    other = make_tiny_checkpoint(tmp_path / "other", hidden=32, dtype=torch.bfloat16, seed=1)
    for write in (export_hf, export_adapter):
        with pytest.raises(CheckpointError, match=r"its weights have the digest .* belong to weights of the digest"):
            write(adapted[1], other, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_average_of_adapters_is_exported_in_both_ways(adapted, tmp_path):
    model_dir, checkpoint, versions = adapted
    export_adapter(checkpoint, model_dir, tmp_path / "adapter", is_average=True)
    export_hf(checkpoint, model_dir, tmp_path / "merged", is_average=True, dtype="float32")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    b = "model.layers.0.mlp.up_proj.lora_B.weight"
    torch.testing.assert_close(found[f"base_model.model.{b}"], versions["adapter"][b] / 2, atol=0, rtol=1e-6)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    weight = "model.layers.0.mlp.up_proj.weight"
    a = found[f"base_model.model.{b}".replace("lora_B", "lora_A")]
    expected = base[weight] + 1.5 * found[f"base_model.model.{b}"] @ a
    torch.testing.assert_close(state[weight], expected, atol=1e-7, rtol=1e-6)


def train_once(backend: TrainerBackend) -> StepResult:
    row = pack_row(draw_samples((20, 30)))
    return backend.step(
        [row],
        clipped_loss,
        proximal=None,
        num_loss_tokens=num_loss_tokens([row]),
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )


def test_layers_that_are_computed_anew_give_their_adapters_the_same_gradients(adapted):
    """The output of a frozen embedding needs no gradient, which must not cut the first layer off."""
    courses = []
    for recompute in ("none", "full"):
        lora = {"rank": 4, "targets": ["attention", "mlp", "output"]}
        backend = open_backend(tiny_config(adapted[0], lora=lora, recompute_activations=recompute), RankContext())
        norms = [train_once(backend).grad_norm for _ in range(3)]
        courses.append((norms, {name: tensor.clone() for name, tensor in backend.weights()}))
        backend.close()
    (norms, weights), (again, others) = courses
    assert norms == pytest.approx(again, rel=1e-6)
    assert norms[0] > 0
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=1e-6, rtol=1e-5)
    assert all(tensor.any() for name, tensor in weights.items() if "lora_B" in name)


# -------------------------------------------------------------------------------------------------------------- layers


def layers_of(model: Path, targets: list[str]) -> list[str]:
    config = json.loads((model / "config.json").read_bytes())
    shape = ModelShape.of(config)
    assert shape is not None
    return list(chosen_layers(LoraConfig(rank=4, targets=tuple(targets)), matrices_of(shape.tensors)))


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["attention"], ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]),
        (["mlp"], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        (["v_proj", "q_proj"], ["self_attn.q_proj", "self_attn.v_proj"]),
        (["mlp.up_proj"], ["mlp.up_proj"]),
    ],
)
def test_targets_are_roles_or_names_as_peft_has_them(adapted, targets, modules):
    assert layers_of(adapted[0], targets) == [f"model.layers.{layer}.{name}" for layer in range(2) for name in modules]


def test_the_head_is_a_layer_tied_or_not_and_one_layer_can_be_named(adapted):
    name = "model.layers.1.mlp.down_proj"
    assert layers_of(adapted[0], ["output", name]) == [name, "lm_head"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_pro"], "no layer of the model is 'q_pro' (did you mean q_proj?); legal: attention, mlp, output, q_proj"),
        (["embed_tokens"], "no layer of the model is 'embed_tokens'"),
        (["attention", "experts"], "no layer of the model is 'experts'"),
    ],
)
def test_a_target_that_is_no_layer_is_refused_with_the_nearest(adapted, targets, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        layers_of(adapted[0], targets)
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_backend(tiny_config(adapted[0], lora={"rank": 2, "targets": targets}), RankContext())


def test_adapters_begin_as_the_base_and_the_same_in_every_process(adapted):
    """A has the variance of PEFT's default, B = 0: the policy begins as the base, in log-probabilities too."""
    lora = {"rank": 16, "targets": ["attention", "mlp"]}
    seen = []
    for _ in range(2):
        torch.manual_seed(len(seen))
        backend = open_backend(tiny_config(adapted[0], lora=lora), RankContext())
        seen.append({name: tensor.clone() for name, tensor in backend.weights()})
        backend.close()
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    of_as = [tensor for name, tensor in seen[0].items() if "lora_A" in name]
    drawn = torch.cat([(tensor * tensor.shape[1] ** 0.5).flatten() for tensor in of_as])
    theirs = torch.cat([torch.nn.init.kaiming_uniform_(torch.empty(64, each.shape[1]), a=5**0.5) for each in of_as[:1]])
    assert drawn.std().item() == pytest.approx(3**-0.5, rel=0.03)
    assert theirs.std().item() * of_as[0].shape[1] ** 0.5 == pytest.approx(3**-0.5, rel=0.05)
    assert drawn.mean().abs().item() < 0.03
    assert not any(tensor.any() for name, tensor in seen[0].items() if "lora_B" in name)


# --------------------------------------------------------------------------------------------- an adapter to begin with


@pytest.fixture
def initial(adapted, tmp_path) -> Path:
    export_adapter(adapted[1], adapted[0], tmp_path / "initial")
    return tmp_path / "initial"


def test_a_run_begins_with_the_adapter_that_it_is_given_which_is_its_reference_too(adapted, initial):
    backend = open_backend(tiny_config(adapted[0], lora={**LORA, "initial": initial}), RankContext())
    rows = [pack_row(draw_samples((24, 9)))]
    assert all(torch.equal(tensor, adapted[2]["adapter"][name]) for name, tensor in backend.weights())
    backend.hold_reference("host")
    begun = backend.logprobs(rows)
    train_once(backend)
    assert torch.equal(backend.logprobs(rows, of_reference=True)[0], begun[0])
    assert not torch.equal(backend.logprobs(rows)[0], begun[0])
    backend.close()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8}, "lora.rank=8: the adapter at lora.initial=.* has 4; legal: 4"),
        ({"alpha": 8.0}, "lora.alpha=8: the adapter at lora.initial=.* has 6; legal: 6"),
        ({"rslora": True}, "lora.rslora=true: the adapter at lora.initial=.* has false; legal: false"),
        ({"targets": ["mlp"]}, "k_proj.lora_A.weight is .4, 32. there and absent by"),
        ({"targets": ["attention", "mlp", "output"]}, "lm_head.lora_A.weight is absent there and .4, 32. by"),
    ],
)
def test_an_adapter_of_other_settings_is_refused_with_key_and_value(adapted, initial, lora, said):
    with pytest.raises(ConfigError, match=said):
        open_backend(tiny_config(adapted[0], lora={**LORA, **lora, "initial": initial}), RankContext())


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 8})],
)
def test_an_adapter_that_is_another_function_of_its_tensors_is_refused(adapted, initial, key, value):
    path = initial / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}))
    with pytest.raises(ConfigError, match=re.escape(f"adapter_config.json: {key}={value!r}; legal: ")):
        open_backend(tiny_config(adapted[0], lora={**LORA, "initial": initial}), RankContext())


def test_dropout_of_an_adapter_is_ignored_and_said(adapted, initial, caplog):
    path = initial / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"lora_dropout": 0.05}))
    backend = open_backend(tiny_config(adapted[0], lora={**LORA, "initial": initial}), RankContext())
    rows = [pack_row(draw_samples((24,)))]
    assert torch.equal(*(backend.logprobs(rows)[0] for _ in range(2)))
    backend.close()
    assert "the dropout of 0.05 that it was trained with is not used" in caplog.text


def test_a_directory_without_an_adapter_is_refused(adapted, initial, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        broken = shutil.copytree(initial, tmp_path / name)
        (broken / name).unlink()
        with pytest.raises(ConfigError, match=f"there is no {name} in it; legal: a directory that PEFT saved"):
            open_backend(tiny_config(adapted[0], lora={**LORA, "initial": broken}), RankContext())


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8}, "lora.rank=8: .*trainer.json was written with 4; legal: 4"),
        ({"alpha": 8.0}, "lora.alpha=8.0: .* was written with 6.0; legal: 6.0"),
        ({"rslora": True}, "lora.rslora=true: .* was written with false; legal: false"),
        ({"targets": ["mlp"]}, 'lora.targets=."mlp".: .* was written with ."attention", "mlp".; legal: '),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_with_key_and_value(adapted, lora, said):
    assert_refused(adapted[1], tiny_config(adapted[0], dtype="bfloat16", lora={**LORA, **lora}), said)


def test_a_checkpoint_of_adapters_and_one_of_whole_weights_are_told_apart(adapted, tmp_path):
    model, checkpoint, _ = adapted
    assert_refused(checkpoint, tiny_config(model), "lora.rank=0: .* holds adapters of rank 4; legal: lora.rank=4")
    whole = open_backend(tiny_config(model), RankContext())
    whole.save(tmp_path / "whole" / "trainer").result()
    whole.close()
    config = tiny_config(model, lora=LORA)
    assert_refused(tmp_path / "whole", config, "lora.rank=4: .* holds whole weights; legal: lora.rank=0")
    with pytest.raises(CheckpointError, match="an export without --adapter"):
        export_adapter(tmp_path / "whole", model, tmp_path / "none")


def test_a_checkpoint_beside_another_base_is_refused(adapted, tmp_path):
    other = make_tiny_checkpoint(tmp_path, hidden=32, dtype=torch.bfloat16, seed=1)
    said = (
        f"model.path: its weights have the digest {base_digest(other)}, .* {base_digest(adapted[0])}; legal: the model"
    )
    assert_refused(adapted[1], tiny_config(other, dtype="bfloat16", lora=LORA), said)


def assert_refused(checkpoint: Path, config: Any, said: str) -> None:
    backend = open_backend(config, RankContext())
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    with pytest.raises(CheckpointError, match=said):
        backend.load(checkpoint / "trainer")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    backend.close()


def test_the_digest_of_a_base_is_that_of_its_numbers_whatever_files_they_are_in(adapted, tmp_path):
    tensors = load_file(adapted[0] / "model.safetensors")
    files = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert base_digest(tmp_path) == base_digest(adapted[0]) != ""
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name].view(-1)[-1] += 1
    save_file({each: tensors[each] for each in tensors if files[each] == files[name]}, tmp_path / files[name])
    assert base_digest(tmp_path) != base_digest(adapted[0])


@pytest.mark.parametrize(
    ("device", "dtype", "model", "complaint"),
    [
        ("cpu", "bfloat16", {}, ""),
        ("cuda", "bfloat16", {"num_experts": 8}, ""),
        ("", "float32", {"num_experts": 8}, ""),
        ("cpu", "bfloat16", {"num_experts": 8}, "no kernel for a mixture of experts on a CPU; legal: a GPU, or"),
        (
            "cuda",
            "float32",
            {},
            "model.dtype='float32': on a GPU vLLM holds adapters of 16 bits only; legal: 'bfloat16'",
        ),
        (
            "cpu",
            "float32",
            {"vocab_size": 262144},
            "no adapter that has more than 258048 tokens, and this one has 262144",
        ),
    ],
)
def test_adapters_that_vllm_does_not_hold_are_refused_unless_they_are_merged(
    tmp_path: Path, device: str, dtype: str, model: dict[str, Any], complaint: str
) -> None:
    config = tiny_config(tmp_path, dtype=dtype, lora=LORA)
    merged, scripted = (
        with_values(config, each) for each in ({"weights.form": "merged"}, {"generation.engine": "scripted"})
    )
    for other in (merged, scripted):
        refuse_unserved_adapters(other, ["lm_head"], model, device=device)
    if not complaint:
        refuse_unserved_adapters(config, ["lm_head"], model, device=device)
        return
    with pytest.raises(ConfigError, match=f"{re.escape(complaint)}.* weights.form='merged'"):
        refuse_unserved_adapters(config, ["lm_head"], model, device=device)


def test_an_adapter_that_vllm_would_ignore_is_refused_unless_it_is_merged(tmp_path: Path) -> None:
    config, layers = tiny_config(tmp_path, lora=LORA), ["model.layers.0.self_attn.kv_b_proj"]
    with pytest.raises(ConfigError, match=r"would ignore an adapter of it; legal: .* or weights\.form='merged'"):
        refuse_unserved_adapters(config, layers, {"vocab_size": 100})
    refuse_unserved_adapters(with_values(config, {"weights.form": "merged"}), layers, {"vocab_size": 100})


@pytest.mark.parametrize(
    ("layer", "device", "complaint"),
    [
        ("model.layers.0.linear_attn.in_proj_qkvz", "cpu", "ordered by key heads"),
        ("model.layers.0.linear_attn.in_proj_ba", "cuda", "ordered by key heads"),
        ("model.language_model.layers.0.self_attn.q_proj", "cuda", "part of a model that also sees"),
        ("model.language_model.layers.0.self_attn.q_proj", "cpu", ""),
        ("model.layers.0.linear_attn.in_proj_qkv", "cuda", ""),
    ],
)
def test_adapters_of_hybrids_are_sent_alone_where_vllm_holds_them(
    layer: str, device: str, complaint: str, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, dtype="bfloat16", lora=LORA)
    refuse_unserved_adapters(with_values(config, {"weights.form": "merged"}), [layer], {}, device=device)
    if not complaint:
        refuse_unserved_adapters(config, [layer], {}, device=device)
        return
    with pytest.raises(ConfigError, match=rf"{complaint}.*; legal: .* or weights\.form='merged'"):
        refuse_unserved_adapters(config, [layer], {}, device=device)


# ------------------------------------------------------------------------------------------------------------- experts

OF_EXPERTS = {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts"]}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixture"), family="qwen3_moe", hidden=32, tied=False)


def test_experts_are_layers_of_a_role_of_their_own_and_their_router_is_none(mixture):
    assert all("self_attn" in name for name in layers_of(mixture, ["attention"]))
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(2)
        for expert in range(8)
        for part in ("gate", "up", "down")
    ]
    assert layers_of(mixture, ["experts"]) == layers_of(mixture, ["gate_proj", "up_proj", "down_proj"]) == names
    assert layers_of(mixture, ["down_proj"]) == names[2::3]
    for target in ("gate", "mlp"):
        with pytest.raises(ConfigError, match=f"no layer of the model is '{target}'.*; legal: attention, experts, "):
            layers_of(mixture, [target])
    said = f"{names[0]} has no adapter, and others of its layer have; legal: 'experts', or 'gate_proj'"
    with pytest.raises(ConfigError, match=re.escape(said)):
        layers_of(mixture, [names[3]])


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # they match parameters
@pytest.mark.parametrize("targets", [["attention", "experts"], ["down_proj"]])
def test_peft_loads_the_exported_adapter_of_experts(mixture, targets, tmp_path):
    lora = OF_EXPERTS | {"targets": targets}
    backend = open_backend(tiny_config(mixture, lora=lora), RankContext())
    train_once(backend)
    backend.save(tmp_path / "state" / "trainer").result()
    (sample,) = draw_samples((24,))
    found = backend.logprobs([pack_row([sample])])[0]
    backend.close()
    export_adapter(tmp_path / "state", mixture, tmp_path / "adapter")
    export_hf(tmp_path / "state", mixture, tmp_path / "merged")
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    plain = hf_logprobs(base, sample, 1.0).detach()
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for hf in (wrapped, merged):
        with torch.no_grad():
            torch.testing.assert_close(found, hf_logprobs(hf, sample, 1.0), atol=1e-5, rtol=0)
    assert (found - plain).abs().max() > 1e-3
    again = open_backend(tiny_config(mixture, lora=lora | {"initial": tmp_path / "adapter"}), RankContext())
    assert torch.equal(again.logprobs([pack_row([sample])])[0], found)
    again.close()


def test_an_adapter_of_experts_that_peft_would_scale_wrongly_is_not_written(mixture, tmp_path):
    backend = open_backend(tiny_config(mixture, lora=OF_EXPERTS | {"rslora": True}), RankContext())
    backend.save(tmp_path / "state").result()
    backend.close()
    with pytest.raises(CheckpointError, match=r"lora.rslora=true: PEFT .* legal: an export without --adapter"):
        export_adapter(tmp_path / "state", mixture, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_experts_that_are_computed_in_another_way_are_refused(mixture, monkeypatch):
    made = Qwen3MoeExperts.__init__

    def interleaved(experts: Any, *given: Any, **options: Any) -> None:
        made(experts, *given, **options)
        experts.is_concatenated = False

    monkeypatch.setattr(Qwen3MoeExperts, "__init__", interleaved)
    with pytest.raises(ConfigError, match=r"lora.targets=.*Qwen3MoeExperts computes .* legal: other lora.targets"):
        open_backend(tiny_config(mixture, lora=OF_EXPERTS), RankContext())
