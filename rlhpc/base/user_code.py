"""Find and load the user's own code that a run file names as "package.module:name".

Input: the key and such a path.  Output: the object.  It can be looked up without importing any user code, so that a
login node can report what is wrong with it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rlhpc.base.near_names import near_hint, nearest
from rlhpc.protocol.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------- code digest
#
# Which code a process runs: processes of one run that differ in it were started from different environments.
#
# Output: a short digest of the package's source files, the same wherever and however it is installed.


def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """Digest of names and content of all modules.  Call it at the start: an update replaces them under a process.

    "" if they cannot be read.
    """
    whole = hashlib.sha256()
    try:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            whole.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    except OSError:
        return ""
    return whole.hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------ user code


Result = TypeVar("Result")
MOST_NAMES = 12  # in a message
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OF_IMPORTS = (__file__, importlib.__file__)  # whose frames lead to any module
_IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")


def is_import_path(text: str) -> bool:
    """True for a text of the form package.module:name."""
    return _IMPORT_PATH.fullmatch(text) is not None


def did_you_mean(text: str, names: Collection[str], *, is_class: bool = False) -> str:
    """Return a hint on what a text means that is neither one of the names nor an import path; "" if nothing is near.

    is_class: a class is wanted, no function.
    """
    if nearest(text, names, cutoff=0.85):
        return near_hint(text, names, cutoff=0.85)
    file, colon, name = text.partition(":")
    directory, _, module = file.removesuffix(".py").rpartition("/")
    if colon and is_import_path(f"{module}:{name}") and file != module:
        return f" (did you mean {module}:{name}, with PYTHONPATH={directory or '.'}?)"
    if not colon and (listed := _own_names(text, is_class=is_class)):
        return listed
    dotted = ":".join(text.rsplit(".", 1))
    if not colon and is_import_path(dotted):  # as Python writes it
        return f" (did you mean {dotted}?)"
    return near_hint(text, names)


def _own_names(text: str, *, is_class: bool) -> str:
    """Return a hint with the names in a user's module, if a text names the module or its file; else ""."""
    module = text.removesuffix(".py")
    package, *inner = module.split(".")
    if not is_import_path(f"{module}:name") or package in sys.stdlib_module_names or package == "__main__":
        return ""
    spec, here = importlib.util.find_spec(package), Path(package, *inner).with_suffix(".py")
    source = _source_file(spec, inner) if spec is not None else here if here.is_file() else None
    try:
        public = _public(ast.parse(source.read_bytes()), is_class=is_class) if source is not None else []
    except SyntaxError:
        return ""
    wanted = f"{module}:{'CLASS' if is_class else 'FUNCTION'}"
    return f" (did you mean {wanted}? its {_listed(public, is_class=is_class)})" if public else ""


def _public(module_text: ast.Module, *, is_class: bool) -> list[str]:
    """Names of the functions, or classes, that a module defines for others."""
    kind = (ast.ClassDef,) if is_class else _FUNCTIONS
    return [node.name for node in module_text.body if isinstance(node, kind) and not node.name.startswith("_")]


def _listed(public: Sequence[str], *, is_class: bool) -> str:
    more = f" and {len(public) - MOST_NAMES} more" if len(public) > MOST_NAMES else ""
    return f"{'classes' if is_class else 'functions'}: {', '.join(public[:MOST_NAMES]) or 'none'}{more}"


def look_up(key: str, path: str, said: str | None = None, *, is_class: bool = False) -> None:
    """Check that the object seems to exist, without importing it; cheap enough for a login node.

    said: the value of `key` in the run file, if that is not the path itself.
    Raises ConfigError if the top-level package is not found, or the source of the module has a syntax error or does not
    bind the name.
    """
    value = f"{key}={said or repr(path)}"
    module, name = _parts(path)
    package, *inner = module.split(".")
    if inner == ["py"]:
        raise ConfigError(f"{value}: a file, not a module; legal: {package}:{name}")
    if package == "__main__":
        raise ConfigError(
            f"{value}: other processes cannot import what a notebook or a program defines; legal: {name} in a module, "
            f"mine.py beside it and 'mine:{name}' here"
        )
    # Only the top-level package: looking up "a.b" would import "a".
    spec = importlib.util.find_spec(package)
    if spec is None:
        here = any(Path(name).exists() for name in (f"{package}.py", f"{package}/__init__.py"))
        how = "export PYTHONPATH=$PWD finds the one in this directory" if here else "put its directory on PYTHONPATH"
        raise ConfigError(f"{value}: there is no module {package!r} here; install it or {how}")
    source = _source_file(spec, inner)
    if source is None:
        return  # compiled, or a namespace package: errors show when it is loaded
    try:
        module_text = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{value}: {source}:{error.lineno}: {error.msg}") from error
    if not _may_bind(module_text, name):
        public = _public(module_text, is_class=is_class)
        listed = _listed(public, is_class=is_class)
        raise ConfigError(f"{value}: {source} has no {name!r}; its {listed}{near_hint(name, public)}")


