"""The commands of docs/dev_cluster.md run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from launch.private_slurm.packages import Installation

PAGE = Path(__file__).parents[2] / "docs" / "dev_cluster.md"


def test_the_commands_of_the_page_run_as_printed(slurm_installation: Installation) -> None:
    block = re.search(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    root = Path(f"/tmp/rlhpc-page-{os.getpid()}")
    script = "set -euo pipefail\n" + block[1].replace("/tmp/my-cluster", str(root))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0,1\n") == 2
    assert f"{root}: ended, deleted" in done.stdout
    assert not root.exists()
