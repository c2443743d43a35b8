"""What a supervisor inherits of signals does not hide from it how its processes end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.starts

SLURM = "signals = SlurmSignals()"
LOCAL = "signals = LocalSignals([], lambda: None).listening(); signals.__enter__()"


@pytest.mark.parametrize("listen", [SLURM, LOCAL])
def test_a_supervisor_whose_parent_ignores_the_ends_of_children_sees_their_status(listen: str) -> None:
    program = (
        "import subprocess\n"
        "from launch.supervisor.local_run import LocalSignals\n"
        "from launch.supervisor.processes import SlurmSignals\n"
        f"{listen}\n"
        "print(subprocess.run(['sh', '-c', 'exit 5']).returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.stdout.strip() == "5"
