"""Processes are killed while long rollouts are being sampled: these go on from where they were last reported."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.prefixes import partial_paths, read_partials
from tests.faults.attempts_kit import Attempts
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, rollouts_on_disk
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = pytest.mark.ring
NUM_STEPS, GROUPS, GROUP_SIZE = 1, 2, 4
IN_FLIGHT = 2 * GROUPS * GROUP_SIZE  # all slots
TOKEN_S = 0.02
INTERVAL_TOKENS = 50  # a second, on a quiet machine
MAX_TOKENS = 240


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A model of which the scripted engine draws slowly, and notes every token that it draws."""
    lab = make_lab(tmp_path)
    lab.script_engine(token_s=TOKEN_S, stop_probability=0.0005, tally=str(tmp_path / "tally"))
    return lab


def settings() -> dict[str, dict[str, Any]]:
    return {
        "run": {"num_steps": NUM_STEPS},
        "generation": {"max_completion_tokens": MAX_TOKENS, "max_num_seqs": 64},
        "admission": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE},
        "trainer": {"token_budget": 1024},
        "buffer": {"partial_interval_tokens": INTERVAL_TOKENS},
        "checkpoint": {"every_steps": 1000},
        "transport": {"dead_after_s": 6.0},
    }


def run_file(lab: Lab, name: str) -> Path:
    return lab.run_file(name, **settings())


def drawn(lab: Lab) -> Counter[tuple[int, int, int]]:
    """How often each (group, sample, position) was drawn."""
    return Counter(token[:3] for token in tokens(lab))


def tokens(lab: Lab) -> list[tuple[int, int, int, int]]:
    """(group, sample, position, pid of who drew it) of each token."""
    lines = (lab.root / "tally").read_text().splitlines() if (lab.root / "tally").exists() else []
    return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]


def is_in_the_middle(lab: Lab, pid: int) -> bool:
    """Whether this generator has drawn some tokens of a member, and is to draw more."""
    own = Counter((group, sample) for group, sample, _, drawer in tokens(lab) if drawer == pid)
    return any(number < MAX_TOKENS for number in own.values())


def wait_for_tokens(run: Run, lab: Lab, least: int) -> None:
    """Until `least` tokens were drawn in all and no report is late: at most 2/3 of an interval are not on disk."""

    def are_there(_: object) -> bool:
        known, _ = read_partials(run.layout.rollouts)
        num_known = sum(len(partial.tokens.token_ids) for partial in known.values())
        return total(lab) >= least and total(lab) - num_known <= IN_FLIGHT * INTERVAL_TOKENS * 2 / 3

    run.wait_until(are_there)


@pytest.mark.long
def test_the_death_of_a_generator_costs_at_most_an_interval_of_each_rollout(lab: Lab) -> None:
    layout = lab.layout("bereft")
    with Run(run_file(lab, "bereft"), layout) as run:
        run.wait_until(lambda _: total(lab) > 0)
        generator = run.role("generator")  # to find it takes a while
        wait_for_tokens(run, lab, IN_FLIGHT * 2 * INTERVAL_TOKENS)
        generator.kill()
        running = members(drawn(lab))
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert_little_was_sampled_again(lab, layout, running)
    assert json.loads(layout.summary.read_text())["tokens_lost"] <= len(running) * INTERVAL_TOKENS


def test_the_death_of_everything_at_once_costs_at_most_an_interval_of_each_rollout(lab: Lab) -> None:
    layout = lab.layout("razed")
    with Run(run_file(lab, "razed"), layout) as run:
        run.wait_until(lambda _: total(lab) > 0)
        everything = [*(run.role(role) for role in ("controller", "generator", "trainer")), run.process]
        wait_for_tokens(run, lab, IN_FLIGHT * 2 * INTERVAL_TOKENS)
        for process in everything:
            process.kill()
        run.process.wait()
        running = members(drawn(lab))
    with Run(run_file(lab, "razed"), layout, "--resume") as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        assert "rollouts go on from" in run.story()
    assert_little_was_sampled_again(lab, layout, running)


def test_a_generator_goes_on_while_the_controller_is_replaced_and_draws_no_token_twice(lab: Lab) -> None:
    """The next controller finds its reports on disk, and what it has sampled since in its first report."""
    with Attempts(lab, "orphans", **settings()) as run:
        run.begin()
        run.start("controller-0", "trainer-0")
        run.start("generator-0", "reward-0")
        run.wait_until(lambda: total(lab) >= IN_FLIGHT * INTERVAL_TOKENS, "tokens")
        run.kill("controller-0", "trainer-0")
        killed_at = total(lab)
        run.wait_until(lambda: total(lab) >= killed_at + IN_FLIGHT * INTERVAL_TOKENS, "tokens that no controller sees")
        run.begin()
        run.start("controller-0", "trainer-0")
        assert run.status_of("controller-0") == 0, run.story()
        assert run.status_of("generator-0") == 0, run.story()
        assert max(drawn(lab).values()) == 1, run.story()
        assert_full_batches_trained_once(run.layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_generator_that_is_told_to_leave_hands_back_every_token(lab: Lab, number: signal.Signals) -> None:
    sections = settings()
    sections["generation"]["num_replicas"] = 2
    with Attempts(lab, "left", **sections) as run:
        run.begin()
        run.start("controller-0", "trainer-0", "reward-0", "generator-0", "generator-1")
        run.wait_until(lambda: is_in_the_middle(lab, run.pid("generator-0")), "tokens of generator-0")
        run.signal("generator-0", number)
        assert run.status_of("generator-0") == 0, run.story()
        assert run.status_of("controller-0") == run.status_of("generator-1") == 0, run.story()
        [handed_back] = re.findall(r"(\d+) rollouts handed back", run.log("generator-0"))
    assert int(handed_back) > 0
    assert max(drawn(lab).values()) == 1, "another generator has drawn a token again"
    assert_full_batches_trained_once(run.layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)


def total(lab: Lab) -> int:
    """Tokens that were drawn."""
    return len(tokens(lab))


def members(tally: Counter[tuple[int, int, int]]) -> set[tuple[int, int]]:
    return {(group, sample) for group, sample, _ in tally}


def assert_little_was_sampled_again(lab: Lab, layout: RunLayout, running: set[tuple[int, int]]) -> None:
    """running: members that had tokens at the death."""
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
    again = Counter((group, sample) for (group, sample, _), count in drawn(lab).items() if count > 1)
    assert sum(again.values()) <= len(running) * INTERVAL_TOKENS, again
    assert max(again.values(), default=0) <= INTERVAL_TOKENS + 2 / TOKEN_S  # a report may be on its way for long
    for row in rollouts_on_disk(layout.rollouts):  # nothing is missing or stands twice, nothing is put together wrong
        positions = {
            position for group, sample, position in drawn(lab) if (group, sample) == (row.group_id, row.sample_index)
        }
        assert len(row.token_ids) == len(positions) == max(positions) + 1
        assert row.versions.tolist() == sorted(row.versions.tolist())
    assert not partial_paths(layout.rollouts)  # nothing is running any more
    assert read_partials(layout.rollouts) == ({}, [])
