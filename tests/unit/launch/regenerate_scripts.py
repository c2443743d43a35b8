"""The golden plans and job scripts: run files that we ship on every site file that we ship.

`python -m tests.unit.launch.regenerate_scripts` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from launch.plan.script import plan_report
from launch.plan.site_file import Site, load_site
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "job_scripts"
# Not the recipes: they bring larger numbers, no other words, and test_job_plan.py plans them.
RUN_FILES = sorted(path for path in (ROOT / "configs").rglob("*.toml") if path.parent.name != "recipes")
SITE_FILES = sorted((ROOT / "slurm" / "sites").glob("*.toml"))


@dataclass(frozen=True)
class Pair:
    run_file: Path
    site_file: Path

    @property
    def golden(self) -> Path:
        return GOLDEN / self.site_file.stem / f"{self.run_file.stem}.txt"

    @property
    def site(self) -> Site:
        return load_site(self.site_file)

    @property
    def overrides(self) -> list[str]:
        """A run directory that the site shares; the demo's processes are of one machine unless told otherwise."""
        assert self.site.cluster is not None
        return [
            f"run.directory={self.site.cluster.shared_directory}/runs/{self.run_file.stem}",
            "transport.kind=tcp",
        ]

    @property
    def config(self) -> Config:
        return load_config(self.run_file, self.overrides)

    def __str__(self) -> str:
        return f"{self.run_file.stem}@{self.site_file.stem}"


PAIRS = [Pair(run_file, site_file) for run_file in RUN_FILES for site_file in SITE_FILES]


def main() -> None:
    wanted = {pair.golden for pair in PAIRS}
    for stale in set(GOLDEN.rglob("*.txt")) - wanted:
        stale.unlink()
    for pair in PAIRS:
        pair.golden.parent.mkdir(parents=True, exist_ok=True)
        pair.golden.write_text(plan_report(pair.config, pair.site) + "\n")
    sys.stdout.write(f"{len(PAIRS)} plans in {GOLDEN.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
