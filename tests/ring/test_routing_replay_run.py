"""Runs whose trainer takes the experts that the engine chose: killed in the middle, on disk, and with a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from launch.verify.audit import audit_run
from launch.verify.evidence import Depth
from launch.verify.report import CheckVerdict
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.journal import read_journals
from rlhpc.buffer.segments import (
    USER_BLOCK_BYTES,
    read_rollouts_directory,
    read_segment,
    segment_paths,
    to_hdf5,
)
from rlhpc.models.routes import MixtureForm
from rlhpc.training.checkpoint_directory import latest_complete
from tests.engines.scripted_engine import scripted_routes
from tests.ring.ring_rewards import GATE, GATE_AFTER, open_gate
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab, run_to_the_end, scalars
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.ring
NUM_STEPS, KILL_AT, HELD_STEPS, GROUPS, GROUP_SIZE = 10, 5, 8, 4, 4
REPLAY: dict[str, Any] = {"routing_replay": True}


def test_routes_reach_trainer_and_segments_and_a_kill_costs_those_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has none, so that steps trained again are routed anew; all others have what the engine told."""
    lab, gate = make_lab(tmp_path, "qwen3_moe"), tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(GATE_AFTER, str(HELD_STEPS * GROUPS * GROUP_SIZE))
    run_file = lab.run_file(
        "replay",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 600.0},
        algorithm=REPLAY,
        buffer={"keep_routes": True},
        checkpoint={"every_steps": 3},
    )
    layout = lab.layout("replay")
    with Run(run_file, layout) as run:
        run.wait_until(lambda status: status["step"] >= KILL_AT and latest_complete(layout.checkpoints) is not None)
        assert all(
            record.scored.rollout.routes is None for each in read_journals(layout.rollouts) for record in each.records
        )
        run.kill_roles("trainer")
        open_gate(gate)
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
    shares = scalars(layout, "rollout/routed_share")
    assert shares[0] == pytest.approx(1.0)
    assert min(shares) < 1.0  # a step that was trained again, on rollouts of the journal

    form = MixtureForm.of_replayed(lab.model)
    routed = 0
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            if (routes := member.rollout.routes) is not None:
                tokens = np.concatenate([resolved.group.prompt.token_ids, member.rollout.token_ids])
                expected = np.sort(scripted_routes(form, tokens), axis=2)
                np.testing.assert_array_equal(form.unpack(routes), expected)
                routed += 1
    assert routed >= GROUPS * GROUP_SIZE

    members = check_of(layout)
    assert members.verdict is CheckVerdict.REMARK, members
    assert "without routes" in members.remarks[0]
    contradict_routes(layout)
    assert check_of(layout).verdict is CheckVerdict.VIOLATED
    assert "routes of 9999 tokens" in check_of(layout).offences[0].text
    damage_routes(layout)
    assert any("checksum differs" in offence.text for offence in check_of(layout, "files").offences)


def check_of(layout: RunLayout, name: str = "members") -> Any:
    audit = audit_run(layout, Depth(), lambda _: None)
    (found,) = [check for check in audit.checks if check.name == name]
    return found


def contradict_routes(layout: RunLayout) -> None:
    """Write a segment whose checksums are right and whose first routes are not."""
    path = segment_paths(layout.rollouts)[0]
    first, *others = read_segment(path)
    with h5py.File(path, "r", locking=False) as file:
        attributes = dict(file.attrs)
    member = next(each for each in first.group.members if each.rollout.routes is not None)
    assert member.rollout.routes is not None
    wrong = replace(member, rollout=replace(member.rollout, routes=replace(member.rollout.routes, num_tokens=9999)))
    members = tuple(wrong if each is member else each for each in first.group.members)
    path.write_bytes(to_hdf5([replace(first, group=replace(first.group, members=members)), *others], attributes))


def damage_routes(layout: RunLayout) -> None:
    """Change a byte of routes in a file whose own checksum is gone."""
    path = segment_paths(layout.rollouts)[0]
    data = path.read_bytes()
    path.write_bytes(bytes(USER_BLOCK_BYTES) + data[USER_BLOCK_BYTES:])
    with h5py.File(path, "r+") as file:
        file["rollouts/routes"][13] ^= 1


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_the_mismatch_of_a_mixture_in_bfloat16_is_a_small_part_of_what_it_is_without(
    tmp_path: Path, engine: str
) -> None:
    """At the first step, whose rollouts are all of the trained version; of 64 experts some scores nearly tie."""
    found = {}
    plain = make_lab(tmp_path)
    model = make_tiny_checkpoint(
        tmp_path / "mixture", "qwen3_moe", hidden=128, layers=4, num_experts=64, num_experts_per_tok=4, tied=False
    )
    lab = Lab(tmp_path, model, plain.dataset)
    for name, algorithm in (("with", REPLAY), ("without", {})):
        layout = run_to_the_end(
            lab,
            name,
            run={"num_steps": 2},
            model={"dtype": "bfloat16"},
            generation={"engine": engine},
            algorithm=algorithm,
            weights={"max_canary_logratio": "off"},
            guard={"action": "off"},
        )
        found[name] = scalars(layout, "policy/mismatch_kl")[0]
        if algorithm:
            assert scalars(layout, "rollout/routed_share") == pytest.approx([1.0, 1.0])
    assert found["without"] > 1e-3
    assert found["with"] < 0.3 * found["without"], found
