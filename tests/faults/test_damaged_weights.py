"""An engine whose weights are damaged after they were received and verified is found, healed, and the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults import damaged_engine
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Run, last_scalar, make_lab, rlhpc


@pytest.mark.ring
@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "every"),
    [(2, 0)],
    ids=["told by its checksum"],
)
def test_a_generator_with_damaged_weights_is_quarantined_healed_and_counted(
    replicas: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(tmp_path)
    hook, order = tmp_path / "hook", tmp_path / "damage"
    hook.mkdir()
    shutil.copy(damaged_engine.__file__, hook / "sitecustomize.py")
    monkeypatch.setenv(damaged_engine.ORDER, str(order))
    monkeypatch.setenv("PYTHONPATH", str(hook))
    run_file = lab.run_file(
        "damaged",
        run={"num_steps": 100_000},  # stopped once everything has been seen
        generation={"engine": "vllm", "num_replicas": replicas, "max_num_seqs": 8, "max_completion_tokens": 40},
        weights={"timeout_s": 20.0, "canary_every": every},
    )
    layout = lab.layout("damaged")
    victim = f"generator-{replicas - 1}"

    def said(words: str) -> int:
        """How often the controller has said it."""
        return sum(log.read_text().count(words) for log in layout.logs.glob("controller-0/*.log"))

    with Run(run_file, layout) as run:
        everyone = [f"generator-{replica}" for replica in range(replicas)]
        run.wait_until(lambda s: s["step"] >= 2 and all(said(f"{name}: canary of version") for name in everyone))
        assert said("quarantined") == 0
        (tmp_path / "order").write_text(str(replicas - 1))
        (tmp_path / "order").rename(order)
        run.wait_until(lambda s: said(f"{victim} is quarantined") >= 1)
        passed = said(f"{victim}: canary of version")
        healed = run.wait_until(lambda s: said(f"{victim}: canary of version") > passed)
        run.wait_for_step(healed["step"] + 4)
        stopped = rlhpc("stop", str(layout.root))
        assert stopped.returncode == 0, stopped.stderr
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert not order.exists()
    assert said("quarantined") == 1
    assert (said("has other weights than others") > 0) == (replicas > 1)
    assert last_scalar(layout, "weights/canary_failed_total") == 1
    assert last_scalar(layout, "weights/canary_logratio") < 0.001  # the last of them was a good one
    assert last_scalar(layout, "weights/members") == replicas
    assert_full_batches_trained_once(layout.rollouts, run.status()["step"], 4, 4)
    audited = rlhpc("audit", str(layout.root))
    assert audited.returncode == 0, audited.stdout
