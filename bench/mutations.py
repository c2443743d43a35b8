"""Plant known bugs, one at a time, and show which test finds each.

Input: mutations.toml, a list of small replacements in the sources, each of which breaks one promise.  Output: a table:
promise, bug, the first test that fails, seconds.  Exit status 1 if a bug is not found or no longer fits its file.

    python -m bench.mutations                      all, each against the tests that are expected to find it
    python -m bench.mutations --only clip-low …    some
    python -m bench.mutations --suite quick        against all cheap tests, to see who finds it without being named
    python -m bench.mutations --list               what there is; runs nothing
    python -m bench.mutations --matrix DIRECTORY … which test finds which bug or generated mutant: bench/matrix.py

The sources are copied to a temporary directory and changed there; the working tree is not touched.  A bug counts as
found only if its module can still be imported, and if the test that failed passes without the bug.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LIMIT_S = 600.0  # for the tests of one bug; they take seconds, but machines may be busy
HANGS_S = 180.0  # of one test: it waits for what the bug has taken away
# What fails like this shows that the replacement is malformed, not that a test has noticed what it does.
MALFORMED = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
NO_FAILURE = "", "all tests pass"
# Only what `make test` runs may find a bug; the suite is that of `make quick`.
EVERYDAY = ["-m", "not long"]
SUITES = {"quick": ["tests/unit", "-m", "not long and not starts"]}


@dataclass(frozen=True, slots=True)
class Bug:
    """One replacement in one file."""

    name: str
    promise: str  # that it breaks
    what: str  # the mistake, for people
    path: Path  # of the file, relative to the root
    old: str
    new: str
    tests: tuple[str, ...]  # files, or FILE::TEST; of a file only the name, which is used once in tests/
    survived: str = ""  # "survived before", if no test beside the module found it when it was first planted
    needs: str = ""  # a library of which the tests make use, and which `make setup` does not install

    def problem(self, root: Path) -> str:
        """Why it cannot be planted in this tree; "" if it can."""
        try:
            count = (root / self.path).read_text(encoding="utf-8").count(self.old)
        except FileNotFoundError:
            return f"there is no {self.path}"
        return "" if count == 1 else f"its text occurs {count} times in {self.path}"

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Replace the text in this tree, and put it back."""
        path = root / self.path
        sound = path.read_text(encoding="utf-8")
        try:
            _rewrite(path, sound.replace(self.old, self.new))
            yield
        finally:
            _rewrite(path, sound)

    @property
    def module(self) -> str:
        """Name under which the file is imported."""
        return ".".join(self.path.with_suffix("").parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said to one bug."""

    finder: str  # FILE::TEST; "" if none
    problem: str  # why it does not count as found
    seconds: float
    reason: str = ""  # how the finder failed


def read_bugs(table: Path = TABLE) -> list[Bug]:
    """All bugs, in the order of the table."""
    document = tomllib.loads(table.read_text(encoding="utf-8"))
    files = document["files"]
    return [
        Bug(
            name=entry["name"],
            promise=entry["promise"],
            what=entry["what"],
            path=Path(files[entry["file"]]),
            old=entry["old"],
            new=entry["new"],
            tests=tuple(entry["tests"]),
            survived=entry.get("survived", ""),
            needs=entry.get("needs", ""),
        )
        for entry in document["bug"]
    ]


def find_test(name: str, root: Path) -> str:
    """FILE or FILE::TEST with the path of the file.  Raises ValueError unless there is exactly one such file."""
    file, separator, test = name.partition("::")
    found = list((root / "tests").rglob(file))
    if len(found) != 1:
        raise ValueError(f"{name}: {len(found)} files of this name in tests/")
    return f"{found[0].relative_to(root)}{separator}{test}"


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = command_line().parse_args(words)
    if options.matrix:
        return _matrix(words, options.matrix)
    bugs = read_bugs()
    if unknown := set(options.only) - {bug.name for bug in bugs}:
        sys.exit(f"no such bug: {', '.join(sorted(unknown))}; --list shows them")
    bugs = [bug for bug in bugs if not options.only or bug.name in options.only]
    if options.list:
        for bug in bugs:
            print(f"{bug.name:32} {bug.promise:28} {bug.what}")
        return 0
    left_out = [bug for bug in bugs if bug.needs and find_spec(bug.needs) is None]
    bugs = [bug for bug in bugs if bug not in left_out]
    suite = SUITES[options.suite] if options.suite else None
    print("| promise | planted bug | found by | s |\n|---|---|---|---|")
    num_survivors = 0
    with tempfile.TemporaryDirectory(prefix="mut-") as scratch, ThreadPoolExecutor(options.jobs) as workers:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(_copied_tree(Path(scratch) / str(number)))

        def try_one(bug: Bug) -> Outcome:
            tree = trees.get()
            try:
                return _try(bug, tree, suite)
            finally:
                trees.put(tree)

        for bug, outcome in zip(bugs, workers.map(try_one, bugs), strict=True):
            num_survivors += bool(outcome.problem)
            found = f"**{outcome.problem}**" if outcome.problem else f"`{_short(outcome.finder)}`"
            found += f" ({bug.survived})" if bug.survived else ""
            print(f"| {bug.promise} | `{bug.name}`: {bug.what} | {found} | {outcome.seconds:.0f} |", flush=True)
            if options.why:
                print(f"    {outcome.reason[:400]}", flush=True)
    for bug in left_out:
        print(f"| {bug.promise} | `{bug.name}`: {bug.what} | not planted: {bug.needs} is not installed | |")
    without = f"; {len(left_out)} not planted" if left_out else ""
    print(f"\n{len(bugs) - num_survivors} of {len(bugs)} found{without}")
    return 1 if num_survivors else 0


def _short(finder: str) -> str:
    """Name of a test function, or of a class of tests that hypothesis runs as one."""
    return finder.partition("[")[0].removesuffix("::runTest").rpartition("::")[2]


def command_line() -> argparse.ArgumentParser:
    """Options of this command and of bench/matrix.py."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m bench.mutations")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of the bugs to plant")
    parser.add_argument("--list", action="store_true", help="show the bugs and run nothing")
    parser.add_argument("--why", action="store_true", help="show how the test failed, below each row")
    parser.add_argument("--suite", choices=SUITES, help="run this instead of the tests that are expected to find a bug")
    parser.add_argument(
        "--jobs", type=int, default=1, help="bugs that are tried at the same time, each in its own copy"
    )
    matrix = parser.add_argument_group("which test finds which planted bug or generated mutant", "see bench/matrix.py")
    matrix.add_argument("--matrix", type=Path, metavar="DIRECTORY", help="where the results are, and go on from")
    matrix.add_argument("--files", nargs="+", default=[], help="sources, or directories of them, to make mistakes in")
    matrix.add_argument("--tests", nargs="+", default=["tests/unit"], help="that may find them")
    matrix.add_argument("--seed", type=int, default=0, help="of the sample of mutants")
    matrix.add_argument("--per-function", type=int, default=4, help="mutants of a function; a long one has more")
    matrix.add_argument("--limit", type=float, default=20.0, help="seconds for all tests of a mutant")
    return parser


