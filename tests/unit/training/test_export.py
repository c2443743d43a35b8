from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig

from launch.commands.export import export_run
from launch.evaluate.request import find_target
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import CheckpointError, ConfigError, DamagedCheckpoint
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_directory import begin, complete, verify
from rlhpc.training.checkpoint_export import export_hf
from rlhpc.training.factory import open_backend
from rlhpc.training.hf_model import load_causal_lm, on_disk
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import read_checkpoint, write_checkpoint
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import clipped_loss, draw_samples, num_loss_tokens, pack_row, tiny_config


@pytest.fixture(scope="module", params=[("qwen2", True), ("llama", False)], ids=["tied", "untied"])
def trained(request, tmp_path_factory):
    """(model directory, checkpoint directory, weights and their average in float32) after one step."""
    root = tmp_path_factory.mktemp("trained")
    family, tied = request.param
    make_tiny_checkpoint(root / "model", family=family, hidden=32, tied=tied, dtype=torch.bfloat16)
    backend = open_backend(tiny_config(root / "model"), RankContext())
    start = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.hold_average("host")
    row = pack_row(draw_samples((20, 30)))
    backend.step(
        [row],
        clipped_loss,
        proximal=None,
        num_loss_tokens=num_loss_tokens([row]),
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    backend.move_average(0.5)
    backend.save(root / "step_000001" / "trainer").result()
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    averages = {name: torch.lerp(start[name], tensor, 0.5) for name, tensor in weights.items()}
    backend.close()
    return root / "model", root / "step_000001", weights, averages


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_the_export_loads_in_transformers_with_the_trained_weights(trained, shard_bytes, tmp_path):
    model_dir, checkpoint_dir, weights, _ = trained
    export_hf(checkpoint_dir, model_dir, tmp_path / "out", shard_bytes=shard_bytes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in weights.items())
    original, copy = (AutoTokenizer.from_pretrained(path) for path in (model_dir, tmp_path / "out"))
    assert original("1 + 2 = 3")["input_ids"] == copy("1 + 2 = 3")["input_ids"]
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)


