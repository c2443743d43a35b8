"""Tools of servers, [mcp.NAME]: what prompts tell of them, calls of them, and servers that fail, stall, die or lie.

The servers are those of the official library, over standard input and output and over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rlhpc.base.own_tools import digest_of_tools, schemas_of_servers, told_tools
from rlhpc.base.processes import tied_command
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.config.tables_tools import McpConfig
from rlhpc.data.prompts import open_prompts, validate_datasets
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.tools import ToolEnvironment
from rlhpc.protocol.errors import ConfigError, RlhpcError
from rlhpc.rewards.environments import VARIABLE, variables_of
from rlhpc.rewards.outcomes import by_task
from rlhpc.rewards.pool import RewardPool
from tests import build
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_chat_model
from tests.unit.rewards.test_environment_host import call, dialogue
from tests.unit.rewards.test_reward_pool import wait_until_gone

pytest.importorskip("mcp", reason="extra 'mcp'")
pytestmark = pytest.mark.starts

SERVER = str(Path(__file__).parent / "sample_tool_server.py")


def command(mode: str = "honest", **changes: Any) -> dict[str, Any]:
    """A table of the run file, whose server may be slow, as on a busy machine."""
    return {"command": [sys.executable, SERVER, mode], "timeout_s": 25.0, **changes}


def tables(**servers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: McpConfig(**table).model_dump(mode="json") for name, table in servers.items()}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, SERVER, "honest", str(port)]
    with subprocess.Popen(words, env=os.environ | {"HERE": "at the server"}) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.kill()


# ------------------------------------------------------------------------------------------------- what prompts tell of


@pytest.mark.long
def test_tools_of_a_server_are_told_as_the_server_describes_them_whatever_it_speaks_over(url):
    told = schemas_of_servers(tables(one=command(tools=["add", "note"]), two={"url": url, "prefix": "http_"}))
    add, note = told["one"]
    assert add["function"]["name"] == "add"
    assert add["function"]["description"] == "Add two numbers."
    assert add["function"]["parameters"]["required"] == ["a"]
    names = [schema["function"]["name"] for schema in told["two"]]
    assert names[:2] == ["http_add", "http_note"]
    assert len(names) == 9
    again = told["two"][0]["function"]
    assert again | {"name": "add"} == add["function"]
    assert note["function"]["parameters"]["properties"]["text"]["type"] == "string"


@pytest.mark.long
def test_servers_are_asked_once_in_a_process_and_again_if_so_meant(tmp_path):
    counter = tmp_path / "counter"
    counter.touch()
    servers = tables(one=command("another time", variables={"COUNTER": str(counter)}))
    first = schemas_of_servers(servers)
    counter.write_text("xx")
    assert schemas_of_servers(servers) == first
    other = schemas_of_servers(servers, anew=True)
    assert other["one"][0]["function"]["name"] == "add_2"
    assert digest_of_tools(other) != digest_of_tools(first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "why"),
    [
        (
            {"command": ["no-such-program"]},
            r"command=\['no-such-program'\]: there is no program 'no-such-program' here",
        ),
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "it cannot be asked: MCPError: Connection closed"),
        ({"command": ["cat", "/etc/hostname"]}, "it cannot be asked: MCPError: Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, r"url='http://127.0.0.1:9/mcp': it cannot be asked: ConnectError"),
        (command(pass_variables=["NOT_SET"]), "the environment variable NOT_SET is not set here"),
        (command(tools=["ad"]), r"tools names 'ad'; legal: add, note, .*\(did you mean add\?\)"),
        (command("no tools"), "the server has no tools"),
        (command("two of one name"), "the server lists two tools of the name 'add'"),
        (command("no schema"), "the arguments of its tool 'add' have no JSON Schema: at .*required"),
        (
            command("too many"),
            r"schemas of their tools have \d+,\d+ bytes, and every prompt .* legal: .*mcp.NAME.tools",
        ),
    ],
)
def test_a_server_that_cannot_be_asked_or_told_of_is_refused_with_its_key(table, why):
    with pytest.raises(ConfigError, match=rf"^mcp\.one.*{why}"):
        schemas_of_servers(tables(one=table))


@pytest.mark.long
def test_two_tools_of_one_name_are_refused_and_a_prefix_tells_them_apart():
    one, two = command(tools=["add"]), command(tools=["add", "note"])
    with pytest.raises(ConfigError, match=r"mcp.two has a tool 'add', and so has mcp.one: .*legal: mcp.NAME.prefix"):
        told_tools([], tables(one=one, two=two))
    told = told_tools(["calculator"], tables(one=one, two=two | {"prefix": "my-"}))
    assert [schema["function"]["name"] for schema in told.schemas] == ["calculator", "add", "my-add", "my-note"]


def test_prompts_tell_of_tools_of_servers_and_carry_their_digest(tmp_path):
    make_chat_model(tmp_path / "model", "qwen2.5")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    config = build.config(
        data={"path": tmp_path / "train.jsonl", "task": "regex", "environment": "tools", "use_chat_template": True},
        environment={"tools": ["calculator"]}, mcp={"one": command(tools=["add"])}, rewards={"timeout_s": 60.0},
        model={"path": tmp_path / "model"},
        generation={"max_prompt_tokens": 1900}, trainer={"token_budget": 2000},
    )  # fmt: skip
    prompt = open_prompts(config).draw()
    text = PromptTokenizer(tmp_path / "model").decode(prompt.token_ids, keep_special_tokens=True)
    assert text.index("Calculate the value") < text.index("Add two numbers.")
    assert prompt.tools == told_tools(["calculator"], config.tool_servers).of_servers != ""
    (found,) = validate_datasets(config)
    assert found.example_tokens == len(prompt.token_ids)


# ---------------------------------------------------------------------------------------------------------------- calls


class Dialogues:
    """Environments of one worker, which share its event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, **servers: dict[str, Any]) -> None:
        named, self._runner = tables(**servers), runner
        monkeypatch.setenv(VARIABLE, json.dumps({"servers": named, "served": schemas_of_servers(named)}))
        self._open: list[ToolEnvironment] = []

    def open(self, **changes: Any) -> ToolEnvironment:
        self._open.append(ToolEnvironment.open(EnvironmentConfig(**changes)))
        return self._open[-1]

    def results(self, tools: ToolEnvironment, *calls: str) -> list[str]:
        return [message["content"] for message in self._runner.run(tools.step("".join(calls))).messages]

    def close(self) -> None:
        for tools in self._open:
            self._runner.run(tools.close())


