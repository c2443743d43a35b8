"""Failures of verifiers by task: from heartbeats of reward services into `rlhpc status` and TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path

from launch.view.status import render_status, verifier_lines
from rlhpc.base.files import write_atomically
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.config.file import write_resolved
from rlhpc.metrics.names import find_metric
from rlhpc.protocol.messages import Heartbeat, Hello
from rlhpc.protocol.types import SamplingParams
from rlhpc.rewards.outcomes import DIED, FAILURES, FIGURES, PREFIX, TIMED_OUT, TaskCounts, by_task
from rlhpc.roles.controller.dispatcher import ProcessRegistry
from rlhpc.roles.controller.recorder import verifier_figures
from rlhpc.roles.controller.run_status import StatusBoard
from tests.unit.launch.site_kit import config_of


def test_counts_survive_the_way_through_a_heartbeat_whatever_the_task_is_called() -> None:
    counts = TaskCounts()
    counts.count("my.rewards:score", 0.5, TIMED_OUT)
    counts.count("my.rewards:score", 0.25, num_forked=2)
    counts.count("regex", 0.1)
    assert by_task(counts.as_metrics() | {"queued": 3.0}) == {
        "my.rewards:score": {"judged": 2.0, "timed_out": 1.0, "forked": 2.0, "seconds": 0.75},
        "regex": {"judged": 1.0, "seconds": 0.1},
    }


def test_every_figure_has_its_metric_and_the_mean_time_is_of_a_completion() -> None:
    figures = verifier_figures({"my.rewards:score": {**dict.fromkeys(FIGURES, 1.0), "judged": 4.0, "seconds": 2.0}})
    for name in figures:
        find_metric(name)
    assert figures["verifier_mean_s/my.rewards:score"] == 0.5
    assert len(figures) == len(FIGURES)  # seconds are told as their mean


def test_a_line_is_for_a_task_of_which_a_verifier_has_failed() -> None:
    lines = verifier_lines({"regex": {"judged": 9.0}, "b": {"judged": 5.0, "timed_out": 2.0, "out_of_memory": 1.0}})
    assert lines == ["verifier b   judged 5, without a verdict: timed out 2, out of memory 1"]
    assert set(FAILURES) <= set(FIGURES)


def test_status_adds_up_the_counts_of_all_reward_services(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    config = config_of()
    write_resolved(config, layout, "")
    registry = ProcessRegistry("", 15.0, time.monotonic)
    for replica, died in ((0, 2.0), (1, 3.0)):
        registry.register(f"reward-{replica}", Hello("reward", replica, f"1.{replica}", "", 1, "here"))
        counts = {f"{PREFIX}judged:math_answer": 10.0, f"{PREFIX}{DIED}:math_answer": died, "queued": 1.0}
        registry.record(f"reward-{replica}", Heartbeat("running", "", -1, metrics=counts))
    ledger = AdmissionLedger(
        num_slots=4, window_groups=2, groups_per_step=2, group_size=2, sampling=lambda _: SamplingParams(16),
        lease_deadline_s=60.0, max_attempts=3, clock=time.monotonic,
    )  # fmt: skip
    write_atomically(layout.status, StatusBoard(layout, config, registry, ledger).document())
    assert "verifier math_answer   judged 20, without a verdict: died 5" in render_status(layout).splitlines()
    document = json.loads(render_status(layout, as_json=True))
    assert document["status"]["verifiers"] == {"math_answer": {"judged": 20.0, "died": 5.0}}
