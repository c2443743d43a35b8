"""Segments: what is written is read back bit for bit; rlhpc/buffer/README.md says enough to read it without us."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import shutil
import struct
import zlib
from dataclasses import fields, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from rollout_samples import (
    ManualClock,
    assert_same_group,
    make_group,
    make_prompt,
    make_routes,
    make_scored,
    make_teacher,
)

from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer import segments
from rlhpc.buffer import segments as segment_files
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.history import EVENTS
from rlhpc.buffer.journal import JOURNAL
from rlhpc.buffer.log import FileHead
from rlhpc.buffer.prefixes import PARTIALS
from rlhpc.buffer.segment_format import (
    ROUTE_COLUMNS,
    ROW_COLUMNS,
    SCHEMA,
    TEACHER_COLUMNS,
    deflated_chunks,
    empty_column,
)
from rlhpc.buffer.segments import (
    USER_BLOCK_BYTES,
    SegmentWriter,
    read_columns,
    read_raw_columns,
    read_rollouts_directory,
    read_segment,
    set_aside_lost_segments,
    to_hdf5,
    write_sealed,
)
from rlhpc.protocol.errors import SegmentError
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, TeacherScores, Verdict
from tests.unit.doc_pages import ROOT, blocks


def make_writer(directory: Path, clock: ManualClock | None = None, **changes: object) -> SegmentWriter:
    settings: dict[str, object] = {
        "run_name": "test",
        "run_attempt": 0,
        "max_groups": 3,
        "max_s": 60.0,
        "clock": clock or ManualClock(),
        "wall_clock": lambda: 1_700_000_000.0,
    }
    return SegmentWriter(directory, 0, **(settings | changes))


def groups_of_schema_3() -> list[ResolvedGroup]:
    """With all that a segment could say before there were routes."""
    taught = tuple(
        make_scored(9, index, length=7, teacher=None if index == 1 else make_teacher(7, num_top=3 * (index == 2)))
        for index in range(3)
    )
    return [*groups_of_schema_2(), ResolvedGroup(RolloutGroup(9, make_prompt(9), 2, taught))]


def sample_groups() -> list[ResolvedGroup]:
    """With all that a segment can say."""
    starts = ((3, 4), (), (1,))
    branched = tuple(make_scored(12, index, length=6, row_starts=each) for index, each in enumerate(starts))
    return [*groups_of_schema_4(), ResolvedGroup(RolloutGroup(12, make_prompt(12), 2, branched))]


def groups_of_schema_4() -> list[ResolvedGroup]:
    """With all that a segment could say before rollouts had rows."""
    routed = tuple(
        make_scored(11, index, length=6, routes=make_routes(7) if index != 1 else None) for index in range(3)
    )
    return [*groups_of_schema_3(), ResolvedGroup(RolloutGroup(11, make_prompt(11), 2, routed))]


def groups_of_schema_2() -> list[ResolvedGroup]:
    """With all that a segment could say before there were teachers."""
    verifier_error = make_scored(
        3, 0, reward=math.nan, verdict=Verdict.VERIFIER_ERROR, detail="\ud800 timed out", reward_parts={}
    )
    return [
        ResolvedGroup(make_group(0), consumed_step=0, trained_version=0, applied=True),
        ResolvedGroup(
            make_group(1, 4, length=400, finish_reason=FinishReason.LENGTH),
            consumed_step=7,
            attempts=3,
            trained_version=5,
            applied=False,
        ),
        ResolvedGroup(make_group(2), drop_reason=DropReason.ZERO_VARIANCE),
        ResolvedGroup(RolloutGroup(3, make_prompt(3), 1, (verifier_error,)), drop_reason=DropReason.VERIFIER_ERROR),
        ResolvedGroup(make_group(4, 0), drop_reason=DropReason.POISON),
        ResolvedGroup(make_group(5)),
        ResolvedGroup(make_group(6, 3, length=12, token_rewards={0: 0.1 + 0.2, 3: -1e-300, 11: 7.0})),
        ResolvedGroup(make_group(7, 5), consumed_step=8, trained_version=5, applied=True, group_size=5),
        ResolvedGroup(make_group(8, 1), drop_reason=DropReason.ZERO_VARIANCE, group_size=4),
    ]


def vars_of(teacher: TeacherScores) -> tuple[np.ndarray, ...]:
    return teacher.logprobs, teacher.flat_top_ids, teacher.flat_top_logprobs


def assert_same(actual: list[ResolvedGroup], expected: list[ResolvedGroup]) -> None:
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert replace(mine, group=theirs.group) == theirs
        assert_same_group(mine.group, theirs.group)


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_is_read_back_bit_for_bit_compressed_or_not(tmp_path, compress):
    token_rewards = {place: 1 / (place + 1) for place in range(2000)}
    groups = [*sample_groups(), ResolvedGroup(make_group(10, length=2000, token_rewards=token_rewards))]
    write_sealed(tmp_path / "file.h5", to_hdf5(groups, {}, compress=compress))
    assert_same(read_segment(tmp_path / "file.h5"), groups)
    with h5py.File(tmp_path / "file.h5") as file:
        assert file["rollouts/token_ids"].compression == ("gzip" if compress else None)


def test_a_segment_of_nothing_can_be_written_and_read(tmp_path):
    write_sealed(tmp_path / "empty.h5", to_hdf5([], {}))
    assert read_segment(tmp_path / "empty.h5") == []


def test_a_segment_is_sealed_when_it_is_full(tmp_path):
    writer = make_writer(tmp_path)
    for index in range(3):
        assert writer.tick() is None
        writer.add(ResolvedGroup(make_group(index)))
    writer.add(ResolvedGroup(make_group(3)))
    assert writer.tick() == tmp_path / "segment_000000.h5"
    assert (writer.num_pending, writer.next_index, writer.is_due) == (1, 1, False)
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0, 1, 2]


def test_a_segment_of_long_rollouts_is_full_before_it_has_all_its_groups(tmp_path, monkeypatch):
    """256 groups of 16 rollouts of 16,384 tokens would be 0.9 GB of arrays, and sealing takes twice that."""
    groups = [ResolvedGroup(make_group(index, length=100)) for index in range(5)]
    tokens_a_group = sum(len(scored.rollout.token_ids) for scored in groups[0].group.members)
    monkeypatch.setattr(segments, "MAX_SEGMENT_TOKENS", 2 * tokens_a_group)
    writer = make_writer(tmp_path, max_groups=100)
    for number, resolved in enumerate(groups, 1):
        writer.add(resolved)
        assert writer.is_due == (number >= 2)
    assert [len(read_segment(path)) for path in writer.seal_all()] == [2, 2, 1]
    monkeypatch.setattr(segments, "MAX_SEGMENT_TOKENS", 1)
    writer.add(groups[0])
    assert len(read_segment(writer.seal())) == 1  # a group is never cut


def test_a_segment_is_sealed_when_its_oldest_group_has_waited_long_enough(tmp_path):
    clock = ManualClock()
    writer = make_writer(tmp_path, clock)
    clock.advance(100.0)
    writer.add(ResolvedGroup(make_group(0)))
    clock.advance(59.0)
    assert writer.tick() is None
    clock.advance(1.0)
    assert writer.tick() is not None
    assert writer.tick() is None


def test_a_failed_write_leaves_no_file_and_loses_no_group(tmp_path):
    writer = make_writer(tmp_path, max_groups=2)
    for index in range(2):
        writer.add(ResolvedGroup(make_group(index, length=2000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (16_000, hard)
    )  # the kernel refuses what lies beyond, as a full disk does
    try:
        with pytest.raises(SegmentError, match=r"segment_000000\.h5 could not be written.*2 resolved groups stay"):
            writer.tick()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert (writer.num_pending, writer.next_index) == (2, 0)
    assert writer.tick() is not None
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0, 1]


def test_an_error_after_the_rename_leaves_no_file_either(tmp_path, monkeypatch):
    def no_space(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("rlhpc.buffer.segments.sync_directory", no_space)
    with pytest.raises(SegmentError, match="Input/output error"):
        write_sealed(tmp_path / "a.h5", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_sealed_segment_is_never_replaced(tmp_path):
    make_sealed(tmp_path, 1)
    other = make_writer(tmp_path)
    other.add(ResolvedGroup(make_group(9)))
    with pytest.raises(SegmentError, match="never replaced"):
        other.seal()
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0]


def test_a_segment_that_got_its_name_before_the_disk_refused_is_not_in_the_way(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = make_writer(tmp_path)
    writer.add(ResolvedGroup(make_group(0)))
    with monkeypatch.context() as refused:
        refused.setattr(segment_files, "sync_directory", refuse)
        refused.setattr(Path, "unlink", refuse)
        with pytest.raises(SegmentError, match="Input/output error"):
            writer.seal()
    writer.add(ResolvedGroup(make_group(1)))  # which the bytes of the try before lack
    assert len(writer.seal_all()) == 2
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0, 1]


def test_groups_stay_pending_while_nobody_can_say_whose_the_run_is(tmp_path):
    layout = RunLayout(tmp_path / "run")
    writer = make_writer(layout.rollouts, fence=Fence.take(layout, 0))
    writer.add(ResolvedGroup(make_group(0)))
    content = layout.owner.read_bytes()
    layout.owner.unlink()
    layout.owner.mkdir()
    with pytest.raises(SegmentError, match=r"owner\.json.*1 resolved groups stay in memory"):
        writer.seal()
    layout.owner.rmdir()
    layout.owner.write_bytes(content)
    assert writer.seal() is not None


def test_every_flipped_bit_is_noticed(tmp_path):
    path = make_sealed(tmp_path, 1)[0]
    sound, original = path.read_bytes(), read_segment(path)
    rng = np.random.default_rng(0)
    positions = rng.integers(512, len(sound), 300).tolist()
    for position in positions:
        path.write_bytes(_with_flipped_bit(sound, position, rng))
        with pytest.raises(SegmentError, match=r"segment_000000\.h5 is damaged"):
            read_segment(path)
    for position in range(60):  # in the block that holds the checksum: noticed, or the rows' own checksums hold
        path.write_bytes(_with_flipped_bit(sound, position, rng))
        with contextlib.suppress(SegmentError):
            assert_same(read_segment(path), original)


def _with_flipped_bit(sound: bytes, position: int, rng: np.random.Generator) -> bytes:
    damaged = bytearray(sound)
    damaged[position] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


@pytest.mark.parametrize("num_bytes", [0, 5, 511, 512, 600, -1])
def test_a_truncated_file_is_refused(tmp_path, num_bytes):
    path = make_sealed(tmp_path, 1)[0]
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(SegmentError, match="segment_000000"):
        read_segment(path)


@pytest.mark.parametrize(
    ("column", "where"),
    [
        ("rollouts/token_ids", "rollouts row 1"),
        ("rollouts/behaviour_logprobs", "rollouts row 1"),
        ("rollouts/versions", "rollouts row 1"),
        ("rollouts/reward", "rollouts row 1"),
        ("rollouts/detail", "rollouts row 1"),
        ("groups/consumed_step", "groups row 0"),
        ("groups/prompt_token_ids", "groups row 0"),
        ("groups/reference", "groups row 0"),
    ],
)
def test_a_row_changed_in_a_copy_is_named(tmp_path, column, where):
    """A copy made with HDF5 tools has no file checksum any more; the rows' own remain."""
    path = make_sealed(tmp_path, 1)[0]
    copy = tmp_path / "copy.h5"
    with h5py.File(path) as source, h5py.File(copy, "w") as target:
        target.attrs.update(source.attrs)
        source.copy("groups", target)
        source.copy("rollouts", target)
    assert_same(read_segment(copy), read_segment(path))
    with h5py.File(copy, "r+") as file:
        file[column][-1 if column.startswith("rollouts") else 0] += 1
    with pytest.raises(SegmentError, match=f"copy.h5: {where}"):
        read_segment(copy)


