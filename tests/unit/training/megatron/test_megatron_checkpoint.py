from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError

from rlhpc.config.tables import CheckpointConfig
from rlhpc.protocol.contracts import TrainerBackend
from rlhpc.protocol.errors import CheckpointError
from rlhpc.training.checkpoint_export import export_hf
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import read_checkpoint
from tests.contracts.trainer_cluster import ClusterPool, Rank
from tests.contracts.trainer_layouts import LENGTHS, MODELS, layout_keys, make_model, packed
from tests.contracts.trainer_scenarios import refuse_to_load, train, weights_of
from tests.unit.training.packed_rows import draw_samples, tiny_config

pytestmark = pytest.mark.starts

TIED, MIXTURE = "qwen2-tied", "qwen3_moe"


class Saved(NamedTuple):
    """A run that was saved after one of three steps."""

    directory: Path
    model: Path
    steps: list[Any]
    files: list[dict[str, int]]  # of every rank
    results: list[Any]  # of the steps after
    weights: dict[str, torch.Tensor]  # at the end


def open_writer(rank: Rank, model: Path, **settings: Any) -> TrainerBackend:
    """A backend that writes Megatron's format."""
    config = tiny_config(model, **{**rank.layout, **settings})
    config = config.model_copy(update={"checkpoint": CheckpointConfig(trainer_format="megatron")})
    store = f"file://{rank.scratch / 'store'}"
    return open_backend(config, RankContext(rank.rank, rank.world_size, store))


def save_midway(rank: Rank, *, model: Path, steps: list[Any], directory: Path) -> Any:
    backend = open_writer(rank, model)
    train(rank, backend, steps[0])
    future = backend.save(directory)
    assert future.done()
    results = [train(rank, backend, rows) for rows in steps[1:]]
    weights = weights_of(backend)
    backend.close()
    return future.result(), results, weights


def resume(rank: Rank, *, model: Path, steps: list[Any], directory: Path) -> Any:
    """Load, write the same state in the other format, go on."""
    backend = rank.open(model)
    backend.load(directory)
    assert backend.num_steps_applied == 1
    backend.save(rank.scratch / "hf").result()
    results = [train(rank, backend, rows) for rows in steps[1:]]
    weights = weights_of(backend)
    backend.close()
    return results, weights


def save_at_once(rank: Rank, *, model: Path, rows: Any) -> Any:
    """A checkpoint from before the first step, loaded again after one, in a model of half precision."""
    backend = open_writer(rank, model, dtype="bfloat16")
    backend.save(rank.scratch / "start").result()
    first = train(rank, backend, rows), weights_of(backend)
    backend.load(rank.scratch / "start")
    assert backend.num_steps_applied == 0
    second = train(rank, backend, rows), weights_of(backend)
    backend.close()
    return first, second


def save_where_nothing_can_be(rank: Rank, *, model: Path, directory: Path) -> Any:
    backend = open_writer(rank, model)
    error = backend.save(directory).exception()
    backend.close()
    return type(error), str(error)


@pytest.fixture(scope="module")
def pool():
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """(layout, model) → the run saved there; each is made once."""
    made: dict[tuple[str, str], Saved] = {}

    def make(layout: str, name: str) -> Saved:
        if (layout, name) not in made:
            scratch = tmp_path_factory.mktemp("saved")
            model = make_model(scratch / "model", name)
            steps = [packed(draw_samples(LENGTHS, vocabulary=MODELS[name]["vocabulary"], seed=s)) for s in range(3)]
            directory = scratch / "ckpt"
            cluster = pool.cluster(layout, layout_keys(layout))
            answers = cluster.run(save_midway, scratch / "run", model=model, steps=steps, directory=directory)
            _, results, weights = answers[0]
            made[layout, name] = Saved(directory, model, steps, [files for files, *_ in answers], results, weights)
        return made[layout, name]

    return make


@pytest.fixture
def continued(pool, tmp_path):
    """(run, layout) → results and weights of rank 0, and the state it loaded, by kind and HF name."""

    def go_on(run: Saved, layout: str) -> Any:
        scratch = tmp_path / layout
        cluster = pool.cluster(layout, layout_keys(layout))
        results, weights = cluster.run(resume, scratch, model=run.model, steps=run.steps, directory=run.directory)[0]
        state = {(kind, name): tensor for kind, name, tensor in read_checkpoint(scratch / "hf", None).tensors()}
        return results, weights, state

    return go_on


