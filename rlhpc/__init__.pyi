# What type checkers are told: rlhpc/__init__.py loads these when they are asked for.
from launch.door import Run as Run
from launch.door import submit as submit

__version__: str
