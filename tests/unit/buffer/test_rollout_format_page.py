"""rlhpc/buffer/README.md is held to what it says: its example runs, and its checksums are those in the file."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path

import h5py

from rlhpc.buffer.journal_layout import COLUMNS, PROMPT_ROW, ROLLOUT_ROW
from tests.unit.doc_pages import ROOT, blocks

GOLDEN = Path(__file__).parent / "golden_segment.h5"
PAGE = ROOT / "rlhpc" / "buffer" / "README.md"


def test_the_reading_example_runs_on_a_segment(tmp_path, monkeypatch, capsys):
    shutil.copy(GOLDEN, tmp_path / "segment_000000.h5")
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(PAGE, "python")
    exec(compile(example, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "0 0  [0. 1.]"
    assert "2 -1 no_spread [0. 1.]" in printed


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
        assert zlib.crc32(record + with_lengths([*words, *texts])) == rollouts["crc32"][row]
    for row in range(len(groups["group_id"])):
        names = ("group_id", "prompt_id", "admitted_version", "consumed_step", "attempts")
        numbers = [int(groups[name][row]) for name in names]
        sizes = [int(groups[name][row + 1] - groups[name][row]) for name in ("rollout_offsets", "prompt_offsets")]
        record = struct.pack("<7q", *numbers, *sizes) + cut(groups, "prompt_token_ids", "prompt_offsets", row)
        texts = [cut(groups, name, f"{name}_offsets", row) for name in ("task", "reference")]
        record += with_lengths([groups["drop_reason"][row], *texts])
        record += struct.pack("<3q", *(groups[name][row] for name in ("trained_version", "applied", "group_size")))
        assert zlib.crc32(record) == groups["crc32"][row]


def test_every_dataset_and_field_of_a_journal_is_on_the_page():
    journal = PAGE.read_text(encoding="utf-8").partition("## The journal")[2]
    names = {*COLUMNS, *ROLLOUT_ROW.names, *PROMPT_ROW.names}
    assert [name for name in sorted(names) if f"`{name}`" not in journal] == []
