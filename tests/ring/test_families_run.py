"""Twenty steps of each family of models, engine and trainer real, one of its processes killed in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.ring_rewards import GATE, GATE_AFTER, open_gate
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Run, make_lab, scalars
from tests.tiny_models import SERVED

pytestmark = [pytest.mark.ring, pytest.mark.vllm, pytest.mark.long]
NUM_STEPS, KILL_AT, HELD_STEPS = 20, 8, 14  # held: at most so many are done before the kill
GROUPS, GROUP_SIZE = 4, 4
# Family → dtype of the model, where vLLM has no float32 kernel for its layers on a CPU.
HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
DTYPES: dict[tuple[str, str], str] = {(family, "vllm"): "bfloat16" for family in HYBRID}
CASES = (
    *((family, "vllm") for family in (*SERVED, "olmo3", *HYBRID)),
    *((family, "transformers") for family in HYBRID),
)
# The others are left to `make soak-matrix`.
EVERY_TIME = (
    *((each, "vllm") for each in ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_5")),
    ("qwen3_5", "transformers"),
)
MEGATRON: dict[str, object] = {"backend": "megatron", "num_ranks": 2, "context_parallel": 2}


@pytest.mark.parametrize(
    ("family", "engine", "victim", "trainer"),
    [
        *(
            pytest.param(
                *case, ("trainer", "generator")[index % 2], {}, marks=() if case in EVERY_TIME else pytest.mark.soak
            )
            for index, case in enumerate(CASES)
        ),
        ("olmo3", "vllm", "trainer", MEGATRON),
    ],
)
def test_twenty_steps_with_a_kill_in_the_middle_are_trained_once_each_and_the_audit_is_clean(
    family: str, engine: str, victim: str, trainer: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, gate = make_lab(tmp_path, family), tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(GATE_AFTER, str(HELD_STEPS * GROUPS * GROUP_SIZE))
    run_file = lab.run_file(
        family,
        run={"num_steps": NUM_STEPS},
        model={"dtype": DTYPES.get((family, engine), "float32")},
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 600.0},
        generation={"engine": engine},
        weights={"canary_every": 5},
        checkpoint={"every_steps": 5},
        trainer=trainer,
    )
    layout = lab.layout(family)
    with Run(run_file, layout) as run:
        run.wait_until(lambda status: status["step"] >= KILL_AT and latest_complete(layout.checkpoints) is not None)
        run.kill_roles(victim)
        open_gate(gate)
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
    attempts = [json.loads(line)["resume_step"] for line in layout.attempts.read_text().splitlines()]
    assert len(attempts) == (2 if victim == "trainer" else 1)
    assert all(kl < 0.1 for kl in scalars(layout, "policy/mismatch_kl"))
