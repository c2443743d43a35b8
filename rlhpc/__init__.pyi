# What type checkers are told: rlhpc/__init__.py loads these when they are asked for.
from launch.door import Run as Run
from launch.door import check as check
from launch.door import compare as compare
from launch.door import evaluate as evaluate
from launch.door import export as export
from launch.door import run as run
from launch.door import start as start
from launch.door import submit as submit

__version__: str
