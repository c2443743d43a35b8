"""Files and the owner of a run directory: what a file server, a power cut, others and a stale process may do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from launch.run_directory.prepare import AttemptStart, note_attempt, num_attempts, prepare_run_dir
from rlhpc.base import ownership
from rlhpc.base.files import KEEP_CORE_FILES, append_lines, openness, rename, write_atomically
from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.log import make_file
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.segments import set_aside_lost_segments, write_sealed
from rlhpc.protocol.errors import CheckpointError, OwnershipLost, RunDirectoryError, SegmentError
from rlhpc.training.checkpoint_directory import AttemptTimeline, Fate, begin, complete, latest_complete, set_aside
from tests.full_disk import fill, small_disk
from tests.unit.buffer.rollout_samples import make_prompt
from tests.unit.launch.site_kit import config_of

# ----------------------------------------------------- What a file server may answer to a request that it has got twice


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in (layout.rollouts, layout.checkpoints):
        directory.mkdir(parents=True)
    return layout


@pytest.fixture
def fence(layout: RunLayout) -> Fence:
    return Fence.take(layout, 0)


def asked_twice(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Each of these calls is made twice, and has the second answer."""
    for name in names:
        monkeypatch.setattr(os, name, _twice(getattr(os, name)))


def _twice(call: Callable[..., None]) -> Callable[..., None]:
    def twice(*arguments: object, **settings: object) -> None:
        call(*arguments, **settings)
        call(*arguments, **settings)

    return twice


