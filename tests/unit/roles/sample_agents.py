"""Agents, also such that misbehave; named by tests as "tests.unit.roles.sample_agents:counting" and so on.

They speak HTTP by the standard library; one is an unmodified client of OpenAI's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def post(path: str, body: object, key: str | None = None) -> tuple[int, Any]:
    """Status and JSON of a request to this agent's session; path: "/chat/completions"."""
    sent = os.environ["OPENAI_API_KEY"] if key is None else key
    headers = {"Authorization": f"Bearer {sent}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def say(messages: list[dict[str, Any]], **wishes: Any) -> dict[str, Any]:
    """The policy's next turn, which is appended."""
    status, reply = post("/chat/completions", {"model": "policy", "messages": messages, **wishes})
    assert status == 200, reply
    messages.append(reply["choices"][0]["message"])
    return reply


def counting(record: dict[str, Any], turns: int = 3, salt: str = "") -> dict[str, Any]:
    """Says what it has heard; reports what was said as its detail."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": record["question"]}]
    for place in range(turns):
        reply = say(messages)
        heard = sum(map(ord, messages[-1]["content"] or ""))
        if place < turns - 1:
            messages.append({"role": "user", "content": f"{heard % 97}{salt}?"})
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    return {"reward": 0.5, "length": float(reply["usage"]["total_tokens"]), "detail": json.dumps(texts)}


async def once(record: dict[str, Any]) -> float:
    """One turn, in an async function; right or wrong by what it heard."""
    messages = [{"role": "user", "content": record["question"]}]
    say(messages)
    return float(sum(map(ord, messages[-1]["content"] or "")) % 2)


def past_proxies(record: dict[str, Any]) -> dict[str, Any]:
    """One turn; reports which hosts are asked without a proxy."""
    say([{"role": "user", "content": record["question"]}])
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    return {"reward": 0.5, "detail": os.environ["no_proxy"]}


def by_text(record: dict[str, Any]) -> dict[str, Any]:
    """Text completions by OpenAI's client: by text, streamed, then by token ids; reports all texts and ids."""
    from openai import BadRequestError, OpenAI

    client, said = OpenAI(), []
    text = f"{record['question']}\nIt is"
    first = client.completions.create(model="policy", prompt=text, max_tokens=7)
    assert first.object == "text_completion"
    assert first.choices[0].text is not None
    text += first.choices[0].text + " or"
    said.append(first.choices[0].model_extra["token_ids"])
    (streamed,) = list(client.completions.create(model="policy", prompt=text, max_tokens=7, stream=True))
    said.append(streamed.choices[0].model_extra["token_ids"])
    try:
        client.completions.create(model="policy", prompt=text + "x" + streamed.choices[0].text, logprobs=3)
    except BadRequestError as error:
        refusal = str(error)
    assert "logprobs=3" in refusal
    text += streamed.choices[0].text + ". No:"
    last = client.completions.create(model="policy", prompt=[text], max_tokens=7)
    said.append(last.choices[0].model_extra["token_ids"])
    return {"reward": 0.5, "detail": json.dumps(said)}


def by_token_ids(record: dict[str, Any]) -> dict[str, Any]:
    """The same by token ids alone: what stands in the row is what it has sent and got."""
    from openai import OpenAI

    client, row = OpenAI(), [int(word) for word in os.environ["BEGINNING"].split()] + [11, 12, 13]
    for _ in range(3):
        reply = client.completions.create(model="policy", prompt=row, max_tokens=5)
        row += reply.choices[0].model_extra["token_ids"] + [14]
    return {"reward": 0.5, "detail": json.dumps(row[:-1])}


def by_messages(record: dict[str, Any]) -> dict[str, Any]:
    """Three turns by Anthropic's client, the second streamed; reports their texts."""
    from anthropic import Anthropic

    client, said = Anthropic(), list[str]()
    messages: list[Any] = [{"role": "user", "content": record["question"]}]
    for place in range(3):
        asked: Any = {"model": "policy", "max_tokens": 9, "system": "Be brief.", "messages": messages}
        if place == 1:
            with client.messages.stream(**asked) as stream:
                reply: Any = stream.get_final_message()
        else:
            reply = client.messages.create(**asked)
        said.append(reply.content[0].text)
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "more"}]
    return {"reward": 0.5, "detail": json.dumps(said)}


def by_responses(record: dict[str, Any]) -> dict[str, Any]:
    """Three turns by OpenAI's client as responses, each named by the next; reports their texts."""
    from openai import OpenAI

    client, said, previous = OpenAI(), list[str](), None
    for word in (record["question"], "more", "more"):
        reply = client.responses.create(
            model="policy", input=word, instructions="Be brief.", previous_response_id=previous, max_output_tokens=9
        )
        said.append(reply.output_text)
        previous = reply.id
    return {"reward": 0.5, "detail": json.dumps(said)}


