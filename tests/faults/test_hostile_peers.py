"""A sample of `make soak-hostile`: mutated frames and hostile connections, and that it would notice if they got in."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec
import pytest

from bench.hostile import frames
from bench.hostile.__main__ import besiege
from bench.hostile.mutants import Breeder
from bench.hostile.specimens import all_codec, make_specimens
from bench.hostile.victim_link import Friend, Victim
from rlhpc.base.patience import Deadline
from rlhpc.transport.codec import Allowance
from tests.patience import PATIENCE_S

NUM_FRAMES, NUM_CONNECTIONS = 3_000, 200
NUM_SEEN = 3_000  # mutants among which there are some of every kind


@pytest.mark.starts
def test_neither_mutated_frames_nor_hostile_connections_get_through_and_nobody_honest_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert besiege(tmp_path, NUM_FRAMES, NUM_CONNECTIONS, seed=5) == []
    told = capsys.readouterr().out
    assert "delivered 0" in told
    assert told.count("escaped exceptions      0") == 2


@pytest.mark.starts
def test_a_server_that_delivers_less_than_it_should_is_noticed(tmp_path: Path) -> None:
    """Or it would be enough to deliver nothing at all."""
    with Victim(tmp_path) as victim, frames.Traitor(victim, frames.TOPOLOGY["leases"]) as traitor:
        breeder = Breeder(*make_specimens(all_codec()), seed=1)
        for _ in range(50):
            traitor.send_honestly(breeder.honest(traitor.next_sequence))
        assert traitor.accounts() == []
        for _ in range(50):
            traitor.expect(breeder.honest(traitor.next_sequence), is_altered=False)
        assert "should have" in "".join(traitor.accounts(patience_s=0.1))


@pytest.mark.starts
def test_silent_strangers_beyond_the_usual_limit_of_open_files_keep_nobody_from_working(tmp_path: Path) -> None:
    with Victim(tmp_path, num_files=100) as victim, Friend(victim) as friend, contextlib.ExitStack() as stack:
        host, port = victim.addresses["control"].removeprefix("tcp://").split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        report = victim.wait(lambda report: report["num_fds"] > 300, PATIENCE_S)  # which opens a file
        assert report["num_fds"] > 300
        num_answers = len(friend.latencies_s)
        assert Deadline(PATIENCE_S).wait_for(lambda: len(friend.latencies_s) > num_answers, 0.01)
    assert friend.trouble == ""


class Whatever(int):
    """A checksum that is right."""

    def __ne__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("name", "harmless"),
    [
        ("crc32", lambda frame, before=0: Whatever()),
        ("_Source.finish", lambda source: None),
        ("_MALFORMED", (msgspec.MsgspecError,)),
    ],
    ids=["checksums", "what is left over", "errors of numpy"],
)
def test_a_codec_that_checks_less_is_found_out(name: str, harmless: object, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = all_codec()
    breeder = Breeder(*make_specimens(codec), seed=2)
    mutants = [breeder.next(0) for _ in range(NUM_SEEN)]
    sound, tally = frames.Tally(), frames.Tally()
    for mutant in mutants:
        frames.judge(codec, mutant, sound)
    assert sound.violations == []
    monkeypatch.setattr(f"rlhpc.transport.codec.{name}", harmless)
    for mutant in mutants:
        frames.judge(codec, mutant, tally)
    assert tally.violations


def test_forged_runs_of_a_gigabyte_are_among_the_mutants_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    covers = Allowance.covers

    def watched(allowance: Allowance, nbytes: int) -> bool:
        asked.append(nbytes)
        return covers(allowance, nbytes)

    codec = all_codec()
    breeder = Breeder(*make_specimens(codec), seed=2)
    mutants = [breeder.next(0) for _ in range(10 * NUM_SEEN)]  # rarer than others
    monkeypatch.setattr(Allowance, "covers", watched)
    tally = frames.Tally()
    for mutant in mutants:
        frames.judge(codec, mutant, tally)
    assert max(asked) >= 1 << 30
    assert tally.violations == []
