"""A whole run one of whose generators the network loses for longer than dead_after_s, and gives back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from tests.cable import Cable
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, consumed
from tests.ring.run_kit import Run, last_scalar, make_lab, rlhpc

pytestmark = [pytest.mark.ring, pytest.mark.long]
DEAD_AFTER_S = 3.0
NUM_STEPS_WITHOUT = 5
CUT_OFF = "generator-1"


@contextlib.contextmanager
def detour(layout: RunLayout, channels: tuple[str, ...]) -> Iterator[list[Cable]]:
    """Whoever looks the controller up from now on comes to it through cables."""
    with contextlib.ExitStack() as stack:
        cables = []
        for channel in channels:
            file = layout.rendezvous / f"{channel}-0.json"
            endpoint = json.loads(file.read_bytes())
            cables.append(stack.enter_context(Cable(endpoint["address"])))
            replace(file, {**endpoint, "address": cables[-1].address})
        yield cables


def replace(file: Path, endpoint: dict[str, Any]) -> None:
    temporary = file.with_suffix(".detour")
    temporary.write_text(json.dumps(endpoint), encoding="utf-8")
    temporary.rename(file)


@pytest.mark.parametrize("forget", [False, True], ids=["held", "forgotten"])
def test_a_generator_that_the_network_loses_for_long_comes_back_and_nothing_is_trained_twice(
    forget: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lab = make_lab(tmp_path_factory.mktemp("lab"))
    run_file = lab.run_file(
        "behind",
        run={"num_steps": 100_000},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        generation={"num_replicas": 2, "max_num_seqs": 8},
        weights={"timeout_s": 6.0},  # its connections to the trainer are not cut: a broadcast waits for it
        transport={"kind": "tcp", "dead_after_s": DEAD_AFTER_S},
    )
    layout = lab.layout("behind")
    with Run(run_file, layout) as run:
        run.wait_until(lambda s: s["step"] >= 2 and tokens(s, CUT_OFF) > 0)
        with detour(layout, ("leases", "control")) as cables:
            first = run.role("generator", 1)
            first.kill()  # the next start of it finds the detour
            run.wait_until(lambda s: tokens(s, CUT_OFF) > 0 and role(s, CUT_OFF)["pid"] != first.pid)
            pid = run.role("generator", 1).pid
            assert all(cable.num_connections == 1 for cable in cables)
            for cable in cables:
                cable.fall_silent()
            gone = run.wait_until(lambda s: role(s, CUT_OFF) is None)
            run.wait_for_step(gone["step"] + NUM_STEPS_WITHOUT)
            for cable in cables:
                cable.work_again(forget=forget)
            back = run.wait_until(lambda s: role(s, CUT_OFF) is not None and role(s, CUT_OFF)["version"] > gone["step"])
            sampled = tokens(back, CUT_OFF)
            run.wait_until(lambda s: tokens(s, CUT_OFF) > sampled)
            assert run.role("generator", 1).pid == pid, "it was not started again: it was alive all the time"
            stopped = rlhpc("stop", str(layout.root))
            assert stopped.returncode == 0, stopped.stderr
            assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert f"{CUT_OFF} is silent for {DEAD_AFTER_S:g} s" in controller_log(layout)
    assert_full_batches_trained_once(layout.rollouts, run.status()["step"], 4, 4)
    assert last_scalar(layout, "group/regranted_total") > 0
    assert max(r.trained_version - r.admitted_version for r in consumed(layout.rollouts)) <= 1


def role(status: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in status["roles"] if each["name"] == name), None)


def tokens(status: dict[str, Any], name: str) -> float:
    found = role(status, name)
    return 0.0 if found is None else float(found["metrics"].get("tokens", 0.0))


def controller_log(layout: RunLayout) -> str:
    return "".join(log.read_text(encoding="utf-8") for log in (layout.logs / "controller-0").glob("*.log"))
