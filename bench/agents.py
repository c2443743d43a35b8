"""What it costs to start agents at once: `python -m bench.agents [SESSIONS]`, 64 unless told.

Each agent makes a client of OpenAI's and asks for a turn; all are started together, as by a lease.  Prints, for a
function, a program of its own and the same program in forks of a process that has loaded the client: seconds until all
have asked, processor time and memory of a session (what it has alone, and its share of what is shared).  The machine's
load is printed beside: seconds on the clock are of a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.figures import tell
from examples.echo_agent import make
from rlhpc.agents.agents import Agents
from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.types import Prompt, RolloutRequest, SamplingParams

PROGRAM = """\
from openai import OpenAI


def ask(record):
    with OpenAI() as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1"}], max_tokens=2)


if __name__ == "__main__":
    ask(None)
"""


def main(num_sessions: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make(directory)
        (directory / "asking_agent.py").write_text(PROGRAM, encoding="utf-8")
        sys.path.insert(0, place)
        command = ["python", str(directory / "asking_agent.py")]
        print(f"{'agents':<22}{'all have asked, s':>18}{'processor, s':>14}{'alone, MB':>11}{'share, MB':>11}")
        kinds: dict[str, dict[str, Any]] = {
            "function": {"function": "asking_agent:ask"},
            "program": {"command": [sys.executable, command[1]]},
            "program, preloaded": {"command": command, "preload": ["openai"]},
        }
        for name, agent in kinds.items():
            asyncio.run(_measured(name, _config(directory, agent), num_sessions))
    print(f"load        {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _config(directory: Path, agent: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_steps": 1},
            "model": {"path": str(directory / "model")},
            "data": {"path": "none.jsonl", "task": "environment", "environment": "agent", "use_chat_template": True},
            "agent": {**agent, "turn_timeout_s": 200.0},
            "generation": {"max_prompt_tokens": 8, "max_completion_tokens": 24},
            "admission": {"groups_per_step": 8, "group_size": 8, "lease_deadline_s": 600.0},
            "trainer": {"backend": "reference", "token_budget": 2048},
        }
    )


async def _measured(name: str, config: Config, num_sessions: int) -> None:
    agents = Agents(config, PromptTokenizer.of(config.model))
    prompt = Prompt(0, "environment", np.zeros(1, np.int32), "{}")
    before: set[int] = {child.pid for child in psutil.Process().children()}
    async with AsyncExitStack() as stack:

        async def begin(place: int) -> None:
            request = RolloutRequest(0, place, prompt, SamplingParams(24))
            session = await stack.enter_async_context(agents.session(request, None))
            await session.begin()
            await session.events.get()

        await begin(0)  # the host is there from the second lease of a run on
        began = time.perf_counter()
        await asyncio.gather(*map(begin, range(1, num_sessions + 1)))
        taken_s = time.perf_counter() - began
        (host,) = [child for child in psutil.Process().children() if child.pid not in before]
        cpu_s, alone, share = zip(*(_cost(agent) for agent in host.children()), strict=True)
    await agents.close()
    figures = taken_s, *map(statistics.median, (cpu_s, alone, share))
    print("{:<22}{:>18.2f}{:>14.3f}{:>11.1f}{:>11.1f}".format(name, *figures))
    for what, value in zip(("all have asked, s", "processor, s", "alone, MB", "share, MB"), figures, strict=True):
        tell(f"{name}: {what}", value)


def _cost(agent: psutil.Process) -> tuple[float, float, float]:
    """(processor seconds, MB that it has alone, MB of its share) of an agent that waits for its turn."""
    times, memory = agent.cpu_times(), agent.memory_full_info()
    return times.user + times.system, memory.uss / 1e6, memory.pss / 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
