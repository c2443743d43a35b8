"""The environment of docs/environments.md does what the page says."""

from __future__ import annotations

import asyncio

from rlhpc.protocol.environment import Environment
from tests.unit.doc_pages import ROOT, blocks


def test_the_environment_of_the_page_plays() -> None:
    (text,) = blocks(ROOT / "docs" / "environments.md", "python", heading="Your own environment")
    module: dict[str, type[Environment]] = {}
    exec(compile(text, "environments.md", "exec"), module)

    async def play() -> None:
        game = module["GuessTheNumber"]()
        assert list(await game.reset({"answer": "42"})) == []
        for guess, hint in (("7", "higher"), ("99", "lower"), ("what?", "higher")):
            (message,) = (await game.step(guess)).messages
            assert message["content"] == hint
        won = await game.step(" 42 ")
        assert (won.reward, won.is_done) == (1.0, True)

    asyncio.run(play())
