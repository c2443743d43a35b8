"""The controller counts what services do, names those that fall silent, and shows both in the status of the run."""

from __future__ import annotations

import json

from launch.plan.processes import expected_processes
from launch.view.status import _run_lines, waiting_for
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.names import find_metric
from rlhpc.protocol.messages import Heartbeat, Hello
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.recorder import ServiceMeter
from rlhpc.roles.controller.run_status import StatusBoard
from tests import build

SERVICES = [
    {"name": "math", "kind": "teacher", "path": "m", "replicas": 2},
    {"name": "judge", "kind": "judge", "path": "m"},
]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def registry_of(clock: Clock) -> ProcessRegistry:
    registry = ProcessRegistry("hash", 15.0, clock=clock)
    for replica, service in enumerate(("math", "math", "judge")):
        greet(registry, replica, service)
    return registry


def greet(registry: ProcessRegistry, replica: int, service: str, incarnation: str = "1.0.0-a") -> None:
    hello = Hello("service", replica, incarnation, "hash", 7 + replica, "node", service=service)
    assert registry.register(f"service-{replica}", hello)


def beat(registry: ProcessRegistry, replica: int, **metrics: float) -> None:
    assert registry.record(f"service-{replica}", Heartbeat("running", "", -1, metrics=metrics))


def test_the_load_of_a_service_is_summed_over_its_processes_and_a_restart_counts_nothing() -> None:
    clock = Clock()
    registry = registry_of(clock)
    meter = ServiceMeter(registry)
    beat(registry, 0, running=3, waiting=2, answered=10, tokens=1000)
    beat(registry, 1, running=1, waiting=0, answered=4, tokens=400)
    first = meter.look()
    assert (first["service_requests_running/math"], first["service_requests_waiting/math"]) == (4, 2)
    assert first["service_requests_per_s/math"] == 0, "since when is not known"
    clock.now += 2.0
    beat(registry, 0, answered=20, tokens=2000)
    greet(registry, 1, "math", incarnation="1.0.1-b")
    beat(registry, 1, answered=1, tokens=5)
    second = meter.look()
    assert (second["service_requests_per_s/math"], second["service_tokens_per_s/math"]) == (5.0, 500.0)
    assert second["service_requests_running/judge"] == 0
    assert meter.look()["service_requests_per_s/math"] == 0, "nothing was heard since"
    for name in second:
        find_metric(name)


def test_the_status_shows_each_process_with_its_service_and_names_who_is_missing(tmp_path) -> None:
    clock, config = Clock(), build.config(service=SERVICES)
    registry = registry_of(clock)
    registry.forget("service-1")
    beat(registry, 0, running=3, waiting=2, answered=10)
    beat(registry, 2, answered=4)
    layout = RunLayout(tmp_path)
    layout.root.mkdir(exist_ok=True)
    board = StatusBoard(layout, config, registry, None)
    status = json.loads(board.document())
    assert [(row["service"], row["kind"]) for row in status["roles"]] == [("math", "teacher"), ("judge", "judge")]
    expected = expected_processes(config)
    assert expected[-3:] == ["service-0 (math)", "service-1 (math)", "service-2 (judge)"]
    assert waiting_for(status, expected) == "reward-0, trainer-0, generator-0, service-1 (math)"
    lines = [" ".join(line.split()) for line in _run_lines(status, "here", expected)]
    assert "service-0 running - 5 0.0s math (teacher): 2 waiting, 10 answered" in lines
    assert "service-2 running - 0 0.0s judge: 0 waiting, 4 answered" in lines
    assert "service-1 (math) starting" in lines


def test_a_service_that_falls_silent_is_named_in_the_events_with_what_it_held(tmp_path) -> None:
    clock = Clock()
    registry = registry_of(clock)
    layout = RunLayout(tmp_path)
    board = StatusBoard(layout, build.config(service=SERVICES), registry, None)
    beat(registry, 2, running=3)
    board.write(board.document())
    clock.now += 20.0
    beat(registry, 0)
    beat(registry, 1)
    assert registry.silent() == ["service-2"]
    board.document()
    registry.forget("service-2")
    board.write(board.document())
    events = [json.loads(line) for line in layout.timeline.read_text().splitlines()]
    lost = [each for each in events if each.get("event") == "lost"]
    assert [(each["name"], each["text"]) for each in lost] == [
        ("service-2", "judge: no sign of life for 20.0 s; it was running with 3 requests")
    ]
    joined = [each["text"] for each in events if each.get("event") == "joined"]
    assert joined[0].startswith("math: pid 7 on node")
