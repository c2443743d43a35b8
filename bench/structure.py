"""Figures of the source tree's structure: how large it is, what ties its rooms, how its documentation begins.

A room is a folder of `launch`, `rlhpc`, `rlhpc/roles` or `rlhpc/training`; in the figures of `rlhpc` each loose file is
a room, too, since whoever looks for something has to know it by name.  A way is what a prompt, or a version of the
weights, passes through: bench/ways.toml lists the functions, and what counts are their files.

    python -m bench.structure [DIRECTORY]    a checkout; this one where none is given
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

HOUSES = ("launch", "rlhpc", "rlhpc/roles", "rlhpc/training")
LONG_FUNCTION = 40  # lines
PREPOSITION = r"(Of|In|For|To|By|With|On|At|From|As|Without|After|Before|Between) "
RIDDLE = r"(What|Where|Those|Who|Why|How) "  # a clause or pronoun in place of the thing's name
BLOCK = 6  # lines that are the same in two places, without blank ones, comments and imports


def sources(root: Path) -> dict[str, ast.Module]:
    """Dotted name of every module of the product → its tree."""
    found = {}
    for package in ("launch", "rlhpc"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a tree imports, of modules or of what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a tree, those inside others too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room_of(module: str, house: str, packages: set[str]) -> str | None:
    """The room of a house that a module lies in; None outside."""
    prefix = house.replace("/", ".") + "."
    if not (module + ".").startswith(prefix):
        return None
    first = module.removeprefix(prefix).partition(".")[0]
    return first if prefix + first in packages else "(files)"


def arrows(trees: dict[str, ast.Module], house: str, packages: set[str]) -> set[tuple[str, str]]:
    """Pairs of different rooms of which the first imports the second."""
    found = set()
    for module, tree in trees.items():
        here = room_of(module, house, packages)
        for name in imports(tree):
            there = room_of(name if name in trees else name.rpartition(".")[0], house, packages)
            if here and there and here != there:
                found.add((here, there))
    return found


def arrows_back(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Arrows that run back up in the order of rooms with the fewest of them that moving one room at a time finds."""
    order = sorted({room for pair in pairs for room in pair})

    def back(of: list[str]) -> list[tuple[str, str]]:
        place = {room: number for number, room in enumerate(of)}
        return sorted((here, there) for here, there in pairs if place[here] < place[there])

    fewest, is_better = back(order), True
    while is_better:
        is_better = False
        for room in list(order):
            rest = [other for other in order if other != room]
            tried = [[*rest[:place], room, *rest[place:]] for place in range(len(order))]
            best = min(tried, key=lambda each: len(back(each)))
            if len(back(best)) < len(fewest):
                order, fewest, is_better = best, back(best), True
    return fewest


def circles(pairs: set[tuple[str, str]]) -> int:
    """Number of groups of rooms in which each imports every other one, by way of others."""
    reached = _reached(pairs)
    return len({frozenset(other for other in reached[room] if room in reached[other]) for room in in_circles(pairs)})


def in_circles(pairs: set[tuple[str, str]]) -> set[str]:
    """Rooms that import themselves by way of others."""
    reached = _reached(pairs)
    return {room for room in list(reached) if room in reached[room]}


def _reached(pairs: set[tuple[str, str]]) -> dict[str, set[str]]:
    reached: dict[str, set[str]] = defaultdict(set)
    for here, there in pairs:
        reached[here].add(there)
    for middle in list(reached):
        for here in list(reached):
            if middle in reached[here]:
                reached[here] |= reached[middle]
    return reached


def ties_of_rlhpc(trees: dict[str, ast.Module]) -> tuple[set[str], set[tuple[str, str]]]:
    """Rooms of rlhpc, each loose file one of them, and the arrows between them but those of type checkers."""

    def room(name: str) -> str | None:
        parts = name.split(".")
        return parts[1] if parts[0] == "rlhpc" and len(parts) > 1 else None

    rooms = {here for module in trees if (here := room(module))}
    found = set()
    for module, tree in trees.items():
        if here := room(module):
            targets = {name if name in trees else name.rpartition(".")[0] for name in imports(_without_types(tree))}
            found |= {
                (here, there) for target in targets if target in trees and (there := room(target)) and there != here
            }
    return rooms, found


def _without_types(tree: ast.Module) -> ast.Module:
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(kept, [])


