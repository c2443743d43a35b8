"""Dozens of tasks in containers at once, a third of them hostile: nothing gets out, and nothing is left."""

import pytest

from bench.containers import HOSTILE, Tasks, a_root

NUM_TASKS = 3 * len(HOSTILE)


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.timeout(600)
def test_hostile_tasks_reach_nothing_outside_and_leave_nothing():
    with a_root() as (root, node):
        tally = Tasks(root, node).run(NUM_TASKS, 8)
    assert tally.kinds == {"good": NUM_TASKS - len(HOSTILE), **dict.fromkeys(HOSTILE, 1)}
    assert (tally.escapes, tally.leftovers, tally.wrong) == ([], [], [])
