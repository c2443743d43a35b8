"""Try a user's own loss or advantage estimator, as a run does when it starts.

`python -m launch.checks.own_formulas KEY PATH GROUP_SIZE ARGUMENTS`, which own_code.py starts: torch and the user's
module are imported here and nowhere else.  ARGUMENTS: JSON.  Prints {"doubts": [what is seldom meant]}, or
{"refused": why} and returns 1 for one that a run would refuse.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from rlhpc.errors import ConfigError


def main(key: str, path: str, group_size: int, arguments: Mapping[str, object]) -> int:
    """Return the exit status."""
    try:
        doubts = _doubts(key, path, group_size, arguments)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    print(json.dumps({"doubts": doubts}))
    return 0


def _doubts(key: str, path: str, group_size: int, arguments: Mapping[str, object]) -> list[str]:
    """Raises ConfigError for one that a run would refuse."""
    if key == "algorithm.loss":
        from rlhpc.algorithms.losses import own as own_loss

        return own_loss.doubts_of(own_loss.load_own_loss(path, tuple(arguments.items())))
    from rlhpc.algorithms.advantages import own as own_advantage

    return own_advantage.doubts_of(own_advantage.load_own_estimator(path, group_size, arguments), group_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))
