"""What an environment says and the model's chat template refuses is an error of the dialogue, and ends no generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.dialogue import TurnsTaken
from rlhpc.protocol.messages import TurnReply
from tests.unit.data.chat_models import QWEN25, make_chat_model
from tests.unit.roles.test_dialogue import dialogue_of, engine_of

STRICT = (
    "{%- for m in messages if m.role == 'referee' %}{{- raise_exception('no referees here') }}{%- endfor %}" + QWEN25
)


@pytest.mark.parametrize("refused_turn", [0, 1, 2])
async def test_a_message_that_the_chat_template_refuses_is_a_verifier_error(tmp_path: Path, refused_turn: int) -> None:
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, "qwen2.5", STRICT))
    speech = tokenizer, DialogueTemplate(tokenizer)

    async def environment(taken: TurnsTaken) -> TurnReply:
        role = "referee" if len(taken.turns) == refused_turn else "user"
        said: dict[str, Any] = {"messages": ({"role": role, "content": "Go on."},), "reward": 0.25 * len(taken.turns)}
        return TurnReply(0, said["messages"], said["reward"], "wrong", {}, "", is_done=False, is_over=taken.is_last)

    engine = await engine_of(speech, 1, 0.5)
    finished = await dialogue_of(speech, engine, environment, {"max_turns": 5}, 2000).run()
    assert finished.reply is not None
    assert (finished.reply.verdict, finished.num_turns) == ("verifier_error", refused_turn)
    assert "the chat template fails on messages of" in finished.reply.detail
    assert "no referees here" in finished.reply.detail
    assert int(finished.rollout.loss_mask.sum()) == sum(
        len(answer.token_ids) - request.num_done for request, answer in engine.fed
    )
