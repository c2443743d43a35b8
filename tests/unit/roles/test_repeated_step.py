"""A step that is trained again is compared with what was recorded of it, as exactly as that can be repeated."""

from __future__ import annotations

import pytest

from rlhpc.buffer.history import RecordedStep, Trained
from rlhpc.protocol.messages import StepReport
from rlhpc.roles.controller.train_loop import compare


@pytest.mark.parametrize(
    ("grad_norm", "exact", "is_told"),
    [(0.8666, False, False), (0.8693, False, False), (0.88, False, True), (0.8666, True, False), (0.8667, True, True)],
)
def test_a_step_in_parts_may_have_another_rounding_when_it_is_repeated_as_a_whole(
    grad_norm: float, exact: bool, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    then = Trained(3, 3, True, {"loss": 0.01, "grad_norm": 0.8666}, "", (), None)
    now = StepReport(3, 4, True, {"loss": 0.01, "grad_norm": grad_norm})
    compare(RecordedStep(3, (1, 2), then), [1, 2], 3, now, exact=exact)
    assert ("went differently: grad_norm" in caplog.text) == is_told