@pytest.fixture
def dialogues(monkeypatch):
    made: list[Dialogues] = []
    with asyncio.Runner() as runner:

        def make(**servers: dict[str, Any]) -> Dialogues:
            made.append(Dialogues(monkeypatch, runner, **servers))
            return made[-1]

        yield make
        for each in made:
            each.close()


@pytest.mark.parametrize("over", ["stdio", "http"])
def test_a_result_is_a_text_and_what_is_none_is_named(dialogues, request, over):
    table = command() if over == "stdio" else {"url": request.getfixturevalue("url")}
    here = dialogues(one=table)
    tools = here.open()
    assert here.results(tools, call("add", a=2), call("add", a=2, b=3), call("divide", a=1, by=2)) == ["3", "5", "0.5"]
    shown = [call("shown", what=what) for what in ("text image", "", "audio", "link", "file", "blob")]
    assert here.results(tools, *shown) == [
        "a text\n(here is image/png, which cannot be shown: only text can)",
        '{"è": [1]}',
        "(here is audio/wav, which cannot be shown: only text can)",
        "(page: http://localhost/page)",
        "of a file",
        "(here is image/gif, which cannot be shown: only text can)",
    ]


def test_a_slip_of_the_policy_is_a_result_that_says_so(dialogues):
    here = dialogues(one=command())
    tools = here.open()
    slips = {
        call("add"): "error: add: $: 'a' is a required property",
        call("add", a="x"): "error: add: $.a: 'x' is not of type 'integer'",
        call("divide", a=1, by=0): "error: Error executing tool divide",
        call("subtract", a=1): "error: there is no tool 'subtract'; there are add, note",
    }
    for slip, said in slips.items():
        (result,) = here.results(tools, slip)
        assert result.startswith(said)
    assert here.results(tools, call("add", a=1)) == ["2"]


@pytest.mark.long
def test_values_between_tags_have_the_types_of_the_servers_schema(dialogues):
    here = dialogues(one=command())
    tagged = "<tool_call><function=add><parameter=a>\n4\n</parameter></function></tool_call>"
    assert here.results(here.open(call_form="qwen3_coder"), tagged) == ["5"]


def test_a_dialogue_has_its_own_session_or_its_workers(dialogues):
    here = dialogues(one=command(prefix="my_"), all=command(prefix="our_", session="worker"))
    first, second = here.open(), here.open()
    for tools, text in ((first, "a"), (second, "b")):
        here.results(tools, call("my_note", text=text), call("our_note", text=text))
    assert here.results(first, call("my_note", text="c")) == ["a c"]
    assert here.results(second, call("our_note", text="c")) == ["a b c"]
    assert (first.most_kept, ToolEnvironment.open(EnvironmentConfig()).most_kept) == (64, 64)


async def test_a_session_ends_with_its_dialogue_and_leaves_no_process(monkeypatch):
    named = tables(one=command())
    monkeypatch.setenv(VARIABLE, json.dumps({"servers": named, "served": schemas_of_servers(named)}))
    tools = ToolEnvironment.open(EnvironmentConfig())
    (said,) = (await tools.step(call("daemon"))).messages
    pids = [int(word) for word in said["content"].split()]
    await tools.close()
    for pid in pids:
        await wait_until_gone(pid)


