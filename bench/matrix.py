"""Which test finds which mistake: tests × planted bugs and generated mutants, and which tests find nothing alone.

    python -m bench.mutations --matrix DIRECTORY --files rlhpc/buffer --tests tests/unit/buffer

1. Every test runs once, traced, in a process forked for its file: the lines of the product that it runs.
2. For every mistake a process is forked, in which the functions that are already imported get the code with the
   mistake, and the tests that run its lines are run, those that run the fewest lines first, until so many have failed
   or the limit is over.
3. The report: what each test finds alone and covers alone, and the tests that could go, in an order in which each
   leaves to those that stay whatever it finds and covers.

DIRECTORY holds coverage.jsonl, mutants.jsonl and report.md.  What is there is not done again: the same command goes on
where it was ended; delete coverage.jsonl when tests have changed.  A test that starts other processes is not looked at:
those would import the sound sources.  A mistake that no test found in time says nothing, and neither does one in code
that numba compiles or that runs at import.  A sample of mutants proposes, a person who reads the test decides.

The sources are copied first, and a mutant can neither signal a process that is not its own nor delete a tree elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import psutil
import pytest
from hypothesis import Phase, settings

from bench.mutants import LiveFunctions, Mutant, generate, planted
from bench.mutations import command_line, read_bugs

T = TypeVar("T")
PRODUCT = ("rlhpc/", "launch/")
MARKS = "not long and not starts and not waits and not gpu and not vllm"
ENOUGH = 5  # test functions that find a mistake: which others would find it, too, makes no difference
MEMORY = 4 << 30  # bytes beyond what the process has when it is forked
LIMIT_OF_A_FILE_S = 600.0  # traced
CALLS_WITHOUT_NEWS = 30  # then a function is traced no further in this test, or its thousands of examples take minutes
LINES_WITHOUT_NEWS = 1000  # the same of a loop
EXAMPLES = 20  # of hypothesis, where a test does not say how many


@dataclass(slots=True)
class Covered:
    """What one test ran."""

    test: str  # pytest's node id
    seconds: float
    lines: dict[str, set[int]] = field(default_factory=dict)  # file → lines

    @property
    def function(self) -> str:
        """The test without the case: what a person writes and deletes."""
        return self.test.partition("[")[0]

    def runs(self, mutant: Mutant) -> bool:
        return not self.lines.get(mutant.path, set()).isdisjoint(mutant.lines)

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.lines.values()))


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of one mistake."""

    mutant: str
    shown: str
    found_by: tuple[str, ...]  # test functions
    num_run: int
    num_covering: int


# -------------------------------------------------------------------------------------------------- one pytest session


