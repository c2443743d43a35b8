"""One task of a component: `python -u -m launch.submitit_hetjob.task FOLDER`.

Input: FOLDER/JOB_submitted.pkl.  Output: FOLDER/JOB_RANK_result.pkl: ("success", value) or ("error", traceback).
"""

from __future__ import annotations

import sys

from launch.submitit_hetjob.job import HeterogeneousSlurmJobEnvironment, run_task


def main() -> None:
    """Run the callable; its exception becomes exit status 1, its traceback the result."""
    environment = HeterogeneousSlurmJobEnvironment()
    environment.hold_signals()
    run_task(sys.argv[1], environment)


if __name__ == "__main__":
    main()
