"""Run beside a program: call its function with each list of arguments and report the result.  Runs in the sandbox.

Input on descriptor 0: {"program", "entry_point", "calls": [{"args", "kwargs"}]}.  Output on descriptor 4: a JSON line
for each call, {"value"} or {"raised"}.  The text of values.py is put in front of this one.  The program is imported as
a module: code under `if __name__ == "__main__"` does not run.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import TYPE_CHECKING, Any, Dict

if TYPE_CHECKING:
    from rlhpc.sandbox.values import decode, encode

RESULTS = 4
MODULE = "program"


def call_all() -> None:
    """Make all calls, unless the program exits before."""
    request = json.load(sys.stdin)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # where dataclasses and pickle look for the classes of a program
    exec(compile(request["program"], MODULE + ".py", "exec"), module.__dict__)
    function = module.__dict__[request["entry_point"]]
    for call in request["calls"]:
        try:
            named = _known_names(function, decode(call.get("kwargs", {})))
            said = {"value": encode(function(*decode(call.get("args", [])), **named))}
        except BaseException as error:  # noqa: BLE001  what a program raises is its answer
            said = {"raised": ("%s: %s" % (type(error).__name__, error))[:200]}
        line = json.dumps(said).encode() + b"\n"
        while line:
            line = line[os.write(RESULTS, line) :]


def _known_names(function: Any, named: Dict[str, Any]) -> Dict[str, Any]:
    """Leave out nulls for parameters that the function does not have: a table pads objects with them."""
    if None not in named.values():
        return named
    import inspect  # takes a while, and is seldom needed

    try:
        has = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return named
    if any(each.kind is each.VAR_KEYWORD for each in has.values()):
        return named
    return {name: value for name, value in named.items() if value is not None or name in has}


if __name__ == "__main__":
    call_all()
