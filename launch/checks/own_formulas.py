"""Try a user's own loss or advantage estimator, as a run does when it starts.

`python -m launch.checks.own_formulas KEY PATH GROUP_SIZE`, which own_code.py starts: torch and the user's module are
imported here and nowhere else.  Prints {"refused": why} and returns 1 for one that a run would refuse.
"""

from __future__ import annotations

import json
import sys

from rlhpc.errors import ConfigError


def main(key: str, path: str, group_size: int) -> int:
    """Return the exit status."""
    try:
        if key == "algorithm.loss":
            from rlhpc.algorithms.losses.own import load_own_loss

            load_own_loss(path)
        else:
            from rlhpc.algorithms.advantages.own import load_own_estimator

            load_own_estimator(path, group_size)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
