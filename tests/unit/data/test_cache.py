"""What is kept between commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.data.record_source import cached


def test_work_is_done_once_for_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path))
    made: list[str] = []

    def make() -> bytes:
        made.append("again")
        return b"result"

    for made_of in ("one", "one", "another"):
        assert cached("kind", made_of, make) == b"result"
    assert len(made) == 2
    assert len(list((tmp_path / "kind").iterdir())) == 2


def test_a_cache_that_cannot_be_written_keeps_nobody_from_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, where a directory should be")
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "cache"))
    assert cached("kind", "one", lambda: b"result") == b"result"


def test_it_lies_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHPC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached("kind", "one", lambda: b"result")
    assert list((tmp_path / "rlhpc" / "kind").iterdir())


def test_what_is_of_no_use_any_more_is_made_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path))
    assert cached("kind", "one", lambda: b"") == b""
    assert cached("kind", "one", lambda: b"whole", is_whole=bool) == b"whole"
    assert cached("kind", "one", lambda: b"other", is_whole=bool) == b"whole"