class MatrixSession:
    """A plugin that takes pytest's collected tests and runs them its own way."""

    def __init__(self, options: argparse.Namespace, directory: Path, root: Path) -> None:
        self.options = options
        self.directory = directory
        self.root = root
        self.failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """A failing example is not made smaller."""
        settings.register_profile(
            "matrix", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("matrix")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own loop."""
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all forks
        covered = self._cover(session.items)
        mutants = self._mutants()
        tried = {each.mutant for each in read_tried(self.directory)}
        left = [mutant for mutant in mutants if mutant.name not in tried]
        _say(f"{len(covered)} tests cover; {len(mutants)} mutants, {len(left)} left")
        for path in {mutant.path for mutant in left}:
            with contextlib.suppress(ImportError):
                __import__(".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"))
        live = LiveFunctions(self.root)
        items = {item.nodeid: item for item in session.items}
        self._in_workers(left, lambda mutants: self._try_all(mutants, covered, items, live))
        return True

    # ------------------------------------------------------------------------------------------------------ coverage

    def _cover(self, items: Sequence[pytest.Item]) -> list[Covered]:
        known = {covered.test: covered for covered in read_covered(self.directory)}
        files = defaultdict(list)
        for item in items:
            files[item.nodeid.partition("::")[0]].append(item)
        left = [tests for tests in files.values() if not all(item.nodeid in known for item in tests)]
        self._in_workers(left, self._cover_files)
        wanted = {item.nodeid for item in items}
        return [covered for covered in read_covered(self.directory) if covered.test in wanted]

    def _cover_files(self, files: Sequence[Sequence[pytest.Item]]) -> None:
        for tests in files:
            began = time.monotonic()
            for line in _lines_of_child(partial(self._trace, tests), LIMIT_OF_A_FILE_S):
                _append(self.directory / "coverage.jsonl", line)
            _say(f"covered {tests[0].nodeid.partition('::')[0]} {time.monotonic() - began:.1f} s")

    def _in_workers(self, work: Sequence[T], do: Callable[[Sequence[T]], None]) -> None:
        """Share work out among as many processes as asked for."""
        count = self.options.jobs
        for worker in [_forked(partial(do, work[number::count])) for number in range(count)]:
            os.waitpid(worker, 0)

    def _trace(self, items: Sequence[pytest.Item], report: Callable[[str], None]) -> None:
        shared: set[tuple[str, int]] = set()
        tracer = Tracer(self.root)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed = False
            tracer.seen = set()
            began = time.monotonic()
            with tracer.on():
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = time.monotonic() - began
            shared |= tracer.of_fixtures
            if self.failed:
                continue
            lines = defaultdict(list)
            for path, line in sorted(tracer.seen | shared):
                lines[path].append(line)
            report(json.dumps({"test": item.nodeid, "seconds": round(seconds, 4), "lines": lines}))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a shared fixture runs, every test of the file needs."""
        tracer = Tracer.current
        if tracer is None or fixturedef.scope == "function":
            return (yield)
        before, tracer.seen = tracer.seen, set()
        try:
            return (yield)
        finally:
            tracer.of_fixtures |= tracer.seen
            tracer.seen = before | tracer.seen

    # ------------------------------------------------------------------------------------------------------- mutants

    def _mutants(self) -> list[Mutant]:
        paths = [path for given in self.options.files for path in _sources(self.root / given)]
        names = {str(path.relative_to(self.root)) for path in paths}
        made = [planted(bug, self.root) for bug in read_bugs() if str(bug.path) in names]
        for path in paths:
            made += generate(path, self.root, per_function=self.options.per_function, seed=self.options.seed)
        return made

    def _try_all(
        self, mutants: Sequence[Mutant], covered: Sequence[Covered], items: dict[str, pytest.Item], live: LiveFunctions
    ) -> None:
        began = time.monotonic()
        num_found = 0
        for number, mutant in enumerate(mutants, 1):
            tests = in_order([each for each in covered if each.runs(mutant)])
            result = self._try(mutant, [items[each.test] for each in tests], live)
            num_found += bool(result.found_by)
            _append(self.directory / "mutants.jsonl", json.dumps(asdict(result)))
            if number % 50 == 0 or number == len(mutants):
                _say(f"tried {number}/{len(mutants)}, found {num_found}, {time.monotonic() - began:.0f} s")

    def _try(self, mutant: Mutant, tests: Sequence[pytest.Item], live: LiveFunctions) -> Tried:
        found: list[str] = []
        left = list(tests)
        end = time.monotonic() + self.options.limit
        while left and len(found) < ENOUGH and time.monotonic() < end:
            running = ""
            work = partial(self._run_with, mutant, tuple(left), tuple(found), live)
            for line in _lines_of_child(work, end - time.monotonic()):
                word, _, test = line.partition(" ")
                if word == "begins":
                    running = test
                    left = left[1:]
                elif word == "fails":
                    found.append(running.partition("[")[0])
                    running = ""
                elif word == "passes":
                    running = ""
                elif word == "unplanted":
                    left, running = [], ""
            if running and time.monotonic() < end:
                found.append(running.partition("[")[0])  # it ended the process
            elif not running:
                break
        return Tried(mutant.name, mutant.shown, tuple(dict.fromkeys(found)), len(tests) - len(left), len(tests))

    def _run_with(
        self,
        mutant: Mutant,
        tests: Sequence[pytest.Item],
        found: Sequence[str],
        live: LiveFunctions,
        report: Callable[[str], None],
    ) -> None:
        failing = set(found)
        _fence()
        try:
            is_planted = live.plant(mutant, self.root)
        except ValueError:  # another number of free variables
            is_planted = False
        if not is_planted:
            report("unplanted")
            return
        for item, following in zip(tests, [*tests[1:], None], strict=True):
            report(f"begins {item.nodeid}")
            function = item.nodeid.partition("[")[0]
            if function in failing:
                report("passes")
                continue
            self.failed = False
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            report("fails" if self.failed else "passes")
            if self.failed:
                failing.add(function)
            if len(failing) >= ENOUGH:
                return


class Tracer:
    """Records the lines of the product that are run."""

    current: Tracer | None = None

    def __init__(self, root: Path) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.of_fixtures: set[tuple[str, int]] = set()
        self._root = f"{root}/"
        self._names: dict[CodeType, str] = {}  # "" for code that is none of the product
        self._calls: Counter[CodeType] = Counter()  # in this test, since one of them ran a new line

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record while this lasts."""
        Tracer.current = self
        self._calls.clear()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            Tracer.current = None

    def _called(self, frame: FrameType, _event: str, _value: object) -> Callable[..., Any] | None:
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            path = code.co_filename.removeprefix(self._root)
            name = self._names[code] = path if path.startswith(PRODUCT) else ""
        if not name or self._calls[code] > CALLS_WITHOUT_NEWS:
            return None
        self._calls[code] += 1
        lines = 0

        def ran(frame: FrameType, event: str, _value: object) -> Callable[..., Any]:
            nonlocal lines
            if event == "line":
                place = name, frame.f_lineno
                if place in self.seen:
                    lines += 1
                    frame.f_trace_lines = lines < LINES_WITHOUT_NEWS
                else:
                    lines = self._calls[code] = 0
                    self.seen.add(place)
            return ran

        return ran


def in_order(covered: Iterable[Covered]) -> list[Covered]:
    """Files whose tests run the fewest lines first, since what a test is about is what it finds; in a file likewise."""
    files = defaultdict(list)
    for each in covered:
        files[each.test.partition("::")[0]].append(each)
    for tests in files.values():
        tests.sort(key=lambda each: each.num_lines)
    return [each for tests in sorted(files.values(), key=lambda tests: tests[0].num_lines) for each in tests]


# --------------------------------------------------------------------------------------------------------------- forks


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as out:
        out.write(line + "\n")


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            _end()
    return child


def _end() -> NoReturn:
    sys.stdout.flush()
    os._exit(0)


def _lines_of_child(work: Callable[[Callable[[str], None]], None], limit_s: float) -> Iterator[str]:
    """What work reports in a process of its own, which is killed with all that it started when it ends or is late."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            work(lambda line: _write_all(writing, line.encode() + b"\n"))
        finally:
            _end()
    os.close(writing)
    end = time.monotonic() + limit_s
    rest = b""
    try:
        while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0] and (
            read := os.read(reading, 1 << 20)
        ):
            *lines, rest = (rest + read).split(b"\n")
            yield from (line.decode() for line in lines)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _fence() -> None:
    """A mistake must not reach beyond this process: it signals nobody else and deletes no tree outside the scratch."""
    me, kill, killpg, rmtree = os.getpid(), os.kill, os.killpg, shutil.rmtree
    scratch = Path(tempfile.gettempdir()).resolve()

    def is_mine(pid: int) -> bool:
        if pid <= 1:
            return False
        try:
            return pid == me or any(parent.pid == me for parent in psutil.Process(pid).parents())
        except psutil.Error:
            return False

    def fenced_kill(pid: int, signal_number: int) -> None:
        if signal_number != 0 and not is_mine(pid):
            raise ProcessLookupError(pid)
        kill(pid, signal_number)

    def fenced_killpg(group: int, signal_number: int) -> None:
        if signal_number != 0 and not is_mine(group):
            raise ProcessLookupError(group)
        killpg(group, signal_number)

    def fenced_rmtree(path: Any, *arguments: Any, **keywords: Any) -> None:
        if keywords.get("dir_fd") is None and not Path(path).resolve().is_relative_to(scratch):
            raise PermissionError(str(path))
        rmtree(path, *arguments, **keywords)

    os.kill, os.killpg, shutil.rmtree = fenced_kill, fenced_killpg, fenced_rmtree  # type: ignore[assignment]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, hard))


