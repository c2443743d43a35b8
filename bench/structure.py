"""Figures of the source tree's structure: how large its rooms are and what ties them.

A room is a folder of `launch`, `rlhpc`, `rlhpc/roles` or `rlhpc/training`; the loose files of one are a room too.

    python -m bench.structure [DIRECTORY]    a checkout; this one where none is given
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

HOUSES = ("launch", "rlhpc", "rlhpc/roles", "rlhpc/training")
LONG_FUNCTION = 40  # lines
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


def in_circles(pairs: set[tuple[str, str]]) -> set[str]:
    """Rooms that import themselves by way of others."""
    reached: dict[str, set[str]] = defaultdict(set)
    for here, there in pairs:
        reached[here].add(there)
    for middle in list(reached):
        for here in list(reached):
            if middle in reached[here]:
                reached[here] |= reached[middle]
    return {room for room in reached if room in reached[room]}


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
    for house in HOUSES:
        rooms: dict[str, list[str]] = defaultdict(list)
        for module in trees:
            if room := room_of(module, house, packages):
                rooms[room].append(module)
        pairs = arrows(trees, house, packages)
        lines = sum(num_lines[module] for modules in rooms.values() for module in modules)
        files = sum(map(len, rooms.values()))
        circles = ", ".join(sorted(in_circles(pairs))) or "none"
        print(
            f"{house}: {files} files, {lines:,} lines, {len(rooms)} rooms, {len(pairs)} arrows; in circles: {circles}"
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
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    sys.exit(main())
