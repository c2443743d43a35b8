"""Completions of a plain text, beside those of a chat: POST /completions of OpenAI's API.

A prompt is a text or a list of token ids, and each prompt of a session begins with all that stands in it already:
prompt, completion, prompt, completion.  What it adds is read as it is, without a chat template.  By text, a completion
is known without its special tokens, which stay where they were sampled; by token ids it is known exactly.
Input: JSON (platform.openai.com/docs/api-reference/completions).  Output: Asked; JSON objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlhpc.roles.generator.agents.replies import Turn
from rlhpc.roles.generator.agents.requests import Asked, Message, Refused, Sampled, asked_of, refuse_other_distributions

PIECE = "piece"  # role of a prompt's part, and of a completion, in the history of a session
Plain = str | tuple[int, ...]
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"echo": (False,), "best_of": (1,), "suffix": ("",)})


def read_text_request(body: object, run: Sampled) -> Asked:
    """Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    for key in ("messages", "tools"):
        if key in body:
            raise Refused(f"{key}: /completions has a prompt; legal: /chat/completions", code="unsupported_parameter")
    refuse_other_distributions({key: body[key] for key in body if key != "prompt"}, run, _FIXED)
    plain = _prompt(body.get("prompt"))
    return asked_of(body, ({"role": PIECE, "content": (plain,)},), plain=plain)


def _prompt(prompt: object) -> Plain:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return tuple(prompt)
    raise Refused("prompt: a text, or a list of token ids, and not empty; a session has one at a time")


def piece(plain: Plain | None, token_ids: Sequence[int]) -> Message:
    """As a history has it; plain: None where only the token ids are known."""
    return {"role": PIECE, "content": (plain,), "token_ids": tuple(token_ids)}


def added(history: Sequence[Message], plain: Plain) -> Plain | None:
    """What a prompt adds to a history; None: it does not begin with it."""
    if any(message["role"] != PIECE for message in history):
        return None
    if isinstance(plain, str):
        texts = [message["content"][0] for message in history]
        if not all(isinstance(text, str) for text in texts):
            return None
        known = "".join(texts)
        return plain[len(known) :] if plain.startswith(known) else None
    ids = tuple(token_id for message in history for token_id in message["token_ids"])
    return plain[len(ids) :] if plain[: len(ids)] == ids else None


def text_completion(session: str, turn: Turn, asked: Asked) -> dict[str, Any]:
    """The whole of it, object text_completion; token_ids: as sampled, for the next prompt."""
    return _head(session, turn, asked) | {
        "choices": [_choice(turn, turn.content, turn.finish_reason)],
        "usage": turn.usage,
    }


def text_chunks(session: str, turn: Turn, asked: Asked) -> Iterator[dict[str, Any]]:
    """The same as a stream, of one chunk."""
    yield _head(session, turn, asked) | {"choices": [_choice(turn, turn.content, turn.finish_reason)]}
    if asked.with_usage:
        yield _head(session, turn, asked) | {"choices": [], "usage": turn.usage}


def _choice(turn: Turn, text: str, reason: str) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": list(turn.token_ids), "logprobs": None, "finish_reason": reason}


def _head(session: str, turn: Turn, asked: Asked) -> dict[str, Any]:
    name = {"id": f"cmpl-{session}-{turn.number}", "object": "text_completion"}
    return name | {"created": int(time.time()), "model": asked.model or "policy"}
