"""Generate small mistakes in the functions of a source file, and plant one in a process that has imported them.

Kinds: a comparison turned, an integer one too large, plus for minus, and/or, a condition negated or a `not` removed,
None in place of what is returned, a statement deleted, a text emptied.  A mutant is named by file, function, kind and
its number among all sites of the function, so that it stays the same as long as that function does.
"""

from __future__ import annotations

import ast
import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType

from bench.mutations import Bug

Function = ast.FunctionDef | ast.AsyncFunctionDef
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SIMPLE = ast.Expr | ast.AugAssign | ast.Raise | ast.Delete
LINES_PER_MUTANT = 12  # a longer function gets more than the number asked for


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small mistake."""

    path: str  # of the file, relative to the root
    function: str  # its qualified name
    kind: str
    number: int  # among all sites of the function
    lines: tuple[int, ...]  # of the statement that it changes; a test that runs none of them cannot notice
    shown: str  # the source of what is changed
    replaced: tuple[str, str] | None = None  # text of the file and what stands in its place: a planted bug

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}:{self.kind}:{self.number}"


@dataclass(frozen=True, slots=True)
class _Site:
    kind: str
    lines: tuple[int, ...]
    node: ast.AST
    plant: Callable[[], None]  # changes the tree


def generate(path: Path, root: Path, *, per_function: int, seed: int) -> list[Mutant]:
    """Mutants of all functions of a file: of each a sample of so many, of all kinds in turn."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = str(path.relative_to(root))
    made = []
    for function, node in _named_functions(tree).items():
        sites = list(enumerate(_sites(node)))
        draw = random.Random(f"{seed} {name} {function}")
        draw.shuffle(sites)
        by_kind = defaultdict(list)
        for number, site in sites:
            by_kind[site.kind].append((number, site))
        in_turn = [pair for row in zip_longest(*by_kind.values()) for pair in row if pair is not None]
        count = max(per_function, ((node.end_lineno or node.lineno) - node.lineno) // LINES_PER_MUTANT)
        for number, site in sorted(in_turn[:count], key=lambda pair: pair[0]):
            shown = ast.unparse(site.node).split("\n", 1)[0][:100]
            made.append(Mutant(name, function, site.kind, number, site.lines, shown))
    return made


def mutated(mutant: Mutant, root: Path) -> CodeType:
    """Code of the whole file with the mistake in it."""
    path = root / mutant.path
    text = path.read_text(encoding="utf-8")
    if mutant.replaced:
        return compile(text.replace(*mutant.replaced), str(path), "exec", dont_inherit=True)
    tree = ast.parse(text)
    sites = list(_sites(_named_functions(tree)[mutant.function]))
    sites[mutant.number].plant()
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def planted(bug: Bug, root: Path) -> Mutant:
    """A bug of mutations.toml as a mutant."""
    before, _, _ = (root / bug.path).read_text(encoding="utf-8").partition(bug.old)
    first = before.count("\n") + 1
    lines = tuple(range(first, first + bug.old.count("\n") + 1))
    return Mutant(str(bug.path), "", f"planted-{bug.name}", 0, lines, bug.what, (bug.old, bug.new))


class LiveFunctions:
    """All functions of a process, by the file and the place that their code comes from."""

    def __init__(self, root: Path) -> None:
        gc.unfreeze()  # else they are not listed
        self._found: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        for found in gc.get_objects():
            if isinstance(found, FunctionType) and found.__code__.co_filename.startswith(str(root)):
                self._found[found.__code__.co_filename, found.__code__.co_qualname].append(found)

    def plant(self, mutant: Mutant, root: Path) -> bool:
        """Give every function that the mistake is in its new code.  False if there is none, as for what numba compiles.

        Raises ValueError if a closure has other free variables with the mistake.
        """
        count = 0
        for code in _codes(mutated(mutant, root)):
            name = code.co_qualname
            if name == mutant.function or name.startswith(f"{mutant.function}.<locals>.") or mutant.replaced:
                for found in self._found.get((code.co_filename, name), ()):
                    if mutant.replaced or found.__code__.co_firstlineno == code.co_firstlineno:
                        found.__code__ = code
                        count += 1
        return count > 0


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named_functions(tree: ast.AST) -> dict[str, Function]:
    """Each function by its name; of several with one name, as a property and its setter, the last."""
    return dict(_functions(tree))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods that stand in no other function, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)


def _sites(function: Function) -> Iterator[_Site]:
    """All places for a mistake, in an order that depends on the source alone."""
    for statements in _blocks(function):
        for place, statement in enumerate(statements):
            if _is_text(statement):
                continue  # a docstring
            lines = _own_lines(statement)
            if isinstance(statement, SIMPLE) or (isinstance(statement, ast.Assign) and _only_attributes(statement)):
                yield _Site("deleted", lines, statement, _replacing(statements, place, ast.Pass()))
            if isinstance(statement, ast.If | ast.While):
                yield _Site("negated", lines, statement.test, _setting(statement, "test", _not(statement.test)))
            if isinstance(statement, ast.Return) and not isinstance(statement.value, ast.Constant | None):
                yield _Site("none", lines, statement, _setting(statement, "value", ast.Constant(None)))
            for node in _expressions(statement):
                yield from _in_expression(node, lines)


def _in_expression(node: ast.AST, lines: tuple[int, ...]) -> Iterator[_Site]:
    match node:
        case ast.Compare(ops=[operator]):
            yield _Site("compared", lines, node, _setting(node, "ops", [TURNED[type(operator)]()]))
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield _Site("andor", lines, node, _setting(node, "op", other))
        case ast.UnaryOp(op=ast.Not()):
            yield _Site("notgone", lines, node, _setting(node, "operand", _not(node.operand)))
        case ast.BinOp(op=ast.Add() | ast.Sub() as operator):
            other_sign = ast.Sub() if isinstance(operator, ast.Add) else ast.Add()
            if not (_has_text(node.left) or _has_text(node.right)):
                yield _Site("sign", lines, node, _setting(node, "op", other_sign))
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield _Site("offbyone", lines, node, _setting(node, "value", value + 1))
        case ast.Constant(value=str() as text) if " " in text.strip():
            yield _Site("text", lines, node, _setting(node, "value", ""))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for child in [node, *(inner for inner in ast.walk(node) if inner is not node)]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(child, field, None)
            if isinstance(block, list):
                yield block


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Nodes of the statement, but of no statement inside it, nor of annotations, decorators and defaults."""
    if isinstance(statement, Function | ast.ClassDef | ast.Import | ast.ImportFrom):
        return
    left: list[ast.AST] = [
        child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr | ast.withitem)
    ]
    if isinstance(statement, ast.AnnAssign):
        left = [child for child in left if child is not statement.annotation]
    while left:
        node = left.pop(0)
        yield node
        left.extend(ast.iter_child_nodes(node))


def _own_lines(statement: ast.stmt) -> tuple[int, ...]:
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno
    return tuple(range(statement.lineno, max(end, statement.lineno) + 1))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _only_attributes(statement: ast.Assign) -> bool:
    """Whether no name would be missing without it."""
    return all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)


def _has_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(op=ast.Not(), operand=test)


def _setting(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def _replacing(statements: list[ast.stmt], place: int, other: ast.stmt) -> Callable[[], None]:
    def replace() -> None:
        statements[place] = other

    return replace
