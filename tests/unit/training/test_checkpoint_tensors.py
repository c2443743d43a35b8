"""Tensors of checkpoints: sharded, from whatever source, as HF writes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig

from launch.commands.export import export_run
from launch.evaluate.request import find_target
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import CheckpointError, ConfigError, DamagedCheckpoint
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_directory import begin, complete, verify
from rlhpc.training.checkpoint_export import export_hf
from rlhpc.training.checkpoint_tensors import (
    BUCKET_SHARDS,
    INDEX_FILE,
    MAX_OPEN_FILES,
    Shard,
    ShardedTensorSpec,
    TensorSource,
    gather_stream,
)
from rlhpc.training.factory import open_backend
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import read_checkpoint, write_checkpoint
from rlhpc.weights.hf_names import on_disk
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import (
    LiveBytes,
    clipped_loss,
    draw_samples,
    num_loss_tokens,
    pack_row,
    tiny_config,
)
from tests.unit.training.rank_processes import run_ranks

# ---------------------------- Pieces from all ranks become whole tensors on one, in order, within the announced memory

CPU = torch.device("cpu")
RANKS = 2
SIZES = (40, 7, 300, 1, 64, 64, 5)  # of the pieces of each item
BUCKET = 200
BUCKETS = (1, BUCKET, 1 << 20)
ELEMENT = 4  # bytes


def halves(index, *, num_elements=None, joined=torch.cat):
    """One tensor, an equal piece of it on each rank."""
    size = SIZES[index] if num_elements is None else num_elements
    spec = TensorSpec(f"tensor {index}", "float32", (RANKS * size,))
    return ShardedTensorSpec(
        (spec,), tuple(Shard(rank, size) for rank in range(RANKS)), lambda pieces: [joined(pieces)]
    )


def piece(rank, index, size):
    """What a rank holds."""
    return torch.arange(size, dtype=torch.float32) + 1000 * rank + 10_000 * index


def stream(rank, items, *, own=None, bucket=BUCKET):
    def held(index):
        return [piece(rank, index, p.num_elements) for p in items[index].shards if p.rank == rank]

    return gather_stream(items, own or held, to_rank=0, dtype=torch.float32, device=CPU, bucket_elements=bucket)


def all_items():
    return [halves(index) for index in range(len(SIZES))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By rank: what each of the functions below returned there, one after the other in one pair of processes."""
    return run_ranks(RANKS, everything, tmp_path_factory.mktemp("ranks"), timeout_s=120)


def everything(rank, world_size):
    return {
        "collected": {bucket: collected(rank, bucket) for bucket in BUCKETS},
        "peak bytes": {bucket: peak_bytes(rank, bucket) for bucket in BUCKETS},
        "closed after one": closed_after_one(rank),
        "failed to join": with_a_join_that_fails(rank),
        "from one rank only": from_one_rank_only(rank),
    }


def collected(rank, bucket):
    return [(name, tensor.clone()) for name, tensor in stream(rank, all_items(), bucket=bucket)]


@pytest.mark.starts
@pytest.mark.parametrize("bucket", BUCKETS)
def test_whole_tensors_come_in_order_on_one_rank_and_nothing_on_the_other(seen, bucket):
    lead, other = (of_rank["collected"][bucket] for of_rank in seen)
    assert other == []
    assert [name for name, _ in lead] == [f"tensor {index}" for index in range(len(SIZES))]
    for index, (_, tensor) in enumerate(lead):
        assert torch.equal(tensor, torch.cat([piece(rank, index, SIZES[index]) for rank in range(RANKS)]))


def peak_bytes(rank, bucket):
    """What receiving and joining takes; a rank's own pieces are there anyway, and are not counted."""
    own = [piece(rank, index, size) for index, size in enumerate(SIZES)]
    with LiveBytes(*own) as bytes_of:
        for _name, tensor in stream(rank, all_items(), own=lambda index: [own[index]], bucket=bucket):
            del tensor
    return bytes_of.peak


