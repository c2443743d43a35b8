"""`rlhpc list`: which runs are shown.  Input: the command line.  Output: a table, or JSON."""

from __future__ import annotations

import argparse
import json

from launch.commands.arguments import MOST_ROWS
from launch.commands.overview.find import DEPTH, directories_to_search
from launch.commands.overview.standing import State, is_mine
from launch.commands.overview.survey import survey
from launch.commands.overview.table import document_of, lines_of
from launch.common.text_table import printable
from rlhpc.errors import ConfigError


def list_runs(options: argparse.Namespace) -> int:
    """Print the list; returns exit status 0.  Raises ConfigError: no such directory, no such state."""
    wanted, tops = _states(options.state), directories_to_search(options.directories)
    depth = DEPTH if options.depth is None else options.depth
    found = survey(tops, depth)
    mine = [run for run in found.runs if options.all or is_mine(run.files)]
    shown = [run for run in mine if run.state in wanted]
    notes = list(found.remarks)
    if others := len(found.runs) - len(mine):
        notes.append(f"{others} {'runs' if others > 1 else 'run'} of other users: --all shows them")
    if options.json:
        print(json.dumps({"runs": [document_of(run) for run in shown], "notes": notes}, indent=1))
        return 0
    lines = lines_of(shown, found.now, None if options.all else MOST_ROWS)
    nothing = f"no run {'of that state ' if mine else ''}below {', '.join(map(str, tops))}, nor in the queue"
    print("\n".join([*(lines or [nothing]), *(f"note: {printable(note)}" for note in notes)]))
    return 0


def _states(text: str | None) -> set[str]:
    legal = [state.value for state in State]
    words = legal if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in legal:
            raise ConfigError(f"--state {word!r}: legal: {', '.join(legal)}")
    return set(words)
