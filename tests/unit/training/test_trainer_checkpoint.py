from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.protocol.errors import CheckpointError, DamagedCheckpoint
from rlhpc.protocol.types import TensorSpec
from rlhpc.training import trainer_state
from rlhpc.training.checkpoint_tensors import plan_shards, write_safetensors
from rlhpc.training.trainer_state import STATE_FILE, STATE_KINDS, open_checkpoint, read_checkpoint, write_checkpoint

SPECS = tuple(TensorSpec(f"t{i}", "bfloat16", shape) for i, shape in enumerate([(5, 3), (7,), (), (0, 2), (64, 4)]))


def state() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {kind: {s.name: torch.randn(s.shape, generator=generator) for s in SPECS} for kind in STATE_KINDS}


def write(directory: Path, **options: int) -> dict[str, int]:
    tensors = state()
    return write_checkpoint(
        directory, SPECS, lambda kind: iter(tensors[kind].values()), num_steps_applied=7, rng={"cpu": "eA=="}, **options
    )


def test_what_was_written_is_read_back(tmp_path):
    files = write(tmp_path)
    assert files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    checkpoint = read_checkpoint(tmp_path, SPECS)
    assert (checkpoint.num_steps_applied, checkpoint.rng) == (7, {"cpu": "eA=="})
    wanted = state()
    found = list(checkpoint.tensors())
    assert len(found) == len(STATE_KINDS) * len(SPECS)
    assert all(torch.equal(tensor, wanted[kind][name]) for kind, name, tensor in found)
    assert {kind for kind, _, _ in checkpoint.tensors("exp_avg")} == {"exp_avg"}


def test_a_part_of_a_tensor_is_read_from_whichever_shard_holds_it(tmp_path):
    write(tmp_path, shard_bytes=100)
    checkpoint, wanted = read_checkpoint(tmp_path, SPECS), state()
    for kind in STATE_KINDS:
        with checkpoint.source(kind) as source:
            assert set(source.names) == {spec.name for spec in SPECS}
            assert source.shape("t4") == (64, 4)
            rows = (slice(10, 20), slice(1, 3))
            assert torch.equal(source.read("t4", index=rows), wanted[kind]["t4"][rows])
            assert torch.equal(source.read("t0"), wanted[kind]["t0"])


