import pytest

from rlhpc.protocol.errors import RoleFailed, StarvedError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.outcomes import QUARANTINED, ErrorGate


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


@pytest.mark.parametrize(("other", "waits"), [("invalid", False), ("raised", True), ("timed_out", True), ("", True)])
def test_what_is_no_reward_each_time_is_not_waited_for(other, waits):
    gate = ErrorGate(0.5, window=10, patience_s=120.0, clock=lambda: 0.0)
    for failure in [other, *["invalid"] * 5]:
        gate.count(Verdict.VERIFIER_ERROR if failure else Verdict.WRONG, "not list", failure)
    gate.count(Verdict.VERIFIER_ERROR, "not list", "invalid")
    if waits:
        gate.check()
        assert gate.is_waiting
    else:
        with pytest.raises(StarvedError, match=r"7 of the last 7 verdicts.*invalid 7.*not list"):
            gate.check()


def test_errors_that_are_alike_are_said_once():
    gate = ErrorGate(0.2, window=10)
    for detail in ("second", "first", "first", "first", "first"):
        gate.count(Verdict.VERIFIER_ERROR, detail)
    with pytest.raises(RoleFailed, match=r"the latest: second; first$"):
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
    said = r"6 of .*\(window 10; quarantined 3, agent died 2, timed out 1\).*-quarantine; the latest: .*record 3"
    with pytest.raises(RoleFailed, match=said):
        gate.check()
    gate.count_refused(
        QUARANTINED, "record 3: 5 reward workers died judging it"
    )  # most are refusals: another attempt would not help
    with pytest.raises(StarvedError):
        gate.check()


class Waiting:
    """A gate of a tenth of ten verdicts that is patient for a minute, and its clock."""

    def __init__(self, max_share: float = 0.1) -> None:
        self.now_s = 1000.0
        self.gate = ErrorGate(max_share, window=10, patience_s=60.0, clock=lambda: self.now_s)

    def fail(self, times: int = 2, *, after_s: float = 0.0, most_in_a_row: int = 0) -> None:
        self.now_s += after_s
        for _ in range(times):
            self.gate.count(Verdict.VERIFIER_ERROR, "no tool server", "raised")
            self.gate.check(most_in_a_row)

    def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            self.gate.count(Verdict.WRONG)
            self.gate.check()

    def leases(self, seconds: int) -> list[int]:
        """Grant whatever may be granted; returns the seconds at which there was one."""
        granted = []
        for second in range(1, seconds + 1):
            self.now_s += 1.0
            if self.gate.may_lease("generator-0"):
                self.gate.lease_granted()
                self.fail(1)
                granted.append(second)
        return granted


def test_what_fails_for_a_while_is_waited_for_with_few_leases_and_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting()
    waiting.succeed(5)
    assert waiting.gate.may_lease("generator-0")
    waiting.fail(30)
    assert waiting.leases(50) == [1, 3, 7, 15, 25, 35, 45]
    assert waiting.gate.document() | {"causes": {}} == {
        "causes": {}, "latest": "no tool server", "waited_s": 50, "patience_s": 60.0
    }  # fmt: skip
    assert waiting.gate.error_share == 1.0
    waiting.succeed()
    assert waiting.gate.may_lease("generator-0")
    assert "waited_s" not in waiting.gate.document()
    waiting.fail(1)  # no more than are tolerated
    waiting.succeed(9)
    waiting.fail(2, after_s=100.0)  # another time, with patience of its own
    assert not waiting.gate.may_lease("generator-0")
    waiting.succeed(2)
    waiting.now_s += 30.0
    waiting.succeed(1)
    waiting.fail(2, after_s=100.0)
    assert not waiting.gate.may_lease("generator-0")
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith(
        "2 of the last 7 verdicts are verifier errors (window 10; raised 2): waiting for up to 60 s "
        "(rewards.error_patience_s); the latest: no tool server"
    )
    assert said[1] == "there are verdicts again, after 50 s"


def test_what_fails_for_good_is_tried_for_so_long_and_then_without_a_pause_until_the_run_ends() -> None:
    waiting = Waiting()
    waiting.fail()
    assert waiting.leases(59)[-1] == 55
    waiting.fail(1, after_s=1.0)
    assert waiting.gate.may_lease("generator-0")
    with pytest.raises(
        StarvedError, match=r"2 of the last 2 verdicts .*raised 2\), 60 s after the first.*tool server$"
    ):
        waiting.fail(1)


@pytest.mark.parametrize("num_verdicts", [1, 5])
def test_a_verdict_now_and_then_makes_nobody_wait_for_longer(num_verdicts: int) -> None:
    waiting = Waiting()
    for _ in range(60):
        waiting.fail(2, after_s=1.0)
        waiting.succeed(num_verdicts)
    with pytest.raises(StarvedError, match="60 s after the first"):
        waiting.fail(2, after_s=1.0)


def test_who_tolerates_every_error_waits_too_where_there_is_none_but_errors() -> None:
    waiting = Waiting(max_share=1.0)
    waiting.fail(12, most_in_a_row=12)
    assert not waiting.gate.may_lease("generator-0")
    with pytest.raises(StarvedError, match=r"12 errors in a row .* 60 s after the first: no batch can be filled"):
        waiting.fail(12, after_s=60.0, most_in_a_row=12)


def test_nobody_waits_for_prompts_that_are_refused() -> None:
    waiting = Waiting()
    waiting.gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    waiting.gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    with pytest.raises(StarvedError, match=r"quarantined 2\), so rewards say nothing"):
        waiting.gate.check()


def test_a_generator_on_which_everything_fails_while_others_have_verdicts_gets_a_share_of_leases_that_shrinks() -> None:
    waiting = Waiting(max_share=1.0)
    gate, paused = waiting.gate, []
    for second in range(100):
        waiting.now_s += 1.0
        waiting.succeed(20)  # of another one
        if not gate.may_lease("generator-1"):
            paused.append(second)
            continue
        for _ in range(8):
            gate.count(Verdict.VERIFIER_ERROR, "no such program", "agent_raised", "generator-1")
    free = [second for second in range(100) if second not in paused]
    assert free == [0, 1, 2, 4, 8, 16, 32, 64]
    assert gate.may_lease("generator-0")
    assert gate.document()["paused"] == ["generator-1"]
    gate.count(Verdict.WRONG, holder="generator-1")
    assert gate.may_lease("generator-1")
    assert "paused" not in gate.document()


def test_the_only_generator_is_never_paused() -> None:
    waiting = Waiting(max_share=1.0)
    for _ in range(50):
        waiting.succeed(1)
        waiting.fail(8)
        assert waiting.gate.may_lease("")