def other_text(record: dict[str, Any]) -> float:
    """A prompt that does not begin with what was said, then one that goes on from the first."""
    status, reply = post("/completions", {"prompt": "one"})
    assert status == 200
    assert post("/completions", {"prompt": "two"})[0] == 200
    status, reply = post("/completions", {"prompt": "one" + reply["choices"][0]["text"] + "."})
    assert status == 200, reply
    return 1.0


def by_post(record: dict[str, Any]) -> None:
    """Reports over HTTP, then stays."""
    say([{"role": "user", "content": "go"}])
    assert post("/reward", {"reward": 0.25, "acc": True})[0] == 200
    time.sleep(600)


def changing(record: dict[str, Any], others: int = 2) -> dict[str, Any]:
    """Compacts after a turn, then asks sub-agents at once; reports the turns that it was given."""
    messages = [{"role": "user", "content": record["question"]}]
    say(messages)
    compacted = [{"role": "user", "content": f"So far: {len(messages[-1]['content'] or '')}. Go on."}]
    lines = [messages, compacted, *([{"role": "user", "content": f"You are number {i}."}] for i in range(others))]
    say(compacted)
    with ThreadPoolExecutor(others) as pool:
        list(pool.map(say, lines[2:]))
    texts = [line[-1]["content"] for line in lines]
    return {"reward": 0.5, "detail": json.dumps(sorted(texts))}


def harness(record: dict[str, Any]) -> dict[str, Any]:
    """Strips what it was told, compacts, asks two sub-agents at once, and goes on; reports all that it was told."""
    told = []

    def line(*messages: str, before: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        history = list(before or [])
        for message in messages:
            history.append({"role": "user", "content": message})
            say(history)
            told.append(history[-1]["content"])
            time.sleep(0.02)
        return history

    first, second, third = record["digits"]
    begun = line(first, second)
    stripped = line(third, before=[*begun[:-1], {"role": "assistant", "content": "0"}])
    compacted = line(f"{len(stripped)}{first}")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(line, (f"1{second}", f"2{third}")))
    line(f"{len(found)}", before=compacted)
    right = [said == digit for said, digit in zip(told, record["digits"], strict=False)]
    return {"reward": sum(right) / 3, "detail": json.dumps(sorted(told))}


def raising(record: dict[str, Any]) -> float:
    """Falls after a turn."""
    say([{"role": "user", "content": "go"}])
    raise RuntimeError("the browser is gone")


def dying(record: dict[str, Any]) -> float:
    """Is killed."""
    say([{"role": "user", "content": "go"}])
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def talkative(record: dict[str, Any]) -> dict[str, Any]:
    """Returns all that it has done."""
    say([{"role": "user", "content": "go"}])
    return {"reward": 0.5, "detail": "and then " * 20_000}


def dying_oddly(record: dict[str, Any]) -> float:
    """Is killed by a signal that has no name."""
    say([{"role": "user", "content": "go"}])
    os.kill(os.getpid(), signal.SIGRTMIN + 3)
    return 1.0


def late(record: dict[str, Any]) -> dict[str, Any]:
    """Dies before its first word the first time, and behind its first turn the second."""
    marks = Path(os.environ["FLAKY"])
    has_died = len(list(marks.iterdir())) if marks.exists() else 0
    if has_died < 2:
        marks.mkdir(exist_ok=True)
        (marks / str(has_died)).touch()
        if has_died:
            counting(record, turns=1)
        os.kill(os.getpid(), signal.SIGKILL)
    return counting(record)


def flaky(record: dict[str, Any]) -> dict[str, Any]:
    """Dies the first time, behind its second turn."""
    has_died = Path(os.environ["FLAKY"])
    if not has_died.exists():
        has_died.touch()
        counting(record, turns=2)
        os.kill(os.getpid(), signal.SIGKILL)
    return counting(record)


def silent(record: dict[str, Any]) -> float:
    """Never asks."""
    time.sleep(600)
    return 1.0


def idle(record: dict[str, Any]) -> float:
    """Reports and has not asked."""
    return 1.0


def speechless(record: dict[str, Any]) -> None:
    """Has no reward of its own."""
    say([{"role": "user", "content": "go"}])


def endless(record: dict[str, Any]) -> float:
    """Talks until it is told that there is no more room."""
    messages = [{"role": "user", "content": "go"}]
    while True:
        status, reply = post("/chat/completions", {"messages": messages})
        if status != 200:
            assert reply["error"]["code"] == "context_length_exceeded", reply
            return 0.75
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]


def main() -> None:
    """As a program: the record comes in, a reward goes out."""
    record = json.load(sys.stdin)
    messages = [{"role": "user", "content": record["question"]}]
    say(messages)
    print("a line for people")
    print(json.dumps({"reward": 1.5, "is_correct": False}))


if __name__ == "__main__":
    main()