def test_a_shard_that_breaks_after_it_was_verified_is_a_checkpoint_error(tmp_path):
    write(tmp_path)
    checkpoint = read_checkpoint(tmp_path, SPECS)
    (tmp_path / "exp_avg-00001.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="exp_avg-00001"):
        list(checkpoint.tensors())
    (tmp_path / "exp_avg-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="exp_avg-00001"):
        checkpoint.source("exp_avg").read("t0")


def test_tensors_of_one_kind_come_in_order_each_file_verified_before_its_first(tmp_path):
    write(tmp_path, shard_bytes=100)
    (tmp_path / "exp_avg-00001.safetensors").unlink()
    checkpoint, wanted = open_checkpoint(tmp_path), state()["weights"]
    found = zip(SPECS, checkpoint.verified_tensors("weights"), strict=True)
    assert all(torch.equal(tensor, wanted[spec.name]) for spec, tensor in found)
    path = tmp_path / "weights-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tensors = checkpoint.verified_tensors("weights")
    assert [tuple(next(tensors).shape) for _ in range(4)] == [spec.shape for spec in SPECS[:4]]
    with pytest.raises(DamagedCheckpoint, match=r"weights-00002\.safetensors: its content is not what was written"):
        next(tensors)
    with pytest.raises(DamagedCheckpoint, match=r"exp_avg-00001\.safetensors: is missing"):
        next(checkpoint.verified_tensors("exp_avg"))


def test_shards_hold_at_most_so_many_bytes_and_the_library_reads_them(tmp_path):
    files = write(tmp_path, shard_bytes=100)
    assert sorted(name for name in files if name.startswith("weights")) == [
        "weights-00001.safetensors",
        "weights-00002.safetensors",
    ]
    assert load_file(tmp_path / "weights-00002.safetensors").keys() == {"t4"}
    assert sum(1 for _ in read_checkpoint(tmp_path, SPECS).tensors()) == len(STATE_KINDS) * len(SPECS)


def test_order_and_dtype_of_the_model_do_not_matter(tmp_path):
    write(tmp_path)
    read_checkpoint(tmp_path, [TensorSpec(s.name, "float32", s.shape) for s in reversed(SPECS)])


def test_no_temporary_file_is_left(tmp_path):
    write(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["weights-00001.safetensors", "exp_avg-00001.safetensors", STATE_FILE])
def test_a_missing_a_short_and_a_changed_file_are_named(tmp_path, name):
    write(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    flipped = content.replace(b"7", b"8", 1) if name == STATE_FILE else content[:-1] + bytes([content[-1] ^ 1])
    for damage in (flipped, content[:-1], b""):
        path.write_bytes(damage)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(tmp_path, SPECS)
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path, SPECS)


def test_readers_beside_each_other_verify_every_file_once(tmp_path, monkeypatch):
    """One alone would read a checkpoint of 72B for half an hour, and the others give it up meanwhile."""
    write(tmp_path)
    verified: list[list[str]] = []
    check = trainer_state.check_file

    def note(path, record, *, verify_content):
        if verify_content:
            verified[-1].append(path.name)
        check(path, record, verify_content=verify_content)

    monkeypatch.setattr(trainer_state, "check_file", note)
    for rank in range(3):
        verified.append([])
        read_checkpoint(tmp_path, SPECS, share=(rank, 3))
    names = [name for ours in verified for name in ours]
    assert sorted(names) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert max(map(len, verified)) - min(map(len, verified)) <= 1
    (tmp_path / verified[2][0]).write_bytes(b"short")
    for rank in range(3):  # sizes are looked at by all
        with pytest.raises(CheckpointError, match=verified[2][0]):
            read_checkpoint(tmp_path, SPECS, share=(rank, 3))


def test_every_byte_of_the_manifest_counts(tmp_path):
    write(tmp_path)
    path = tmp_path / STATE_FILE
    outer = json.loads(path.read_bytes())
    outer["manifest"]["num_steps_applied"] = 8
    path.write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(tmp_path, SPECS)


@pytest.mark.parametrize("content", [b"[]", b"{}", b"3", b'{"manifest": {}, "crc32": 0}', b"\xff"])
def test_a_manifest_of_something_else_is_refused(tmp_path, content):
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(tmp_path, SPECS)


def test_a_disk_that_errs_where_the_format_is_looked_for_is_a_checkpoint_error(tmp_path):
    """Or the rank that it errs on would leave alone, and the others wait for it."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path / ("x" * 300))


def test_another_model_is_refused_by_the_tensor_that_differs(tmp_path):
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"t1 is \(7,\) there and \(8,\) in the model"):
        read_checkpoint(tmp_path, [*SPECS[:1], TensorSpec("t1", "float32", (8,)), *SPECS[2:]])
    with pytest.raises(CheckpointError, match=r"t4 is .* there and absent"):
        read_checkpoint(tmp_path, SPECS[:4])


def test_writing_over_an_older_state_never_leaves_its_manifest_beside_new_tensors(tmp_path):
    write(tmp_path)
    broken = lambda kind: iter(())  # noqa: E731
    with pytest.raises(StopIteration):
        write_checkpoint(tmp_path, SPECS, broken, num_steps_applied=9, rng={})
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(tmp_path, SPECS)


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        write(tmp_path / "file" / "below")


def test_tensors_are_asked_for_one_at_a_time(tmp_path):
    """Streaming: the next tensor is made only after the one before is on its way to disk."""
    specs = [TensorSpec(f"t{i}", "float32", (1000,)) for i in range(4)]
    sizes = []

    def stream() -> Iterator[torch.Tensor]:
        for _ in specs:
            (temporary,) = tmp_path.glob(".*.tmp")
            sizes.append(temporary.stat().st_size)
            yield torch.zeros(1000)

    write_safetensors(tmp_path / "x.safetensors", specs, stream())
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 2 * 4000  # what is missing is at most the file object's buffer


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own():
    specs = [TensorSpec(name, "float32", (size,)) for name, size in [("a", 1), ("b", 100), ("c", 1), ("d", 1)]]
    assert [[s.name for s in shard] for shard in plan_shards(specs, 20)] == [["a"], ["b"], ["c", "d"]]