def test_a_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file.attrs["schema"] = SCHEMA + 1
    for read in (read_segment, lambda p: read_columns(p, ["rollouts/reward"])):
        with pytest.raises(SegmentError, match=f"has schema {SCHEMA + 1}"):
            read(path)


def test_some_other_file_is_refused(tmp_path):
    path = tmp_path / "notes.h5"
    path.write_text("hello")
    with pytest.raises(SegmentError, match=r"notes\.h5"):
        read_segment(path)
    with pytest.raises(SegmentError, match="cannot be read"):
        read_segment(tmp_path / "absent.h5")


def test_single_columns_are_read_without_the_rest(tmp_path):
    writer = make_writer(tmp_path, max_groups=10)
    for resolved in sample_groups():
        writer.add(resolved)
    names = [
        "rollouts/verdict",
        "groups/drop_reason",
        "groups/consumed_step",
        "rollouts/detail",
        "rollouts/token_offsets",
    ]
    columns = read_columns(writer.seal(), names)
    assert list(columns) == names
    assert columns["groups/drop_reason"].tolist() == [
        "",
        "",
        "zero_variance",
        "verifier_error",
        "poison",
        "",
        "",
        "",
        "zero_variance",
        "",
    ]
    assert columns["groups/consumed_step"].tolist() == [0, 7, -1, -1, -1, -1, -1, 8, -1, -1]
    assert columns["rollouts/verdict"][:2].tolist() == ["wrong", "correct"]
    assert columns["rollouts/detail"][0] == make_scored(0, 0).detail
    with pytest.raises(SegmentError, match="rollouts/nothing"):
        read_columns(tmp_path / "segment_000000.h5", ["rollouts/nothing"])