def docstrings(trees: dict[str, ast.Module]) -> list[str]:
    """Every docstring of the product."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def figures(root: Path, trees: dict[str, ast.Module]) -> dict[str, str]:
    """The figures that say how much there is to hold, by name."""
    rooms, ties = ties_of_rlhpc(trees)
    written = docstrings(trees)
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    begins = {
        "with a preposition": sum(bool(re.match(PREPOSITION, text)) for text in written),
        "with What, Who, How …": sum(bool(re.match(RIDDLE, text)) for text in written),
        "The same, but": sum(text.startswith("The same") for text in written),
        "See": sum(text.startswith("See ") for text in written),
    }
    num_statements = sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree))
    tests, pages = _files(root, "tests", ".py"), _files(root, "docs", ".md")
    return {
        "files of rlhpc and launch": f"{len(trees)}",
        "their lines": f"{sum(_num_lines(root, name) for name in trees):,}",
        "their statements": f"{num_statements:,}",
        "rooms of rlhpc, loose files included": f"{len(rooms)}",
        "arrows between them": f"{len(ties)}",
        "of these back up": ", ".join(f"{here} to {there}" for here, there in arrows_back(ties)) or "0",
        "circles": f"{circles(ties)}",
        "files directly below rlhpc/": f"{len(list((root / 'rlhpc').glob('*.py')))}",
        "class names that exist twice or more": f"{sum(count > 1 for count in classes.values())}",
        "docstrings": f"{len(written):,}",
        **{f"docstrings that begin {how}": f"{count}" for how, count in begins.items()},
        "docstrings of four words or fewer": f"{sum(len(text.split()) <= 4 for text in written)}",
        "tests: files": f"{len(tests)}",
        "tests: lines": f"{sum(map(_lines, tests)):,}",
        "docs: pages without decisions": f"{sum(page.parent.name == 'docs' for page in pages)}",
        "docs: their lines": f"{sum(_lines(page) for page in pages if page.parent.name == 'docs'):,}",
        "CHANGELOG: lines": f"{_lines(root / 'CHANGELOG.md'):,}",
    }


def ways(root: Path) -> dict[str, list[str]]:
    """Name of each way of bench/ways.toml → its files, in the order in which they are entered.

    Raises ValueError for a function that is not there.
    """
    found = {}
    for name, stages in tomllib.loads((root / "bench" / "ways.toml").read_text(encoding="utf-8")).items():
        places = [place.partition("::")[::2] for stage in stages.values() for place in stage]
        for file, function in places:
            if function not in _definitions(root / file):
                raise ValueError(f"bench/ways.toml, {name}: there is no {function} in {file}")
        found[name.replace("_", " ")] = list(dict.fromkeys(file for file, _ in places))
    return found


def _definitions(file: Path) -> set[str]:
    """Names of the functions and classes of a file, and of methods as Class.method."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    top = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    inner = {f"{node.name}.{each.name}" for node in top for each in node.body if isinstance(each, kinds)}
    return inner | {node.name for node in top}


def _files(root: Path, folder: str, suffix: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.splitlines() if name.endswith(suffix)]


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def doubled_blocks(root: Path) -> int:
    """Blocks of BLOCK lines that stand in more than one place; a longer one counts for each line more."""
    seen: Counter[str] = Counter()
    for package in ("launch", "rlhpc"):
        for path in (root / package).rglob("*.py"):
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            lines = [line for line in lines if len(line) > 1 and not line.startswith(("#", "import ", "from "))]
            seen.update("\n".join(lines[i : i + BLOCK]) for i in range(len(lines) - BLOCK + 1))
    return sum(count > 1 for count in seen.values())


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path(__file__).parents[1])
    root: Path = parser.parse_args().directory
    trees = sources(root)
    packages = {name for name in trees if any(other.startswith(name + ".") for other in trees)}
    num_lines = {name: _num_lines(root, name) for name in trees}
    for name, value in figures(root, trees).items():
        print(f"{name:<44}{value}")
    for name, crossed in ways(root).items():
        print(f"{'files of the way ' + name:<44}{len(crossed)}")
    for house in HOUSES:
        rooms: dict[str, list[str]] = defaultdict(list)
        for module in trees:
            if room := room_of(module, house, packages):
                rooms[room].append(module)
        pairs = arrows(trees, house, packages)
        lines = sum(num_lines[module] for modules in rooms.values() for module in modules)
        files = sum(map(len, rooms.values()))
        round_about = ", ".join(sorted(in_circles(pairs))) or "none"
        print(
            f"{house}: {files} files, {lines:,} lines, {len(rooms)} rooms, {len(pairs)} arrows; "
            f"in circles, imports for types included: {round_about}"
        )
        for room, modules in sorted(rooms.items()):
            print(f"    {room:<18}{len(modules):>4} files {sum(num_lines[module] for module in modules):>6,} lines")
    everything = [function for tree in trees.values() for function in functions(tree)]
    inner = sum(len(list(imports(function))) for function in everything)
    longest = [f for f in everything if (f.end_lineno or f.lineno) - f.lineno + 1 > LONG_FUNCTION]
    print(f"functions: {len(everything):,}, over {LONG_FUNCTION} lines: {len(longest)}")
    print(f"names imported inside functions: {inner}")
    print(f"blocks of {BLOCK} lines that stand twice: {doubled_blocks(root)}")
    return 0


def _num_lines(root: Path, module: str) -> int:
    path = root / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _lines(file)


if __name__ == "__main__":
    sys.exit(main())
