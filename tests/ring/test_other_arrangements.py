"""The ring with other parts: sockets between machines, several ranks, real data, strict order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import ROOT, Lab, Run, last_scalar, make_lab, run_to_the_end, scalars, summary_of

pytestmark = pytest.mark.ring
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.mark.long
def test_a_run_over_tcp_with_two_trainer_ranks_and_weights_by_gloo(lab: Lab) -> None:
    run_file = lab.run_file(
        "spread-out",
        run={"num_steps": 4},
        trainer={"num_ranks": 2},
        weights={"transport": "gloo"},
        transport={"kind": "tcp"},
        rewards={"num_replicas": 2},
    )
    layout = lab.layout("spread-out")
    with Run(run_file, layout) as run:
        run.wait_until(lambda status: "name" in status)  # the controller has bound its sockets
        addresses = [json.loads(path.read_bytes())["address"] for path in layout.rendezvous.glob("*.json")]
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert len(addresses) >= 3
    assert all(address.startswith("tcp://") for address in addresses)
    assert_full_batches_trained_once(layout.rollouts, 4, 4, 4)
    assert summary_of(layout)["staleness_max"] <= 1


@pytest.mark.parametrize("backend", ["megatron", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_steps_begin_with_what_is_finished_and_train_everything_once(tmp_path: Path, backend: str) -> None:
    lab = make_lab(tmp_path)
    lab.script_engine(token_s=0.03)
    layout = run_to_the_end(
        lab, "in-parts", run={"num_steps": 5}, admission={"step_parts": 4}, trainer={"num_ranks": 2, "backend": backend}
    )
    assert_full_batches_trained_once(layout.rollouts, 5, 4, 4)
    assert summary_of(layout)["staleness_max"] <= 1
    assert max(scalars(layout, "trainer/step_parts")) > 1


@pytest.mark.parametrize(
    "engine", ["scripted", "transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])]
)
def test_staleness_zero_is_synchronous_with_one_version_a_rollout(lab: Lab, engine: str) -> None:
    layout = run_to_the_end(
        lab, f"synchronous-{engine}", run={"num_steps": 3}, generation={"engine": engine},
        admission={"max_staleness": 0}, trainer={"device": "auto"}, weights={"timeout_s": 60.0},
    )  # fmt: skip
    assert_full_batches_trained_once(layout.rollouts, 3, 4, 4)
    for rollout in consumed(layout.rollouts):
        assert rollout.admitted_version == rollout.consumed_step
        assert set(rollout.versions.tolist()) == {rollout.consumed_step}
    summary = summary_of(layout)
    assert (summary["staleness_max"], summary["staleness_bound"], summary["rollouts_spanning_update"]) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_an_engine_follows_a_bfloat16_trainer_by_what_has_changed(lab: Lab, engine: str) -> None:
    """Each version is asked for by the canary: the engine computes what the trainer does, deltas or not."""
    layout = run_to_the_end(
        lab, "deltas", run={"num_steps": 5}, model={"dtype": "bfloat16"}, generation={"engine": engine},
        trainer={"device": "auto", "learning_rate": 1e-5}, transport={"kind": "tcp"},
        weights={"timeout_s": 60.0, "canary_every": 1, "transport": "gloo"},
    )  # fmt: skip
    assert_full_batches_trained_once(layout.rollouts, 5, 4, 4)
    assert 0 < last_scalar(layout, "weights/sent_share") < 0.5
    assert last_scalar(layout, "weights/canary_failed_total") == 0
    assert last_scalar(layout, "weights/checksums_differed") == 0


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_trainer_and_engine_have_the_same_base_of_four_bits(lab: Lab, engine: str) -> None:
    pytest.importorskip("bitsandbytes")
    layout = run_to_the_end(
        lab, "four-bits", run={"num_steps": 3}, generation={"engine": engine},
        lora={"rank": 8, "quantization": "nf4", "learning_rate": 0.01}, weights={"timeout_s": 60.0, "canary_every": 1},
    )  # fmt: skip
    assert max(scalars(layout, "weights/canary_logratio")) < 1e-5


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no copy of GSM8K beside the repository")
def test_three_steps_of_gsm8k_are_judged_as_mathematics(lab: Lab) -> None:
    layout = run_to_the_end(
        lab,
        "gsm8k",
        run={"num_steps": 3},
        data={
            "path": str(GSM8K / "train.jsonl"),
            "task": "math_answer",
            "prompt_template": "Question: {question}\nAnswer:",
            "reference_field": "answer",
        },
        generation={"max_prompt_tokens": 1024},
        admission={"active_sampling": False},
        trainer={"token_budget": 2048},
    )
    assert_full_batches_trained_once(layout.rollouts, 3, 4, 4)
    assert {rollout.verdict for rollout in consumed(layout.rollouts)} <= {"correct", "wrong"}
