"""Tools of the user's own: their schemas, calls of them, and what is refused; and the tool of docs/environments.md."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sample_tools
from msgspec.structs import replace

from rlhpc.base.own_tools import load_tool, schemas_of_tools
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompts import open_prompts, validate_datasets
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.tools import ToolEnvironment
from rlhpc.protocol.environment import TOOL_SCHEMAS
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.environments import VARIABLE
from rlhpc.rewards.outcomes import NoReward, by_task
from rlhpc.rewards.pool import RewardPool
from tests import build
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_chat_model
from tests.unit.doc_pages import ROOT, blocks
from tests.unit.rewards.test_environment_host import call, dialogue

# -------------------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("name", ["weather", "many", "nothing"])
def test_a_schema_is_the_one_that_transformers_makes(name):
    from transformers.utils import get_json_schema  # loads torch, which the tests below need not wait for

    assert load_tool(f"sample_tools:{name}").schema == get_json_schema(getattr(sample_tools, name))


def test_a_tool_has_the_name_of_the_run_file(own_module):
    own_module("from sample_tools import weather as forecast\n")
    assert load_tool("mine:forecast").schema["function"]["name"] == "forecast"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the module `mine`, as a user does in a notebook."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(source: str) -> None:
        sys.modules.pop("mine", None)
        (tmp_path / "mine.py").write_text(source)

    yield written
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("lines", "description"),
    [
        ("city (str): A city", "A city"),
        ("city (str, optional): A city", "A city"),
        ("city:\n            A city", "A city"),
        ("city: One of\n            Rome: warm\n            Oslo: cold", "One of Rome: warm Oslo: cold"),
        ("city: A city\n\n    Note:\n        other: words", "A city"),
        ("other: Gone since\n        city: A city\n\n    Raises:\n        city: Never", "A city"),
    ],
)
def test_descriptions_are_read_as_people_write_them(own_module, lines, description):
    own_module(f'def f(city: str) -> str:\n    """Tell.\n\n    Args:\n        {lines}\n    """\n')
    found = load_tool("mine:f").schema["function"]
    assert found["parameters"]["properties"] == {"city": {"type": "string", "description": description}}
    assert found["description"] == "Tell."


DOC = '    """Tell.\n\n    Args:\n        a: A\n        b: B\n    """\n'


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(a: int): pass\n", "f has no docstring that says what it does"),
        ('def f(a: int):\n    """\n    Args:\n        a: A\n    """\n', "no docstring that says what it does"),
        (f"def f(a):\n{DOC}", "its parameter 'a' has no type hint"),
        (f"def f(a: int, c: int = 1):\n{DOC}", 'its docstring has no line "c: …"'),
        ('def f(a: int):\n    """Tell.\n\n    :param a: A\n    """\n', 'no line "a: …" in a section "Args:"'),
        (f"def f(a: int, *b: int):\n{DOC}", r"its parameter \*b: int cannot be given by name"),
        (f"def f(a: int, **b: int):\n{DOC}", r"its parameter \*\*b: int cannot be given by name"),
        (f"def f(a: int, /):\n{DOC}", "its parameter a: int cannot be given by name"),
        (f"import datetime\ndef f(a: datetime.date):\n{DOC}", "its parameter 'a' has the type datetime.date"),
        (f"def f(a: list[bytes]):\n{DOC}", r"the type list\[bytes\], whose values JSON does not have"),
        (f"def f(a: dict[int, str]):\n{DOC}", r"the type dict\[int, str\]"),
        (f"def f(a: set[str]):\n{DOC}", r"the type set\[str\]"),
        (f"def f(a: list[int] | tuple[int, int]):\n{DOC}", "or does not tell apart"),
        (f"from typing import Literal\ndef f(a: Literal[1.5]):\n{DOC}", r"the type Literal\[1.5\]"),
        (f"def f(a: int) -> object:\n{DOC}", "what it returns has the type object"),
        (f"def f(a: 'Later'):\n{DOC}", "name 'Later' is not defined"),
        (f"def f(a: 'int |'):\n{DOC}", "Forward reference must be an expression"),
        (f"def f(a: int):\n{DOC}    yield 1\n", "f yields its results"),
        (f"class f:\n{DOC}", "f is a class, not a function"),
        ("from functools import partial\nf = partial(print)\n", "f is a partial, not a function"),
        ('def f(a: str):\n    """Tell.\n\n    Args:\n        a: A (choices: [x])\n    """\n', "is no list in JSON"),
    ],
)
def test_what_cannot_be_told_to_a_model_is_refused(own_module, source, why):
    own_module(source)
    with pytest.raises(ConfigError, match=rf"^environment\.tools='mine:f': .*{why}.*; legal: def f\("):
        load_tool("mine:f")


def test_methods_of_an_object_and_wrapped_functions_are_tools(own_module):
    wrapped = "@functools.wraps(weather)\nasync def g(*given, **named): return await weather(*given, **named)\n"
    own_module(
        "import functools\nfrom sample_tools import weather\n"
        f"class Client:\n    def f(self, a: int):\n    {DOC.replace(chr(10), chr(10) + '    ').rstrip(' ')}"
        "        return a\n"
        f"f = Client().f\n{wrapped}"
    )
    assert [*load_tool("mine:f").hints] == ["a"]
    assert [*load_tool("mine:g").hints] == ["city", "days", "unit"]


# ------------------------------------------------------------------------------------------- Schemas of a run's prompts


@pytest.mark.starts
def test_prompts_tell_of_tools_whose_modules_are_not_imported_here(own_module):
    busy = "import sys, threading, time\nprint('{}')\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    own_module(f"{busy}def f(a: int):\n{DOC}")
    calculator, own = schemas_of_tools(["calculator", "mine:f"])
    assert calculator == TOOL_SCHEMAS["calculator"]
    assert own["function"]["name"] == "f"
    assert "mine" not in sys.modules
    own_module(f"{busy}def f(b: str):\n{DOC}")  # edited, in a notebook
    (own,) = schemas_of_tools(["mine:f"])
    assert own["function"]["parameters"]["required"] == ["b"]


@pytest.mark.starts
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (f"import sys\nsys.exit(0)\ndef f(a: int):\n{DOC}", "is a program, which ends when it is imported"),
        (f"import os\nos._exit(0)\ndef f(a: int):\n{DOC}", "importing them ended with status 0"),
        ("def f(a: int): pass\n", "f has no docstring"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_tool(own_module, source, why):
    own_module(source)
    with pytest.raises(ConfigError, match=rf"^environment\.tools='mine:f': .*{why}"):
        schemas_of_tools(["mine:f"])


def test_a_function_that_is_not_there_is_refused_without_an_import(own_module):
    own_module(f"import no_such_package\ndef wether(a: int):\n{DOC}")
    with pytest.raises(ConfigError, match=r"has no 'weather'; its functions: wether \(did you mean wether\?\)"):
        schemas_of_tools(["mine:weather"])


@pytest.mark.starts
def test_prompts_and_their_checks_change_with_a_docstring(own_module, tmp_path):
    make_chat_model(tmp_path / "model", "qwen2.5")
    (tmp_path / "train.jsonl").write_text('{"prompt": "Warm?", "answer": "yes"}\n')
    data = {"path": tmp_path / "train.jsonl", "task": "regex", "environment": "tools", "use_chat_template": True}
    config = build.config(
        data=data, environment={"tools": ["mine:f"]}, model={"path": tmp_path / "model"},
        generation={"max_prompt_tokens": 900}, trainer={"token_budget": 1000},
    )  # fmt: skip
    lengths = []
    for number in (1, 9):
        own_module(f"def f(a: int):\n{DOC.replace('Tell', 'Tell ' + 'more ' * number)}")
        prompt = open_prompts(config).draw()
        text = PromptTokenizer(tmp_path / "model").decode(prompt.token_ids, keep_special_tokens=True)
        assert f"Tell {'more ' * number}" in text
        assert '"a": {"type": "integer", "description": "A"}' in text
        (found,) = validate_datasets(config)
        assert found.example_tokens == len(prompt.token_ids)
        lengths.append(found.example_tokens)
    assert lengths[0] < lengths[1]


# ---------------------------------------------------------------------------------------------------------------- calls


def environment(*tools: str, kind: type[ToolEnvironment] = ToolEnvironment, **changes: Any) -> ToolEnvironment:
    return kind.open(EnvironmentConfig(tools=[f"sample_tools:{tool}" for tool in tools], **changes))


def results(tools: ToolEnvironment, *calls: str) -> list[str]:
    return [message["content"] for message in asyncio.run(tools.step("".join(calls))).messages]


def test_a_call_has_several_arguments_of_the_types_that_are_hinted():
    tools = environment("weather", "many", "nothing")
    assert results(tools, call("weather", city="Rome", days=2), call("weather", city="Oslo", unit="F")) == [
        '["21 °C", "21 °C"]',
        '["4 °F"]',
    ]
    assert results(tools, call("nothing")) == ["so be it"]
    given = {"a": 1.5, "b": [{"x": 1}], "c": None, "d": [2, "b"], "e": {}, "f": {"y": "z"}, "h": "y", "j": "x"}
    taken = load_tool("sample_tools:many").arguments(given)
    assert taken == given | {"d": (2, "b")}
    assert type(load_tool("sample_tools:many").arguments({"a": 1, "b": [], "c": 3})["c"]) is float


def test_values_between_tags_have_the_types_that_are_hinted():
    tools = environment("weather", call_form="qwen3_coder")
    days = "<parameter=city>\nOslo\n</parameter><parameter=days>2</parameter>"
    assert results(tools, tagged("weather", days)) == ['["4 °C", "4 °C"]']
    for spelt, value in (("1.5", 1.5), ("null", None), ("None", None)):
        c = f"<parameter=a>1</parameter><parameter=b>[]</parameter><parameter=c>{spelt}</parameter>"
        assert results(environment("many", call_form="qwen3_coder", kind=Echo), tagged("many", c)) == [
            json.dumps({"a": 1, "b": [], "c": value})
        ]


def tagged(name: str, parameters: str) -> str:
    return f"<tool_call><function={name}>{parameters}</function></tool_call>"


class Echo(ToolEnvironment):
    """Says what it was given."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        super().__init__(settings)
        self.tools = {"many": lambda **given: given}


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("weather", {}, "weather needs the argument 'city'"),
        ("weather", {"town": "Rome"}, "weather has no argument 'town'; its arguments: city, days, unit"),
        ("nothing", {"x": 1}, "nothing has no argument 'x'; its arguments: none"),
        ("weather", {"city": 3}, "weather, argument 'city': Expected `str`, got `int`"),
        ("weather", {"city": "Rome", "days": "two"}, "weather, argument 'days': Expected `int`, got `str`"),
        ("weather", {"city": "Rome", "days": True}, "weather, argument 'days': Expected `int`, got `bool`"),
        ("weather", {"city": "Rome", "days": None}, "weather, argument 'days': Expected `int`, got `null`"),
        ("weather", {"city": "Rome", "unit": "K"}, """weather, argument 'unit': one of ["C", "F"] is wanted"""),
        ("many", {"a": 1, "b": [{"x": "y"}]}, "many, argument 'b': Expected `int`, got `str`"),
        ("many", {"a": 1, "b": [], "h": "z"}, """many, argument 'h': one of ["x", "y"] is wanted"""),
        ("many", {"a": 1, "b": [], "h": ["x"]}, """many, argument 'h': one of ["x", "y"] is wanted"""),
        ("weather", {"city": "Bonn"}, "no such city: Bonn"),
    ],
)
def test_a_slip_of_the_policy_is_a_result_that_says_so(name, arguments, why):
    (result,) = results(environment("weather", "many", "nothing"), call(name, **arguments))
    assert result.startswith(f"error: {why}")