# -------------------------------------------------------------------------------------------------------------- report


def read_covered(directory: Path) -> list[Covered]:
    """Tests whose coverage is known, each once."""
    found = {}
    for row in _rows(directory / "coverage.jsonl"):
        lines = {path: set(numbers) for path, numbers in row["lines"].items()}
        found[row["test"]] = Covered(row["test"], row["seconds"], lines)
    return list(found.values())


def read_tried(directory: Path) -> list[Tried]:
    """Mistakes that were tried."""
    rows = _rows(directory / "mutants.jsonl")
    return [Tried(**{**row, "found_by": tuple(row["found_by"])}) for row in rows]


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # one that was being written
            rows.append(json.loads(line))
    return rows


def could_go(
    found: dict[str, set[str]], covers: dict[str, set[tuple[str, int]]], sizes: dict[str, int], kept: set[str]
) -> list[str]:
    """Tests that can go in this order: whatever each finds and covers is found and covered by those that stay.

    found: test → mistakes; covers: test → lines; sizes: test → lines of its own.  What finds least per line goes first.
    """
    num_finders = Counter(mistake for test in sizes for mistake in found[test])
    num_covering = Counter(line for test in sizes for line in covers[test])
    gone = []
    for test in sorted(sizes, key=lambda test: (len(found[test]) / sizes[test], -sizes[test], test)):
        alone = any(num_finders[mistake] == 1 for mistake in found[test])
        if test in kept or alone or any(num_covering[line] == 1 for line in covers[test]):
            continue
        gone.append(test)
        num_finders.subtract(found[test])
        num_covering.subtract(covers[test])
    return gone