def test_a_call_that_takes_too_long_is_an_error_if_the_server_still_answers_others(dialogues):
    here = dialogues(one=command(timeout_s=1.0))
    tools = here.open()
    here.results(tools, call("add", a=1))  # the session is open
    assert here.results(tools, call("sleep", seconds=60)) == ["error: no answer within 1 s"]
    assert here.results(tools, call("add", a=1)) == ["2"]


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (call("freeze", seconds=60), "mcp.one: it has answered nothing for 2 s, in a call of freeze"),
        (call("die"), "mcp.one: it has ended, or closed the connection, in a call of die"),
    ],
)
def test_a_server_that_is_away_is_a_verifier_error_and_the_next_call_has_a_new_one(dialogues, turn, why):
    here = dialogues(one=command(timeout_s=1.0))
    tools = here.open()
    here.results(tools, call("note", text="a"))
    with pytest.raises(RlhpcError, match=why):
        here.results(tools, turn)
    assert here.results(tools, call("note", text="b")) == ["b"]


@pytest.mark.long
def test_results_that_break_the_servers_own_schema_are_a_verifier_error(dialogues):
    here = dialogues(one=command("wrong results"))
    with pytest.raises(RlhpcError, match="a call of add was answered with RuntimeError: Invalid structured content"):
        here.results(here.open(), call("add", a=1))


@pytest.mark.long
def test_a_session_whose_tools_are_others_than_prompts_tell_of_is_a_verifier_error(dialogues, tmp_path):
    counter = tmp_path / "counter"
    counter.touch()
    here = dialogues(one=command("another time", variables={"COUNTER": str(counter)}))
    counter.write_text("xx")
    with pytest.raises(RlhpcError, match="tools are not those that prompts tell of: it lacks add_0; it also has add_2"):
        here.results(here.open(), call("add_0", a=1))


def test_a_server_gets_the_variables_and_headers_of_the_run_file_and_no_others(dialogues, url, monkeypatch):
    monkeypatch.setenv("PASSED", "a secret")
    monkeypatch.setenv("KEPT", "another")
    table = command(prefix="my_", variables={"SET": "by the file"}, pass_variables=["PASSED"])
    here = dialogues(one=table, two={"url": url, "header_variables": {"X-Key": "PASSED"}})
    named = [call("my_told", key=key) for key in ("SET", "PASSED", "KEPT")]
    assert here.results(here.open(), *named, call("told", key="x-key")) == ["by the file", "a secret", "", "a secret"]


# -------------------------------------------------------------------------------------------------------------- workers


def config_of(tmp_path: Path, **server: Any) -> Any:
    data = {"path": tmp_path / "train.jsonl", "task": "regex", "environment": "tools", "use_chat_template": True}
    return build.config(data=data, mcp={"one": command(**server)}, rewards={"timeout_s": 60.0})


async def test_a_worker_calls_servers_and_refuses_prompts_that_tell_of_other_tools(tmp_path):
    config = config_of(tmp_path, tools=["add", "die"], timeout_s=4.0)
    digest = told_tools([], config.tool_servers).of_servers
    async with RewardPool(1, PATIENCE_S, environment=variables_of(config)) as pool:
        assert pool.tools == {"tools": ("add", "die")}

        async def answer(turn: str, tools: str) -> Any:
            asked = replace(dialogue(turn, key=turn + tools), environment="tools", tools=tools)
            return await pool.answer(asked)

        told = await answer(call("add", a=1), digest)
        assert [message["content"] for message in told.messages] == ["2"]
        other = await answer(call("add", a=1), "0123")
        assert "prompts of this run tell of other tools of [mcp.NAME] than" in other.error
        dead = await answer(call("die"), digest)
        assert "ToolServerAway: mcp.one: it has ended" in dead.error
        counted = by_task(pool.counts.as_metrics())["tools"]
    assert (counted["invalid"], counted["raised"]) == (1.0, 1.0)


async def test_no_process_of_a_server_outlives_a_worker_that_is_killed(tmp_path):
    config = config_of(tmp_path)
    async with RewardPool(1, PATIENCE_S, environment=variables_of(config)) as pool:
        told = await pool.answer(replace(dialogue(call("daemon")), environment="tools"))
        pids = [int(word) for word in told.messages[0]["content"].split()]
        (worker,) = pool._workers
        os.kill(worker.pid, signal.SIGKILL)
        for pid in pids:
            await wait_until_gone(pid)


@pytest.mark.long
async def test_dialogues_beyond_the_most_sessions_are_played_again(tmp_path):
    config = config_of(tmp_path, max_sessions=1)
    async with RewardPool(1, PATIENCE_S, environment=variables_of(config)) as pool:

        async def answer(key: str, *turns: str) -> str:
            told = await pool.answer(replace(dialogue(*turns, key=key), environment="tools"))
            return told.messages[0]["content"]

        first, second = call("note", text="a"), call("note", text="b")
        await answer("one", call("note", text="a"))
        (other,) = (await pool.answer(replace(dialogue(call("daemon"), key="two"), environment="tools"))).messages
        assert await answer("one", first, second) == "a b"
        await wait_until_gone(int(other["content"].split()[0]))


def test_a_tied_program_ends_with_its_status_and_leaves_nothing():
    words = [sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(7)"]
    done = subprocess.run(tied_command(words), input="said", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "said\n")
