"""Run beside a compiler: give it the program from descriptor 0, and write the binary to descriptor 4.  Runs in the
sandbox.

Input: the compiler's words as arguments, the program as standard input.  Output: the binary; the compiler's exit status
and messages.  The result is not trusted outside: a binary is only ever run in the sandbox.
"""

from __future__ import annotations

import os
import subprocess
import sys

RESULTS = 4
_BINARY = "program"
_PIECE = 1 << 20


def compile_it() -> int:
    """Compile the program; return the exit status."""
    done = subprocess.run([*sys.argv[1:], "-x", "c++", "-o", _BINARY, "-"], stdout=2, check=False)
    if done.returncode:
        return done.returncode if done.returncode > 0 else 1
    with open(_BINARY, "rb") as made:
        while piece := made.read(_PIECE):
            while piece:
                piece = piece[os.write(RESULTS, piece) :]
    return 0


if __name__ == "__main__":
    sys.exit(compile_it())
