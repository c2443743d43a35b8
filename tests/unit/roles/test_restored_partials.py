"""Which partial rollouts of earlier attempts a controller goes on from when it begins again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Admitted, Began, open_journal
from rlhpc.buffer.prefixes import PartialLog
from rlhpc.roles.controller.state import _restore
from rlhpc.roles.lifecycle import RoleContext
from tests.unit.buffer.partial_samples import make_draft, piece_of
from tests.unit.launch.audit_runs import CountedPrompts
from tests.unit.roles.small_ring import make_buffer, small_config


@pytest.mark.parametrize(("goes_on", "num_tokens"), [(True, 6), (False, 0)])
def test_what_was_sampled_before_the_run_started_over_is_not_gone_on_from(
    tmp_path: Path, goes_on: bool, num_tokens: int
) -> None:
    layout = RunLayout(tmp_path)
    layout.rollouts.mkdir()
    for attempt, began in enumerate((Began(0, 0, True, 0), Began(0, 0, goes_on, 0))):
        journal = open_journal(layout, "small", attempt, 0, None)
        journal.note(began)
        journal.note(Admitted(0, 0, 0))
        journal.commit()
        journal.close()
    draft = replace(make_draft(0, 6), versions=np.zeros(6, np.int32))
    PartialLog(layout.rollouts, 0).begin([piece_of(draft, 0, 6)])
    config = small_config()
    buffer = make_buffer(config, tmp_path / "new")
    context = RoleContext("controller", 0, 1, 2, None, "third", layout, config, "")
    _restore(context, None, 0, buffer, CountedPrompts(1))  # type: ignore[arg-type]
    prefix = buffer.open_record(0).members[0].prefix
    assert (0 if prefix is None else len(prefix.token_ids)) == num_tokens
