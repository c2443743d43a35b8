"""The optimiser, what a checkpoint holds of it, and parameters that change places with a copy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhpc.protocol.errors import CheckpointError, DamagedCheckpoint
from rlhpc.protocol.types import TensorSpec
from rlhpc.training import trainer_state
from rlhpc.training.backends import HeldParameters
from rlhpc.training.checkpoint_tensors import plan_shards, write_safetensors
from rlhpc.training.trainer_state import (
    NORM_RUN,
    STATE_FILE,
    STATE_KINDS,
    FlatAdamW,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from tests.unit.training.packed_rows import LiveBytes

# -------------------------------------------------------------------------------------------------- trainer checkpoint

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


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own_and_the_library_reads_all(tmp_path):
    files = write(tmp_path, shard_bytes=100)
    assert sorted(name for name in files if name.startswith("weights")) == [
        "weights-00001.safetensors",
        "weights-00002.safetensors",
    ]
    assert load_file(tmp_path / "weights-00002.safetensors").keys() == {"t4"}
    assert sum(1 for _ in read_checkpoint(tmp_path, SPECS).tensors()) == len(STATE_KINDS) * len(SPECS)
    specs = [TensorSpec(name, "float32", (size,)) for name, size in [("a", 1), ("b", 100), ("c", 1), ("d", 1)]]
    assert [[s.name for s in shard] for shard in plan_shards(specs, 20)] == [["a"], ["b"], ["c", "d"]]


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


@pytest.mark.parametrize("content", [b"[]", b"{}", b"3", b'{"manifest": {}, "crc32": 0}', b"\xff"])
def test_a_manifest_of_something_else_is_refused(tmp_path, content):
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(tmp_path, SPECS)


def test_a_disk_that_errs_where_the_format_is_looked_for_is_a_checkpoint_error(tmp_path):
    """Or the rank that it errs on would leave alone, and the others wait for it."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path / ("x" * 300))


def test_every_byte_of_the_manifest_counts_and_another_model_is_refused_by_the_tensor(tmp_path):
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"t1 is \(7,\) there and \(8,\) in the model"):
        read_checkpoint(tmp_path, [*SPECS[:1], TensorSpec("t1", "float32", (8,)), *SPECS[2:]])
    with pytest.raises(CheckpointError, match=r"t4 is .* there and absent"):
        read_checkpoint(tmp_path, SPECS[:4])
    write(tmp_path)
    read_checkpoint(tmp_path, [TensorSpec(s.name, "float32", s.shape) for s in reversed(SPECS)])
    write(tmp_path)
    path = tmp_path / STATE_FILE
    outer = json.loads(path.read_bytes())
    outer["manifest"]["num_steps_applied"] = 8
    path.write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(tmp_path, SPECS)


def test_writing_over_an_older_state_never_leaves_its_manifest_beside_new_tensors(tmp_path):
    write(tmp_path)
    broken = lambda kind: iter(())  # noqa: E731
    with pytest.raises(StopIteration):
        write_checkpoint(tmp_path, SPECS, broken, num_steps_applied=9, rng={})
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(tmp_path, SPECS)


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


# ----------------------------------------------------------------------------------------------------------- optimizer


