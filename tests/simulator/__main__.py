"""`python -m tests.simulator --seeds 10000 --jobs 2`: run seeds, stop at the first that fails and tell its story.

--first N       the first seed
--bug NAME      with a bug planted, to see it found
--trace         of one seed, everything
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulator.bugs import BUGS
from tests.simulator.search import run_seeds, shrunk, workplace

TELL_EVERY_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Run seeds of the simulator.")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="plant one")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    options = parser.parse_args()
    began_s = told_s = time.monotonic()
    num_events = num_attempts = num_faults = done = 0
    cpu_s, so_far = 0.0, ""
    seeds = range(options.first, options.first + options.seeds)
    with workplace() as directory:
        for outcome in run_seeds(seeds, options.jobs, directory, options.bug):
            done, num_events, cpu_s = done + 1, num_events + outcome.num_events, cpu_s + outcome.cpu_s
            num_attempts, num_faults = num_attempts + outcome.num_attempts, num_faults + len(outcome.faults)
            if options.trace:
                print("\n".join(outcome.trace))
            if outcome.problem:
                print(f"seed {outcome.seed} fails: {outcome.problem}\nwith as few faults as possible:")
                print(shrunk(outcome, directory, options.bug).story())
                return 1
            so_far = f"{done} seeds in {time.monotonic() - began_s:.0f} s, {1000 * cpu_s / done:.0f} ms of CPU each"
            if time.monotonic() > told_s + TELL_EVERY_S:
                told_s = time.monotonic()
                print(f"{so_far}, no violation", flush=True)
    print(f"{so_far}: no violation in {num_events:,} events, {num_attempts:,} attempts, {num_faults:,} faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