def test_a_gap_between_segments_is_an_error(tmp_path):
    paths = make_sealed(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(SegmentError, match="segment 1 is missing"):
        list(read_rollouts_directory(tmp_path))


def test_segments_of_a_lost_timeline_are_set_aside_and_their_numbers_used_again(tmp_path):
    make_sealed(tmp_path, 4)
    (tmp_path / "segment_000004.h5.partial").write_bytes(b"half")
    moved = set_aside_lost_segments(tmp_path, first_lost_index=2, attempt=1)
    assert moved == [tmp_path / "lost_attempt_1" / f"segment_00000{i}.h5" for i in (2, 3)]
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0, 1]
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path / "lost_attempt_1")] == [2, 3]
    assert not list(tmp_path.glob("*.partial"))
    assert set_aside_lost_segments(tmp_path, first_lost_index=2, attempt=1) == []
    writer = SegmentWriter(tmp_path, 2, run_name="t", run_attempt=1, max_groups=1, max_s=1.0, clock=ManualClock())
    writer.add(ResolvedGroup(make_group(8)))
    writer.seal()
    assert [r.group.group_id for r in read_rollouts_directory(tmp_path)] == [0, 1, 8]


def test_arrays_of_unequal_length_are_refused_before_anything_is_written(tmp_path):
    scored = make_scored(0, 0, length=4)
    object.__setattr__(scored.rollout, "versions", np.zeros(3, np.int32))
    writer = make_writer(tmp_path)
    writer.add(ResolvedGroup(RolloutGroup(0, make_prompt(0), 0, (scored,))))
    with pytest.raises(SegmentError, match="rollout 0:0"):
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_the_form_of_a_segment_does_not_change_unnoticed():
    """The golden file was written once: whoever has to write it again raises SCHEMA."""
    assert_same(read_segment(Path(__file__).parent / "golden_segment.h5"), sample_groups())


