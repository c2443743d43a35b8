"""The environment "verifiers": an environment of that library (PyPI), by environment.id, with its own loop and rubric.

    reset(record) ─▶ rollout() of the library begins ─▶ its first request ─▶ messages after the prompt
    step(turn)    ─▶ the answer to that request ─▶ its next request ─▶ new messages; at the end the rubric's reward

The library's client is ours: a request to the model waits for the policy's turn.  So an environment's loop runs
unchanged; rlhpc only turns messages into text.
Records are rows of the library's dataset: `python -m rlhpc.environments.verifiers ID > FILE` writes
them, with data.prompt_field = "prompt".  Refused: tools (the chat template would not describe them), a history that the
environment changes, and rewards of whole groups.  Extra `verifiers`, 0.1: later releases have no such loop.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Self

import verifiers
from verifiers.clients import Client
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.types import Response, ResponseMessage

from rlhpc.base.user_code import try_out
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.protocol.environment import Environment, Message, Step
from rlhpc.protocol.errors import ConfigError

_FIELDS = ("prompt", "answer", "info", "example_id", "task")  # of a row, as the library's rollouts take it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TurnClient(Client):
    """A client of the library whose model is the policy: each request waits for a turn."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.turn: asyncio.Queue[str | None] = asyncio.Queue()  # None: no room for another turn

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Response:
        """Return the policy's turn.  Raises OverlongPromptError if there is no room; the library then judges."""
        self.asked.put_nowait([_plain(message) for message in prompt])
        turn = await self.turn.get()
        if turn is None:
            raise verifiers.OverlongPromptError("the dialogue has no room for another turn")
        message = ResponseMessage(content=turn, finish_reason="stop", is_truncated=False)
        return Response(id="turn", created=0, model=model, message=message)

    async def close(self) -> None:
        """Do nothing."""

    async def setup_client(self, config: Any) -> None:
        """Never called, nor are the five below, which convert messages for a provider."""

    to_native_tool = to_native_prompt = get_native_response = raise_from_native_response = setup_client
    from_native_response = setup_client


class VerifiersEnvironment(Environment):
    """One rollout of the library."""

    def __init__(self, environment: Any) -> None:
        self._environment, self._client = environment, TurnClient()
        self._history: list[Message] = []
        self._rollout: asyncio.Task[Any] | None = None

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """Load the environment.  Raises ConfigError if that fails, or if it uses a refused feature."""
        return cls(_loaded(settings.id, json.dumps(settings.arguments)))

    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """Messages between the record's prompt and the first turn; usually none."""
        row = {name: record[name] for name in _FIELDS if name in record}
        self._rollout = asyncio.create_task(self._play({"example_id": 0} | row))
        self._history = [_plain(message) for message in record["prompt"]]
        return await self._next() or ()

    async def step(self, completion: str) -> Step:
        """The environment's next messages; at the end the rubric's reward, with its functions as parts."""
        self._history.append({"role": "assistant", "content": completion})
        self._client.turn.put_nowait(completion)
        said = await self._next()
        return self._end() if said is None else Step(said)

    async def finish(self) -> Step:
        """The rubric's reward for a dialogue that a limit has ended."""
        self._client.turn.put_nowait(None)
        assert self._rollout is not None
        await self._rollout
        return self._end()

    async def close(self) -> None:
        """Cancel a rollout that still waits for a turn."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _play(self, row: dict[str, Any]) -> Any:
        state = await self._environment.rollout(row, self._client, "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the environment has failed: {state['error']!r}")
        await self._environment.rubric.score_rollout(state)
        return state

    async def _next(self) -> list[Message] | None:
        """Messages that the next request adds; None: the rollout has ended.  Raises the rollout's exception."""
        assert self._rollout is not None
        request = asyncio.create_task(self._client.asked.get())
        await asyncio.wait((request, self._rollout), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            await self._rollout
            return None
        asked = request.result()
        known, added = asked[: len(self._history)], asked[len(self._history) :]
        if known != self._history:
            raise ValueError("the environment has changed what was said before; tokens that were read stay as they are")
        self._history = asked
        return added

    def _end(self) -> Step:
        assert self._rollout is not None
        state = self._rollout.result()
        parts = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Step(
            (), float(state["reward"]), is_done=True, parts=parts, detail=str(state.get("stop_condition") or "")
        )


@cache
def _loaded(name: str, arguments: str) -> Any:
    """An environment of the library, loaded once per process.  Raises ConfigError."""
    where = f"environment.id={name!r}"
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    given = json.loads(arguments)
    try:
        found = try_out(
            "environment.id", name, f"environment.arguments={given}", lambda: verifiers.load_environment(name, **given)
        )
    finally:
        for number, handler in handlers.items():  # the library takes these; a worker leaves them to its service
            signal.signal(number, handler)
    if not isinstance(found, MultiTurnEnv):
        raise ConfigError(f"{where} is a {type(found).__name__}; legal: a MultiTurnEnv, or what is made of it")
    if found.tool_defs:
        raise ConfigError(f'{where} has tools, which no chat template would describe; legal: data.environment="tools"')
    if found.rubric.has_group_rewards:
        raise ConfigError(f"{where} rewards groups as a whole; legal: functions of one completion")
    return found


def _plain(message: Any) -> Message:
    """Role and text of a message.  Raises ValueError for images and the like."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content") or ""
    if not isinstance(content, str):
        raise ValueError(f"a message of role {fields['role']} is no text: {str(content)[:80]}")  # noqa: TRY004
    return {"role": str(fields["role"]), "content": content}


def rows(name: str, arguments: str = "{}") -> Iterator[dict[str, Any]]:
    """Records of an environment's dataset, for data.path.  Raises ConfigError."""
    for row in _loaded(name, arguments).get_dataset():
        yield {**row, "prompt": [_plain(message) for message in row["prompt"]]}


if __name__ == "__main__":
    for each in rows(*sys.argv[1:3]):
        sys.stdout.write(json.dumps(each, default=str) + "\n")
