"""The Python API: `rlhpc.Run`, `run`, `submit`, `evaluate`, `compare`, which `import rlhpc` loads on first use.

Small on purpose: everything in it keeps its names and meanings (docs/python.md).
"""

from launch.door.local import compare, evaluate, run
from launch.door.run import Checkpoint, Run
from launch.door.run_job import RunJob
from launch.door.submit import submit

__all__ = ["Checkpoint", "Run", "RunJob", "compare", "evaluate", "run", "submit"]