def test_a_segment_of_schema_4_is_read_and_every_rollout_is_one_row():
    older = Path(__file__).parent / "golden_segment_schema_4.h5"
    assert_same(read_segment(older), groups_of_schema_4())
    _, columns = read_raw_columns(older, ROW_COLUMNS, is_verified=True)
    num_rollouts = sum(len(each.group.members) for each in groups_of_schema_4())
    assert [len(columns[name]) for name in ROW_COLUMNS] == [0, num_rollouts + 1]


@pytest.mark.parametrize("starts", [(0, 3), (3, 3), (4, 2), (2, 6), (-1, 3)])
def test_rows_that_cannot_be_are_refused_before_anything_is_written(tmp_path, starts):
    writer = make_writer(tmp_path)
    broken = make_scored(0, 0, length=6, row_starts=starts)
    writer.add(ResolvedGroup(RolloutGroup(0, make_prompt(0), 0, (broken,))))
    with pytest.raises(SegmentError, match=r"rollout 0:0: its rows begin at tokens \[0, .* of 6, and each must have"):
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_of_schema_3_is_read_and_has_no_routes():
    older = Path(__file__).parent / "golden_segment_schema_3.h5"
    assert_same(read_segment(older), groups_of_schema_3())
    _, columns = read_raw_columns(older, ROUTE_COLUMNS, is_verified=True)
    num_rollouts = sum(len(each.group.members) for each in groups_of_schema_3())
    assert [len(columns[name]) for name in ROUTE_COLUMNS] == [0, num_rollouts + 1]


