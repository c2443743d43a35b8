"""What a key of a file means: the string below it in its class.

Programs need none of it, and pydantic's use_attribute_docstrings would read these sources whenever a process starts.
"""

import ast
import inspect
import textwrap
from functools import cache

from pydantic import BaseModel


def meaning_of(model: type[BaseModel], key: str) -> str:
    """On one line; "" if there is none."""
    found = (_docstrings(parent).get(key) for parent in model.__mro__ if issubclass(parent, BaseModel))
    return next(filter(None, found), "")


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    if model is BaseModel:
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, text in zip(definition.body, definition.body[1:], strict=False):
        match statement, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found