def test_results_are_texts_or_json_and_cut_like_others():
    tools = environment("spoken", max_result_characters=20)
    calls = [call("spoken", what=what) for what in ("none", "number", "numpy", "è", "long")]
    assert results(tools, *calls) == ["null", "1.5", "[0, 1]", '{"è": [true]}', f"{'x' * 20}… (79 more characters)"]
    (result,) = results(tools, call("spoken", **{"z" * 99: 1}))
    assert len(result) < 60


def test_what_is_no_slip_of_the_policy_is_a_verifier_error():
    with pytest.raises(KeyError):
        results(environment("spoken"), call("spoken", what="raise"))
    with pytest.raises(NoReward, match="tool spoken: its result is neither a text nor a value in JSON: a object"):
        results(environment("spoken"), call("spoken", what="?"))


def test_a_method_in_the_place_of_a_function_knows_its_dialogue():
    one, other = (environment("spoken", kind=sample_tools.Notes) for _ in range(2))
    assert results(one, call("spoken", what="a"), call("spoken", what="b")) == ['["a"]', '["a", "b"]']
    assert results(other, call("spoken", what="c")) == ['["c"]']
    assert results(one, call("shout", text="c")) == ["C"]
    assert one.offered_tools() == ("spoken", "shout")


@pytest.mark.starts
async def test_workers_say_which_tools_there_are_and_their_failures_are_counted_as_of_any_environment():
    settings = EnvironmentConfig(tools=["sample_tools:weather", "sample_tools:spoken"])
    names = ["tools", "sample_tools:Notes"]
    here = {VARIABLE: json.dumps({"settings": settings.model_dump(mode="json"), "names": names})}
    async with RewardPool(1, PATIENCE_S, task_timeout_s={"exact_match": 0.5}, environment=here) as pool:
        assert pool.tools == {"tools": ("weather", "spoken"), names[1]: ("weather", "spoken", "shout")}
        asked = {what: call("spoken", what=what) for what in ("none", "raise", "?", "hang")}
        told = {
            what: await pool.answer(replace(dialogue(turn, key=what, task=task), environment="tools"))
            for what, turn in asked.items()
            for task in ("exact_match" if what == "hang" else "environment",)
        }
        counted = by_task(pool.counts.as_metrics())["tools"]
    assert [message["content"] for message in told["none"].messages] == ["null"]
    assert "KeyError: 'Paris'" in told["raise"].error
    assert "no answer within 0.5 s" in told["hang"].error
    assert {name: counted[name] for name in ("judged", "raised", "invalid", "timed_out")} == {
        "judged": 4.0, "raised": 1.0, "invalid": 1.0, "timed_out": 1.0
    }  # fmt: skip


# ------------------------------------------------------------------------------ The tool of docs/environments.md is one


def test_the_tool_of_the_page_is_one(own_module):
    (text,) = blocks(ROOT / "docs" / "environments.md", "python", heading="Tools")
    own_module(text)
    tools = ToolEnvironment.open(EnvironmentConfig(tools=["mine:weather"]))
    assert results(tools, call("weather", city="Oslo", unit="F"), call("weather", city="Atlantis")) == [
        "39 °F", "error: no weather of Atlantis",
    ]  # fmt: skip
