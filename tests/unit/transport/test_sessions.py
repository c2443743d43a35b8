from __future__ import annotations

import pytest

from rlhpc.protocol.errors import PeerUnreachable, ProtocolError
from rlhpc.transport.sessions import PeerBook, SequenceCheck, Session, peer_name


def opened(name: str = "generator-0", incarnation: str = "first") -> bytes:
    return Session.open(name, incarnation).routing_id


def hear(book: PeerBook, routing_id: bytes, sequence: int, user_id: str | None = None) -> str:
    """What the server does for every message."""
    name = book.name_of(routing_id, user_id)
    book.accept(routing_id, sequence)
    return name


def test_a_session_survives_the_way_through_a_routing_id():
    session = Session.open("generator-12", "4711.0-1-uuid")
    assert Session.parse(session.routing_id) == session
    assert len(session.routing_id) < 255  # ZeroMQ's limit


@pytest.mark.parametrize("incarnation", ["", "a/b", "ä", "x" * 121, "a b", "a\n"])
def test_an_incarnation_that_cannot_travel_is_refused(incarnation: str):
    with pytest.raises(ValueError, match="incarnation"):
        Session.open("generator-0", incarnation)


@pytest.mark.parametrize("routing_id", [b"", b"\0abcd", b"generator-0", b"generator-0/x/1", b"\xff" * 40])
def test_other_routing_ids_are_no_sessions(routing_id: bytes):
    with pytest.raises(ProtocolError):
        PeerBook().name_of(routing_id, None)


def test_a_name_that_cannot_be_one_is_refused():
    assert peer_name("generator", 1) == "generator-1"
    with pytest.raises(ValueError, match="generator/0"):
        peer_name("generator/0", 1)


def test_a_gap_is_counted_and_a_copy_refused():
    check = SequenceCheck()
    for sequence in (0, 1, 4):
        check.accept(sequence, "peer")
    assert check.lost == 2
    for sequence in (4, 2, 0):
        with pytest.raises(ProtocolError, match="duplicate or late"):
            check.accept(sequence, "peer")
    check.accept(5, "peer")
    assert check.lost == 2


def test_a_loss_before_the_first_message_is_counted_too():
    book = PeerBook()
    hear(book, opened(), 3)
    assert book.lost == 3


def test_a_restarted_peer_begins_anew_and_its_old_incarnation_is_fenced():
    book = PeerBook()
    old, new = opened(incarnation="first"), opened(incarnation="second")
    hear(book, old, 0)
    hear(book, old, 2)
    hear(book, new, 0)
    assert book.find("generator-0").routing_id == new
    with pytest.raises(ProtocolError, match="a newer one has replaced it"):
        hear(book, old, 3)
    with pytest.raises(ProtocolError, match="a newer one has replaced it"):
        hear(book, opened(incarnation="first"), 0)  # the zombie opens its channel again
    hear(book, new, 1)
    assert book.lost == 1  # counted for good
    assert book.names == {"generator-0"}


def test_a_peer_that_opens_its_channel_again_begins_anew():
    book = PeerBook()
    first, again = opened(), opened()
    hear(book, first, 0)
    hear(book, again, 0)
    with pytest.raises(ProtocolError):
        hear(book, first, 1)
    hear(book, again, 1)
    assert book.lost == 0


def test_an_earlier_start_is_fenced_though_it_was_never_heard():
    book = PeerBook()
    hear(book, opened(incarnation="9.0.1-b"), 0)
    for incarnation in ("9.0.0-a", "8.7.0-c"):
        for _ in range(2):
            with pytest.raises(ProtocolError, match="a newer one has replaced it"):
                book.name_of(opened(incarnation=incarnation), None)
    hear(book, opened(incarnation="9.0.1-a"), 0)  # equal in order: the newest wins, whatever its text
    hear(book, opened(incarnation="10.0.0-a"), 0)  # numbers, not text
    with pytest.raises(ProtocolError):
        book.name_of(opened(incarnation="9.5.0-a"), None)
    assert book.name_of(opened("generator-1", "9.5.0-a"), None) == "generator-1"  # another name's order is its own


def test_an_incarnation_without_order_takes_over_and_does_not_unfence_the_earlier():
    book = PeerBook()
    for incarnation in ("2.0.0-a", "x"):
        hear(book, opened(incarnation=incarnation), 0)
    with pytest.raises(ProtocolError):
        book.name_of(opened(incarnation="1.0.0-b"), None)
    hear(book, opened(incarnation="2.0.1-b"), 0)


def test_peers_are_numbered_apart():
    book = PeerBook()
    one, two = opened("generator-1"), opened("generator-2")
    for sequence in range(3):
        assert hear(book, one, sequence, "generator-1") == "generator-1"
        assert hear(book, two, sequence, "generator-2") == "generator-2"
    assert book.lost == 0


def test_a_key_speaks_under_its_own_name_only():
    book = PeerBook()
    hear(book, opened("generator-1"), 0, "generator-1")
    with pytest.raises(ProtocolError, match="generator-1: routing id: claims to be generator-2") as error:
        book.name_of(opened("generator-2"), "generator-1")
    assert error.value.peer == "generator-1"
    assert book.names == {"generator-1"}


def test_who_is_missing_is_said_beside_who_is_there():
    book = PeerBook()
    hear(book, opened("generator-1"), 0)
    with pytest.raises(PeerUnreachable, match="generator-2 is not connected; generator-1 is"):
        book.find("generator-2")