def write_report(directory: Path, root: Path) -> Path:
    """report.md, from what is in the directory."""
    tried = read_tried(directory)
    covers: dict[str, set[tuple[str, int]]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for each in read_covered(directory):
        covers[each.function] |= {(path, line) for path, lines in each.lines.items() for line in lines}
        seconds[each.function] += each.seconds
    sizes = {test: size for test, size in _sizes(covers, root).items() if size}
    found: dict[str, set[str]] = {test: set() for test in covers}
    for mistake in tried:
        for test in mistake.found_by:
            found[test].add(mistake.mutant)
    named = _named_tests(root)
    kept = {test for test in sizes if test.rpartition("::")[2] in named}
    going = could_go(found, covers, sizes, kept)
    staying = set(sizes) - set(going)
    finders = {mistake.mutant: mistake.found_by for mistake in tried}

    def others(test: str) -> str:
        counts = Counter(other for mistake in found[test] for other in finders[mistake] if other in staying)
        return ", ".join(other for other, _ in counts.most_common(3))

    text = [
        f"{len(sizes)} test functions, {len(tried)} mistakes, {sum(map(bool, finders.values()))} found.",
        f"{len(going)} tests could go, {sum(sizes[test] for test in going)} lines, "
        f"{sum(seconds[test] for test in going):.0f} s traced; {len(kept)} are named in pages or bugs, and stay.",
        "\n## Tests that could go, in order\n",
        *_table(
            "test | lines | s | finds | most of it is found by",
            going,
            lambda test: (test, sizes[test], f"{seconds[test]:.2f}", len(found[test]), others(test)),
        ),
        "\n## All tests\n",
    ]
    num_finders = Counter(mistake for mistakes in found.values() for mistake in mistakes)
    num_covering = Counter(line for lines in covers.values() for line in lines)
    text += _table(
        "test | lines | s | finds | alone | lines it alone covers",
        sorted(sizes),
        lambda test: (
            test,
            sizes[test],
            f"{seconds[test]:.2f}",
            len(found[test]),
            sum(num_finders[mistake] == 1 for mistake in found[test]),
            sum(num_covering[line] == 1 for line in covers[test]),
        ),
    )
    text.append("\n## Mistakes that no test found\n")
    text += [
        f"* `{each.mutant}`: `{each.shown}` ({each.num_run} of {each.num_covering} tests)"
        for each in tried
        if not each.found_by
    ]
    path = directory / "report.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def _table(head: str, tests: Iterable[str], row: Callable[[str], tuple[object, ...]]) -> list[str]:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return lines + [f"| {' | '.join(map(str, row(test)))} |" for test in tests]


def _sizes(tests: Iterable[str], root: Path) -> dict[str, int]:
    """Lines of each test function, with its decorators."""
    sizes = {}
    by_file = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    for file, names in by_file.items():
        lines = {}
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lines[node.name] = (node.end_lineno or node.lineno) - first + 1
        for name in names:
            sizes[name] = lines.get(name.rpartition("::")[2], 0)  # 0: made by a class, as hypothesis' state machines
    return sizes


def _named_tests(root: Path) -> set[str]:
    """Tests that pages and planted bugs name."""
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("tests/*.md"), root / "bench/mutations.toml"]
    return {word for path in paths for word in re.findall(r"\btest_\w+", path.read_text(encoding="utf-8"))}


# ------------------------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in the copy of the sources that this process runs in, and write the report."""
    options = command_line().parse_args(arguments)
    tree = Path.cwd()
    options.matrix.mkdir(parents=True, exist_ok=True)
    words = ["-q", "-s", "-n0", "-p", "no:cacheprovider", "-m", MARKS, "-o", "tmp_path_retention_policy=none"]
    words += [f"--timeout={max(30.0, options.limit):.0f}"]
    status = pytest.main([*words, *options.tests], plugins=[MatrixSession(options, options.matrix, tree)])
    print(write_report(options.matrix, tree))
    return int(status)


def _sources(given: Path) -> list[Path]:
    return [given] if given.is_file() else sorted(given.rglob("*.py"))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
