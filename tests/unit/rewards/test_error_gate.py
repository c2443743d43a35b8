import pytest

from rlhpc.errors import RoleFailed, StarvedError
from rlhpc.rewards.error_gate import QUARANTINED, ErrorGate
from rlhpc.types import Verdict


def count(gate: ErrorGate, verdict: Verdict, times: int, detail: str = "") -> None:
    for _ in range(times):
        gate.count(verdict, detail)


def test_a_first_unlucky_verdict_does_not_stop_a_run():
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 2)
    gate.check()
    assert gate.error_share == 1.0


def test_a_verifier_that_always_fails_is_found_before_the_window_is_full():
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 3, "ValueError: no such book")
    with pytest.raises(RoleFailed, match=r"(?s)max_error_share=0.2: 3 of the last 3.*no such book"):
        gate.check()


def test_errors_that_are_alike_are_said_once():
    gate = ErrorGate(0.2, window=10)
    for detail in ("first", "second", "first"):
        gate.count(Verdict.VERIFIER_ERROR, detail)
    with pytest.raises(RoleFailed, match=r"the latest: first; second$"):
        gate.check()


def test_only_the_last_verdicts_count():
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 2)
    count(gate, Verdict.WRONG, 10)
    assert gate.error_share == 0.0
    count(gate, Verdict.VERIFIER_ERROR, 2)
    gate.check()
    count(gate, Verdict.VERIFIER_ERROR, 1)
    with pytest.raises(RoleFailed):
        gate.check()


def test_wrong_answers_never_close_the_gate():
    gate = ErrorGate(0.0, window=10)
    count(gate, Verdict.WRONG, 50)
    count(gate, Verdict.CORRECT, 50)
    gate.check()
    assert ErrorGate(0.0).error_share == 0.0


def test_a_limit_of_one_lets_everything_pass():
    gate = ErrorGate(1.0, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 100)
    gate.check()


def test_the_message_counts_errors_by_their_cause():
    gate = ErrorGate(0.5, window=10)
    for failure in ("agent_died", "timed_out", "agent_died"):
        gate.count(Verdict.VERIFIER_ERROR, "exit status 1: HTTP 400", failure)
    gate.count(Verdict.WRONG)
    for _ in range(3):
        gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    said = (
        r"6 of the last 7 verdicts .*\(window 10; quarantined 3, agent died 2, timed out 1\).*record 3: .*-quarantine$"
    )
    with pytest.raises(RoleFailed, match=said):
        gate.check()
    gate.count_refused(
        QUARANTINED, "record 3: 5 reward workers died judging it"
    )  # most are refusals: another attempt would not help
    with pytest.raises(StarvedError):
        gate.check()
