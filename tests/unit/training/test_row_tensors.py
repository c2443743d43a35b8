"""What a loss gets of a packed row is what the samples in it say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rlhpc.training.logprob import token_row
from tests.unit.training.packed_rows import draw_samples, pack_row

LENGTHS = [5, 9, 4]
SHARES = [0.5, 2.0, 1.0]
SAMPLES = [replace(one, loss_weight=share) for one, share in zip(draw_samples(LENGTHS), SHARES, strict=True)]
NOTHING = torch.zeros(18)


def test_every_token_has_the_share_and_the_number_of_its_sequence() -> None:
    row = token_row(pack_row(SAMPLES), NOTHING, proximal=None)
    assert row.num_sequences == 3
    assert row.sequence.tolist() == [0] * 5 + [1] * 9 + [2] * 4
    assert row.weights.tolist() == [0.5] * 5 + [2.0] * 9 + [1.0] * 4
    assert row.versions.tolist() == np.concatenate([sample.versions for sample in SAMPLES]).tolist()


def test_without_log_probabilities_of_its_own_proximal_policy_and_reference_are_the_sampler() -> None:
    packed = pack_row(SAMPLES)
    row = token_row(packed, NOTHING, proximal=None)
    assert torch.equal(row.proximal, row.behaviour)
    assert torch.equal(row.reference, row.behaviour)
    given = token_row(packed, NOTHING, proximal=torch.full((18,), -7.0), reference=torch.full((18,), -5.0))
    assert torch.equal(given.proximal, torch.where(given.loss_mask, -7.0, 0.0))
    assert torch.equal(given.reference, torch.where(given.loss_mask, -5.0, 0.0))
