"""Check before a run that its teachers read the tokens that its policy writes, and rows as long as its rollouts.

Input: Config, the policy's tokenizer.  Output: ConfigError that names both models and the first token that differs; for
servers that others run warnings, too: they may not be reachable from where the run is checked.
Padding of a vocabulary may differ, and a teacher may have more tokens: it is asked about those of the policy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from launch.checks.model_files import PROBES, read_model
from rlhpc.config.rules import Config
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.service_client import AskingLimits, ServiceClient, ServiceFailed, Unusable, places_of

ASKING_S = 10.0  # for a server's tokens of the probes


def asked_teachers(config: Config) -> dict[str, ServiceConfig]:
    """Teachers that are asked about some dataset, by their key in messages: "service", of several "service.0"."""
    asked = {id(config.teacher_of(place)) for place in range(len(config.data))}
    keys = (f"service.{place}" if len(config.service) > 1 else "service" for place in range(len(config.service)))
    return {key: each for key, each in zip(keys, config.service, strict=True) if id(each) in asked}


def refuse_unfit_teachers(config: Config, tokenizer: PromptTokenizer) -> None:
    """Raise ConfigError for a teacher's checkpoint with other tokens, or with less context than a rollout needs."""
    for key, service in asked_teachers(config).items():
        if service.path is None:
            continue
        value = f"{key}.path={str(service.path)!r}"
        model = read_model(service.path, f"{key}.path")
        _refuse_other_tokens(value, config, tokenizer.vocabulary, PromptTokenizer(service.path).vocabulary)
        size, highest = model.get("vocab_size"), max(tokenizer.vocabulary, default=-1)
        if isinstance(size, int) and size <= highest:
            raise ConfigError(
                f"{value}: vocab_size={size}, and the tokenizer of model.path={str(config.model.path)!r} has token "
                f"{highest}; legal: a teacher with the policy's tokens"
            )
        positions = model.get("max_position_embeddings")
        if isinstance(positions, int):
            _refuse_short(value, config, positions, "max_position_embeddings in its config.json")


def _refuse_other_tokens(value: str, config: Config, policy: dict[int, str], teacher: dict[int, str]) -> None:
    for number in sorted(policy):
        if policy[number] != teacher.get(number):
            theirs = repr(teacher[number]) if number in teacher else "none"
            raise ConfigError(
                f"{value} has another tokenizer than model.path={str(config.model.path)!r}: token {number} is "
                f"{theirs}, and {policy[number]!r} of the policy; legal: a teacher with the policy's tokens"
            )


def _refuse_short(value: str, config: Config, positions: int, what: str) -> None:
    wanted = config.generation.max_tokens + 1
    if positions < wanted:
        raise ConfigError(
            f"{value}: {positions} tokens at most ({what}), and the longest row of this run has {wanted}: "
            "generation.max_prompt_tokens + generation.max_completion_tokens, and the token that is sampled behind it; "
            f"legal: a teacher with {wanted} or more"
        )


# ---------------------------------------------------------------------------------------------------- servers of others


def teacher_warnings(config: Config, tokenizer: PromptTokenizer) -> Iterator[str]:
    """Ask servers of others for tokens of a few texts; yield a warning for one that does not answer.

    Raises ConfigError for one with other tokens, or whose context is too short.
    """
    for key, service in asked_teachers(config).items():
        if not service.url:
            continue
        value = f"{key}.url={service.url!r}"
        try:
            limits = AskingLimits(f"service {service.name!r}", "its limit", ASKING_S, 1, 0.0)
            client = ServiceClient(limits, places_of(service, ""))
            for text in PROBES:
                found, positions = client.ask(
                    "/tokenize", {"prompt": text, "add_special_tokens": False}, _tokens_in, {}
                )
                _refuse_other_reading(value, config, text, tokenizer.encode_rendered(text).tolist(), found)
                if positions is not None:
                    _refuse_short(value, config, positions, "max_model_len of POST /tokenize")
        except (ServiceFailed, ValueError) as error:  # ValueError: its key is missing here
            yield (
                f"{value}: its tokens were not compared with the policy's: {error}; a teacher with another tokenizer "
                "teaches nonsense"
            )


def _tokens_in(document: Any) -> tuple[list[int], int | None]:
    """Tokens and longest row in a reply of POST /tokenize.  Raises Unusable."""
    tokens, positions = document["tokens"], document.get("max_model_len")
    if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
        raise Unusable("no tokens in the reply")
    return tokens, positions if type(positions) is int else None


def _refuse_other_reading(value: str, config: Config, text: str, policy: list[int], teacher: list[int]) -> None:
    for place, (mine, theirs) in enumerate(zip_longest(policy, teacher)):
        if mine != theirs:
            raise ConfigError(
                f"{value} has another tokenizer than model.path={str(config.model.path)!r}: of {text!r} token {place} "
                f"is {theirs}, and {mine} of the policy; legal: a teacher with the policy's tokens"
            )
