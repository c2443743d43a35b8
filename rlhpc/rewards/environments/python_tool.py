"""A Python tool: a program of the policy in the sandbox.

Input: a program.  Output: what it prints, and how it failed.  A program's own failure is the policy's to see; one of
the sandbox raises SandboxError, a verifier error.
"""

from __future__ import annotations

from rlhpc.rewards.code_place import failure, limits_of, place


def run_python(code: str) -> str:
    """Standard output, then a line on a failure.  Raises SandboxError."""
    sandbox, settings = place()
    run = sandbox.run(code.encode(errors="replace"), b"", limits_of(settings, settings.wall_s))
    printed, why = run.stdout.decode(errors="replace"), failure(run)
    return "\n".join(filter(None, (printed.rstrip("\n"), f"error: {why}" if why else ""))) or "(nothing was printed)"
