"""Show that a change moved code and changed none: the same definitions before and after, wherever they stand.

Input: two revisions of this repository.  Output: how many top-level statements (functions, classes, constants; not
imports) are equal by ast.dump without docstrings, how many differ in names and texts alone (each renaming, with how
often), how many were copies of another, and every other one.  `module.name` counts as `name`.  Exit status 1 if there
is another one.

    python -m bench.same_code BEFORE AFTER [FOLDER …]
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = ("id", "attr", "name", "arg", "asname", "module")  # fields of nodes that hold identifiers
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FOLDERS = ("rlhpc", "launch", "tests/engines")

Placed = tuple[str, ast.stmt]  # "path:line", statement


def statements(revision: str, folders: Sequence[str]) -> Iterator[Placed]:
    """Top-level statements of a revision, without docstrings and without imports."""
    paths = [path for path in _git("ls-tree", "-r", "--name-only", revision).splitlines() if path.endswith(".py")]
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths}
    for path in paths:
        if not path.startswith(tuple(f"{folder}/" for folder in folders)):
            continue
        tree = ast.parse(_git("show", f"{revision}:{path}"), path)
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body[:1] = [] if node.body[1:] or isinstance(node, ast.Module) else [ast.Pass()]
        plain = _Plain(modules, tree)
        for node in tree.body:
            is_of_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if not isinstance(node, ast.Import | ast.ImportFrom) and not is_of_types:
                yield f"{path}:{node.lineno}", _filled(plain.visit(node))


def _filled(node: ast.stmt) -> ast.stmt:
    """Give blocks that had nothing but imports a `pass`."""
    for part in ast.walk(node):
        if getattr(part, "body", None) == []:
            part.body = [ast.Pass()]  # type: ignore[attr-defined]
    return node


class _Plain(ast.NodeTransformer):
    """Leaves imports out, and the names of modules of this repository."""

    def __init__(self, modules: set[str], tree: ast.Module) -> None:
        self._modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in modules
        }

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.Name(node.attr, node.ctx)
        return node


def identifiers(node: ast.AST) -> list[str]:
    """Every name and text of a statement, in the order of the tree."""
    found = []
    for part in ast.walk(node):
        found += [value for field in NAMES if isinstance(value := getattr(part, field, None), str)]
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.append(part.value)
    return found


def shape(node: ast.AST) -> str:
    """The statement without names and texts."""
    copy = ast.parse(ast.unparse(node))
    for part in ast.walk(copy):
        for field in NAMES:
            if isinstance(getattr(part, field, None), str):
                setattr(part, field, "")
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            part.value = ""
    return ast.dump(copy)


def main() -> int:
    """Compare two revisions; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.same_code", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    options = parser.parse_args()
    before, after = (_by_dump(statements(revision, options.folders)) for revision in (options.before, options.after))
    num_equal = sum(min(len(places), len(after[dump])) for dump, places in before.items() if dump in after)
    copies = [each for dump, places in before.items() if dump in after for each in places[len(after[dump]) :]]
    gone = [each for dump, places in before.items() if dump not in after for each in places]
    loggers = [place for place, node in gone if ast.unparse(node).startswith("log = logging.getLogger(")]
    gone = [(place, node) for place, node in gone if place not in loggers]
    come = [each for dump, places in after.items() for each in places[len(before.get(dump, ())) :]]
    renamings, others = _paired(gone, come)
    num_renamed = len(gone) - sum(line[0] == "-" for line in others)
    print(f"{num_equal} statements are equal, {num_renamed} differ in names and texts alone:")
    for (old, new), count in renamings.most_common():
        print(f"    {old!r:.60} is now {new!r:.60} ({count})")
    print(f"{len(copies)} were copies of another in the same file, {len(loggers)} named a logger of a merged file")
    print("\n".join(others) or "no other statement has changed, come or gone")
    return 1 if others else 0


def _by_dump(found: Iterator[Placed]) -> dict[str, list[Placed]]:
    by_dump = defaultdict[str, list[Placed]](list)
    for place, node in found:
        by_dump[ast.dump(node)].append((place, node))
    return dict(by_dump)


def _paired(gone: list[Placed], come: list[Placed]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Renamings among statements of one shape, and lines for those that have no counterpart."""
    by_shape = defaultdict[str, list[Placed]](list)
    for place, node in come:
        by_shape[shape(node)].append((place, node))
    renamings, others = Counter[tuple[str, str]](), list[str]()
    for place, node in gone:
        candidates = by_shape[shape(node)]
        if not candidates:
            others.append(_line("-", place, node))
            continue
        words = identifiers(node)
        differing = [sum(a != b for a, b in zip(words, identifiers(other), strict=False)) for _, other in candidates]
        _, match = candidates.pop(differing.index(min(differing)))
        renamings.update((a, b) for a, b in zip(words, identifiers(match), strict=False) if a != b)
    others += [_line("+", place, node) for places in by_shape.values() for place, node in places]
    return renamings, others


def _line(sign: str, place: str, node: ast.stmt) -> str:
    return f"{sign} {place}: {ast.unparse(node).partition(chr(10))[0][:100]}"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
