"""[[demonstrations]] and [sft]: supervised fine-tuning, as a run of its own or as the stage before an RL run.

A file with [[demonstrations]] and none of [data], [generation] and [admission] is of that stage alone: it needs [run],
[model] and [trainer] besides, of which the learning rate and the number of steps are in [sft].  rules.supervised makes
the settings of the stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config.setting import (
    ANY_SIZE,
    STEPS,
    USUAL_TOKENS,
    Faults,
    Keys,
    LearningRate,
    LoosePath,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Usual,
    only_with,
    only_with_any,
    rule,
)

if TYPE_CHECKING:
    from rlhpc.config.rules import Config

PAIRED = only_with("demonstrations.completion_field")
DPO = only_with("sft.loss", "dpo")
HELD_OUT = only_with_any("sft.held_out", "demonstrations.held_out")
_RATE = Usual(1e-7, 1e-2, "supervised fine-tuning takes 1e-6 to 1e-4, of adapters ten times as much")


class DemonstrationsConfig(Section):
    """[demonstrations]: answers to imitate; several datasets are a table [[demonstrations]] each."""

    path: LoosePath
    """A file or directory of any format that data.path reads."""
    split: str = ""
    """"train", "validation", "test", "all", as data.split."""
    messages_field: Annotated[
        str, only_with("demonstrations.completion_field", "", why="prompt and completion are fields of their own")
    ] = "messages"
    """Field with a conversation, a list of chat messages; each turn of the assistant is learnt, as the chat template
    writes it, with the token that ends it."""
    completion_field: str = ""
    """Instead: the field with the answer to a prompt, as text, or as chat messages of the assistant and what it was
    told in between; text without a chat template ends with the tokenizer's end token."""
    rejected_field: Annotated[str, PAIRED, DPO] = ""
    """With sft.loss = "dpo": the field with an answer to the same prompt to which that of completion_field is
    preferred."""
    prompt_template: Annotated[
        str, PAIRED, only_with("demonstrations.prompt_field", "", why="the prompt is the field, unchanged")
    ] = "{prompt}"
    """As data.prompt_template: filled with the record's fields; empty, of preferences: both answers begin with the
    prompt."""
    prompt_field: Annotated[str, PAIRED] = ""
    """As data.prompt_field: instead of prompt_template, the field that holds the prompt, as text or chat messages."""
    use_chat_template: Annotated[bool, PAIRED] = False
    """As data.use_chat_template: wrap the prompt as a user message; chat messages always are in the template."""
    tools_field: str = "tools"
    """Field with the tools of a conversation, a list of JSON schemas or that list in JSON, for the chat template; a
    record without it has none; empty: nobody has."""
    system_prompt: str = ""
    """System message put before a conversation that has none."""
    passes: Annotated[PositiveFloat, Usual(1e-3, 1e3, "it is in passes over this dataset")] = 1.0
    """Passes over this dataset in an epoch: of several, 2 counts it twice, and 0.5 takes another half in each epoch."""
    held_out: bool = False
    """Learn nothing from it: it is for the held-out loss."""


