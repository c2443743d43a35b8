"""Run beside a program: call its function with each list of arguments and report the result.  Runs in the sandbox.

Input on descriptor 0: {"program", "entry_point", "calls": [{"args", "kwargs"}]}.  Output on descriptor 4: a JSON line
for each call, {"value"} or {"raised"}.  The text of values.py stands in front of this one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhpc.sandbox.values import decode, encode

RESULTS = 4


def call_all() -> None:
    """Make all calls, unless the program ends itself before."""
    request = json.load(sys.stdin)
    names: Any = {"__name__": "__main__"}
    exec(compile(request["program"], "program.py", "exec"), names)
    function = names[request["entry_point"]]
    for call in request["calls"]:
        try:
            arguments = decode(call.get("args", []))
            said = {"value": encode(function(*arguments, **decode(call.get("kwargs", {}))))}
        except BaseException as error:  # noqa: BLE001  what a program raises is its answer
            said = {"raised": ("%s: %s" % (type(error).__name__, error))[:200]}
        line = json.dumps(said).encode() + b"\n"
        while line:
            line = line[os.write(RESULTS, line) :]


if __name__ == "__main__":
    call_all()
