"""The commands of launch/private_slurm/README.md run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launch.private_slurm.packages import Installation
from tests.unit.doc_pages import ROOT, blocks

PAGE = ROOT / "launch" / "private_slurm" / "README.md"


def test_the_commands_of_the_page_run_as_printed(slurm_installation: Installation) -> None:
    block = next(blocks(PAGE, "bash"))
    root = Path(f"/tmp/rlhpc-page-{os.getpid()}")
    script = "set -euo pipefail\n" + block.replace("/tmp/my-cluster", str(root))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0,1\n") == 2
    assert f"{root}: ended, deleted" in done.stdout
    assert not root.exists()
