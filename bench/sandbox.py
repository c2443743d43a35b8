"""What a program costs in the sandbox: `python -m bench.sandbox [RUNS]`, 10,000 unless told.

Prints milliseconds of a warm trivial run on the clock (median, 95th percentile) and of processor time (the server's
processes and this one's), runs a second of two sandboxes side by side, what is left after all runs (processes,
descriptors, files), and the same for a program in C++ where there is a compiler.  The machine's load is printed beside:
times on the clock are of a machine that does nothing else, processor times of any.
"""

import os
import statistics
import sys
import threading
import time
from pathlib import Path

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox.client import Kind, Sandbox
from rlhpc.sandbox.cpp import compile_cpp, compile_limits, find_compiler

_PROGRAM = b"print(int(input()) * 2)"
_CPP = b"#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; }"
_TICKS_S = os.sysconf("SC_CLK_TCK")


def main(num_runs: int) -> None:
    with Sandbox() as one, Sandbox() as other:
        print(f"isolation   {one.layers.described()}")
        for box in (one, other):
            box.run(_PROGRAM, b"1")
        time.sleep(0.5)  # the last is on its way out
        held = _held(one, other)
        _time_alone(one, min(num_runs, 500), _PROGRAM, "python")
        _time_both(one, other, num_runs, _PROGRAM, "python")
        time.sleep(0.5)
        more = [now - before for now, before in zip(_held(one, other), held, strict=True)]
        print("left        {} processes, {} descriptors, {} files".format(*more))
        _time_cpp(one, other, num_runs)


def _time_cpp(one: Sandbox, other: Sandbox, num_runs: int) -> None:
    try:
        compiler = find_compiler(())
    except SandboxError as error:
        print(f"C++         {error}")
        return
    began, cpu = time.perf_counter(), _cpu_s(one)
    made = compile_cpp(one, compiler, _CPP, compile_limits(60.0, 2 << 30))
    assert not made.why_not, made.why_not
    clock_ms = (time.perf_counter() - began) * 1000
    one.run(_PROGRAM, b"1")  # the server has waited for the compiler now
    cpu_ms = (_cpu_s(one) - cpu) * 1000
    print(f"C++         {' '.join(compiler)}: {clock_ms:.0f} ms to compile, {cpu_ms:.0f} ms of processor time")
    _time_alone(one, min(num_runs, 500), made.binary, "binary")
    _time_both(one, other, min(num_runs, 1000), made.binary, "binary")


def _time_alone(box: Sandbox, num_runs: int, program: bytes, kind: Kind) -> None:
    taken, cpu = [], _cpu_s(box)
    for _ in range(num_runs):
        began = time.perf_counter()
        assert box.run(program, b"21", kind=kind).stdout == b"42\n"
        taken.append((time.perf_counter() - began) * 1000)
    cpu_ms = (_cpu_s(box) - cpu) / num_runs * 1000
    print(
        f"one run     {statistics.median(taken):.1f} ms, 95 % below {statistics.quantiles(taken, n=20)[-1]:.1f} ms; "
        f"{cpu_ms:.1f} ms of processor time (load {_load()})"
    )


def _time_both(one: Sandbox, other: Sandbox, num_runs: int, program: bytes, kind: Kind) -> None:
    def many(box: Sandbox) -> None:
        for _ in range(num_runs // 2):
            box.run(program, b"21", kind=kind)

    began, cpu = time.perf_counter(), _cpu_s(one, other)
    threads = [threading.Thread(target=many, args=(box,)) for box in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate, cpu_ms = num_runs / (time.perf_counter() - began), (_cpu_s(one, other) - cpu) / num_runs * 1000
    print(f"two at once {rate:.0f} runs/s, {cpu_ms:.1f} ms of processor time each (load {_load()})")


def _held(*boxes: Sandbox) -> tuple[int, int, int]:
    """Processes below the servers, descriptors here and there, files that programs could have left."""
    pids = [box.server_pid for box in boxes]
    children = sum(len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) for pid in pids)
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ("self", *pids))
    return children, descriptors, sum(len(list(Path(f"/proc/{pid}/root/box").iterdir())) for pid in pids)


def _cpu_s(*boxes: Sandbox) -> float:
    """Processor time of this process and of what the servers have waited for, in seconds."""
    ticks = 0
    for box in boxes:
        fields = Path(f"/proc/{box.server_pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_S + time.process_time()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