class SftConfig(Section):
    """[sft]: supervised fine-tuning on [[demonstrations]]."""

    whole_table = (only_with("demonstrations.path", other="a table [[demonstrations]]"),)

    loss: Literal["cross_entropy", "dpo"] = "cross_entropy"
    """Cross-entropy with answers to imitate, or that of preferences between two (direct preference optimisation)."""
    beta: Annotated[PositiveFloat, Usual(0.001, 10, "published preferences take 0.01 to 0.5"), DPO] = 0.1
    """How strongly preferences are held near the model that the stage begins with."""
    batch_size: Annotated[Positive, Usual(1, 1e6, "it is in conversations")] = 64
    """Conversations of an optimiser step, or pairs of them."""
    epochs: Annotated[
        PositiveFloat, Usual(0.01, 100, "it is in passes over the data"), only_with("sft.num_steps", None)
    ] = 1.0
    """Passes over the data, which give the number of optimiser steps; the last batch of an epoch is filled up from the
    next."""
    num_steps: Annotated[Positive | None, Usual(1, 1e6, STEPS)] = None
    """Instead of epochs: optimiser steps."""
    max_tokens: Annotated[Positive | None, USUAL_TOKENS] = None
    """Tokens of a conversation, at most; none: trainer.token_budget, or half of it, since both of a pair are in a
    row."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """A longer one: is refused before the run starts, or left out."""
    learning_rate: Annotated[LearningRate, _RATE] = 1e-5
    """Peak learning rate, of adapters too."""
    warmup_steps: Annotated[NonNegative, Usual(1, 1e5, STEPS, zero=True)] = 0
    """Steps of linear warm-up from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """After warm-up: constant, or decay to min_learning_rate at the last step."""
    min_learning_rate: Annotated[float, Field(ge=0), ANY_SIZE, only_with("sft.lr_schedule", "linear", "cosine")] = 0.0
    """Final learning rate of linear and cosine."""
    held_out: Annotated[float, Field(ge=0, lt=1), ANY_SIZE] = 0.0
    """Share of conversations, drawn by run.seed, that is never learnt from, for the held-out loss."""
    evaluate_every: Annotated[Positive, Usual(1, 1e6, STEPS), HELD_OUT] = 50
    """Steps between two computations of the held-out loss, which is also computed at the end."""
    early_stop: Annotated[
        Positive | Literal["off"], Usual(1, 1000, "it is in computations of the held-out loss"), HELD_OUT
    ] = "off"
    """Stop after this many consecutive held-out losses that were not the lowest; the model with the lowest is kept."""

    @property
    def counts(self) -> str:
        """Noun of what is counted, in the singular."""
        return "pair" if self.loss == "dpo" else "conversation"

    @rule
    def conversations_fit_a_row(self, config: Config, key: Keys) -> Faults:
        """`max_tokens`: 2 to `trainer.token_budget`, half of it for `loss` = `"dpo"`; a conversation is never cut."""
        budget = config.trainer.token_budget // (2 if self.loss == "dpo" else 1)
        if not 2 <= config.longest_conversation <= budget:
            yield f"{key.max_tokens} with {key.trainer.token_budget}; legal: 2 to {budget}"

    @rule
    def preferences_are_between_two(self, config: Config, key: Keys) -> Faults:
        """`loss` = `"dpo"`: each table `[[demonstrations]]` has a `rejected_field`."""
        for place, table in enumerate(config.demonstrations):
            if self.loss == "dpo" and not table.rejected_field:
                yield f"demonstrations.{place}.rejected_field='' with {key.loss}; legal: the worse answer's field"

    @rule
    def an_answer_is_its_own_field(self, config: Config, key: Keys) -> Faults:
        """`rejected_field`, `completion_field` and `prompt_field` name different fields; with an empty
        `prompt_template` there is no `use_chat_template`, since answers that begin with their prompt are not wrapped.
        """
        for place, table in enumerate(config.demonstrations):
            answer, where = table.completion_field, f"demonstrations.{place}"
            for name in ("rejected_field", "prompt_field"):
                if answer and getattr(table, name) == answer:
                    yield (
                        f"{where}.{name}={answer!r} with demonstrations.completion_field={answer!r}: "
                        "it is the same; legal: another field"
                    )
            if table.rejected_field and not (table.prompt_template or table.prompt_field) and table.use_chat_template:
                yield f"{where}.use_chat_template=true has no effect with prompt_template=''; legal: false"

    @rule
    def something_is_learnt(self, config: Config, key: Keys) -> Faults:
        """`[[demonstrations]]`: one at least without `held_out`."""
        if config.demonstrations and all(each.held_out for each in config.demonstrations):
            yield "demonstrations.held_out=true in all tables: nothing is learnt from; legal: false in one of them"

    @rule
    def the_rate_does_not_cross(self, config: Config, key: Keys) -> Faults:
        """`min_learning_rate`: at most `learning_rate`."""
        if self.min_learning_rate > self.learning_rate:
            yield f"{key.min_learning_rate} is above {key.learning_rate}; legal: 0 to {self.learning_rate:g}"
