# What type checkers are told: rlhpc/__init__.py loads these when they are asked for.
from launch.api import Run as Run
from launch.api import check as check
from launch.api import compare as compare
from launch.api import evaluate as evaluate
from launch.api import export as export
from launch.api import run as run
from launch.api import start as start
from launch.api import submit as submit

__version__: str
__all__ = ["Run", "check", "compare", "evaluate", "export", "run", "start", "submit"]
