"""Which names of a foreign package our source uses, and how it calls them; read from the source, not written down.

Input: a directory of ours.  Output: Uses: imported names and what hangs on them, calls with their keywords, attributes
of objects whose class an annotation or receivers.py tells, methods that a subclass overrides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Use:
    """One place."""

    place: str  # file:line
    dotted: str
    is_call: bool = False
    num_positional: int = 0
    keywords: frozenset[str] = frozenset()
    is_open: bool = False  # *args or **kwargs hide more


@dataclass(frozen=True)
class Receivers:
    """What the source does not say: classes of objects in one file, by expression, and keys of **expressions."""

    classes: Mapping[str, tuple[str, ...]]  # expression → classes; a name must exist in all that the version has
    expanded: Mapping[str, frozenset[str]]


OBJECTS = {"vllm.platforms.current_platform": "vllm.platforms.interface.Platform"}  # imported, and no classes
NO_RECEIVERS = Receivers({}, {})


def uses_in(root: Path, packages: tuple[str, ...], receivers: Mapping[str, Receivers]) -> list[Use]:
    """All uses below `root`/rlhpc.  Raises LookupError for a receiver that no source knows any more."""
    found: list[Use] = []
    called = {
        node.attr
        for path in (root / "rlhpc").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for path in sorted((root / "rlhpc").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        reader = _File(name, ast.parse(path.read_text()), packages, receivers.get(name, NO_RECEIVERS))
        found += [*reader.imported(), *reader.used(), *reader.overridden(called)]
        if unknown := reader.unknown_receivers():
            raise LookupError(f"tests/gpu_dry/receivers.py: {name} holds no {', '.join(sorted(unknown))} any more")
    return found


class _File:
    """One source file."""

    def __init__(self, name: str, tree: ast.Module, packages: tuple[str, ...], receivers: Receivers) -> None:
        self.name, self.tree, self.packages, self.receivers = name, tree, packages, receivers
        self.bound = dict(self._bindings())
        self.optional = {
            node.args[1].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _is_feature_test(node) and isinstance(node.args[1], ast.Constant)
        }
        self.seen: set[str] = set()

    def imported(self) -> Iterator[Use]:
        """Every import is a use."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and self._is_foreign(node.module or ""):
                yield from (self._use(node, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (self._use(node, each.name) for each in node.names if self._is_foreign(each.name))

    def used(self) -> Iterator[Use]:
        """Attributes and calls."""
        functions = {id(node.func): node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
                for dotted in self._meaning(node):
                    yield self._use(node, dotted, functions.get(id(node)))

    def overridden(self, called: set[str]) -> Iterator[Use]:
        """Methods of a subclass that nobody of ours calls: the library does, by this name."""
        for node in ast.walk(self.tree):
            bases = [dotted for base in getattr(node, "bases", []) for dotted in self._meaning(base)]
            if not isinstance(node, ast.ClassDef) or not bases:
                continue
            own = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            own |= {each.attr for each in ast.walk(node) if _is_own_attribute(each) and isinstance(each.ctx, ast.Store)}
            for name in sorted(own - called):
                if not name.startswith("__") and name not in self.optional:
                    yield self._use(node, f"{bases[0]}.{name}")
            for each in ast.walk(node):
                if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Load):
                    continue
                is_super = ast.unparse(each.value) == "super()"
                if is_super or (_is_own_attribute(each) and each.attr not in own):
                    yield self._use(each, f"{bases[0]}.{each.attr}")

    def unknown_receivers(self) -> set[str]:
        """Expressions of receivers.py that do not occur here."""
        return {*self.receivers.classes, *self.receivers.expanded} - self.seen

    def _use(self, node: ast.AST, dotted: str, call: ast.Call | None = None) -> Use:
        place = f"{self.name}:{getattr(node, 'lineno', 0)}"
        if call is None:
            return Use(place, dotted)
        keywords = {each.arg for each in call.keywords if each.arg is not None}
        is_open = any(isinstance(each, ast.Starred) for each in call.args)
        for each in call.keywords:
            if each.arg is None:
                spelt = ast.unparse(each.value)
                keywords |= self.receivers.expanded.get(spelt, frozenset())
                self.seen.add(spelt)
                is_open = is_open or spelt not in self.receivers.expanded
        positional = sum(not isinstance(each, ast.Starred) for each in call.args)
        return Use(place, dotted, True, positional, frozenset(keywords), is_open)

    def _meaning(self, node: ast.expr) -> list[str]:
        """Dotted names that an expression stands for; none if it is not foreign, or feature-tested."""
        spelt = ast.unparse(node)
        if spelt in self.receivers.classes:
            self.seen.add(spelt)
        if isinstance(node, ast.Name):
            return [self.bound[spelt]] if spelt in self.bound else []
        if not isinstance(node, ast.Attribute) or node.attr in self.optional:
            return []
        owner = ast.unparse(node.value)
        if owner in self.receivers.classes:
            self.seen.add(owner)
            return [f"{each}.{node.attr}" for each in self.receivers.classes[owner]]
        return [f"{OBJECTS.get(each, each)}.{node.attr}" for each in self._meaning(node.value)]

    def _bindings(self) -> Iterator[tuple[str, str]]:
        """Names of this file that stand for something foreign; an annotated one stands for its class."""
        imported = dict(pair for node in ast.walk(self.tree) for pair in self._bound_by(node))
        yield from imported.items()
        names: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg):
                spelt = ast.unparse(node.annotation) if node.annotation is not None else ""
                names.setdefault(node.arg, set()).add(imported.get(spelt, ""))
        for name, meanings in names.items():  # one name of several functions must mean one class in all of them
            if len(meanings) == 1 and (meaning := meanings.pop()) and name not in imported:
                yield name, meaning

    def _bound_by(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Names that an import binds, or a call of importlib.import_module."""
        if isinstance(node, ast.ImportFrom) and self._is_foreign(node.module or ""):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: self._is_foreign(alias.name), node.names):
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Call):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            module = _imported_by_name(node.value)
            if self._is_foreign(module) and isinstance(target, ast.Name):
                yield target.id, module

    def _is_foreign(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages


def _is_feature_test(node: ast.Call) -> bool:
    """`hasattr(x, "name")`, `getattr(x, "name", default)`: our source can do without the name."""
    return isinstance(node.func, ast.Name) and (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))


def _imported_by_name(call: ast.Call) -> str:
    """Of `importlib.import_module("name")`; "": it is another call."""
    is_import = ast.unparse(call.func) == "importlib.import_module" and isinstance(call.args[0], ast.Constant)
    return str(ast.literal_eval(call.args[0])) if is_import else ""


def _is_own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