def test_a_file_that_the_server_has_renamed_is_written_though_it_finds_no_source_when_asked_again(
    layout: RunLayout, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_twice(monkeypatch, "rename", "replace")
    for text in (b"first", b"second"):
        write_atomically(layout.attempt, text)
        fence.write(layout.status, text)
        assert layout.attempt.read_bytes() == layout.status.read_bytes() == text
    os.close(make_file(layout.rollouts / "journal_000000.log", b"abc", fence))
    assert (layout.rollouts / "journal_000000.log").read_bytes() == b"abc"


def test_a_segment_and_a_checkpoint_that_the_server_has_renamed_are_no_failures_for_ever(
    layout: RunLayout, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next try finds the name taken, as if by another controller, and every one after it."""
    asked_twice(monkeypatch, "rename", "replace")
    write_sealed(layout.segment(0), b"groups", staging=fence.staging(layout.rollouts))
    assert layout.segment(0).read_bytes() == b"groups"
    temporary = begin(layout.checkpoint(4), fence.staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    complete(temporary, layout.checkpoint(4), {"step": 4})
    assert latest_complete(layout.checkpoints) == (4, layout.checkpoint(4))


def test_two_writers_of_one_file_are_in_nobodys_way_though_their_processes_have_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, or in two threads."""
    path, real = tmp_path / "file", Path.replace
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def after_another(self: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        write_atomically(path, b"of the other")
        assert path.read_bytes() == b"of the other"
        return real(self, to)

    monkeypatch.setattr(Path, "replace", after_another)
    write_atomically(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_source_that_is_gone_is_not_taken_for_what_already_had_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the file system has given the number of its inode to the other file."""
    source, target, real = tmp_path / "source", tmp_path / "target", Path.replace
    source.write_bytes(b"ours")

    def after_another(self: Path, to: Path) -> Path:
        source.unlink()
        to.write_bytes(b"theirs, in the inode that came free")
        return real(self, to)

    monkeypatch.setattr(Path, "replace", after_another)
    with pytest.raises(FileNotFoundError):
        rename(source, target)
    assert target.read_bytes().startswith(b"theirs")


def test_a_run_is_taken_over_though_the_server_says_that_its_new_directories_exist(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_twice(monkeypatch, "mkdir")
    Fence.take(layout, 0).write(layout.status, b"of the new owner")
    assert layout.status.read_bytes() == b"of the new owner"


@pytest.mark.starts
@pytest.mark.parametrize("write", [write_atomically, append_lines])
def test_where_the_disk_is_full_the_error_names_the_file(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    """os.write and os.fsync do not: "No space left on device" alone sends nobody to the right disk."""
    file = tmp_path / "full" / "config.json"
    file.parent.mkdir()
    with small_disk(file.parent, 1 << 20):
        fill(file.parent / "filler", but_bytes=0)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write(file, b"content")
        assert caught.value.filename == str(file)


# ---------------------------------------------------------------------------------------------- What a power cut leaves

# No power is cut: real files are written, and what was handed to fsync is compared with what there is.


class Disk:
    """Knows which files and directories are on disk as they are, and what was renamed that was not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed_too_early: list[str] = []
        self._synced: dict[tuple[int, int], tuple[int, int]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._looked_at(getattr(os, name)))

    def lost(self, path: Path) -> list[str]:
        """What a power cut would take away of this path: its name, or content of it."""
        return [str(each) for each in (path.parent, *_all_below(path)) if not self._is_synced(each)]

    def _note(self, descriptor: int) -> None:
        self._fsync(descriptor)
        _, key, stamp = _facts(os.fstat(descriptor))
        self._synced[key] = stamp

    def _is_synced(self, path: Path) -> bool:
        _, key, stamp = _facts(path.stat())
        return self._synced.get(key) == stamp

    def _looked_at(self, rename: Callable[..., None]) -> Callable[..., None]:
        def call(source: str | Path, target: str | Path) -> None:
            # Renaming a directory changes its own times on some file systems: look before.
            lost = [path for path in _all_below(Path(source)) if not self._is_synced(path)]
            self.renamed_too_early += [f"{path}, when it became {target}" for path in lost]
            rename(source, target)

        return call


def _all_below(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _facts(state: os.stat_result) -> tuple[int, tuple[int, int], tuple[int, int]]:
    return state.st_mode, (state.st_dev, state.st_ino), (state.st_size, state.st_mtime_ns)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def replace_file(fence: Fence) -> Path:
    write_atomically(fence.layout.root / "inputs.json", b"old")
    write_atomically(fence.layout.root / "inputs.json", b"new")
    return fence.layout.root / "inputs.json"


def replace_file_as_owner(fence: Fence) -> Path:
    fence.write(fence.layout.status, b"{}")
    return fence.layout.status


def seal_segment(fence: Fence) -> Path:
    path = fence.layout.segment(0)
    write_sealed(path, b"rollouts" * 1000, staging=fence.staging(path.parent))
    return path


def set_segment_aside(fence: Fence) -> Path:
    path = seal_segment(fence)
    return set_aside_lost_segments(path.parent, 0, 1)[0]


def complete_checkpoint(fence: Fence) -> Path:
    final = fence.layout.checkpoint(7)
    temporary = begin(final, fence.staging(final.parent))
    (temporary / "trainer").mkdir()
    (temporary / "trainer" / "weights-00001.safetensors").write_bytes(b"weights" * 1000)
    (temporary / "controller.json").write_bytes(b"{}")
    complete(temporary, final, {"step": 7})
    return final


def set_checkpoint_aside(fence: Fence) -> Path:
    return set_aside(complete_checkpoint(fence), Fate.UNDONE)


def record_lost_lease(fence: Fence) -> Path:
    book = LostLeases()
    book.record_death([(make_prompt(1), 1)])
    LostLeaseFile(fence.layout.lost_leases, fence).append(book)
    return fence.layout.lost_leases


def note_an_attempt(fence: Fence) -> Path:
    note_attempt(fence.layout, AttemptStart(0, None, fence.owner))
    note_attempt(fence.layout, AttemptStart(1, 4, fence.owner))
    return fence.layout.attempts


@pytest.mark.parametrize(
    "write",
    [
        replace_file, replace_file_as_owner, seal_segment, set_segment_aside, complete_checkpoint,
        set_checkpoint_aside, record_lost_lease, note_an_attempt,
    ],
)  # fmt: skip
def test_what_counts_on_disk_is_there_before_it_has_its_name_and_its_name_before_it_is_reported(
    write: Callable[[Fence], Path], fence: Fence, disk: Disk
) -> None:
    path = write(fence)
    assert disk.renamed_too_early == []
    assert disk.lost(path) == []


def test_a_run_directory_that_was_taken_over_has_its_owner_on_disk(tmp_path: Path, disk: Disk) -> None:
    layout = RunLayout(tmp_path / "run")
    fence = Fence.take(layout, 0)
    assert Fence.holder(layout) == fence.owner
    assert disk.renamed_too_early == []
    assert disk.lost(layout.owner) == []


def test_an_attempt_that_begins_does_not_continue_the_line_of_one_that_a_crash_has_cut_off(
    fence: Fence,
) -> None:
    """Else neither had begun: the next had the number of this one, and checkpoints that it undid would count again."""
    note_attempt(fence.layout, AttemptStart(0, None, fence.owner))
    with fence.layout.attempts.open("a") as file:
        file.write('{"index": 1, "resu')
    note_attempt(fence.layout, AttemptStart(2, 4, fence.owner))
    assert num_attempts(fence.layout) == 3
    assert AttemptTimeline.read(fence.layout.attempts).undone_by(6, 0) == 2


# ----------------------------------- What is said of a run directory that others may read or change, and of core files


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o700, ""), (0o750, "chmod 700"), (0o705, "chmod 700"), (0o711, "chmod 700"), (0o770, "chmod -R go-w"),
        (0o702, "chmod -R go-w"), (0o1777, "chmod -R go-w"),
    ],
)  # fmt: skip
def test_each_right_of_others_has_its_remedy(tmp_path: Path, mode: int, remedy: str) -> None:
    tmp_path.chmod(mode)
    text = openness(tmp_path).text
    assert bool(text) == bool(remedy)
    assert f"`{remedy}" in text or not remedy
    tmp_path.chmod(0o700)


def test_a_directory_that_is_not_there_is_open_to_nobody(tmp_path: Path) -> None:
    assert openness(tmp_path / "run").text == ""


@pytest.mark.starts
def test_a_run_makes_its_directory_for_itself_and_tells_of_one_that_others_may_read(tmp_path: Path) -> None:
    config, told = config_of(f"run.directory={tmp_path / 'run'}"), list[str]()
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False, tell=told.append)
    assert layout.root.stat().st_mode & 0o777 == 0o700
    assert told == []
    layout.root.chmod(0o755)
    prepare_run_dir(config, layout, resume=True, fresh=False, tell=told.append)
    assert [line for line in told if "mode 0755: others may read" in line and "umask 077" in line] == told[:1]


def test_a_directory_that_others_may_change_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    layout.root.mkdir()
    layout.root.chmod(0o775)
    with pytest.raises(RunDirectoryError, match=r"mode 0775: others may change .*`chmod -R go-w "):
        prepare_run_dir(config, layout, resume=False, fresh=False)
    assert list(layout.root.iterdir()) == []


@pytest.mark.parametrize("opened", ["checkpoints", "jobs", "config.json", "rollouts/made.jsonl", "elsewhere"])
@pytest.mark.starts
def test_what_others_may_change_in_a_directory_that_they_may_enter_is_refused_too(tmp_path: Path, opened: str) -> None:
    """`chmod -R g+rwX RUN`, and then `chmod go-w RUN`."""
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    layout.jobs.mkdir()
    (layout.rollouts / "made.jsonl").touch()
    (tmp_path / "elsewhere").mkdir()
    (layout.root / "elsewhere").symlink_to(tmp_path / "elsewhere")  # scratch, perhaps
    path = layout.root / opened
    path.chmod(path.stat().st_mode | 0o070)
    prepare_run_dir(config, layout, resume=True, fresh=False)  # nobody else may enter
    layout.root.chmod(0o750)
    with pytest.raises(RunDirectoryError, match=rf"/{opened} has mode .*: others may .*`chmod -R go-w {layout.root}`"):
        prepare_run_dir(config, layout, resume=True, fresh=False)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.starts
@pytest.mark.usefixtures("open_umask")
def test_in_a_directory_that_others_may_read_they_may_write_nothing_under_any_umask(tmp_path: Path) -> None:
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    layout.root.mkdir(mode=0o755)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    (layout.rollouts / "segment.h5").touch()  # as a library makes it
    assert [path for path in layout.root.rglob("*") if path.stat().st_mode & 0o022] == []


@pytest.mark.starts
@pytest.mark.parametrize(("environment", "is_none"), [({}, True), ({KEEP_CORE_FILES: "1"}, False)])
def test_a_process_with_keys_leaves_no_core_file_unless_it_is_asked_to(
    environment: dict[str, str], is_none: bool
) -> None:
    """The hard limit stays, so that its user can still ask for one."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    code = (
        "import resource, rlhpc.base.files as p; h = resource.getrlimit(resource.RLIMIT_CORE)[1]; "
        "resource.setrlimit(resource.RLIMIT_CORE, (h, h)); p.leave_no_core_file(); "
        "print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    command = [sys.executable, "-c", code]
    root = str(Path(__file__).parents[3])
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root).stdout.split()
    assert out == ["0" if is_none else str(hard), str(hard)]


# ----------------------------------- Who has lost a run directory changes nothing in it any more, whenever it wakes up

ROOT = Path(__file__).parents[3]


def test_the_last_to_take_over_is_the_owner(layout: RunLayout) -> None:
    first, second = Fence.take(layout, 0), Fence.take(layout, 1)
    assert Fence.holder(layout) == second.owner != first.owner
    second.check()
    with pytest.raises(OwnershipLost, match=f"was taken over by {second.owner}; this process belongs to {first.owner}"):
        first.check()


def test_attempts_of_one_number_are_told_apart(layout: RunLayout) -> None:
    """As after --fresh, which counts from 0 again."""
    old, new = Fence.take(layout, 0), Fence.take(layout, 0)
    new.check()
    with pytest.raises(OwnershipLost):
        old.check()


def test_a_directory_that_was_deleted_belongs_to_nobody(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Fence.take(layout, 0)
    layout.owner.unlink()
    monkeypatch.setattr(ownership, "ABSENT_S", 0.0)
    for _ in range(ownership.ABSENT_LOOKS - 1):
        with pytest.raises(FileNotFoundError, match="not there at the moment"):  # one look says nothing
            fence.check()
    with pytest.raises(OwnershipLost, match="taken over, moved or deleted"):
        fence.check()


def test_an_owner_that_is_there_again_was_never_lost(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    fence, content = Fence.take(layout, 0), layout.owner.read_bytes()
    monkeypatch.setattr(ownership, "ABSENT_S", 0.0)
    for _ in range(3):  # absences, each of two looks
        layout.owner.unlink()
        for _ in range(ownership.ABSENT_LOOKS - 1):
            with pytest.raises(FileNotFoundError):
                fence.check()
        layout.owner.write_bytes(content)
        fence.check()


def test_a_stale_controller_holds_nothing_against_a_prompt(layout: RunLayout) -> None:
    stale, book = Fence.take(layout, 0), LostLeases()
    Fence.take(layout, 1)
    book.record_death([(make_prompt(0), 1)])
    with pytest.raises(OwnershipLost):
        LostLeaseFile(layout.lost_leases, stale).append(book)
    assert not layout.lost_leases.exists()


def test_a_damaged_record_is_not_taken_for_a_loss(layout: RunLayout) -> None:
    fence = Fence.take(layout, 0)
    layout.owner.write_bytes(b"{")
    with pytest.raises(OSError, match="damaged"):
        fence.check()


def test_a_file_is_replaced_whole_by_the_owner_alone(layout: RunLayout) -> None:
    fence = Fence.take(layout, 0)
    fence.write(layout.status, b"one")
    fence.write(layout.status, b"two", is_synced=False)
    assert layout.status.read_bytes() == b"two"
    Fence.take(layout, 1).write(layout.status, b"three")
    with pytest.raises(OwnershipLost):
        fence.write(layout.status, b"four")
    assert layout.status.read_bytes() == b"three"


# What a process does that was stopped after it had asked, at the latest moment there is: between write and rename.


def stopped_before_rename(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Let `meanwhile` happen before the next Path.replace."""
    real = Path.replace

    def late(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        meanwhile()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", late)


def test_a_status_that_comes_late_does_not_appear(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Fence.take(layout, 0)
    old.write(layout.status, b"before")

    def successor() -> None:
        Fence(layout, Fence.take(layout, 1).owner).write(layout.status, b"of the successor")

    real, is_first = os.replace, True

    def replace(source: object, target: object, **settings: object) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            successor()
        real(source, target)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OwnershipLost):
        old.write(layout.status, b"late")
    assert layout.status.read_bytes() == b"of the successor"


@pytest.mark.parametrize("has_sealed", [False, True])
def test_a_segment_that_comes_late_neither_appears_nor_takes_the_successors_away(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, has_sealed: bool
) -> None:
    old, path = Fence.take(layout, 0), layout.segment(0)

    def successor() -> None:
        new = Fence.take(layout, 1)
        if has_sealed:
            write_sealed(path, b"of the successor", staging=new.staging(layout.rollouts))

    stopped_before_rename(monkeypatch, successor)
    with pytest.raises(SegmentError, match="could not be written"):
        write_sealed(path, b"late", staging=old.staging(layout.rollouts))
    assert (path.read_bytes() if path.exists() else None) == (b"of the successor" if has_sealed else None)


def test_a_checkpoint_that_comes_late_does_not_count(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Fence.take(layout, 0)
    temporary = begin(layout.checkpoint(4), old.staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    stopped_before_rename(monkeypatch, lambda: Fence.take(layout, 1))
    with pytest.raises(CheckpointError, match="cannot be completed"):
        complete(temporary, layout.checkpoint(4), {"step": 4})
    assert latest_complete(layout.checkpoints) is None
    assert not layout.checkpoint(4).exists()


def test_a_checkpoint_counts_in_the_instant_in_which_it_appears(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that was renamed before a take-over could become complete after it."""
    temporary = begin(layout.checkpoint(4), Fence.take(layout, 0).staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    seen = []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        result = real(self, target)
        seen.append(latest_complete(layout.checkpoints))
        return result

    monkeypatch.setattr(Path, "replace", replace)
    complete(temporary, layout.checkpoint(4), {"step": 4})
    assert seen[-1] == (4, layout.checkpoint(4))


def test_a_writer_that_does_not_stop_cannot_keep_its_place(layout: RunLayout) -> None:
    """Files appear in the old staging directory while it is being deleted."""
    old, over = Fence.take(layout, 0), threading.Event()

    def write_on() -> None:
        number = 0
        while not over.is_set():
            try:
                (old.staging(layout.rollouts) / f"{number}.partial").touch()
            except FileNotFoundError:
                continue
            number += 1

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for attempt in range(1, 20):
            Fence.take(layout, attempt)
            assert not old.staging(layout.rollouts).exists()
    finally:
        over.set()
        writer.join()
    assert [path.name.partition("_")[0] for path in layout.rollouts.iterdir()] == [".owner"]


@pytest.mark.starts
def test_of_many_that_take_over_at_once_one_owns_at_the_end(layout: RunLayout) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhpc.base.ownership import Fence; "
        "from rlhpc.base.run_directory import "
        "RunLayout; sys.stdin.read(); fence = Fence.take(RunLayout(Path(sys.argv[1])), 1);"
        "fence.check(); fence.write(fence.layout.status, fence.owner.encode()); print(fence.owner)"
    )
    words = [sys.executable, "-c", code, str(layout.root)]
    takers = [subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=ROOT) for _ in range(6)]
    for taker in takers:  # they have read their imports, or will in a moment
        assert taker.stdin is not None
        taker.stdin.close()
    said = [taker.stdout.read().decode().strip() for taker in takers if taker.stdout is not None]
    told = [taker.stderr.read().decode() for taker in takers if taker.stderr is not None]
    for taker in takers:
        taker.wait()
    owner = Fence.holder(layout)
    assert said.count(owner) == 1, told
    assert layout.status.read_text() == owner
    assert all(
        "took it over" in words or "OwnershipLost" in words for words, who in zip(told, said, strict=True) if not who
    )