def differing(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> list[Any]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_continues(run: Saved, source: str, target: str, continued: Any) -> None:
    """Bit for bit where it was saved; elsewhere from the same bits on the same course."""
    at_home, weights, state = continued(run, source)
    assert at_home == run.results
    assert differing(weights, run.weights) == []
    results, weights, state_there = continued(run, target)
    assert differing(state, state_there) == []
    assert any(tensor.any() for (kind, _), tensor in state.items() if kind == "exp_avg_sq")
    for there, here in zip(run.results, results, strict=True):
        assert here.metrics["loss"] == pytest.approx(there.metrics["loss"], rel=1e-5, abs=1e-5)
        assert here.grad_norm == pytest.approx(there.grad_norm, rel=1e-5)
    for name in weights:
        torch.testing.assert_close(weights[name], run.weights[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("target", ["megatron-tp2", "megatron-pp2", "megatron-dp2_replicated", "megatron-dp1"])
@pytest.mark.long
def test_replicas_continue_in_any_layout(target, saved, continued):
    assert_continues(saved("megatron-dp2", TIED), "megatron-dp2", target, continued)


@pytest.mark.parametrize("source", ["megatron-cp2", "megatron-dp2_replicated", "megatron-pp2", "megatron-dp1"])
@pytest.mark.long
def test_any_layout_continues_in_replicas(source, saved, continued):
    assert_continues(saved(source, TIED), source, "megatron-dp2", continued)


def test_tensor_ranks_with_an_odd_vocabulary_continue_in_a_pipeline(saved, continued):
    assert_continues(saved("megatron-sp", "llama-odd"), "megatron-sp", "megatron-pp2", continued)


@pytest.mark.parametrize("source", ["megatron-dp2", "megatron-sp", "megatron-sp_ep2"])
@pytest.mark.long
def test_a_mixture_continues_with_its_experts_elsewhere(source, saved, continued):
    assert_continues(saved(source, MIXTURE), source, "megatron-ep2", continued)


def test_tensor_ranks_and_replicas_continue_in_tensor_ranks_and_stages(saved, continued):
    assert_continues(saved("megatron-tp2_dp2", TIED), "megatron-tp2_dp2", "megatron-tp2_pp2", continued)


def test_every_rank_writes_a_share_and_the_lead_knows_all_files(saved):
    run = saved("megatron-dp2", TIED)
    on_disk = {path.name: path.stat().st_size for path in run.directory.iterdir()}
    assert run.files == [on_disk, {}]
    shares = [size for name, size in on_disk.items() if name.endswith(".distcp")]
    assert len(shares) == 2
    assert max(shares) < 2 * min(shares)


def test_a_checkpoint_from_before_the_first_step_is_like_any_other(pool, saved, tmp_path):
    run = saved("megatron-dp2", TIED)
    cluster = pool.cluster("megatron-dp2", layout_keys("megatron-dp2"))
    first, second = cluster.run(save_at_once, tmp_path, model=run.model, rows=run.steps[0])[0]
    assert first[0] == second[0]
    assert differing(first[1], second[1]) == []


def test_damaged_and_foreign_checkpoints_are_refused_on_all_ranks_before_anything_changed(pool, saved, tmp_path):
    run = saved("megatron-dp2", TIED)
    flipped, cut, lost = (shutil.copytree(run.directory, tmp_path / name) for name in ("flipped", "cut", "lost"))
    content = bytearray((flipped / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (flipped / "__1_0.distcp").write_bytes(content)
    (cut / "megatron.json").write_bytes((cut / "megatron.json").read_bytes()[:-20])
    (lost / ".metadata").unlink()
    other = make_model(tmp_path / "other", "llama-odd")
    cluster = pool.cluster("megatron-dp2", layout_keys("megatron-dp2"))
    answers = cluster.run(refuse_to_load, tmp_path / "a", model=run.model, directories=[flipped, cut, lost])
    assert all(is_unchanged for _, is_unchanged in answers)
    for messages, _ in answers:
        assert "__1_0.distcp" in messages[0]
        assert "checksum" in messages[0]
        assert "megatron.json" in messages[1]
        assert ".metadata: is missing" in messages[2]
    for messages, is_unchanged in cluster.run(refuse_to_load, tmp_path / "b", model=other, directories=[run.directory]):
        assert is_unchanged
        assert "another model" in messages[0]


def test_a_place_that_cannot_be_looked_into_is_an_error_on_all_ranks(pool, saved, tmp_path):
    run = saved("megatron-dp2", TIED)
    cluster = pool.cluster("megatron-dp2", layout_keys("megatron-dp2"))
    nowhere = tmp_path / ("x" * 300)  # as of a file server that does not answer: an error, not an absence
    for messages, is_unchanged in cluster.run(refuse_to_load, tmp_path / "run", model=run.model, directories=[nowhere]):
        assert is_unchanged
        assert "cannot be read" in messages[0]
        assert str(nowhere) in messages[0]


@pytest.mark.parametrize("obstacle", ["ckpt", "ckpt/__1_0.distcp/in_its_place", "ckpt/common.pt/in_its_place"])
def test_what_cannot_be_written_is_an_error_on_all_ranks(obstacle, pool, saved, tmp_path):
    run = saved("megatron-dp2", TIED)
    (tmp_path / obstacle).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / obstacle).write_bytes(b"")
    cluster = pool.cluster("megatron-dp2", layout_keys("megatron-dp2"))
    directory = tmp_path / "ckpt"
    for kind, message in cluster.run(save_where_nothing_can_be, tmp_path / "run", model=run.model, directory=directory):
        assert kind is CheckpointError
        assert str(directory) in message
        assert "cannot be written" in message
    assert not (directory / "megatron.json").exists()


def test_export_and_other_backends_say_how_to_get_one_they_read(saved, tmp_path):
    run = saved("megatron-dp2", TIED)
    with pytest.raises(CheckpointError, match=r"continue the run with checkpoint\.trainer_format='hf'"):
        export_hf(run.directory, run.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"which only trainer\.backend='megatron' reads"):
        read_checkpoint(run.directory, [])


def test_the_format_needs_its_backend(tmp_path):
    config = tiny_config(tmp_path, backend="megatron").model_dump()
    config["checkpoint"]["trainer_format"] = "megatron"
    type(tiny_config(tmp_path)).model_validate(config)
    config["trainer"]["backend"] = "reference"
    with pytest.raises(ValidationError, match=r"trainer_format=.megatron. needs trainer\.backend=.megatron."):
        type(tiny_config(tmp_path)).model_validate(config)
