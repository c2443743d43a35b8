"""Environments, also such that misbehave; named by tests as "sample_environments:Counting" and so on."""

import asyncio
import os
import signal
import time
from typing import ClassVar

from rlhpc.protocol.environment import Environment, Step
from tests.ring.ring_rewards import GATE


class Counting(Environment):
    """Says how many turns it has seen, and which process it is in; ends at "stop"."""

    async def reset(self, record):
        self.turns = 0
        return [{"role": "user", "content": f"go, {record.get('name')}"}]

    async def step(self, completion):
        await asyncio.sleep(0)
        self.turns += 1
        text = f"{self.turns} {os.getpid()}"
        return Step([{"role": "user", "content": text}], reward=0.5, is_done=completion == "stop", parts={"n": 1.0})


class Failing(Counting):
    """Does what its turn says."""

    async def step(self, completion):
        if completion == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "hang":
            time.sleep(600)  # noqa: ASYNC251 - that is what is wrong with it
        if completion == "raise":
            raise RuntimeError("the board fell off the table")
        if completion == "nan":
            return Step([], reward=float("nan"), parts={"reward": 1.0})
        if completion == "huge":
            return Step([], reward=1e39)
        if completion == "endless":
            return Step([], reward=10**400)
        if completion == "odd":
            return Step(["no message"])
        if completion == "strange":
            return Step([{"role": "environment", "content": "…"}])
        return await super().step(completion)


class Talking(Counting):
    """Says the same in every process."""

    async def step(self, completion):
        step = await super().step(completion)
        self.heard = [*getattr(self, "heard", []), completion]
        text = f"{self.turns}: {', '.join(self.heard)}"
        return Step([{"role": "tool", "content": text}, {"role": "user", "content": "and?"}], 0.5, parts=step.parts)


class Holding(Counting):
    """Holds something that has to be given back, and fails where its turn says so."""

    closed: ClassVar[list[str]] = []

    async def reset(self, record):
        self.name = record["name"]
        if self.name == "reset":
            raise RuntimeError("the lock is rusty")
        return await super().reset(record)

    async def step(self, completion):
        if completion == "step":
            raise RuntimeError("the door is stuck")
        return Step(["no message"]) if completion == "odd" else await super().step(completion)

    async def close(self):
        self.closed.append(self.name)
        if self.name == "stuck":
            raise RuntimeError("the bolt is bent")


class Bare(Environment):
    """Lacks a step."""

    async def reset(self, record):
        return []


class Half(Talking):
    """Pays for turns of even length."""

    async def step(self, completion):
        step = await super().step(completion)
        return Step(step.messages, 1.0 * (len(completion) % 2 == 0), parts=step.parts)


class GatedHalf(Half):
    """The same behind a gate: from the second turn on it waits until the file that GATE names is there."""

    async def step(self, completion):
        while self.turns and not os.path.exists(os.environ[GATE]):  # noqa: PTH110, ASYNC240
            time.sleep(0.05)  # noqa: ASYNC251 - one dialogue at a time
        return await super().step(completion)
