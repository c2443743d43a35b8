"""Every figure that we hold ourselves to, in one table: what peers reach, what we aim at, what this machine shows.

Input: scoreboard.toml and the programs it names, each started by itself.  Output: the table, printed and written into
bench/scoreboard.md with the machine and the load at each measurement.  Exit status 1: a program failed.

    python -m bench.scoreboard                       all; half an hour on two quiet cores
    python -m bench.scoreboard --only transport …    some programs; the other rows stay as they are
    python -m bench.scoreboard --list                what there is; runs nothing

What a program prints goes to --logs.  A missed aim is a row like any other: it says so, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.figures import FIGURES_FILE, read_figures
from bench.packing import machine

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "bench" / "scoreboard.md"
FOUND = Path(__file__).with_name("scoreboard.json")  # what was measured last, row by row


@dataclass(frozen=True, slots=True)
class Figure:
    """A row: what is measured, and what it is held to."""

    id: str
    what: str
    name: str  # as the program tells it
    program: str
    better: str  # "more" or "less"
    aim: float
    peers: str
    unit: str = ""

    def is_reached(self, value: float) -> bool:
        """Whether the aim is."""
        return value >= self.aim if self.better == "more" else value <= self.aim


@dataclass(frozen=True, slots=True)
class Program:
    """What measures some of the rows."""

    words: tuple[str, ...]
    minutes: float
    needs: str = ""

    @property
    def command(self) -> str:
        """As a reader types it."""
        return " ".join(["python -m", *(f'"{word}"' if " " in word else word for word in self.words)])


@dataclass(frozen=True, slots=True)
class Measured:
    """One value with its circumstances."""

    value: float
    load: float  # when the program started
    day: str
    machine: str


def read_table(path: Path = TABLE) -> tuple[dict[str, Program], list[Figure]]:
    """Programs by name, and all rows in order."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    programs = {
        name: Program(tuple(entry["words"]), entry["minutes"], entry.get("needs", ""))
        for name, entry in document["programs"].items()
    }
    return programs, [Figure(**entry) for entry in document["figure"]]


def read_found(path: Path = FOUND) -> dict[str, Measured]:
    """What was measured last, by the row's id."""
    if not path.exists():
        return {}
    return {row: Measured(**entry) for row, entry in json.loads(path.read_text(encoding="utf-8")).items()}


class ProgramFailed(Exception):
    """A program of the board ended with an error."""


def run(name: str, program: Program, logs: Path) -> dict[str, float]:
    """Start a program; return what it told.  Raises ProgramFailed with the end of its log."""
    figures, log = logs / f"{name}.jsonl", logs / f"{name}.log"
    figures.unlink(missing_ok=True)
    environment = os.environ | {FIGURES_FILE: str(figures), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        command = [sys.executable, "-m", *program.words]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment, cwd=ROOT)
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise ProgramFailed(f"{program.command} ended with {done.returncode}:\n{last}")
    return read_figures(figures)


def page(programs: Mapping[str, Program], rows: Sequence[Figure], found: Mapping[str, Measured]) -> str:
    """bench/scoreboard.md."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python -m bench.scoreboard`; rows: bench/scoreboard.toml).  A ratio is taken within",
        "one run of one program; absolute figures are of the machine named below.  An aim that is not reached says so.",
        "What peers reach is from their papers, or was measured with their own code on a machine of this kind.",
        "",
        "| | figure | peers | aim | here | | load |",
        "|---|---|---|---|---|---|---|",
        *(row_of(figure, found.get(figure.id)) for figure in rows),
        "",
        *(f"- {line}" for line in sorted({f"{each.day}: {each.machine}" for each in found.values()})),
        "",
        "| program | figures | minutes | needs |",
        "|---|---|---|---|",
    ]
    for name, program in programs.items():
        ids = ", ".join(figure.id for figure in rows if figure.program == name)
        lines.append(f"| `{program.command}` | {ids} | {program.minutes:g} | {program.needs} |")
    lines += [
        "",
        "Not here, because they need GPUs: transfer between devices against the card's own copy, the share of a",
        "network's line rate, tokens a second and utilisation of a real model (docs/gpu.md).",
    ]
    return "\n".join(lines) + "\n"


def row_of(figure: Figure, measured: Measured | None) -> str:
    """One line of the table."""
    sign, unit = "≥" if figure.better == "more" else "≤", f" {figure.unit}" if figure.unit else ""
    start = f"| {figure.id} | {figure.what} | {figure.peers} | {sign} {figure.aim:g}{unit} |"
    if measured is None:
        return f"{start} not measured | | |"
    verdict = "" if figure.is_reached(measured.value) else "**missed**"
    return f"{start} {three_digits(measured.value)}{unit} | {verdict} | {measured.load:.1f} |"


def three_digits(value: float) -> str:
    """1234.5 is 1,234; 0.01234 is 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="these; the rows of the others stay")
    parser.add_argument("--list", action="store_true", help="show programs and rows, run nothing")
    parser.add_argument("--logs", type=Path, default=ROOT / ".cache" / "bench", help="where their outputs go")
    options = parser.parse_args()
    programs, rows = read_table()
    if unknown := set(options.only or ()) - set(programs):
        parser.error(f"--only {' '.join(sorted(unknown))}: no such program; there are {', '.join(programs)}")
    if options.list:
        for figure in rows:
            print(f"{figure.id:5}{figure.program:22}{figure.what}")
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)
    found, today = read_found(), datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    failed = []
    for name in options.only or programs:
        load, began = os.getloadavg()[0], time.monotonic()
        print(f"{name:22}", end="", flush=True)
        try:
            told = run(name, programs[name], options.logs)
        except ProgramFailed as error:
            failed.append(str(error))
            print("failed")
            continue
        for figure in rows:
            if figure.program == name and figure.name in told:
                host = machine().rpartition(", load")[0]
                found[figure.id] = Measured(told[figure.name], round(load, 1), today, host)
        print(f"{time.monotonic() - began:4.0f} s, {len(told)} figures" + ("" if told else ": skipped, see its log"))
        FOUND.write_text(json.dumps({row: asdict(each) for row, each in found.items()}, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(programs, rows, found), encoding="utf-8")
    print("\n".join(row_of(figure, found.get(figure.id)) for figure in rows))
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