@pytest.mark.starts
@pytest.mark.parametrize("bucket", BUCKETS)
def test_memory_is_one_bucket_and_what_one_item_is_joined_to(seen, bucket):
    lead, other = (of_rank["peak bytes"][bucket] for of_rank in seen)
    largest, everything_sent = RANKS * max(SIZES), sum(SIZES)
    received = min(max(bucket, largest // RANKS), everything_sent)
    assert lead <= ELEMENT * (received + largest)
    assert lead >= ELEMENT * (largest // RANKS + largest), "the largest tensor was not seen: nothing was measured"
    assert other == 0


def closed_after_one(rank):
    """Take one tensor and close; then the group must still work, and nothing stale lie in it."""
    items = all_items()
    tensors = stream(rank, items)
    first = next(tensors, None)
    tensors.close()
    again = [(name, tensor.clone()) for name, tensor in stream(rank, items)]
    return first and first[0], again


@pytest.mark.starts
def test_closing_early_takes_what_the_others_send_and_leaves_the_group_sound(seen):
    first, again = seen[0]["closed after one"]
    assert first == "tensor 0"
    assert torch.equal(again[1][1], torch.cat([piece(rank, 1, SIZES[1]) for rank in range(RANKS)]))
    assert len(again) == len(SIZES)


def with_a_join_that_fails(rank):
    def broken(pieces):
        raise ArithmeticError("no tensor can be made of this")

    items = all_items()
    items[1] = halves(1, joined=broken)
    try:
        list(stream(rank, items))
        failure = ""
    except ArithmeticError as error:
        failure = str(error)
    return failure, [name for name, _ in stream(rank, all_items())]


@pytest.mark.starts
def test_an_error_in_joining_leaves_no_rank_waiting(seen):
    (failure, names), (others_failure, _) = (of_rank["failed to join"] for of_rank in seen)
    assert failure == "no tensor can be made of this"
    assert others_failure == ""
    assert len(names) == len(SIZES)


def from_one_rank_only(rank):
    spec = TensorSpec("elsewhere", "float32", (6,))
    items = [
        ShardedTensorSpec((spec,), (Shard(1, 2), Shard(0, 0), Shard(1, 4)), lambda pieces: [torch.cat(pieces)]),
        ShardedTensorSpec((spec,), (Shard(0, 6),), lambda pieces: pieces),
    ]
    asked = []

    def own(index):
        asked.append(index)
        return [piece(rank, index, p.num_elements) for p in items[index].shards if p.rank == rank]

    return [tensor.clone() for _, tensor in stream(rank, items, own=own)], asked


@pytest.mark.starts
def test_ranks_are_asked_only_for_items_of_which_they_hold_something(seen):
    (tensors, asked), (_, asked_of_other) = (of_rank["from one rank only"] for of_rank in seen)
    assert torch.equal(tensors[0], torch.cat([piece(1, 0, 2), piece(1, 0, 4)]))
    assert torch.equal(tensors[1], piece(0, 1, 6))
    assert (asked, asked_of_other) == ([0, 1], [0])


@pytest.mark.starts
def test_one_rank_alone_needs_no_group_and_copies_nothing():
    spec = TensorSpec("whole", "float32", (4,))
    held = torch.arange(4.0)
    items = [ShardedTensorSpec((spec,), (Shard(0, 4),), lambda pieces: pieces)]
    ((name, tensor),) = stream(0, items, own=lambda index: [held])
    assert name == "whole"
    assert tensor.data_ptr() == held.data_ptr()


@pytest.mark.starts
def test_a_batch_has_a_bounded_number_of_messages_however_small_they_are():
    """NCCL has hung on large batches; with 64 ranks of ZeRO-3 one bucket of a small model would have thousands."""
    items = [
        ShardedTensorSpec((TensorSpec(f"tensor {n}", "float32", (1,)),), (Shard(0, 1),), lambda pieces: pieces)
        for n in range(3 * BUCKET_SHARDS)
    ]
    asked = []

    def own(index):
        asked.append(index)
        return [torch.zeros(1)]

    tensors = stream(0, items, own=own, bucket=1 << 20)
    next(tensors)
    assert len(asked) == BUCKET_SHARDS
    tensors.close()


@pytest.mark.starts
def test_a_piece_of_another_size_or_dtype_than_announced_is_our_own_mistake():
    spec = TensorSpec("whole", "float32", (4,))
    items = [ShardedTensorSpec((spec,), (Shard(0, 4),), lambda pieces: pieces)]
    with pytest.raises(AssertionError, match=r"whole: \[3\] numbers where \[4\] were announced"):
        list(stream(0, items, own=lambda index: [torch.zeros(3)]))
    with pytest.raises(AssertionError):
        list(stream(0, items, own=lambda index: [torch.zeros(4, dtype=torch.bfloat16)]))


# ------------------------------------------------------------------------------- Parts of tensors in safetensors files

MATRIX = torch.arange(24.0).view(4, 6)


@pytest.fixture
def model(tmp_path):
    """A checkpoint of two files with an index."""
    save_file({"matrix": MATRIX}, tmp_path / "one.safetensors")
    save_file({"halves": MATRIX.bfloat16(), "scalar": torch.tensor(3.0)}, tmp_path / "two.safetensors")
    index = {"matrix": "one.safetensors", "halves": "two.safetensors", "scalar": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return tmp_path


def resident_bytes_of_files():
    """Of this process, in pages of mapped files."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))


def test_rows_columns_and_all_of_a_tensor_come_as_asked_for(model):
    with TensorSource.of_model(model) as source:
        assert set(source.names) == {"matrix", "halves", "scalar"}
        assert source.shape("matrix") == (4, 6)
        assert source.shape("scalar") == ()
        assert torch.equal(source.read("matrix"), MATRIX)
        assert torch.equal(source.read("matrix", index=(slice(1, 3),)), MATRIX[1:3])
        assert torch.equal(source.read("matrix", index=(slice(None), slice(2, 5))), MATRIX[:, 2:5])
        assert source.read("matrix", index=(slice(2, 2),)).shape == (0, 6)
        assert source.read("scalar").item() == 3.0


def test_a_tensor_keeps_its_dtype_unless_another_is_asked_for(model):
    source = TensorSource.of_model(model)
    assert source.read("halves").dtype == torch.bfloat16
    assert torch.equal(source.read("halves", dtype=torch.float32), MATRIX)


@pytest.mark.parametrize("files", [1, 2])
def test_a_model_without_an_index_is_all_its_safetensors_files(model, files):
    (model / INDEX_FILE).unlink()
    if files == 1:
        (model / "two.safetensors").unlink()
    source = TensorSource.of_model(model)
    assert set(source.names) == ({"matrix"} if files == 1 else {"matrix", "halves", "scalar"})
    assert torch.equal(source.read("matrix"), MATRIX)


@pytest.mark.parametrize("has_index", [True, False])
def test_of_two_saves_in_one_directory_the_one_file_is_the_model_as_for_transformers(tmp_path, has_index):
    model = make_tiny_checkpoint(tmp_path)
    (name, shape), *_ = ((name, each.shape) for name, each in load_file(model / "model.safetensors").items())
    save_file({name: torch.full(shape, 9.0)}, model / "older.safetensors")
    if has_index:
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": {name: "older.safetensors"}}))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()[name]
    assert torch.equal(TensorSource.of_model(model).read(name, torch.float32), expected)


def test_only_the_rows_that_are_looked_at_are_read_from_the_disk(tmp_path):
    num_rows, row_bytes = 2048, 4 * 4096
    save_file({"large": torch.ones(num_rows, 4096)}, tmp_path / "model.safetensors")
    source = TensorSource.of_model(tmp_path)
    source.shape("large")
    before = resident_bytes_of_files()
    assert source.read("large", index=(slice(100, 110),)).sum() == 10 * 4096
    assert resident_bytes_of_files() - before < num_rows * row_bytes / 4


def test_few_files_are_open_at_once_and_none_after_closing(tmp_path):
    files = {}
    for number in range(3 * MAX_OPEN_FILES):
        files[f"t{number}"] = tmp_path / f"{number}.safetensors"
        save_file({f"t{number}": torch.full((2,), float(number))}, files[f"t{number}"])

    def num_mapped():
        with Path("/proc/self/maps").open() as maps:
            return len({line.split()[-1] for line in maps if str(tmp_path) in line})

    with TensorSource.of_files(files) as source:
        for _ in range(2):
            for number, name in enumerate(files):
                assert source.read(name)[0] == number
                assert num_mapped() <= MAX_OPEN_FILES
        assert num_mapped() == MAX_OPEN_FILES
    assert num_mapped() == 0


def test_a_name_or_shape_that_is_not_there_is_refused_by_name(model):
    source = TensorSource.of_model(model)
    with pytest.raises(ConfigError, match=f"model.path={model}: there is no tensor bias"):
        source.read("bias")
    with pytest.raises(ConfigError, match="there is no tensor bias"):
        source.require("bias", (4,))
    source = TensorSource.of_model(model)
    source.require("matrix", (4, 6))
    with pytest.raises(ConfigError, match=r"model.path=.*one.safetensors: matrix is \(4, 6\), not \(6, 4\)"):
        source.require("matrix", (6, 4))
    source = TensorSource.of_files({"bias": model / "one.safetensors"}, error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"one.safetensors: cannot read bias"):
        source.shape("bias")


def test_a_tensor_of_integers_is_refused_by_name(tmp_path):
    save_file({"matrix": MATRIX.to(torch.int8)}, tmp_path / "model.safetensors")
    with (
        TensorSource.of_model(tmp_path) as source,
        pytest.raises(ConfigError, match=r"matrix is stored as I8.*quantised.*legal: F64"),
    ):
        source.require("matrix", (4, 6))


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: no .*safetensors file"):
        TensorSource.of_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": [1]}'])
def test_an_index_that_says_nothing_is_refused(model, content):
    (model / INDEX_FILE).write_text(content)
    with pytest.raises(ConfigError, match=f"model.path=.*{INDEX_FILE} cannot be read"):
        TensorSource.of_model(model)


def test_a_file_that_the_index_names_and_that_is_missing_is_named(model):
    (model / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path=.*two.safetensors is missing"):
        TensorSource.of_model(model)


def test_a_file_of_another_format_is_named(model):
    (model / INDEX_FILE).unlink()
    (model / "two.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"model.path=.*two.safetensors: is no safetensors file"):
        TensorSource.of_model(model)


def test_a_file_cut_short_is_found_when_it_is_opened(model):
    os.truncate(model / "one.safetensors", (model / "one.safetensors").stat().st_size - 8)
    with pytest.raises(ConfigError, match=r"one.safetensors: cannot read matrix"):
        TensorSource.of_model(model).read("matrix")


def test_the_error_of_given_files_is_the_callers(tmp_path):
    source = TensorSource.of_files({"weight": tmp_path / "gone.safetensors"}, error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"gone.safetensors: cannot read weight"):
        source.read("weight")


# -------------------------------------------------------------------------------------------------------------- export


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


def test_a_place_without_a_checkpoint_and_a_configuration_that_is_none_are_named(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        export_hf(tmp_path, trained[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float8"}))
    with pytest.raises(ConfigError, match="float8"):
        export_hf(trained[1], tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: holds no JSON object"):
        export_hf(trained[1], tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        export_hf(trained[1], trained[0], tmp_path)


@pytest.mark.starts
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


@pytest.mark.starts
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