def test_what_modules_have_on_disk_besides_what_is_trained_is_exported_as_it_is(tmp_path):
    config = Glm4MoeConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config)
    bias = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.data = torch.tensor([0.1, -0.2, 0.3, 7.0])  # float32, as engines and others have it in models of bfloat16
    model.save_pretrained(tmp_path / "model")
    specs = tuple(load_causal_lm(tmp_path / "model", device=torch.device("cpu")).tensor_specs())
    specs = [renamed for spec in specs for renamed in on_disk(spec)]
    write_checkpoint(
        tmp_path / "trainer",
        specs,
        lambda kind: (torch.zeros(spec.shape) for spec in specs),
        num_steps_applied=1,
        rng={},
        kinds=("weights",),
    )
    export_hf(tmp_path, tmp_path / "model", tmp_path / "out")
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(found.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    assert found.get_input_embeddings().weight.abs().sum() == 0
    assert found.lm_head.weight.abs().sum() == 0


def test_every_chat_template_of_the_tokenizer_is_exported(trained, tmp_path):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model_dir)
    (model_dir / ".cache").mkdir()
    export_hf(trained[1], model_dir, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert not (tmp_path / "out" / ".cache").exists()


def test_the_average_is_exported_where_there_is_one(trained, tmp_path):
    model_dir, checkpoint_dir, weights, averages = trained
    export_hf(checkpoint_dir, model_dir, tmp_path / "out", is_average=True)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in averages.items():
        torch.testing.assert_close(state[name], tensor.bfloat16(), atol=0, rtol=2**-7)  # may round the other way
    assert any(not torch.equal(state[name], tensor.bfloat16()) for name, tensor in weights.items())
    backend = open_backend(tiny_config(model_dir), RankContext())
    backend.save(tmp_path / "plain").result()
    backend.close()
    with pytest.raises(CheckpointError, match=r"has no weight average: trainer\.ema_decay was off"):
        export_hf(tmp_path / "plain", model_dir, tmp_path / "none", is_average=True)
    assert not (tmp_path / "none").exists()


def test_nothing_is_overwritten(trained, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        export_hf(trained[1], trained[0], tmp_path)


def test_an_export_that_is_interrupted_leaves_nothing_and_can_be_repeated(trained, tmp_path):
    out = tmp_path / "out"

    def interrupt_once_it_writes(*_):
        if any(out.glob("*")):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt_once_it_writes)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        with pytest.raises(KeyboardInterrupt):
            export_hf(trained[1], trained[0], out)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not out.exists()
    export_hf(trained[1], trained[0], out)


def test_a_place_without_a_checkpoint_is_named_and_nothing_is_made(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        export_hf(tmp_path, trained[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_dtype_is_refused(trained, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float8"}))
    with pytest.raises(ConfigError, match="float8"):
        export_hf(trained[1], tmp_path, tmp_path / "out")


def test_an_export_in_float32_rounds_nothing_and_another_says_that_it_rounds(trained, tmp_path):
    model_dir, checkpoint_dir, weights, _ = trained
    assert export_hf(checkpoint_dir, model_dir, tmp_path / "rounded") == "bfloat16"
    assert export_hf(checkpoint_dir, model_dir, tmp_path / "out", dtype="float32") == "float32"
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    layout = RunLayout(tmp_path / "run")
    layout.checkpoints.mkdir(parents=True)
    layout.checkpoint(1).symlink_to(checkpoint_dir.resolve())
    write_resolved(tiny_config(model_dir), layout, "")
    said = export_run(layout, tmp_path / "third", 1)
    assert "bfloat16, rounded from float32 (--dtype float32 rounds nothing)" in said
    assert ", float32" in export_run(layout, tmp_path / "fourth", 1, dtype="float32")


def checkpoint_of(place: Path, weights: dict[str, torch.Tensor]) -> None:
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    write_checkpoint(
        place, specs, lambda _: iter(list(weights.values())), num_steps_applied=1, rng={}, kinds=("weights",)
    )


@pytest.mark.parametrize(("outlier", "other"), [(7e4, 1.0), (-7e4, 1.0), (7e4, -torch.inf)])
def test_a_weight_that_float16_does_not_hold_is_refused_by_name_and_not_written_as_inf(
    outlier, other, trained, tmp_path
):
    model_dir, _, weights, _ = trained
    name = "model.norm.weight"
    weights = weights | {name: weights[name].clone()}
    weights[name][3], weights[name][4] = outlier, other
    checkpoint_of(tmp_path / "trainer", weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 70000, and float16 ends at 65504.*bfloat16"):
        export_hf(tmp_path, model_dir, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert export_hf(tmp_path, model_dir, tmp_path / "wide", dtype="bfloat16") == "bfloat16"


def test_what_float16_holds_or_what_was_not_finite_before_is_exported_as_it_is(trained, tmp_path):
    model_dir, _, weights, _ = trained
    name = "model.norm.weight"
    weights = weights | {name: weights[name].clone()}
    weights[name][:4] = torch.tensor([65504.0, -65504.0, torch.inf, -torch.inf])
    checkpoint_of(tmp_path / "trainer", weights)
    export_hf(tmp_path, model_dir, tmp_path / "out", dtype="float16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], weights[name].half())


@pytest.mark.parametrize("keys", [("torch_dtype",), ("dtype",), ("dtype", "torch_dtype"), ()])
def test_another_dtype_is_said_under_the_spelling_that_the_models_configuration_has(keys, trained, tmp_path):
    model_dir = shutil.copytree(trained[0], tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (model_dir / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "bfloat16")))
    export_hf(trained[1], model_dir, tmp_path / "out", dtype="float16")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | dict.fromkeys(keys or ("dtype",), "float16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float16


def test_a_configuration_that_is_no_object_is_named(trained, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: holds no JSON object"):
        export_hf(trained[1], tmp_path, tmp_path / "out")


def run_of(trained, root: Path, *steps: int) -> RunLayout:
    """A run whose checkpoints are all the same."""
    model_dir, checkpoint_dir, *_ = trained
    layout = RunLayout(root / "run")
    layout.root.mkdir()
    write_resolved(tiny_config(model_dir), layout, "")
    for step in steps:
        place = begin(layout.checkpoint(step))
        shutil.copytree(checkpoint_dir / "trainer", place / "trainer")
        complete(place, layout.checkpoint(step), {"attempt": 0})
    return layout


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def bytes_read_so_far() -> int:
    """By this process, with read and its like; mapped files do not count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_an_evaluation_and_an_export_read_and_verify_what_they_use_alone_and_once(trained, tmp_path, monkeypatch):
    layout = run_of(trained, tmp_path, 1)
    trainer = layout.checkpoint(1) / "trainer"
    for kind in ("exp_avg", "exp_avg_sq", "average"):
        flip_last_bit(trainer / f"{kind}-00001.safetensors")
    weights = trainer / "weights-00001.safetensors"
    # The comparison of tokenizers reads files of its own, as many as these weights have bytes.
    monkeypatch.setattr("launch.commands.export.other_tokens", lambda *_: [])
    before = bytes_read_so_far()
    evaluated, exported = find_target(layout.root, None).weights(tmp_path / "evaluated"), tmp_path / "exported"
    export_run(layout, exported, None)
    num_files_read = (bytes_read_so_far() - before) / weights.stat().st_size
    assert 2 <= num_files_read < 3  # and what is small: settings, manifests, the tokenizer
    for out in (evaluated, exported):
        state = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
        assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in trained[2].items())
    with pytest.raises(CheckpointError, match=r"exp_avg-00001\.safetensors: its content is not what was written"):
        read_checkpoint(trainer, None)  # as a resume does
    with pytest.raises(CheckpointError, match=r"average-00001\.safetensors: its content is not what was written"):
        verify(layout.checkpoint(1))
    with pytest.raises(CheckpointError, match=r"average-00001\.safetensors: its content is not what was written"):
        export_run(layout, tmp_path / "averaged", 1, is_average=True)


def test_damaged_weights_are_refused_by_name_and_nothing_is_left_of_what_was_written(trained, tmp_path):
    layout = run_of(trained, tmp_path, 1, 2)
    weights = layout.checkpoint(2) / "trainer" / "weights-00001.safetensors"
    flip_last_bit(weights)
    why = rf"{weights}: its content is not what was written .*"
    with pytest.raises(DamagedCheckpoint, match=why):
        export_run(layout, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=why + "`rlhpc evaluate RUN_DIR DATA --step N` takes another"):
        find_target(layout.root, None).weights(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    told = export_run(layout, tmp_path / "out", None)
    assert told.startswith(f"step_000002 is skipped: {weights}: its content")
    assert "weights after step 1 of" in told
    weights.unlink()
    assert find_target(layout.root, None).checkpoint == layout.checkpoint(1)  # is not complete, which needs no reading
