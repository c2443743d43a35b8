"""What judging costs, task by task: `python -m bench.rewards [--seconds S] [--workers N] [--only TASK …]`.

Through a reward pool, as in a run: completions and references of the kind that a task is given, right and wrong ones in
turn.  Prints completions a second with all workers at work, and milliseconds of one completion alone (median, 95 %).
llm_judge asks a server in this process that answers at once: what is left is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

from rlhpc.config.tables_services import CompositeConfig, JudgeConfig, SandboxConfig
from rlhpc.protocol.errors import SandboxError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.code_place import check_sandbox, environment_of
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
INSTRUCTIONS = [
    {"id": "punctuation:no_comma", "kwargs": {}},
    {"id": "length_constraints:number_words", "kwargs": {"num_words": 100, "relation": "at least"}},
    {"id": "length_constraints:number_sentences", "kwargs": {"num_sentences": 20, "relation": "less than"}},
    {"id": "keywords:forbidden_words", "kwargs": {"forbidden_words": ["never", "always"]}},
]
PROSE = "The kettle sings and the cup is warm while rain falls on the roof. " * 40
DOUBLE = "```python\ndef f(n):\n    return 2 * n\n```"


@dataclass(frozen=True, slots=True)
class Case:
    """A task, a reference, a completion that is right and one that is wrong."""

    task: str
    reference: str
    right: str
    wrong: str


CASES = [
    Case("integer_arithmetic", "46", "12+34=46", "12+34=47"),
    Case("math_answer", "#### 1,234", f"{PROSE}\n#### 1234", f"{PROSE}\n#### 1235"),
    Case("math_answer", r"\frac{\sqrt{3}}{2}", rf"{PROSE}\boxed{{\sqrt{{3}}/2}}", rf"{PROSE}\boxed{{\sqrt{{2}}/2}}"),
    Case("exact_match", "the Eiffel Tower", f"{PROSE}\n#### Eiffel tower", f"{PROSE}\n#### Louvre"),
    Case("token_f1", "the Eiffel Tower", f"{PROSE}\n#### Eiffel tower", f"{PROSE}\n#### Eiffel"),
    Case("regex", r"\d{4}-\d\d", f"{PROSE}\n#### 2026-11", f"{PROSE}\n#### November"),
    Case("multiple_choice", "B", f"{PROSE}\nAnswer: B", f"{PROSE}\nAnswer: C"),
    Case("instruction_following", json.dumps(INSTRUCTIONS), "Tea is hot and good today. " * 18, PROSE),
    Case("json_schema", json.dumps(SCHEMA), '```json\n{"n": 3}\n```', '```json\n{"n": "3"}\n```'),
    Case(
        "code_stdin", json.dumps([{"input": "3\n", "output": "6"}] * 5), "```python\nprint(2 * int(input()))\n```", ""
    ),
    Case("code_functions", json.dumps({"entry_point": "f", "tests": [{"args": [3], "output": 6}] * 5}), DOUBLE, ""),
    Case("llm_judge", "tea", "tea", "coffee"),
    Case("graded", "46", "12+34=46", "12+34=47"),  # a composite of two
]


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [{"message": {"content": "Grade: 10"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


async def measure(pool: RewardPool, case: Case, num_workers: int, seconds: float) -> str:
    """One row."""
    right = await pool.judge(case.task, case.right, case.reference)
    assert right.verdict is Verdict.CORRECT, f"{case.task}: {right}"
    numbers, alone = count(), list[float]()

    async def judge() -> None:
        completion = (case.right, case.wrong)[next(numbers) % 2]
        judgement = await pool.judge(case.task, completion, case.reference)
        assert judgement.verdict is not Verdict.VERIFIER_ERROR, f"{case.task}: {judgement.detail}"

    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end or len(alone) < 20:
        began = time.perf_counter()
        await judge()
        alone.append((time.perf_counter() - began) * 1000)
    began, end, before = time.perf_counter(), time.perf_counter() + seconds / 2, next(numbers)

    async def keep_busy() -> None:
        while time.perf_counter() < end:
            await judge()

    await asyncio.gather(*(keep_busy() for _ in range(2 * num_workers)))
    rate = (next(numbers) - before - 1) / (time.perf_counter() - began)
    return f"{rate:>8.0f}  {statistics.median(alone):>8.2f}  {statistics.quantiles(alone, n=20)[-1]:>8.2f}"


async def main(seconds: float, num_workers: int, only: list[str]) -> None:
    """Print the table."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = TaskSettings(
        judge=JudgeConfig(endpoint=f"http://127.0.0.1:{server.server_port}/v1", model="m"),
        composite={"graded": CompositeConfig(tasks={"a": "integer_arithmetic", "b": "token_f1"}, correct="a")},
    )
    sandbox = SandboxConfig()
    try:
        check_sandbox(sandbox, is_needed=True)
    except SandboxError:
        sandbox = SandboxConfig(require="none")
        print("sandbox     weaker than in a run: this machine gives no more")
    environment = {VARIABLE: settings.model_dump_json(), **environment_of(sandbox)}
    print(f"{num_workers} workers\n{'task':<24}{'1/s':>8}  {'ms':>8}  {'95 %':>8}")
    tasks = sorted({case.task for case in CASES})
    async with RewardPool(num_workers, 60.0, preload_tasks=tasks, environment=environment) as pool:
        for case in CASES:
            if not only or case.task in only:
                kind = " (LaTeX)" if "frac" in case.reference else ""
                print(f"{case.task + kind:<24}{await measure(pool, case, num_workers, seconds)}", flush=True)
    server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each task (default 4)")
    parser.add_argument("--workers", type=int, default=2, help="reward workers (default 2)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TASK")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.seconds, options.workers, options.only)))