def test_routes_reach_a_segment_only_if_asked(tmp_path):
    for keeps_routes in (True, False):
        (directory := tmp_path / str(keeps_routes)).mkdir()
        writer = make_writer(directory, keeps_routes=keeps_routes)
        for group in sample_groups():
            writer.add(group)
        found = [group for path in writer.seal_all() for group in read_segment(path)]
        assert_same(found, sample_groups() if keeps_routes else [each.without_routes() for each in sample_groups()])


@pytest.mark.parametrize(
    ("column", "place", "whose"),
    [("routes", 0, "11:0"), ("routes", 13, "11:0"), ("row_starts", 1, "12:0")],  # of their head, of their experts
)
def test_a_late_column_that_was_altered_is_found_without_the_checksum_of_the_file(tmp_path, column, place, whose):
    write_sealed(tmp_path / "file.h5", to_hdf5(sample_groups(), {}))
    data = (tmp_path / "file.h5").read_bytes()
    (tmp_path / "file.h5").write_bytes(bytes(USER_BLOCK_BYTES) + data[USER_BLOCK_BYTES:])
    with h5py.File(tmp_path / "file.h5", "r+") as file:
        file[f"rollouts/{column}"][place] ^= 1
    with pytest.raises(SegmentError, match=rf"rollout {whose}\): checksum differs"):
        read_segment(tmp_path / "file.h5")


def test_a_segment_of_schema_2_is_read_and_has_no_teachers():
    older = Path(__file__).parent / "golden_segment_schema_2.h5"
    assert_same(read_segment(older), groups_of_schema_2())
    num_rollouts = sum(len(each.group.members) for each in groups_of_schema_2())
    names = ["rollouts/teacher_logprobs", "rollouts/teacher_offsets", "rollouts/reward"]
    for is_verified in (False, True):
        _, columns = read_raw_columns(older, names, is_verified=is_verified)
        assert [len(columns[name]) for name in names] == [0, num_rollouts + 1, num_rollouts]
        assert not columns["rollouts/teacher_offsets"].any()


@pytest.mark.parametrize("name", ["logprobs", "flat_top_ids", "flat_top_logprobs"])
def test_a_number_of_a_teacher_that_was_altered_is_found_without_the_checksum_of_the_file(tmp_path, name):
    write_sealed(tmp_path / "file.h5", to_hdf5(sample_groups(), {}))
    data = (tmp_path / "file.h5").read_bytes()
    (tmp_path / "file.h5").write_bytes(bytes(USER_BLOCK_BYTES) + data[USER_BLOCK_BYTES:])  # as h5repack leaves it
    assert_same(read_segment(tmp_path / "file.h5"), sample_groups())
    with h5py.File(tmp_path / "file.h5", "r+") as file:
        column = file[f"rollouts/teacher_{name.removeprefix('flat_')}"]
        column[2] = column[2] + 1
    with pytest.raises(SegmentError, match=r"rollout 9:[02]\): checksum differs"):
        read_segment(tmp_path / "file.h5")