def parameters(path: str) -> tuple[str, ...]:
    """Names of a function's positional parameters, from the source of its module; () if they cannot be determined."""
    function = _definition(path)
    return () if function is None else tuple(each.arg for each in (*function.args.posonlyargs, *function.args.args))


def required_parameters(path: str) -> tuple[str, ...]:
    """Names of parameters without a default, keyword-only ones last; () as for parameters(), and if there is *args."""
    function = _definition(path)
    if function is None or function.args.vararg is not None:
        return ()
    names, keywords = parameters(path), function.args.kwonlyargs
    without = [each.arg for each, default in zip(keywords, function.args.kw_defaults, strict=True) if default is None]
    return (*names[: len(names) - len(function.args.defaults)], *without)


def _definition(path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function in the source of its module; None if it is not found there."""
    source, name = source_of(path), _parts(path)[1]
    if source is None:
        return None
    nodes = ast.parse(source.read_bytes()).body
    return next((node for node in nodes if isinstance(node, _FUNCTIONS) and node.name == name), None)


def load(key: str, path: str, said: str | None = None) -> Any:
    """Import the object; said: see look_up.

    Raises ConfigError if the module cannot be imported, or the object of this name is not callable.
    """
    value = f"{key}={said or repr(path)}"
    module_name, name = _parts(path)
    module = load_module(value, module_name)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"{value}: {module_name}.{name} is {found!r}, which cannot be called; legal: a function"
            if hasattr(module, name)
            else f"{value}: {module_name} has no function {name!r}"
        )
    return found


def load_module(value: str, module_name: str) -> ModuleType:
    """Import the module that a key names; value: that key with its value.  Raises ConfigError if it cannot be."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{value}: cannot import {module_name}: {error}{_last_line(error)}") from error
    except Exception as error:  # it is not our code
        raise ConfigError(f"{value}: cannot import {module_name}: {error!r}{_last_line(error)}") from error
    except SystemExit as error:  # with the status 0 a role would end as if it had done its work
        raise ConfigError(
            f"{value}: {module_name} is a program, which ends when it is imported ({error!r}); legal: what it does by "
            "itself below if __name__ == '__main__'"
        ) from error


