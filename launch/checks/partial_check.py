"""The partial rollouts of a run: every record by its checksum.

    rollouts/partials_NNNNNN.bin ─▶ rows of `rlhpc check RUN_DIR`

Guarantees: a run that is going on, or was killed, is sound: the end of a file may be half written, and it is deleted
once the next one holds what is running.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.checks.run_rows import Progress, Row, Verdict, from_to
from launch.common.counted import counted
from rlhpc.buffer.partial_files import PartialFile, partial_paths, read_partial_file, read_partials
from rlhpc.errors import JournalError
from rlhpc.run_layout import RunLayout


def partial_rows(layout: RunLayout, progress: Progress) -> Iterator[Row]:
    """Read every record."""
    paths = partial_paths(layout.rollouts) if layout.rollouts.is_dir() else []
    is_sound = True
    for path in paths:
        progress(path.name)
        try:
            file = read_partial_file(path)
            file = read_partial_file(path) if file.damage else file  # perhaps it was being written
        except JournalError as error:
            if path.exists():  # else the next one has taken its place meanwhile
                is_sound = False
                yield Row("partials", path.name, Verdict.DAMAGED, str(error))
            continue
        if file.damage:
            is_sound &= file.is_torn
            yield _damage_of(file)
    if paths and is_sound:
        known = read_partials(layout.rollouts)[0].values()
        tokens = counted(sum(each.end for each in known), "token")
        text = f"{counted(len(known), 'rollout')} of {tokens}, all checksums right"
        yield Row("partials", from_to(paths), Verdict.SOUND, text)


def _damage_of(file: PartialFile) -> Row:
    where = ", ".join(f"{first} to {end}" for first, end in file.damage[:10])
    if file.is_torn:
        text = f"bytes {where} at its end: half written when its process ended, or being written now"
        return Row("partials", file.path.name, Verdict.NOTE, text)
    text = f"{file.path}: bytes {where} are damaged: their rollouts are sampled again"
    return Row("partials", file.path.name, Verdict.DAMAGED, text)
