"""What the simulator leaves out of the product, and what it makes quicker: nothing that decides anything."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlhpc.config.tables import DataConfig, ModelConfig
from rlhpc.data import prompts
from rlhpc.data.record_source import Record, read_records
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.transport.codec import Codec

SILENCE_S = 4.0  # after which an outbox delivers again: runs are short here


class _NoTensorBoard:
    """Takes everything."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _NoTensorBoard


async def _never(_: object) -> None:
    """In the place of what measures the event loop ten times a second."""
    await asyncio.get_running_loop().create_future()


class _Dataset(list[Record]):
    """May be looked up: nobody changes it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@functools.cache
def _read(path: Path) -> _Dataset:
    return _Dataset(read_records(path))


def _records(data: DataConfig) -> _Dataset:
    assert data.path is not None
    return _read(data.path)


# One of each kind will do: making them costs as much as a run, and what all runs read does not change.
_codec = functools.cache(Codec)
_tokenizer_of = functools.cache(PromptTokenizer)
_fingerprint = functools.cache(prompts._fingerprint)


def _tokenizer(model: ModelConfig) -> PromptTokenizer:
    assert not model.chat_template_kwargs  # a dict is no key of a cache
    return _tokenizer_of(model.path)


@contextmanager
def in_silence() -> Iterator[None]:
    """Neither logs nor TensorBoard."""
    with ExitStack() as stack:
        stack.enter_context(patch("tests.engines.memory_channel.Codec", _codec))
        stack.enter_context(patch("rlhpc.data.prompts.records_of", _records))
        stack.enter_context(patch("rlhpc.data.prompts._fingerprint", _fingerprint))
        stack.enter_context(patch.object(PromptTokenizer, "of", _tokenizer))
        stack.enter_context(patch("rlhpc.roles.generator.sampling.SILENCE_S", SILENCE_S))
        stack.enter_context(patch("rlhpc.roles.controller.recorder.Recorder", _NoTensorBoard))
        stack.enter_context(patch("rlhpc.metrics.meters.LoopLag.run", _never))
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, before)
        yield