# ------------------------------------------------------------------------------------------------------ trying one bug


def _try(bug: Bug, tree: Path, suite: Sequence[str] | None) -> Outcome:
    began = time.monotonic()
    if problem := bug.problem(tree):
        return Outcome("", problem, 0.0)
    with bug.planted(tree):
        if problem := _import_problem(bug, tree):
            return Outcome("", problem, time.monotonic() - began)
        failed, reason = _first_failure(tree, suite or [*EVERYDAY, *(find_test(name, tree) for name in bug.tests)])
    seconds = time.monotonic() - began
    if failed and reason.startswith(MALFORMED):
        return Outcome(failed, f"malformed: {reason[:80]}", seconds)
    if failed and (answer := _first_failure(tree, [failed])) != NO_FAILURE:
        return Outcome(failed, f"{failed} does not pass without the bug, either: {answer[1][:80]}", seconds)
    return Outcome(failed, "" if failed else f"survived: {reason}", seconds, reason)


def _import_problem(bug: Bug, tree: Path) -> str:
    words = [sys.executable, "-c", f"import {bug.module}"]
    done = subprocess.run(words, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot be imported: {done.stderr.strip().splitlines()[-1]}"


def _first_failure(tree: Path, tests: Sequence[str]) -> tuple[str, str]:
    """The first test that fails, as FILE::TEST, and its reason; if none does, "" and why the tests ended."""
    report = tree.parent / f"{tree.name}.xml"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    words += [f"--junitxml={report}", f"--timeout={HANGS_S:g}"]
    process = subprocess.Popen(
        [*words, f"--basetemp={tree.parent / f't{tree.name}'}", *tests],
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"no end within {LIMIT_S:.0f} s"
    if process.returncode == 0:
        return NO_FAILURE
    if process.returncode != 1 or not report.exists():
        return "", f"pytest ended with status {process.returncode}: {output.strip().splitlines()[-1][:120]}"
    return _failure_in(report, tree)


def _failure_in(report: Path, tree: Path) -> tuple[str, str]:
    for case in ElementTree.parse(report).iter("testcase"):
        for fault in (*case.findall("failure"), *case.findall("error")):
            words = case.get("classname", "").split(".")  # of directories, file and classes
            paths = ["/".join(words[: count + 1]) + ".py" for count in range(len(words))]
            count, file = next((n + 1, path) for n, path in enumerate(paths) if (tree / path).exists())
            return "::".join((file, *words[count:], case.get("name", ""))), fault.get("message", "")
    return "", "a failure that pytest does not report"


def _matrix(words: Sequence[str], directory: Path) -> int:
    """Run bench/matrix.py in a copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="mx-") as scratch:
        tree = _copied_tree(Path(scratch) / "tree")
        command = [sys.executable, "-m", "bench.matrix", *words, "--matrix", str(directory.resolve())]
        environment = {**_environment(tree), "TMPDIR": scratch, "HOME": scratch}
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


# ------------------------------------------------------------------------------------------------------------- copies


def _copied_tree(copy: Path) -> Path:
    """Copy what git tracks, and new files that it does not ignore, as they are in the working tree."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file() or source.is_symlink():  # one that was deleted is still listed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return copy


def _rewrite(path: Path, text: str) -> None:
    """Write a source file, and delete its bytecode: Python compares sizes and whole seconds only."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
