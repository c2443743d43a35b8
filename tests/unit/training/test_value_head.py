"""A critic beside HF's own trunk: values, gradients, steps; what it saves is loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhpc.algorithms.objectives import ValueLoss
from rlhpc.protocol.errors import CheckpointError
from rlhpc.training.factory import open_backend
from rlhpc.training.logprob import VALUE_HEAD
from rlhpc.training.ranks import RankContext
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, num_loss_tokens, pack_row, tiny_config

pytestmark = pytest.mark.starts  # DeepSpeed tries what a compiler can do
ROW = pack_row(draw_samples((20, 37, 8, 33)))
STEP: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1.0}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("model") / "m"
    return make_tiny_checkpoint(directory, hidden=32, layers=2, tied=request.param)


OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Groups of a process are its backends', the last one's included."""
    yield
    while OPEN:
        OPEN.pop().close()


def open_critic(model: Path, backend: str = "reference", **settings: object) -> Any:
    return opened(model, backend=backend, has_value_head=True, **settings)


def opened(model: Path, *, has_value_head: bool = False, **settings: object) -> Any:
    OPEN.append(open_backend(tiny_config(model, **settings), RankContext(), has_value_head=has_value_head))
    return OPEN[-1]


def learn(critic: Any, row: Any, times: int = 1) -> list[float]:
    losses = []
    for _ in range(times):
        result = critic.step([row], ValueLoss(None), proximal=None, num_loss_tokens=num_loss_tokens([row]), **STEP)
        assert result.applied
        losses.append(result.metrics["loss"] / num_loss_tokens([row]))
    return losses


def test_a_critic_begins_with_nothing_and_has_no_head_over_the_vocabulary(model: Path) -> None:
    critic = open_critic(model)
    (values,) = critic.logprobs([ROW])
    assert not values.any()
    specs = {spec.name: spec.shape for spec in critic.tensor_specs()}
    assert specs[VALUE_HEAD] == (1, 32)
    assert "lm_head.weight" not in specs
    policy = {spec.name for spec in opened(model).tensor_specs()}
    assert set(specs) - {VALUE_HEAD} == policy - {"lm_head.weight"}


@pytest.mark.parametrize("backend", ["reference", "deepspeed", "megatron"])
def test_values_are_the_head_s_product_with_the_state_before_each_token(model: Path, backend: str) -> None:
    critic = open_critic(model, backend)
    learn(critic, ROW, 3)
    weights = {name: tensor.clone() for name, tensor in critic.weights()}
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    hf.load_state_dict({n: w for n, w in weights.items() if n != VALUE_HEAD}, strict=False)
    (values,) = critic.logprobs([ROW])
    for first, last in zip(ROW.cu_seqlens[:-1], ROW.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(ROW.token_ids[first:last].astype(np.int64))
        with torch.no_grad():
            states = hf.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        expected = (states.double() @ weights[VALUE_HEAD].double().t())[:-1, 0]
        assert values[first] == 0
        np.testing.assert_allclose(values[first + 1 : last].numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "deepspeed", "megatron"])
def test_it_learns_what_it_is_told(model: Path, backend: str) -> None:
    """Returns that can be told from the tokens: whether the next token is even."""
    returns = np.where(ROW.loss_mask, np.roll(ROW.token_ids, 1) % 2, 0).astype(np.float32)
    losses = learn(open_critic(model, backend), replace(ROW, advantages=returns), 60)
    assert losses[-1] < 0.1 * losses[0]


def test_all_backends_learn_alike(model: Path) -> None:
    row = replace(ROW, advantages=np.where(ROW.loss_mask, 1, 0).astype(np.float32))
    losses = []
    for backend in ("reference", "deepspeed", "megatron"):
        critic = open_critic(model, backend)
        losses.append(learn(critic, row, 5))
        critic.close()
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=1e-5)


def test_what_is_saved_is_loaded_and_a_policy_is_no_critic(model: Path, tmp_path: Path) -> None:
    critic = open_critic(model)
    learn(critic, ROW, 2)
    (tmp_path / "critic").mkdir()
    critic.save(tmp_path / "critic").result()
    (file,) = (tmp_path / "critic").glob("*weights*.safetensors")
    assert load_file(file)[VALUE_HEAD].shape == (1, 32)
    another = open_critic(model)
    another.load(tmp_path / "critic")
    torch.testing.assert_close(another.logprobs([ROW]), critic.logprobs([ROW]), rtol=0, atol=0)
    assert learn(another, ROW, 3) == learn(critic, ROW, 3)
    with pytest.raises(CheckpointError):
        opened(model).load(tmp_path / "critic")


def test_figures_of_one_rank_are_its_own(model: Path) -> None:
    assert open_critic(model).sum_over_replicas({"b": 2.5, "a": -1.0}) == {"a": -1.0, "b": 2.5}


ZERO2, ZERO3 = ({"backend": "deepspeed", "zero_stage": stage} for stage in (2, 3))


@pytest.mark.parametrize("trainer", [pytest.param(ZERO2, marks=pytest.mark.long), ZERO3, {"backend": "megatron"}])
def test_policy_and_critic_share_a_process_and_its_groups(model: Path, trainer: dict[str, Any]) -> None:
    """The critic leaves first: the groups are those of the backend that was opened first."""
    for _ in range(2):
        policy = opened(model, **trainer)
        before = policy.logprobs([ROW])[0].clone()
        critic = open_critic(model, **trainer)
        learn(critic, ROW, 2)
        critic.close()
        torch.testing.assert_close(policy.logprobs([ROW])[0], before, rtol=0, atol=0)
        policy.close()