def test_a_teacher_that_was_cut_out_of_a_file_is_missed(tmp_path):
    write_sealed(tmp_path / "file.h5", to_hdf5(sample_groups(), {}))
    data = (tmp_path / "file.h5").read_bytes()
    (tmp_path / "file.h5").write_bytes(bytes(USER_BLOCK_BYTES) + data[USER_BLOCK_BYTES:])
    with h5py.File(tmp_path / "file.h5", "r+") as file:
        for name in TEACHER_COLUMNS:
            values = empty_column(name, len(file["rollouts/group_id"]))
            del file[name]
            file[name] = values
    with pytest.raises(SegmentError, match=r"rollout 9:0\): checksum differs"):
        read_segment(tmp_path / "file.h5")


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        (make_teacher(3), "has 3 log-probabilities"),
        (TeacherScores(*(np.append(each, each[:1]) for each in vars_of(make_teacher(4, 2)))), "has 5 log-prob"),
        (replace(make_teacher(4, 2), flat_top_ids=np.zeros(7, np.int32)), "and 7 and 8 of likely tokens"),
        (replace(make_teacher(4), logprobs=np.array([0, math.nan, 0, 0], np.float32)), "is not finite"),
        (replace(make_teacher(4, 1), flat_top_logprobs=np.full(4, -math.inf, np.float32)), "is not finite"),
    ],
)
def test_numbers_of_a_teacher_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, teacher, why):
    scored = make_scored(0, 0, length=4, teacher=teacher)
    writer = make_writer(tmp_path)
    writer.add(ResolvedGroup(RolloutGroup(0, make_prompt(0), 0, (scored,))))
    with pytest.raises(SegmentError, match=f"rollout 0:0: .*{why}"):
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_likely_tokens_of_a_teacher_are_a_row_for_each_token():
    teacher = make_teacher(5, 3)
    assert teacher.top_ids.shape == teacher.top_logprobs.shape == (5, 3)
    assert teacher.top_ids[2].tolist() == teacher.flat_top_ids[6:9].tolist()
    assert make_teacher(5).top_ids.shape == (5, 0)


def test_a_segment_is_full_sooner_where_teachers_name_likely_tokens(tmp_path, monkeypatch):
    scored = tuple(make_scored(0, index, length=100, teacher=make_teacher(100, 16)) for index in range(2))
    taught = ResolvedGroup(RolloutGroup(0, make_prompt(0), 0, scored))
    monkeypatch.setattr(segments, "MAX_SEGMENT_TOKENS", 1000)
    writer = make_writer(tmp_path)
    writer.add(ResolvedGroup(make_group(1, length=100)))
    assert not writer.is_due
    writer.add(taught)
    assert writer.is_due


def make_sealed(directory: Path, count: int) -> list[Path]:
    """`count` segments of one group each; group i is in segment i."""
    writer = make_writer(directory, max_groups=1)
    for index in range(count):
        writer.add(ResolvedGroup(make_group(index), consumed_step=index))
    return writer.seal_all()


# ------------------------ Chunks are what any zlib inflates to the shuffled bytes of their entries, whatever these are

KINDS = ("<i4", "<u4", "<i8", "<f4", "<f8", "u1", "<i1", "S16")


def columns(kind: str, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = np.frombuffer(rng.bytes(length * np.dtype(kind).itemsize), kind)
    small = rng.integers(0, 100, length).astype(kind)
    return [drawn, small, np.zeros(length, kind), np.ones(length).astype(kind)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (5_000, 5_000), (5_000, 3_000), (70_000, 1 << 16)])
