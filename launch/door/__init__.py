"""The Python API: what `import rlhpc` loads on first use (rlhpc/__init__.py), and the classes of what it returns.

Small on purpose: everything in it keeps its names and meanings (docs/python.md).
"""

from launch.door.local import StartedRun, check, compare, evaluate, export, run, start
from launch.door.run import Checkpoint, Run
from launch.door.run_job import RunJob
from launch.door.submit import submit

__all__ = [
    "Checkpoint", "Run", "RunJob", "StartedRun", "check", "compare", "evaluate", "export", "run", "start", "submit",
]  # fmt: skip
