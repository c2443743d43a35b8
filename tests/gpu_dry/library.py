"""What an unpacked Python package offers, read without importing it.

Input: a directory that holds the package (of a wheel, an sdist, or site-packages).  Output: what a dotted name is,
which members a class has, and which parameters a call takes.  Follows imports between the package's own modules.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """What a name stands for.  kind: module, class, function, value; external: defined by another package."""

    kind: str
    dotted: str
    node: Any = None
    module: str = ""


@dataclass(frozen=True)
class Parameters:
    """Of a function or of a class' constructor; without self."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    takes_any_positional: bool
    takes_any_keyword: bool

    def complaint(self, num_positional: int, keywords: frozenset[str], is_open: bool) -> str:
        """What is wrong with a call; "": nothing.  is_open: it passes *args or **kwargs that nobody can read."""
        given = set(self.positional[:num_positional])
        if num_positional > len(self.positional) and not self.takes_any_positional:
            return f"takes {len(self.positional)} positional arguments, is given {num_positional}"
        unknown = keywords - {*self.positional, *self.keyword_only}
        if unknown and not self.takes_any_keyword:
            return f"takes no {', '.join(sorted(unknown))}"
        missing = self.required - given - keywords
        return f"wants {', '.join(sorted(missing))} besides" if missing and not is_open else ""


