"""Task "reward_model": a service scores the completion, as [reward_model] of the run file specifies.

Input: completions and references, texts or whole records.  Output: a RewardOutcome each, with part `score`, the model's
own; of a process reward model also what each step earns.  A service that does not answer, or not with a score, is a
verifier error and never a reward.

    record ─ prompt_template ─▶ prompt ┐
                        completion ────┴─▶ /classify ─▶ scores of classes ─ label, activation, scale, shift ─▶ reward
                                       └─▶ steps, each with step_token ─▶ /tokenize, /pooling ─▶ the same of each step
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rlhpc.config.tables_models import RewardModelConfig, ServiceConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.outcomes import JudgedOutcome, NoVerdict
from rlhpc.rewards.service_client import (
    ServiceClient,
    Unusable,
    fields_for,
    parsed_template,
    patience_with,
    places_of,
)
from rlhpc.rewards.task_settings import task_settings

TEMPLATE = "reward_model.prompt_template"
MOST_IN_FLIGHT = 16  # requests of a worker for the completions of a batch
_SHOWN_CHARACTERS = 120


def reward_model(completions: Sequence[str], references: Sequence[str]) -> list[RewardOutcome | NoVerdict]:
    """Score completions.  Raises ValueError for the settings; a failure of one completion is in its place."""
    return _model_of_this_process().score_all(completions, references)


@cache
def _model_of_this_process() -> RewardModel:
    settings = task_settings()
    if (service := settings.reward_service) is None:
        raise ValueError("reward_model.service is missing; legal: the name of a [[service]] with kind = 'reward'")
    client = ServiceClient(patience_with(service), places_of(service, settings.rendezvous), not service.url)
    return RewardModel(settings.reward_model, client, label_of(settings.reward_model, service))


class RewardModel:
    """Template, client, and how scores become rewards."""

    def __init__(self, settings: RewardModelConfig, client: ServiceClient, label: int | None = None) -> None:
        """label: number of the class that counts; None: the only one.  Raises ValueError for an illegal template."""
        self._settings, self._client, self._label = settings, client, label
        self._fields = parsed_template(TEMPLATE, settings.prompt_template)
        self._step_token: int | None = None  # its id, once the service has been asked

    def score_all(self, completions: Sequence[str], references: Sequence[str]) -> list[RewardOutcome | NoVerdict]:
        """Score completions, several at a time, all within the service's timeout_s together."""
        until = self._client.clock() + self._client.patience.timeout_s
        score = partial(self._scored_or_not, until=until)
        if len(completions) == 1:
            return [score(completions[0], references[0])]
        with ThreadPoolExecutor(min(MOST_IN_FLIGHT, len(completions))) as threads:
            return list(threads.map(score, completions, references))

    def _scored_or_not(self, completion: str, reference: str, until: float) -> RewardOutcome | NoVerdict:
        costs: dict[str, float] = {}
        try:
            return self._scored(completion, reference, costs, until)
        except NoVerdict as failure:
            return failure
        except ValueError as error:  # the record of this completion lacks a field
            return NoVerdict(str(error), costs)

    def _scored(self, completion: str, reference: str, costs: dict[str, float], until: float) -> RewardOutcome:
        settings = self._settings
        prompt = settings.prompt_template.format(**fields_for(TEMPLATE, self._fields, reference))
        if not settings.step_separator:
            body = self._input(prompt, completion, "input") | {"use_activation": False}
            score = self._client.ask("/classify", body, self._score_in, costs, until)
            reward = self._clipped(score)
            detail = f"score {score:g}"
            return JudgedOutcome(reward, reward >= settings.correct_from, {"score": score}, detail, costs=costs)
        steps = list(steps_of(completion, settings.step_separator))
        scores = self._scores_of(prompt, [step.text for step in steps], costs, until)
        rewards = [self._clipped(score) for score in scores]
        earned = [reduced(rewards[: number + 1], settings.step_reduction) for number in range(len(rewards))]
        # What a step earns is by how much it changes the reduction, so that all of it together is the reward.
        gains = [earned[0], *(after - before for before, after in pairwise(earned))]
        return JudgedOutcome(
            earned[-1],
            earned[-1] >= settings.correct_from,
            {"score": reduced(scores, settings.step_reduction), "steps": float(len(steps))},
            f"scores {', '.join(f'{score:.3g}' for score in scores)}"[:_SHOWN_CHARACTERS],
            rewards_at={step.end: gain for step, gain in zip(steps, gains, strict=True) if step.end},
            costs=costs,
        )

    def _input(self, prompt: str, completion: str, text_key: str) -> dict[str, Any]:
        """Return the input of a request: chat messages, or one text under text_key, "input" or "prompt"."""
        if not self._settings.use_chat_template:
            return {text_key: prompt + completion}
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return {"messages": messages} | ({"add_generation_prompt": False} if text_key == "prompt" else {})

    def _score_in(self, document: Any) -> float:
        """Read the reply of /classify."""
        (only,) = document["data"]
        scores = only["probs"]
        if only.get("num_classes", len(scores)) != len(scores):
            raise Unusable(f"{len(scores)} scores of {only['num_classes']} classes")
        return self._score(scores)

    def _score(self, scores: Any) -> float:
        """The score of the label among those of the classes, activated.  Raises Unusable unless all are numbers."""
        if not isinstance(scores, list) or not scores or not all(map(_is_finite, scores)):
            raise Unusable(f"scores are finite numbers, not {json.dumps(scores)[:_SHOWN_CHARACTERS]}")
        label = self._label
        if label is None and len(scores) > 1:
            legal = f"reward_model.label, a number from 0 to {len(scores) - 1}"
            raise Unusable(f"scores of {len(scores)} classes; legal: {legal}", is_final=True)
        if label is not None and label >= len(scores):
            legal = f"0 to {len(scores) - 1}"
            raise Unusable(f"scores of {len(scores)} classes, and the label is {label}; legal: {legal}", is_final=True)
        return activated(scores, label or 0, self._settings.activation)

    def _clipped(self, score: float) -> float:
        settings = self._settings
        reward = score * settings.scale + settings.shift
        reward = reward if settings.clip_low == "off" else max(settings.clip_low, reward)
        return reward if settings.clip_high == "off" else min(settings.clip_high, reward)

    # ------------------------------------------------------------------------------------------------------------ steps

    def _scores_of(self, prompt: str, steps: Sequence[str], costs: dict[str, float], until: float) -> list[float]:
        """Return the scores at the step tokens, one behind each step; those in the prompt do not count."""
        token, ask = self._settings.step_token, self._client.ask
        # A policy that writes the token itself would be scored at places of its choice.
        marked = "".join(step.replace(token, "") + token for step in steps)
        if self._step_token is None:
            body = {"prompt": token, "add_special_tokens": False}
            self._step_token = ask("/tokenize", body, partial(_only_token, token), costs, until)
        ids = ask("/tokenize", self._input(prompt, marked, "prompt"), _tokens, costs, until)
        places = [place for place, each in enumerate(ids) if each == self._step_token][-len(steps) :]
        if len(places) < len(steps):
            why = f"{len(places)} tokens {token!r} in the model's own form of {len(steps)} steps; legal: a step_token"
            raise NoVerdict(f"{why} that its chat template keeps", costs)

        def read(document: Any) -> list[float]:
            (only,) = document["data"]
            rows = only["data"]
            if len(rows) != len(ids):
                raise Unusable(f"scores of {len(rows)} tokens, and {len(ids)} were sent")
            return [self._score(rows[place]) for place in places]

        body = {"input": ids, "task": "token_classify", "use_activation": False}
        return ask("/pooling", body, read, costs, until)


