"""Routing replay in every backend and layout, beside plain HF whose routers are written down again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.types import Routes, TrainingSample
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.contracts.replay_scenarios import obey_routes
from tests.contracts.trainer_layouts import LAYOUTS, LENGTHS, MIXTURE, MODELS, layout_keys, marks_of, packed
from tests.contracts.trainer_textbook import hf_logprobs, load_hf, torch_training, weights_on_disk
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config

# Those that place a mixture's tokens or its layers in a way of their own.
REPLAYED = (
    *("reference-dp1", "megatron-dp1", "megatron-dp2", "megatron-pp2", "megatron-vpp2", "megatron-cp2"),
    *("megatron-ep2", "megatron-sp_ep2", "megatron-sp", "deepspeed-zero2", "deepspeed-zero3"),
)
EVERYDAY = ("reference-dp1", "megatron-sp_ep2")


def routed_samples(form: MixtureForm, seed: int = 0) -> list[TrainingSample]:
    """Experts at random for all tokens but the last; the third sample has none, the fifth only those of its prompt."""
    rng = np.random.default_rng(seed)
    samples = draw_samples(LENGTHS, vocabulary=MODELS[MIXTURE]["vocabulary"], seed=seed)
    return [
        replace(sample, routes=draw_routes(rng, form, {4: 15}.get(place, len(sample.token_ids) - 1)))
        if place != 2
        else sample
        for place, sample in enumerate(samples)
    ]


def draw_routes(rng: np.random.Generator, form: MixtureForm, num_tokens: int) -> Routes:
    order = np.argsort(rng.random((num_tokens, len(form.layers), form.num_experts)), axis=2)
    return form.pack(order[:, :, : form.top_k])


class ToldRouters:
    """Routers of qwen3_moe in plain torch, which take the experts that they are told."""

    def __init__(self, hf: Any, form: MixtureForm) -> None:
        self.hf, self.form = hf, form
        self.sample: TrainingSample | None = None
        for place, layer in enumerate(hf.model.layers):
            layer.mlp.gate.forward = partial(self._route, place, layer.mlp.gate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hf, name)

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        return self.hf(input_ids=input_ids, **options)

    def _route(self, place: int, gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden, gate.weight)
        probabilities = logits.float().softmax(-1)
        experts = probabilities.topk(self.form.top_k).indices
        if self.sample is not None and self.sample.routes is not None:
            told = torch.from_numpy(self.form.unpack(self.sample.routes).astype(np.int64))[:, place]
            experts[: len(told)] = told
        weights = probabilities.gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts


def told_logprobs(routers: ToldRouters, samples: list[TrainingSample]) -> list[Tensor]:
    found = []
    for sample in samples:
        routers.sample = sample
        found.append(hf_logprobs(routers, sample, 1.0).detach())
    routers.sample = None
    return found


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(name, marks=marks_of(name in EVERYDAY)) for name in LAYOUTS if name in REPLAYED],
    indirect=True,
)
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_routers_obey_the_engine_with_weights_and_gradients_of_their_own(cluster, recomputed, model_for, tmp_path):
    """Tokens without routes are routed by the model, and so is a reference; layers computed again replay the same."""
    model = model_for(MIXTURE, cluster.name)
    form = MixtureForm.of_replayed(model)
    samples = routed_samples(form)
    rows = packed(samples)
    seen = cluster.run(obey_routes, tmp_path, model=model, rows=rows, recompute_activations=recomputed)

    routers = ToldRouters(load_hf(model), form)
    given = told_logprobs(routers, samples)
    own = told_logprobs(routers, [replace(sample, routes=None) for sample in samples])
    assert (torch.cat(given) - torch.cat(own)).abs().max() > 0.1  # or nothing would be shown below
    dp_size = 1 + max(each["dp_rank"] for each in seen)
    for each in seen:
        places = range(len(rows))[each["dp_rank"] :: dp_size]
        for name, expected in (("given", given), ("own", own), ("of the reference", own), ("given again", given)):
            for place, found in zip(places, each[name], strict=False):
                whole = torch.cat(expected[3 * place : 3 * place + 3])
                torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

    (loss, norm), weights = trained(routers, samples)
    for each in seen:
        assert each["step"].metrics["loss"] == pytest.approx(loss, rel=2e-5, abs=1e-4)
        assert each["step"].grad_norm == pytest.approx(norm, rel=2e-5)
    for name, tensor in seen[0]["weights"].items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def trained(routers: ToldRouters, samples: list[TrainingSample]) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """(loss, gradient norm) and weights after a step of the textbook."""

    class InTurn:
        """Tells the routers of each sample when the textbook comes to it."""

        def __init__(self) -> None:
            self._turn = iter(samples)

        def parameters(self) -> Any:
            return routers.hf.parameters()

        def __call__(self, **inputs: Any) -> Any:
            routers.sample = next(self._turn)
            return routers.hf(**inputs)

    (figures,) = torch_training(InTurn(), [samples], 1.0)
    return figures, weights_on_disk(routers.hf)


@pytest.mark.parametrize("backend", [{"backend": "reference"}, layout_keys("megatron-dp1")], ids=["hf", "megatron"])
def test_a_dense_model_and_routes_of_another_model_are_refused_by_name(backend, tmp_path):
    context = RankContext(0, 1, f"file://{tmp_path / 'store'}")
    dense = make_tiny_checkpoint(tmp_path / "dense", "qwen3", hidden=32)
    with pytest.raises(ConfigError, match=r"routing_replay=true: model.path=.*dense has no mixtures"):
        open_backend(tiny_config(dense, routing_replay=True, **backend), context)

    mixture = make_tiny_checkpoint(tmp_path / "mixture", "qwen3_moe", hidden=32, vocabulary=117, tied=False)
    form, (sample,) = MixtureForm.of_replayed(mixture), draw_samples((9,))
    rng = np.random.default_rng(0)
    opened = open_backend(tiny_config(mixture, routing_replay=True, **backend), context)
    try:
        for odd, words in (
            (draw_routes(rng, replace(form, layers=(0,)), 8), "1 layers of 2 experts; this model has 2 of 2"),
            (draw_routes(rng, form, 10), "a sample of 9 tokens has routes of 10"),
            (replace(draw_routes(rng, form, 8), packed=np.arange(40, dtype=np.uint8)), "not deflated"),
            (draw_routes(rng, replace(form, num_experts=200), 8), r"expert \d+ of 8"),
        ):
            with pytest.raises(RoleFailed, match=words):
                opened.logprobs([pack_row([replace(sample, routes=odd)])])
    finally:
        opened.close()
