"""Routing replay in transformers' mixtures, whose routers differ in all but how they choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.hf_model import CausalLM, load_trained
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.route_replay import HfReplay
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config

CPU = torch.device("cpu")
LENGTHS = (12, 7)
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_family_s_mixtures_are_those_that_were_given(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, family, layers=4)
    form = MixtureForm.of_replayed(path)
    model = load_trained(tiny_config(path, routing_replay=True), CPU, has_value_head=False)
    rng = np.random.default_rng(0)
    samples = draw_samples(LENGTHS)
    given = [
        np.argsort(rng.random((length - 1, len(form.layers), form.num_experts)), axis=2)[:, :, : form.top_k]
        for length in LENGTHS
    ]
    routed = pack_row([replace(each, routes=form.pack(ids)) for each, ids in zip(samples, given, strict=True)])
    with noted(model, form) as seen:
        hidden = states_of(model, routed)
        places = [*range(LENGTHS[0] - 1), *range(LENGTHS[0], sum(LENGTHS) - 1)]  # all but the last of each
        np.testing.assert_array_equal(torch.stack(seen, 1).numpy()[places], np.sort(np.concatenate(given), axis=2))
        seen.clear()
        own = states_of(model, pack_row(samples))
        assert torch.stack(seen, 1).numpy()[places].tolist() != np.sort(np.concatenate(given), axis=2).tolist()
    assert (hidden - own).abs().max() > 1e-3


def states_of(model: CausalLM, row: PackedMicrobatch) -> Tensor:
    assert model.replay is not None
    model.replay.begin_row(row, CPU)
    tokens, positions = (torch.from_numpy(each.astype(np.int64)) for each in (row.token_ids, row.position_ids))
    with torch.no_grad():
        return model.hidden_states(tokens, positions, SegmentPlan.of(row.cu_seqlens, CPU))


@contextmanager
def noted(model: CausalLM, form: MixtureForm) -> Iterator[list[Tensor]]:
    """Collect the ids, ascending, that each layer's experts are called with."""
    seen, hooks = list[Tensor](), []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[1].view(-1, form.top_k).sort(-1).values)

    for part in model.module.modules():
        if isinstance(experts := getattr(part, "experts", None), nn.Module):
            hooks.append(experts.register_forward_pre_hook(note))
    yield seen
    for hook in hooks:
        hook.remove()


class Sorting(nn.Module):
    """A mixture that chooses by sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Identity()

    def forward(self, scores: Tensor) -> Tensor:
        return scores.argsort(-1)[:, -2:]


def test_a_router_that_cannot_be_told_is_refused_by_its_layer() -> None:
    model = nn.Sequential(Sorting(), Sorting())
    replay = HfReplay(model, MixtureForm((1, 2), 8, 2))
    with pytest.raises(ConfigError, match="router of layer 1 does not choose 2 of 8"):
        replay.refuse_deaf(lambda: model[0](torch.randn(5, 8)), 5, CPU, "model")
    with pytest.raises(ConfigError, match=r"has 2 mixtures of experts, its config\.json names 3"):
        HfReplay(model, MixtureForm((0, 1, 2), 8, 2))