def draw() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (3,), "matrix": (4, 3), "bias": (4,), "cube": (2, 3, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def loss_of(parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    return sum((p.float() ** 3).sum() for p in parameters.values())


def test_steps_are_those_of_adamw_with_decay_on_matrices():
    ours, theirs = draw(), draw()
    flat = FlatAdamW(ours, betas=(0.9, 0.95), eps=1e-8)
    groups = [
        {"params": [theirs["matrix"], theirs["cube"]], "weight_decay": 0.1},
        {"params": [theirs["norm"], theirs["bias"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        learning_rate = 0.01 * (step + 1)
        flat.zero_gradients()
        loss_of(ours).backward()
        flat.step(learning_rate=learning_rate, weight_decay=0.1)
        adamw.zero_grad()
        loss_of(theirs).backward()
        for group in adamw.param_groups:
            group["lr"] = learning_rate
        adamw.step()
    assert flat.num_steps_applied == 4
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(flat.state("exp_avg")[name], adamw.state[theirs[name]]["exp_avg"])
        torch.testing.assert_close(flat.state("exp_avg_sq")[name], adamw.state[theirs[name]]["exp_avg_sq"])


def test_gradients_are_summed_clipped_to_the_norm_and_one_that_is_not_finite_is_seen():
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    loss_of(parameters).backward()
    once = flat.gradients.clone()
    loss_of(parameters).backward()
    assert torch.equal(flat.gradients, 2 * once)
    assert all(parameter.grad is None for parameter in parameters.values())
    flat.zero_gradients()
    assert flat.gradient_norm() == 0
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    loss_of(parameters).backward()
    norm, before = flat.gradient_norm(), flat.gradients.clone()
    flat.clip(norm, norm + 1)
    assert torch.equal(flat.gradients, before)
    flat.clip(norm, 0.5)
    assert flat.gradient_norm() == pytest.approx(0.5)
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    (parameters["bias"].sum() * math.inf).backward()
    assert not math.isfinite(flat.gradient_norm())


@pytest.mark.parametrize("size", [1, NORM_RUN - 1, NORM_RUN, 2 * NORM_RUN + 3])
def test_the_norm_is_that_of_all_gradients(size: int):
    parameters = {"only": nn.Parameter(torch.zeros(size))}
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    (parameters["only"] * torch.arange(1, size + 1)).sum().backward()
    assert flat.gradient_norm() == pytest.approx(math.sqrt(sum(n * n for n in range(1, size + 1))))


def test_masters_keep_what_bfloat16_parameters_round_away():
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2))}
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    # As in the backend: masters are taken in float32, then the parameters are cast.
    parameters["matrix"].data = parameters["matrix"].data.bfloat16()
    for _ in range(40):
        flat.zero_gradients()
        parameters["matrix"].sum().backward()
        flat.step(learning_rate=1e-4, weight_decay=0.0)
    master = flat.state("weights")["matrix"]
    assert master[0, 0].item() == pytest.approx(1 - 40e-4, abs=1e-5)
    assert parameters["matrix"].dtype == torch.bfloat16
    assert torch.equal(parameters["matrix"].detach(), master.bfloat16())


def test_a_model_without_vectors_or_without_matrices_is_fine():
    for shape in [(3, 3), (3,)]:
        parameters = {"only": nn.Parameter(torch.ones(shape))}
        flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
        parameters["only"].sum().backward()
        flat.step(learning_rate=0.1, weight_decay=0.0)
        assert parameters["only"].detach().flatten()[0].item() == pytest.approx(0.9)


# ------------------------------------ A copy changes places with what it is a copy of, and both come back as they were


def parameters() -> list[Tensor]:
    """Two dtypes, odd sizes, a number without dimensions, nothing at all, a view, and what is not a number."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 7, generator=draw)
    broken = torch.tensor([float("nan"), -0.0, float("-inf")])
    half = torch.randn(1000, 3, generator=draw).bfloat16()
    return [whole[3:20], half, torch.tensor(2.5), torch.empty(0, 4), whole[20:], broken]


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def changed(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(-1.5).add_(1)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_they_hold_the_copy_while_it_is_asked_and_every_bit_of_their_own_after_it(memory: str) -> None:
    live = parameters()
    held, first = HeldParameters(lambda: live), bits(live)
    held.hold(memory)
    changed(live)
    own = bits(live)
    assert own != first
    for _ in range(2):
        with held.in_place():
            assert bits(live) == first
        assert bits(live) == own
    with held.in_place(is_wanted=False):
        assert bits(live) == own
    places = [tensor.data_ptr() for tensor in held._held]
    held.hold(memory)
    assert [tensor.data_ptr() for tensor in held._held] == places  # no second copy while it is replaced
    changed(live)
    with held.in_place():
        assert bits(live) == own


def test_an_error_while_the_copy_is_in_place_leaves_both_as_they_were() -> None:
    live = parameters()
    held, first = HeldParameters(lambda: live), bits(live)
    held.hold("host")
    changed(live)
    own = bits(live)
    with pytest.raises(ValueError, match="in between"), held.in_place():
        raise ValueError("in between")
    assert bits(live) == own
    with held.in_place():
        assert bits(live) == first


def test_tensors_are_written_to_only_within_what_their_backend_puts_around_it() -> None:
    live, seen = parameters(), []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append(bits(live))
        yield
        seen.append(bits(live))

    held, first = HeldParameters(lambda: live, around), bits(live)
    held.hold("device")
    changed(live)
    own = bits(live)
    with held.in_place():
        pass
    assert seen == [own, first, first, own]


def test_beside_model_and_copy_there_is_one_tensor_more_of_the_largest_size() -> None:
    live = [torch.randn(100, 100) for _ in range(5)] + [torch.randn(300, 100)]
    held = HeldParameters(lambda: live)
    with LiveBytes(*live) as holding:
        held.hold("host")
    total = sum(tensor.nbytes for tensor in live)
    assert total <= holding.peak <= total + 6 * 512
    with LiveBytes(*live, *held._held) as asking, held.in_place():
        pass
    assert asking.peak == live[-1].nbytes


def test_without_a_copy_there_is_nothing_to_ask_and_one_that_was_released_is_forgotten() -> None:
    live = parameters()
    held = HeldParameters(lambda: live)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no reference is held"), held.in_place():
            pass
        held.hold("host")
        held.release()
        held.release()