class Library:
    """One package in one version."""

    def __init__(self, root: Path, package: str) -> None:
        """root: the directory in which the package's first name lies."""
        self.root, self.package = root, package
        if not (root / package).is_dir():
            raise FileNotFoundError(f"no package {package} in {root}")

    @functools.cache  # noqa: B019 - a few libraries live as long as the process
    def tree(self, module: str) -> ast.Module | None:
        """Syntax of a module; None: there is no such file."""
        path = self.root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def is_module(self, module: str) -> bool:
        """Of Python files or of compiled ones."""
        path = self.root.joinpath(*module.split("."))
        return path.is_dir() or self.tree(module) is not None or any(path.parent.glob(f"{path.name}.*.so"))

    def find(self, dotted: str) -> Found | None:
        """What `package.module.name.member` is; None: nothing."""
        parts = dotted.split(".")
        found: Found | None = Found("module", parts[0], module=parts[0])
        for part in parts[1:]:
            found = None if found is None else self.member(found, part)
        return found

    def member(self, owner: Found, name: str) -> Found | None:
        """One step of `find`."""
        if owner.kind == "module":
            return self._in_module(owner.module, name, frozenset())
        if owner.kind == "class":
            return self.members(owner).get(name) or self._inherited_from_outside(owner, name)
        return Found("value", f"{owner.dotted}.{name}")  # of something whose class nobody can read

    def members(self, owner: Found) -> dict[str, Found]:
        """Methods, fields and attributes of a class and of its bases within the package, by name."""
        found: dict[str, Found] = {}
        for base in reversed(self._bases(owner)):
            found |= self.members(base)
        for name, node in _own_members(owner.node):
            kind = "function" if isinstance(node, Function) else "class" if isinstance(node, ast.ClassDef) else "value"
            if kind != "value" or name not in found:
                found[name] = Found(kind, f"{owner.dotted}.{name}", node, owner.module)
        return found

    def parameters(self, found: Found) -> Parameters | None:
        """What calling it takes; None: nobody can read it."""
        if found.kind == "function":
            is_method = bool(found.node.args.args) and found.node.args.args[0].arg in ("self", "cls")
            return _parameters(found.node, is_method)
        if found.kind != "class":
            return None
        constructor = self.members(found).get("__init__")
        if constructor is not None and constructor.kind == "function":
            return _parameters(constructor.node, True)
        fields = self._fields(found)
        if not fields:
            return None
        required = frozenset(name for name, has_default in fields.items() if not has_default)
        return Parameters(tuple(fields), (), required, False, False)

    def _fields(self, owner: Found) -> dict[str, bool]:
        """Annotated fields of dataclasses and their like, and whether each has a default."""
        found: dict[str, bool] = {}
        for base in reversed(self._bases(owner)):
            found |= self._fields(base)
        for node in owner.node.body:
            is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if is_field and "ClassVar" not in ast.unparse(node.annotation):
                found[node.target.id] = node.value is not None
        return found

    def _bases(self, owner: Found) -> list[Found]:
        resolved = [self._resolve(owner.module, ast.unparse(base)) for base in owner.node.bases]
        return [base for base in resolved if base is not None and base.kind == "class"]

    def _inherited_from_outside(self, owner: Found, name: str) -> Found | None:
        """A member that a base of another package, installed here, has."""
        for base in owner.node.bases:
            found = self._resolve(owner.module, ast.unparse(base))
            if found is not None and found.kind == "external" and _installed_has(found.dotted, name):
                return Found("value", f"{owner.dotted}.{name}")
            if found is not None and found.kind == "class" and (deeper := self._inherited_from_outside(found, name)):
                return deeper
        return None

    def _resolve(self, module: str, expression: str) -> Found | None:
        head, *rest = expression.partition("[")[0].split(".")
        found = self._in_module(module, head, frozenset())
        for part in rest:
            if found is not None and found.kind == "external":
                found = Found("external", f"{found.dotted}.{part}")
            else:
                found = None if found is None else self.member(found, part)
        return found

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        tree = self.tree(module)
        if tree is not None and (module, name) not in seen:
            seen |= {(module, name)}
            for node in _statements(tree.body):
                found = self._defined_by(node, module, name, seen)
                if found is not None:
                    return found
            if (lazy := _lazy_target(tree, module, name)) is not None:
                return self.find(lazy) if lazy else Found("value", f"{module}.{name}")
        if self.is_module(f"{module}.{name}"):
            return Found("module", f"{module}.{name}", module=f"{module}.{name}")
        return None

    def _defined_by(self, node: ast.stmt, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        dotted = f"{module}.{name}"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return Found("class", dotted, node, module)
        if isinstance(node, Function) and node.name == name:
            return Found("function", dotted, node, module)
        if isinstance(node, ast.ImportFrom):
            return self._imported(node, module, name, seen)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    target = alias.name if alias.asname else name
                    is_ours = target.partition(".")[0] == self.package
                    return Found("module", target, module=target) if is_ours else Found("external", target)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        return Found("value", dotted) if name in names else None

    def _imported(self, node: ast.ImportFrom, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        source = node.module or ""
        if node.level:
            is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            source = ".".join([*parts, *([node.module] if node.module else [])])
        is_ours = source.partition(".")[0] == self.package
        for alias in node.names:
            if alias.name == "*" and is_ours and (found := self._in_module(source, name, seen)) is not None:
                return found
            if (alias.asname or alias.name) == name and alias.name != "*":
                return self._in_module(source, alias.name, seen) if is_ours else Found("external", f"{source}.{name}")
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, inside `if`, `try` and `with` too; later ones first, as they win."""
    for node in reversed(body):
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _lazy_target(tree: ast.Module, module: str, name: str) -> str | None:
    """Where a module's `__getattr__` takes a name from: by a table {"name": ".module:name"}; "": it makes it itself."""
    lazy = [node for node in tree.body if isinstance(node, Function) and node.name == "__getattr__"]
    if not lazy:
        return None
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                where, _, what = str(value.value).partition(":")
                return f"{module}{where}.{what}" if where.startswith(".") else f"{where}.{what}"
    compared = (each for node in ast.walk(lazy[0]) if isinstance(node, ast.Compare) for each in node.comparators)
    return "" if any(isinstance(each, ast.Constant) and each.value == name for each in compared) else None


def _own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for each in _statements(node.body):
        if isinstance(each, Function | ast.ClassDef):
            yield each.name, each
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        yield from ((target.id, each) for target in targets if isinstance(target, ast.Name))
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr, each


def _parameters(node: Function, is_method: bool) -> Parameters:
    arguments = node.args
    is_static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    plain = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    required = plain[: len(plain) - len(arguments.defaults)]
    skipped = int(is_method and not is_static)
    named = [each.arg for each in arguments.kwonlyargs]
    required_named = [name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None]
    return Parameters(
        tuple(plain[skipped:]),
        tuple(named),
        frozenset([*required[skipped:], *required_named]),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _installed_has(dotted: str, name: str) -> bool:
    module, _, attribute = dotted.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return False
    # What a module's constructor sets is no attribute of the class.
    return hasattr(owner, name) or f"self.{name} =" in inspect.getsource(owner)