def takes(key: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return why a function cannot be called with keyword arguments of the table `key` alone; "" if it can.

    Raises ConfigError for an argument that it has no parameter for.
    """
    refuse_unknown(key, function, arguments)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{error}{place_of(function)}"
    except ValueError:  # of C, perhaps
        pass
    return ""


def bound(
    key: str, path: str, function: Callable[..., Any], given: Sequence[str], arguments: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the loaded function with keyword arguments of the run file, KEY_arguments, after a look at its signature.

    given: the other arguments of the call, for the message.
    Raises ConfigError: it lacks a parameter for one of the arguments, or cannot be called in this way.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, perhaps
        signature = None
    first = () if signature is None else tuple(signature.parameters)[: len(given)]
    refuse_unknown(f"{key}_arguments", function, arguments, first)
    if signature is None:
        return partial(function, **arguments) if arguments else function
    try:
        signature.bind(*given, **arguments)
    except TypeError as error:
        called, names = path.partition(":")[2], ", ".join(given)
        raise ConfigError(
            f"{key}={path!r}: {called}{signature}, called as {called}({names}): {error}{place_of(function)}; "
            f"legal: f({names}), with other parameters in {key}_arguments or with a default"
        ) from error
    return partial(function, **arguments) if arguments else function


def refuse_unknown(
    key: str, function: Callable[..., Any], arguments: Mapping[str, Any], given: Collection[str] = ()
) -> None:
    """Raise ConfigError for an argument, of the table `key`, that a function has no parameter for; names what it has.

    given: names of parameters that have their values from elsewhere.
    """
    try:
        signature = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C, perhaps
        return
    named = [each.name for each in signature if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [name for name in named if name not in given]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature)
    for name, value in arguments.items():
        if name not in names and (name in given or not takes_any):
            called = getattr(function, "__qualname__", repr(function))
            legal = ", ".join(names) or f"leave it out: {called} has no parameters but {', '.join(given) or 'none'}"
            raise ConfigError(
                f"{key}.{name}={value!r}: {called} has no such parameter{place_of(function)}; legal: {legal}"
                f"{near_hint(name, names)}"
            )


def place_of(function: Callable[..., Any]) -> str:
    """Return " (FILE:LINE)" of a function, of the constructor of a class, or of the class; "" if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(
        getattr(function, "__init__", None), "__code__", None
    )
    if code is not None:
        return f" ({code.co_filename}:{code.co_firstlineno})"
    try:
        return f" ({inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError):  # of C, or an object
        return ""


def try_out(
    key: str, path: str, on: str, trial: Callable[[], Result], unless: tuple[type[Exception], ...] = ()
) -> Result:
    """Return the result of `trial`, which calls the loaded code; on: a short description of the input.

    unless: exceptions that are not the code's fault, whoever calls: they are left as they are.
    Raises ConfigError, with the line, for any other exception: in a first trial, before a run has cost anything.
    """
    try:
        return trial()
    except unless:
        raise
    except (Exception, SystemExit) as error:  # it is not our code
        raise ConfigError(
            f"{key}={path!r}, tried on {on}: {error!r}{line_of(path, error)}{_fields_for(error)}"
        ) from error


def _fields_for(error: BaseException) -> str:
    """Return "; legal: …" with the fields of a dataclass if a field that it lacks was asked for; else ""."""
    if not isinstance(error, AttributeError) or not is_dataclass(error.obj):
        return ""
    names = [each.name for each in fields(error.obj)]
    return f"; legal: {', '.join(names)}{near_hint(str(error.name), names)}"


def line_of(path: str, error: BaseException) -> str:
    """ " (FILE:LINE)", where the module of this path was when it raised; "" if none of its lines is known.

    path: may be another name, such as the id of an environment.
    """
    parts = _IMPORT_PATH.fullmatch(path)
    module = sys.modules.get(parts["module"]) if parts else None
    file = getattr(module, "__file__", None)  # what is built into Python has none
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""


def _last_line(error: BaseException) -> str:
    """ " (FILE:LINE)" in the module where an import failed; "" if it failed in none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [f" ({file}:{line})" for file, line in frames if file not in _OF_IMPORTS and not file.startswith("<")]
    return theirs[-1] if theirs else ""


def _parts(path: str) -> tuple[str, str]:
    match = _IMPORT_PATH.fullmatch(path)
    assert match is not None, f"{path!r} is no import path"
    return match["module"], match["name"]


def source_of(path: str) -> Path | None:
    """The Python file of the module of an import path, found without importing it; None if there is none."""
    package, *inner = _parts(path)[0].split(".")
    spec = importlib.util.find_spec(package)
    return _source_file(spec, inner) if spec is not None else None


def _source_file(spec: ModuleSpec, inner: Sequence[str]) -> Path | None:
    """The Python file of a module below a top-level package, found by its path alone; None if there is none."""
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not inner:
        files = [Path(spec.origin or "")]
    else:
        files = [place.joinpath(*inner).with_suffix(".py") for place in places]
        files += [place.joinpath(*inner, "__init__.py") for place in places]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _may_bind(module_text: ast.Module, name: str) -> bool:
    """False if nothing in the source of a module can define a global variable of this name."""
    for node in ast.walk(module_text):
        match node:
            case (
                ast.FunctionDef(name=bound)
                | ast.AsyncFunctionDef(name=bound)
                | ast.ClassDef(name=bound)
                | ast.Name(id=bound, ctx=ast.Store())
            ):
                if bound in (name, "__getattr__"):
                    return True
            case ast.alias(name=imported, asname=renamed):
                if imported == "*" or (renamed or imported) == name:
                    return True
            case ast.Name(id="globals" | "exec"):
                return True
    return False
