"""A child that a signal has stopped is killed after a while, and one that goes on in time is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.starts
SCRIPT = """
import os, signal, subprocess, sys, threading
from rlhpc.base.processes import wait_for_child
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({sleep_s})"])
os.kill(child.pid, signal.SIGSTOP)
if {goes_on}:
    threading.Timer(0.5, os.kill, (child.pid, signal.SIGCONT)).start()
print(wait_for_child(child.pid, {standstill_s}, lambda: print("said")))
"""


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"sleep_s": 1000, "goes_on": False, "standstill_s": 0.6}, ["said", "-9"]),
        ({"sleep_s": 0.1, "goes_on": True, "standstill_s": 1000}, ["0"]),
    ],
)
def test_a_child_that_stands_still_is_killed_after_a_while(settings: dict[str, object], printed: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT.format(**settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == printed
