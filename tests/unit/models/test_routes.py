"""Routes: packed small, unpacked as they were, and refused by what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from math import comb, log2

import numpy as np
import pytest

from rlhpc.models.routes import MixtureForm, fault_of
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import Rollout, Routes
from rlhpc.transport.codec import Codec

FORMS = [
    MixtureForm((0, 1, 2), 128, 8),
    MixtureForm((1,), 2, 1),
    MixtureForm((0,), 4, 4),
    MixtureForm((0, 3), 256, 6),
    MixtureForm((0, 3), 257, 6),
    MixtureForm((2, 3), 1000, 10),
]


def draw(form: MixtureForm, num_tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((num_tokens, len(form.layers), form.num_experts)), axis=2)[:, :, : form.top_k]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_experts_come_back_as_the_sets_they_were(form, num_tokens):
    experts = draw(form, num_tokens)
    routes = form.pack(experts.astype(np.uint16))
    found = form.unpack(routes)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, np.sort(experts, axis=2))
    assert fault_of(routes, num_tokens) == ""


def test_packed_experts_are_within_a_tenth_of_the_number_of_sets():
    """And below two thirds of the ids: what a link, a batch and the controller's memory have to hold."""
    form = FORMS[0]
    packed = form.pack(draw(form, 4000)).packed
    assert len(packed) < 1.1 * 4000 * 3 * log2(comb(128, 8)) / 8
    assert len(packed) < 4000 * form.bytes_per_token * 2 / 3


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (np.zeros((4, 3, 8), np.uint8), "not 8 different experts of 128"),
        (np.arange(4 * 3 * 8).reshape(4, 3, 8) + 100, "not 8 different experts of 128"),
        (np.zeros((4, 2, 8), np.uint8), r"shape \(4, 2, 8\)"),
        (np.zeros((4, 3, 7), np.uint8), r"shape \(4, 3, 7\)"),
        (np.zeros(96, np.uint8), r"shape \(96,\)"),
    ],
)
def test_experts_that_no_router_chooses_are_refused(experts, why):
    with pytest.raises(ValueError, match=why):
        FORMS[0].pack(experts)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_tokens": 6}, "not the 144 bytes of its tokens"),
        ({"num_tokens": 4}, "not the 96 bytes"),
        ({"num_tokens": -1}, "routes of -1 tokens"),
        ({"num_tokens": 1 << 40}, "routes of 1099511627776 tokens"),
        ({"packed": np.zeros(0, np.uint8)}, "not the 120 bytes"),
        ({"packed": np.arange(9, dtype=np.uint8)}, "not deflated"),
    ],
)
def test_damaged_routes_are_described_without_the_model(changes, why):
    routes = replace(FORMS[0].pack(draw(FORMS[0], 5)), **changes)
    assert why in fault_of(routes, 10) or why in fault_of(routes, 1 << 50)
    with pytest.raises(ValueError, match=r"tokens|deflated|layers"):
        FORMS[0].unpack(routes)


def test_every_flipped_bit_is_refused_or_still_names_experts_of_the_model():
    form = FORMS[0]
    routes = form.pack(draw(form, 20))
    for place in range(len(routes.packed)):
        packed = routes.packed.copy()
        packed[place] ^= 1 << (place % 8)
        try:
            found = form.unpack(replace(routes, packed=packed))
        except ValueError:
            continue
        assert found.shape == (20, 3, 8)
        assert found.min() >= 0
        assert found.max() < 128
    with pytest.raises(ValueError, match=r"expert \d+ of 64"):
        replace(form, num_experts=64).unpack(routes)


MODELS = [
    ({"num_hidden_layers": 3, "hidden_size": 8}, None),
    ({"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}, MixtureForm((0, 1, 2), 8, 2)),
    (
        {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
        MixtureForm((1, 3), 8, 2),
    ),
    (
        {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0, 2]},
        MixtureForm((1, 3), 8, 2),
    ),
    (
        {"num_hidden_layers": 4, "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        MixtureForm((1, 2, 3), 64, 6),
    ),
    (
        {"num_hidden_layers": 2, "num_local_experts": 32, "num_experts_per_tok": 4, "model_type": "gpt_oss"},
        MixtureForm((0, 1), 32, 4),
    ),
    (
        {
            "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        MixtureForm((1, 2), 8, 2),
    ),
    (
        {"text_config": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}, "num_experts": 0},
        MixtureForm((0, 1), 8, 2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "form"), MODELS)
def test_mixtures_are_read_from_every_family_s_config(model, form):
    assert MixtureForm.of(model) == form


def test_more_experts_than_routes_can_name_are_refused():
    with pytest.raises(ConfigError, match="65536 experts"):
        MixtureForm.of({"num_hidden_layers": 1, "num_experts": 65536, "num_experts_per_tok": 2})


def test_what_an_engine_tells_of_all_layers_is_cut_to_the_mixtures():
    form = MixtureForm((1, 3), 8, 2)
    told = np.arange(2 * 4 * 2).reshape(2, 4, 2)
    np.testing.assert_array_equal(form.of_layers(told), told[:, [1, 3]])
    np.testing.assert_array_equal(form.of_layers(told[:, [1, 3]]), told[:, [1, 3]])


def test_a_rollout_takes_its_routes_along_and_has_none_without_them():
    codec, form = Codec([Rollout]), FORMS[0]
    plain = np.zeros(5, np.int32)
    rollout = Rollout(1, 2, 3, plain, plain.astype(np.float32), plain, plain == 0, "stop", form.pack(draw(form, 7)))
    _, there = codec.decode(codec.encode(rollout, 1), "peer")
    assert isinstance(there.routes, Routes)
    np.testing.assert_array_equal(form.unpack(there.routes), form.unpack(rollout.routes))
    _, there = codec.decode(codec.encode(replace(rollout, routes=None), 2), "peer")
    assert there.routes is None