def test_a_column_is_inflated_to_its_shuffled_bytes_and_zeros_behind_them(kind: str, length: int, chunk: int) -> None:
    itemsize = np.dtype(kind).itemsize
    for values in columns(kind, length):
        found = [np.frombuffer(zlib.decompress(data), np.uint8) for data in deflated_chunks(values, chunk)]
        assert [len(each) for each in found] == [chunk * itemsize] * -(-length // chunk)
        whole = b"".join(each.reshape(itemsize, -1).T.tobytes() for each in found)
        assert whole[: values.nbytes] == values.tobytes()
        assert not any(whole[values.nbytes :])


def test_what_repeats_takes_little_room_and_what_does_not_hardly_more_than_it_is() -> None:
    for kind in KINDS:
        drawn, _, zeros, _ = columns(kind, 50_000)
        (of_zeros,), (of_drawn,) = deflated_chunks(zeros, 50_000), deflated_chunks(drawn, 50_000)
        assert len(of_zeros) < zeros.nbytes / 50
        assert len(of_drawn) < 1.06 * drawn.nbytes + 64  # zlib-ng's quickest level may add a twentieth


# ---------------- rlhpc/buffer/README.md is held to what it says: its example runs, and its checksums are those in the

GOLDEN = Path(__file__).parent / "golden_segment.h5"
PAGE = ROOT / "rlhpc" / "buffer" / "README.md"


def test_the_reading_example_runs_on_a_segment(tmp_path, monkeypatch, capsys):
    shutil.copy(GOLDEN, tmp_path / "segment_000000.h5")
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(PAGE, "python")
    exec(compile(example, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "0 0  [0. 1.]"
    assert "2 -1 zero_variance [0. 1.]" in printed


def test_every_column_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    with h5py.File(GOLDEN) as file:
        names = {*file["groups"], *file["rollouts"], *file.attrs}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_checksums_are_those_that_the_page_describes():
    data = GOLDEN.read_bytes()
    assert data.startswith(b"rlhpc rollouts\nbytes %d\ncrc32 %08x\n\0" % (len(data) - 512, zlib.crc32(data[512:])))
    with h5py.File(GOLDEN) as file:
        groups = {name: column[:] for name, column in file["groups"].items()}
        rollouts = {name: column[:] for name, column in file["rollouts"].items()}

    def cut(table, name, offsets, row):
        return table[name][table[offsets][row] : table[offsets][row + 1]].tobytes()

    def with_lengths(texts):
        return b"".join(struct.pack("<q", len(text)) + text for text in texts)

    for row in range(len(rollouts["group_id"])):
        numbers = [int(rollouts[name][row]) for name in ("group_id", "sample_index")]
        num_tokens = int(rollouts["token_offsets"][row + 1] - rollouts["token_offsets"][row])
        record = struct.pack("<3qd", *numbers, num_tokens, rollouts["reward"][row])
        for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
            record += cut(rollouts, name, "token_offsets", row)
        words = [rollouts[name][row] for name in ("verdict", "finish_reason")]
        texts = [cut(rollouts, name, f"{name}_offsets", row) for name in ("detail", "reward_parts", "token_rewards")]
        record += with_lengths([*words, *texts])
        cuts = ("teacher_offsets", "teacher_top_offsets", "teacher_top_offsets")
        names = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
        said = [cut(rollouts, name, offsets, row) for name, offsets in zip(names, cuts, strict=True)]
        if said[0]:
            record += struct.pack("<2q", len(said[0]) // 4, len(said[1]) // 4) + b"".join(said)
        record += cut(rollouts, "routes", "routes_offsets", row)
        if starts := cut(rollouts, "row_starts", "row_offsets", row):
            record += struct.pack("<q", len(starts) // 4) + starts
        assert zlib.crc32(record) == rollouts["crc32"][row]
    for row in range(len(groups["group_id"])):
        names = ("group_id", "prompt_id", "admitted_version", "consumed_step", "attempts")
        numbers = [int(groups[name][row]) for name in names]
        sizes = [int(groups[name][row + 1] - groups[name][row]) for name in ("rollout_offsets", "prompt_offsets")]
        record = struct.pack("<7q", *numbers, *sizes) + cut(groups, "prompt_token_ids", "prompt_offsets", row)
        texts = [cut(groups, name, f"{name}_offsets", row) for name in ("task", "reference")]
        record += with_lengths([groups["drop_reason"][row], *texts])
        record += struct.pack("<3q", *(groups[name][row] for name in ("trained_version", "applied", "group_size")))
        assert zlib.crc32(record) == groups["crc32"][row]


def test_every_message_and_field_of_a_log_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8").partition("## The journal")[2]
    messages = [message for kind in (JOURNAL, EVENTS, PARTIALS) for message in kind.messages]
    names = {each.__name__ for each in messages}
    names |= {
        field.name
        for each in (*messages, FileHead, ScoredRollout, TeacherScores, Rollout, Prompt)
        for field in fields(each)
    }
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
