"""Runs whose engines and trainer take a known time, by sleeping: others on the machine change it little.

Input: generators and a bound on staleness.  Output: a complete run.  Engines: a token of each rollout every TOKEN_S.
The trainer: TRAINED_TOKEN_S for each token of the batch, and its arithmetic on a tiny model beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhpc.base.run_directory import RunLayout
from tests.ring.run_kit import Lab, Run, make_lab
from tests.ring.sleeping_loss import SLEEP

TOKEN_S = 0.02
STOP_PROBABILITY = 0.03
TRAINED_TOKEN_S = 0.0008
LONGEST = 64
LONGEST_S = 3600.0  # of a run, on a machine that is busy


def make_timed_lab(root: Path, slowness: float = 1.0) -> Lab:
    """As make_lab; its engines take so many times TOKEN_S."""
    lab = make_lab(root)
    lab.script_engine(token_s=slowness * TOKEN_S, stop_probability=STOP_PROBABILITY)
    return lab


def timed_run(lab: Lab, name: str, *, generators: int, max_staleness: int, num_steps: int) -> RunLayout:
    """24 rollouts a step, 8 at once a generator; the trainer takes its time where the caller is in `slow_trainers`."""
    run_file = lab.run_file(
        name,
        run={"num_steps": num_steps},
        generation={"num_replicas": generators, "max_num_seqs": 8, "max_completion_tokens": LONGEST},
        admission={"groups_per_step": 6, "group_size": 4, "max_staleness": max_staleness},
        algorithm={"loss": "tests.ring.sleeping_loss:loss"},
        trainer={"token_budget": 2048},
        checkpoint={"every_steps": 1000},
    )
    with Run(run_file, lab.layout(name)) as run:
        assert run.finish(LONGEST_S) == 0, run.story()
    return lab.layout(name)


@contextmanager
def slow_trainers(token_s: float = TRAINED_TOKEN_S) -> Iterator[None]:
    """Trainers that are started meanwhile take so long for a token."""
    before = os.environ.get(SLEEP)
    os.environ[SLEEP] = str(token_s)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SLEEP]
        else:
            os.environ[SLEEP] = before