@dataclass(frozen=True, slots=True)
class SolutionStep:
    """A step of a completion."""

    text: str
    end: int  # characters of the completion up to its end, what separates it from the next one included


def steps_of(completion: str, separator: str) -> Iterator[SolutionStep]:
    """Yield the steps of a completion, at least one; what is blank belongs to the step before, or else to the next."""
    pieces = completion.split(separator)
    ends = accumulate(len(piece) + len(separator) for piece in pieces)
    found: list[SolutionStep] = []
    for piece, end in zip(pieces, ends, strict=True):
        end = min(end, len(completion))
        if piece.strip() or not found:
            if found and not found[-1].text.strip():
                found.pop()
            found.append(SolutionStep(piece, end))
        else:
            found[-1] = SolutionStep(found[-1].text, end)
    yield from found


def reduced(scores: Sequence[float], reduction: str) -> float:
    """Reduce scores of steps to one."""
    by_name: Mapping[str, Callable[[Sequence[float]], float]] = {
        "mean": lambda values: math.fsum(values) / len(values),
        "min": min,
        "last": lambda values: values[-1],
        "product": math.prod,
    }
    return by_name[reduction](scores)


def activated(scores: Sequence[float], label: int, activation: str) -> float:
    """The activated score of one class; softmax is over all of them."""
    score = float(scores[label])
    if activation == "sigmoid":
        return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
    if activation == "softmax":
        highest = max(scores)
        return math.exp(score - highest) / math.fsum(math.exp(each - highest) for each in scores)
    return score


def label_of(settings: RewardModelConfig, service: ServiceConfig) -> int | None:
    """Return the number of the class whose score counts; None: the only one.

    Raises ValueError for a name that the checkpoint does not have, a number that it does not reach, and for none where
    it has several classes.
    """
    names = _classes_of(service.path) if service.path is not None else {}
    listed = ", ".join(map(repr, names.values()))
    if not settings.label:
        if len(names) > 1:
            raise ValueError(f"reward_model.label is missing; legal for {service.path}: {listed}")
        return None
    if named := [number for number, name in names.items() if name == settings.label]:
        return named[0]
    number = int(settings.label) if settings.label.isdecimal() else -1
    if number < 0 or (names and number not in names):
        legal = listed or "a number, since the names of its classes are not known here"
        raise ValueError(f"reward_model.label={settings.label!r}; legal: {legal}")
    return number


def _classes_of(path: Path) -> dict[int, str]:
    """Names of a checkpoint's classes, by number; {} if its config.json does not list them.  Raises ValueError."""
    file = path / "config.json"
    try:
        named = json.loads(file.read_bytes()).get("id2label") or {}
        return {number: str(name) for number, name in sorted((int(key), name) for key, name in named.items())}
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: id2label cannot be read: {error}") from error


def check_reward_model(reference: str, settings: RewardModelConfig) -> None:
    """Raise ValueError if the template needs a record, or a field that the record lacks, or cannot be read."""
    fields_for(TEMPLATE, parsed_template(TEMPLATE, settings.prompt_template), reference)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _tokens(document: Any) -> list[int]:
    ids = document["tokens"]
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise Unusable(f"tokens are numbers, not {json.dumps(ids)[:_SHOWN_CHARACTERS]}")
    return ids


def _only_token(token: str, document: Any) -> int:
    ids = _tokens(document)
    if len(ids) != 1:
        why = f"reward_model.step_token={token!r} is {len(ids)} tokens of the model; legal: one of its tokens"
        raise Unusable(why, is_final=True)
    return ids[0]
