"""What a program costs in the sandbox: `python bench/sandbox.py [RUNS]`, 10,000 unless told.

Prints milliseconds of a warm trivial run (median, 95th percentile), runs a second of two sandboxes side by side, and
what is left afterwards: processes and descriptors.
"""

import statistics
import sys
import threading
import time
from pathlib import Path

from rlhpc.sandbox.client import Sandbox

_PROGRAM = b"print(int(input()) * 2)"


def main(num_runs: int) -> None:
    with Sandbox() as one, Sandbox() as other:
        print(f"isolation   {one.layers.described()}")
        one.run(_PROGRAM, b"1")
        descriptors, taken = len(list(Path("/proc/self/fd").iterdir())), []
        for _ in range(min(num_runs, 500)):
            began = time.perf_counter()
            assert one.run(_PROGRAM, b"21").stdout == b"42\n"
            taken.append((time.perf_counter() - began) * 1000)
        print(
            f"one run     {statistics.median(taken):.1f} ms, 95 % below {statistics.quantiles(taken, n=20)[-1]:.1f} ms"
        )
        began = time.perf_counter()
        threads = [threading.Thread(target=_many, args=(sandbox, num_runs // 2)) for sandbox in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"two at once {num_runs / (time.perf_counter() - began):.0f} runs/s")
        time.sleep(0.5)
        left = [Path(f"/proc/{box.server_pid}/task/{box.server_pid}/children").read_text() for box in (one, other)]
        more = len(list(Path("/proc/self/fd").iterdir())) - descriptors
        print(f"left        {sum(len(pids.split()) for pids in left)} processes, {more} descriptors")


def _many(sandbox: Sandbox, num_runs: int) -> None:
    for _ in range(num_runs):
        sandbox.run(_PROGRAM, b"21")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
