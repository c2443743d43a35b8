"""The user's own code: reward functions, environments, tools, agents, losses, advantages; and who judges."""

from __future__ import annotations

from tests.unit.launch.bad_inputs.desk import Spoil, both, case, key, model_file, module

MINE = {"data": {"task": "mine:judge"}}
DEF = "def judge(completion, reference):\n"
CHAT = model_file(
    "chat_template.jinja",
    "{% for m in messages %}<bos>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}",
)


def game(*methods: str) -> Spoil:
    """An environment of the user's own, in which these stand in the place of what is right."""
    head = "import itertools, time\nfrom rlhpc.protocol.environment import Environment, Step\n"
    head += "NUMBERS = map(str, itertools.count(1))\nclass Game(Environment):\n"
    right = ("async def reset(self, record): return []", "async def step(self, completion): return Step(is_done=True)")
    body = "".join(f"    {method}\n" for method in (*right, *methods))
    return both(
        CHAT, module(head + body, data={"environment": "mine:Game", "use_chat_template": True, "task": "environment"})
    )


def tools(source: str, *names: str) -> Spoil:
    """Tools of the user's own, in a module that is this."""
    return both(
        CHAT, module(source, data={"environment": "tools", "use_chat_template": True}, environment={"tools": [*names]})
    )


def server(**table: object) -> Spoil:
    """A server of tools that is this."""
    return both(CHAT, key("data.environment", "tools", data__use_chat_template=True, mcp__files={**table}))


SAYS = '    """Tell.\n\n    Args:\n        city: A city\n    """\n    return city\n'  # a tool's docstring and body

REWARDS = (
    case("a module that is not there", key("data.task", "yours:judge"), "data.task='yours:judge'", "no module 'yours'", "PYTHONPATH"),
    case("a path for a module", key("data.task", "mine.py:judge"), "data.task='mine.py:judge'", "mine:judge"),
    case("a function of a notebook", key("data.task", "__main__:judge"), "data.task='__main__:judge'", "a notebook or a program", "'mine:judge'"),
    case("a function as Python writes it", key("data.task", "mine.judge"), "data.task='mine.judge'", "did you mean mine:judge?"),
    case("a file in a directory", key("data.task", "mods/mine.py:judge"), "data.task='mods/mine.py:judge'", "did you mean mine:judge, with PYTHONPATH=mods?"),
    case("a benchmark for a task", key("data.task", "GSM8K"), "data.task='GSM8K' is not a task", "did you mean math_answer?"),
    case("the beginning of a task", key("data.task", "integer"), "data.task='integer'", "did you mean integer_arithmetic?"),
    case("a module without its function", module("def judge(a, b): return 1.0\ndef score(a, b): return 1.0\n", data={"task": "mine"}), "data.task='mine'", "did you mean mine:FUNCTION? its functions: judge, score)"),
    case("a file without its function", module("def judge(a, b): return 1.0\n", data={"task": "mine.py"}), "data.task='mine.py'", "did you mean mine:FUNCTION? its functions: judge)"),
    case("a module without its loss", module("def loss(current, row): return 1.0\n", algorithm={"loss": "mine"}), "algorithm.loss='mine'", "did you mean mine:FUNCTION? its functions: loss)"),
    case("a loss as Python writes it", key("algorithm.loss", "mine.loss"), "algorithm.loss='mine.loss'", "did you mean mine:loss?"),
    case("a function whose name is mistyped", module("def judge(a, b): return 1.0\n", data={"task": "mine:jugde"}), "data.task='mine:jugde'", "did you mean judge?"),
    case("a file's path", key("data.task", "./mine:judge"), "data.task='./mine:judge'", "legal"),
    case("a function of another name", module("def score(a, b): return 1.0\n", **MINE), "data.task='mine:judge'", "mine.py has no 'judge'", "score"),
    case("a syntax error", module("def judge(a, b)\n    return 1\n", **MINE), "mine.py:1", "expected ':'"),
    case("an error on import", module("import no_such_package\n" + DEF + "    return 1.0\n", **MINE), "data.task='mine:judge'", "no_such_package", is_tried=True),
    case("an exception on import", module("x = 1 / 0\n" + DEF + "    return 1.0\n", **MINE), "data.task='mine:judge'", "ZeroDivisionError", is_tried=True),
    case("a program for a module", module("import argparse\n" + DEF + "    return 1.0\np = argparse.ArgumentParser('mine.py')\np.add_argument('model')\np.parse_args([])\n", **MINE), "data.task='mine:judge'", "SystemExit", "__main__", is_tried=True),
    case("a number in place of a function", module("judge = 3\n", **MINE), "data.task='mine:judge'", "function", is_tried=True),
    case("one parameter", module("def judge(completion):\n    return 1.0\n", **MINE), "data.task='mine:judge'", "one parameter; legal: def judge(completion, reference): return judge(completion)", "docs/coming_from.md"),
    case("a function of verl", module("def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return 1.0\n", data={"task": "mine:compute_score"}), "data.task='mine:compute_score'", "parameters of verl (data_source, solution_str, ground_truth, extra_info)", "solution_str=completion", 'data.reference_field = "*"', "docs/coming_from.md"),
    case("a function of verl with keywords alone", module("def compute_score(*, data_source, solution_str, ground_truth):\n    return 1.0\n", data={"task": "mine:compute_score"}), "parameters of verl", "docs/coming_from.md"),
    case("a batched function of verl", module("def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [1.0 for _ in solution_strs]\n", data={"task": "mine:compute_score"}), "parameters of verl, in batches", "def judge(completions, records)"),
    case("a function of prime-rl", module("def reward(completion, verification_info):\n    return 1.0\n", data={"task": "mine:reward"}), "parameters of prime-rl", 'verification_info=record["verification_info"]'),
    case("a function of a rubric", module("def correct(prompt, completion, answer, state):\n    return 1.0\n", data={"task": "mine:correct"}), "parameters of prime-rl's verifiers", "a completion is a text here"),
    case("a function of TRL that asks for tokens", module("def reward(prompts, completions, completion_ids, **kwargs):\n    return [1.0 for _ in completions]\n", data={"task": "mine:reward"}), "parameters of TRL", "without completion_ids"),
    case("a function of TRL whose completions are messages", module("def reward(completions, answer, **kwargs):\n    return [float(each[0]['content'] == right) for each, right in zip(completions, answer)]\n", data={"task": "mine:reward", "reference_field": "*"}), "two completions at once", "TypeError", "`completion` in place of completion[0]['content']", "docs/coming_from.md", is_tried=True),
    case("a function of AReaL", module("def reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n    return 1.0\n", data={"task": "mine:reward"}), "parameters of AReaL", "completions=completion"),
    case("a function of OpenRLHF", module("def reward_func(queries, prompts, labels):\n    return [1.0 for _ in labels]\n", data={"task": "mine:reward_func"}), "parameters of OpenRLHF", 'labels=[each["answer"] for each in records]'),
    case("a function of slime", module("async def custom_rm(args, sample, **kwargs):\n    return 1.0\n", data={"task": "mine:custom_rm"}), "parameters of slime", "sample.label"),
    case("the reference before the completion", module("def score(ground_truth, response):\n    return 1.0\n", data={"task": "mine:score"}), "takes 'ground_truth' first", "score(ground_truth=reference, response=completion)"),
    case("a reference that is read as a record", module("def judge(completion, reference):\n    return float(completion == reference['answer'])\n", **MINE), "string indices", "a parameter called record", is_tried=True),
    case("four parameters", module("def judge(data_source, solution, truth, extra):\n    return 1.0\n", **MINE), "data.task='mine:judge'", "missing 2 required", is_tried=True),
    case("it raises", module(DEF + "    raise KeyError('x')\n", **MINE), "data.task='mine:judge'", "train.jsonl:1", "KeyError: 'x'", is_tried=True, without="legal: "),
    case("a difference from a text", module(DEF + "    return float(abs(float(completion or 0) - reference) < 1)\n", **MINE), "data.task='mine:judge'", "TypeError: unsupported operand", "mine.py:2", "texts, never numbers: float(reference)", is_tried=True, without="legal: "),
    case("a completion that is read as a number", module(DEF + "    return float(int(completion) == int(reference))\n", **MINE), "ValueError: invalid literal", "mine.py:2", "what cannot be read needs a reward, too", is_tried=True, without="legal: "),
    case("an argument that it needs and nobody gives", module("def judge(completion, reference, *, bonus, malus):\n    return bonus\n", **MINE), "data.task='mine:judge'", "legal: a default for bonus, malus, or a value in rewards.task_arguments = { \"mine:judge\" = { bonus = …, malus = … } }", is_tried=True),
    case("a class in place of its object", module("class Judge:\n    def __call__(self, completion, reference):\n        return 1.0\n", data={"task": "mine:Judge"}), "data.task='mine:Judge' is a class (", "mine.py:1)", "legal: a function, or an object that can be called: in the module `judge = Judge()`, and mine:judge here", is_tried=True),
    case("an argument that it has not", both(module("def judge(completion, reference, *, bonus=0.5):\n    return bonus\n", **MINE), key("rewards.task_arguments", {"mine:judge": {"bonsu": 0.1}})), 'rewards.task_arguments."mine:judge".bonsu=0.1: judge has no such parameter', "mine.py:1", "legal: bonus", is_tried=True),
    case("arguments for a function that is not its task", both(module(DEF + "    return 1.0\n", **MINE), key("rewards.task_arguments", {"mine:other": {"bonus": 0.1}})), "rewards.task_arguments names 'mine:other'; legal: mine:judge"),
    case("it returns a text", module(DEF + "    return '1.0'\n", **MINE), "data.task='mine:judge'", "not str", is_tried=True),
    case("it returns nothing for a wrong answer", module(DEF + "    if completion == reference:\n        return 1.0\n", **MINE), "data.task='mine:judge'", "not NoneType", is_tried=True),
    case("it returns NaN", module(DEF + "    return float('nan')\n", **MINE), "data.task='mine:judge'", "finite", "nan", is_tried=True),
    case("it returns a list for a batch", module(DEF + "    return [1.0] * len(completion)\n", **MINE), "data.task='mine:judge'", "not list", is_tried=True),
    case("a dict without a reward", module(DEF + "    return {'accuracy': 1.0}\n", **MINE), "data.task='mine:judge'", "'reward' or 'score'", "accuracy", is_tried=True),
    case("it hangs", both(module("import time\n" + DEF + "    time.sleep(600)\n", **MINE), key("rewards.timeout_s", 0.5)), "data.task='mine:judge'", "0.5 s", "rewards.timeout_s", is_tried=True),
    case("it hangs, async", both(module("import asyncio\nasync " + DEF + "    await asyncio.sleep(600)\n", **MINE), key("rewards.timeout_s", 0.5)), "data.task='mine:judge'", "0.5 s", is_tried=True),
    case("async, and it yields", module("async " + DEF + "    yield 1.0\n", **MINE), "data.task='mine:judge'", "async_generator", is_tried=True),
    case("it ends its process", module("import os\n" + DEF + "    os._exit(3)\n", **MINE), "data.task='mine:judge'", "exit status 3", is_tried=True),
    case("it wants the record", module("def judge(completion, record):\n    return 1.0\n", **MINE), "data.reference_field='answer'", 'legal: "*"'),
    case("a batched function that returns one number", module("def judge(completions, references):\n    return 1.0\n", **MINE), "data.task='mine:judge'", "two completions at once", "a list with a reward for each, not float", is_tried=True),
    case("a batched function that returns too few", module("async def judge(completions, references):\n    return [1.0]\n", **MINE), "data.task='mine:judge'", "two completions at once", "2 completions, not 1", is_tried=True),
    case("a batched function that raises", module("def judge(completions, references):\n    return [float(text) for text in completions]\n", **MINE), "data.task='mine:judge'", "two completions at once", "ValueError", "I do not know.", is_tried=True),
    case("a batched function whose rewards are texts", module("def judge(completions, references):\n    return list(references)\n", **MINE), "data.task='mine:judge'", "train.jsonl:1", "not str", is_tried=True),
    case("a batched function with parameters without names", module("def judge(completions, references, /):\n    return [1.0 for _ in completions]\n", **MINE), "data.task='mine:judge'", "'completions' cannot be given by name", is_tried=True),
    case("a batched function that wants fields", module("def judge(completions, answer, **kwargs):\n    return [1.0 for _ in completions]\n", **MINE), "data.reference_field='answer'", 'legal: "*"'),
    case("a batched function that wants a field that is not there", both(module("def judge(completions, solution, **kwargs):\n    return [1.0 for _ in completions]\n", **MINE), key("data.reference_field", "*")), "data.task='mine:judge'", "no field 'solution'", "'answer'", is_tried=True),
    case("parts that it does not name", both(module(DEF + "    return {'reward': 1.0, 'right': 1.0}\n", **MINE), key("shaping.part_weights", {"right": 1.0, "format": 0.2})), "shaping.part_weights", "'format'", "legal: right", is_tried=True),
    case("a composite of it that fails", module(DEF + "    return None\n", data={"task": "two"}, **{"composite.two": {"tasks": {"a": "integer_arithmetic", "b": "mine:judge"}, "correct": "a"}}), "data.task='two'", "NoneType", is_tried=True),
    case("a composite without its part", key("data.task", "two", composite__two={"tasks": {"a": "integer_arithmetic"}, "correct": "b"}), "composite.two.correct", "'b'", "legal: a"),
    case("a composite that nobody names", key("composite.two", {"tasks": {"a": "integer_arithmetic"}, "correct": "a"}), "composite.two has no effect", "legal"),
    case("a composite called as a task", key("composite.regex", {"tasks": {"a": "integer_arithmetic"}, "correct": "a"}, data__task="regex"), "composite.regex", "legal: another name"),
)  # fmt: skip

ENVIRONMENTS = (
    case("an environment that is none", both(CHAT, key("data.environment", "tolls", data__use_chat_template=True)), "data.environment='tolls'", "legal: agent, container, gymnasium, tools, verifiers"),
    case("a module without its environment", both(CHAT, module("class Game: pass\n", data={"environment": "mine", "use_chat_template": True})), "data.environment='mine'", "did you mean mine:CLASS? its classes: Game)"),
    case("tools without a chat template", key("data.environment", "tools", environment__tools=["calculator"]), "data.environment='tools'", "legal: use_chat_template=true"),
    case("tools without tools", both(CHAT, key("data.environment", "tools", data__use_chat_template=True)), "environment.tools"),
    case("a server of tools twice", server(command=["files"], url="http://node7/mcp"), "mcp.files.command=['files'] with mcp.files.url=…", "legal: one of them"),
    case("a server of tools nowhere", server(), "mcp.files.command=[] with mcp.files.url=''", "legal: one of them"),
    case("headers for a program", server(command=["files"], header_variables={"X": "KEY"}), "mcp.files.header_variables is for mcp.files.url", "legal: leave it out"),
    case("a key in the address of a server", server(url="http://me:secret@node7/mcp"), "mcp.files.url=…; legal: http://HOST:PORT/mcp", "without a key in it"),
    case("a prefix that is in no name", server(command=["files"], prefix="my."), "mcp.files.prefix='my.'", "legal: letters, digits, _ and -"),
    case("a server that nobody calls", key("mcp.files", {"command": ["files"]}), "mcp.files has no effect", 'data.environment="tools"'),
    case("a slow server", server(command=["files"], timeout_s=6.0), "mcp.files.timeout_s=6: twice that is not below the 10 s", "rewards.timeout_s"),
    case("a tool that is none", both(CHAT, key("data.environment", "tools", data__use_chat_template=True, environment__tools=["browser"])), "environment.tools=['browser']: 'browser' is no tool", "legal: calculator, python, search, shell, or package.module:function of your own"),
    case("a tool that is not there", tools(f"def wether(city: str):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", "mine.py has no 'weather'", "did you mean wether?"),
    case("a tool as Python writes it", tools(f"def weather(city: str):\n{SAYS}", "mine.weather"), "environment.tools=['mine.weather']", "did you mean mine:weather?"),
    case("a tool with the name of another", tools(f"def search(city: str):\n{SAYS}", "mine:search"), "environment.tools=['mine:search']", "'mine:search' has the name of a tool of rlhpc; legal: another name"),
    case("two tools of one name", tools(f"def weather(city: str):\n{SAYS}", "mine:weather", "yours:weather"), "environment.tools=['mine:weather', 'yours:weather']", "'mine:weather' and 'yours:weather' have one name"),
    case("a tool with an error on import", tools(f"import no_such_package\ndef weather(city: str):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", "no_such_package", is_tried=True),
    case("a tool without a docstring", tools("def weather(city: str): return city\n", "mine:weather"), "environment.tools='mine:weather'", "no docstring that says what it does (", "mine.py:1); legal: def f(", is_tried=True),
    case("a tool without type hints", tools(f"def weather(city):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", "'city' has no type hint (", "mine.py:1); legal: def f(", is_tried=True),
    case("a tool with a parameter that nobody describes", tools(f"def weather(town: str):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", 'no line "town: …" in a section "Args:"', is_tried=True),
    case("a tool of types that JSON has not", tools(f"import datetime\ndef weather(city: datetime.date):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", "'city' has the type datetime.date", "it has str, int", is_tried=True),
    case("a tool that is a class", tools(f"class weather:\n  def __call__(self, city: str):\n{SAYS}", "mine:weather"), "environment.tools='mine:weather'", "weather is a class, not a function", is_tried=True),
    case("search without documents", both(CHAT, key("data.environment", "tools", data__use_chat_template=True, environment__tools=["search"])), "environment.corpus=None", "search"),
    case("documents that are not there", both(CHAT, key("data.environment", "tools", data__use_chat_template=True, environment__tools=["search"], environment__corpus="docs.jsonl")), "environment.corpus=", "docs.jsonl"),
    case("turns without an environment", key("environment.max_turns", 3), "environment.max_turns=3", "a data.environment"),
    case("a class that is no environment", both(CHAT, module("class Game:\n    pass\n", data={"environment": "mine:Game", "use_chat_template": True})), "data.environment='mine:Game'", "Environment (", "mine.py:1); legal: class Game(Environment) with async reset(record)", is_tried=True),
    case("an environment that lacks a method", both(CHAT, module("from rlhpc.protocol.environment import Environment\nclass Game(Environment):\n    pass\n", data={"environment": "mine:Game", "use_chat_template": True})), "data.environment='mine:Game' lacks reset, step (", "mine.py:2); legal: async reset(record) that returns", is_tried=True),
    case("an environment with an error on import", both(CHAT, module("import no_such_package\nclass Game: pass\n", data={"environment": "mine:Game", "use_chat_template": True})), "data.environment='mine:Game'", "no_such_package", is_tried=True),
    case("an environment that needs an argument", game("def __init__(self, n): pass"), "data.environment='mine:Game': Game(n): missing a required argument: 'n' (", "mine.py:", "legal: a constructor whose parameters have a default or a value in environment.arguments", is_tried=True),
    case("an argument that an environment has not", both(game("def __init__(self, *, number=1): pass"), key("environment.arguments", {"numbr": 3})), "environment.arguments.numbr=3: Game has no such parameter", "mine.py:", "legal: number", is_tried=True),
    case("an environment whose reset raises", game("async def reset(self, record): return [record['question']]"), "data.environment='mine:Game', tried on", "train.jsonl:1, reset(record)", "KeyError: 'question'", is_tried=True),
    case("an environment whose reset is not async", game("def reset(self, record): return []"), "data.environment='mine:Game'", "reset(record)", "await", "legal: async reset(record)", is_tried=True),
    case("an environment whose reset returns a text", game("async def reset(self, record): return 'Begin.'"), "data.environment='mine:Game'", "reset(record)", "a list of messages is wanted", "not str", is_tried=True),
    case("an environment whose step returns a number", game("async def reset(self, record): return []", "async def step(self, completion): return 1.0"), "data.environment='mine:Game'", "step('I do not know.')", "step returned a float, not a Step", "legal: async step(completion)", is_tried=True),
    case("an environment whose step returns what gymnasium's does", game("async def step(self, completion): return [], 1.0, True, False, {}"), "data.environment='mine:Game'", "step returned a tuple (as gymnasium's), not a Step", "legal: async step(completion)", is_tried=True),
    case("an environment whose step returns messages without content", game("async def reset(self, record): return []", "async def step(self, completion): return Step([{'role': 'user', 'text': 'lower'}])"), "data.environment='mine:Game'", "step('I do not know.')", "a message is", is_tried=True),
    case("an environment whose messages have a role of its own", game("async def reset(self, record): return []", "async def step(self, completion): return Step([{'role': 'environment', 'content': 'lower'}])"), "data.environment='mine:Game'", "step('I do not know.')", "a message has the role 'environment'; legal: 'system'", is_tried=True),
    case("an environment that forgets its answer", game("async def step(self, completion): return Step()"), "data.environment='mine:Game'", "step('I do not know.')", "a Step with no message, no reward and no end", "legal: messages", is_tried=True),
    case("an agent without a program", both(CHAT, key("data.environment", "agent", data__use_chat_template=True, data__task="environment")), "agent.function", "agent.command"),
    case("an agent of another program", both(CHAT, key("data.environment", "agent", data__use_chat_template=True, data__task="environment", agent__command=["no-such-program"])), "agent.command=['no-such-program']", "legal: one on PATH"),
    case("an agent's module that is not there", both(CHAT, key("data.environment", "agent", data__use_chat_template=True, data__task="environment", agent__command=["python3", "-m", "json.tool"], agent__preload=["no_such_module"])), "agent.preload='no_such_module'", "No module named 'no_such_module'", is_tried=True),
    case("an agent that is preloaded and no Python program", both(CHAT, key("data.environment", "agent", data__use_chat_template=True, data__task="environment", agent__command=["sh", "-c", "true"], agent__preload=["json"])), "agent.preload=['json']", "agent.command=['sh', '-c', 'true']", "legal: python, then a file, or -m and a module"),
    case("an agent's script that is not there", both(CHAT, key("data.environment", "agent", data__use_chat_template=True, data__task="environment", agent__command=["python3", "-u", "no_such_script.py"])), "no file 'no_such_script.py'", "agent.command=['python3', '-u', 'no_such_script.py']", "legal: a script that is there"),
    case("an agent's function of another name", both(CHAT, module("def play(record): return 1.0\n", data={"environment": "agent", "use_chat_template": True, "task": "environment"}, agent={"function": "mine:solve"})), "agent.function='mine:solve'", "play"),
    case("an agent with an error on import", both(CHAT, module("import no_such_package\ndef solve(record): return 1.0\n", data={"environment": "agent", "use_chat_template": True, "task": "environment"}, agent={"function": "mine:solve"})), "agent.function='mine:solve'", "no_such_package", is_tried=True),
    case("an agent's function that wants more", both(CHAT, module("def solve(record, client): return 1.0\n", data={"environment": "agent", "use_chat_template": True, "task": "environment"}, agent={"function": "mine:solve"})), "agent.function='mine:solve'", "client", is_tried=True),
)  # fmt: skip

LOSSES = (
    case("a loss that is not there", module("def other(a, b): pass\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "other"),
    case("an advantage with an error on import", module("import no_such_package\ndef mine(rewards, lengths): pass\n", algorithm={"advantage": "mine:mine"}), "algorithm.advantage='mine:mine'", "no_such_package", is_tried=True),
    case("a program for a loss", module("import sys\ndef loss(current, row): pass\nsys.exit(0)\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "SystemExit", "__main__", is_tried=True),
    case("a loss without weights", module("import torch\ndef loss(current, row):\n    return -torch.where(row.loss_mask, row.advantages * current, 0.0).sum(), {}\n", algorithm={"loss": "mine:loss", "aggregation": "sequence"}), "algorithm.loss='mine:loss'", "twice row.weights", "algorithm.aggregation", "legal: each loss token times row.weights", is_tried=True),
    case("a loss of another signature", module("def loss(logprobs, old, mask):\n    return 0.0\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "mine.py:1", "legal: f(current, row)", is_tried=True),
    case("an argument that a loss has not", module("def loss(current, row, *, clip=0.2):\n    return 0.0\n", algorithm={"loss": "mine:loss", "loss_arguments": {"clp": 0.3}}), "algorithm.loss_arguments.clp=0.3", "mine.py:1", "legal: clip", is_tried=True),
    case("arguments for a loss of ours", key("algorithm.loss_arguments", {"clip": 0.3}), "algorithm.loss_arguments", "has no effect with algorithm.loss='ppo'"),
    case("a loss without gradient", module("def loss(current, row):\n    return -(current.detach() * row.advantages).sum(), {}\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "carries no gradient; legal: ", "docs/algorithms.md", is_tried=True),
    case("a loss with a ratio that is not bounded", module("import torch\ndef loss(current, row):\n    c, b = (torch.where(row.loss_mask, v, 0.0) for v in (current, row.behaviour))\n    return -(row.loss_mask * row.weights * row.advantages * (c - b).exp()).sum(), {}\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "e^100 times as likely", "clamp(-20, 20)", is_tried=True),
    case("a loss for each token", module("import torch\ndef loss(current, row):\n    return torch.where(row.loss_mask, current, 0.0), {}\n", algorithm={"loss": "mine:loss"}), "shape (4,); legal: one number", is_tried=True),
    case("a loss that changes its row", module("def loss(current, row):\n    row.advantages.mul_(row.loss_mask)\n    row.weights.zero_()\n    return (current * row.advantages).sum(), {}\n", algorithm={"loss": "mine:loss"}), "it changes row.weights in place; legal: ", is_tried=True),
    case("an advantage divided by a deviation of 0", module("def mine(rewards, lengths):\n    return (rewards - rewards.mean()) / rewards.std()\n", algorithm={"advantage": "mine:mine"}), "algorithm.advantage='mine:mine'", "rewards 0, 0, 0, 0", "zeros where all rewards are equal", "docs/algorithms.md", is_tried=True),
    case("an advantage where no answer is better", module("def mine(rewards, lengths):\n    return rewards - 0.5\n", algorithm={"advantage": "mine:mine"}), "where all rewards are equal", "legal: zeros there", is_tried=True),
    case("an advantage divided by tokens that are not there", module("def mine(rewards, lengths):\n    return (rewards - rewards.mean()) / lengths\n", algorithm={"advantage": "mine:mine"}), "of 3, 0, 0, 0 tokens", "legal: one finite number for each", is_tried=True),
    case("an advantage that changes its rewards", module("def mine(rewards, lengths):\n    rewards -= rewards.mean()\n    return rewards\n", algorithm={"advantage": "mine:mine"}), "it changes rewards in place; legal: ", is_tried=True),
    case("a loss that asks for a field of another name", module("def loss(current, row):\n    return -(current * row.mask).sum(), {}\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "no attribute 'mask'", "mine.py:2", "; legal: behaviour, proximal, ", "did you mean loss_mask?", is_tried=True),
    case("a loss that is a mean", module("def loss(current, row):\n    return (current * row.advantages * row.loss_mask).mean(), {}\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", is_tried=True),
    case("an advantage of one number", module("def mine(rewards): return 0.0\n", algorithm={"advantage": "mine:mine"}), "algorithm.advantage='mine:mine'", is_tried=True),
)  # fmt: skip

SCORES = {"name": "scores", "kind": "reward", "url": "http://node7:8000/v1"}
JUDGES = (
    case("a judge's service of another kind", key("data.task", "llm_judge", service=[SCORES], judge__service="scores"), "judge.service='scores'", "legal: a table [[service]] with kind='judge'"),
    case("a judge's limit beside a service", key("data.task", "llm_judge", service=[SCORES | {"kind": "judge"}], judge__service="scores", judge__timeout_s=9.0), "judge.timeout_s=9 has no effect", "judge.service"),
    case("a judge's key beside a service", key("data.task", "llm_judge", service=[SCORES | {"kind": "judge"}], judge__service="scores", judge__key_file="key"), "judge.key_file=", "has no effect"),
    case("a reward model that is not there", key("data.task", "reward_model"), "reward_model.service=''", "legal: a table [[service]] with kind='reward'"),
    case("a class by its name at a url", key("data.task", "reward_model", service=[SCORES], reward_model__label="good"), "reward_model.label='good'", "legal: its number"),
    case("a softmax over one class", key("data.task", "reward_model", service=[SCORES], reward_model__activation="softmax"), "reward_model.activation='softmax' without reward_model.label", "legal: both"),
    case("a reward model's template with another field", key("data.task", "reward_model", service=[SCORES], reward_model__prompt_template="{question}"), "reward_model.prompt_template names {question}", "legal: "),
    case("a service's key that is not set", key("data.task", "reward_model", service=[SCORES | {"key_variable": "NO_SUCH_KEY"}], data__reference_field="*"), "service 'scores': key_variable='NO_SUCH_KEY' is not set"),
    case("a judge without an endpoint", key("data.task", "llm_judge"), "judge.endpoint is missing", "llm_judge"),
    case("a judge's address without a scheme", key("data.task", "llm_judge", judge__endpoint="node7:8000", judge__model="m"), "judge.endpoint='node7:8000'", "legal: http://"),
    case("a key in a judge's address", key("data.task", "llm_judge", judge__endpoint="http://me:secret@node7/v1", judge__model="m"), "judge.endpoint=…", "without a key"),
    case("a judge who takes too long", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__timeout_s=10.0), "judge.timeout_s=10", "rewards.timeout_s"),
    case("a judge's rate that is too low for its workers", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__requests_per_s=0.1), "judge.requests_per_s=0.1", "judge.timeout_s=8"),
    case("a judge's pattern without a group", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__grade_pattern="Grade"), "judge.grade_pattern='Grade'", "legal: one around the grade"),
    case("a judge's key that is not set", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__key_variable="NO_SUCH_KEY"), "judge.key_variable='NO_SUCH_KEY'", "not set"),
    case("a judge's key in a file that is not there", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__key_file="key"), "judge.key_file=", "key"),
    case("a judge's template with another field", key("data.task", "llm_judge", judge__endpoint="http://node7:8000/v1", judge__model="m", judge__template="{question}"), "judge.template", "{completion}"),
    case("a judge nobody asks", key("judge.model", "m"), "judge.model='m' has no effect", "llm_judge"),
    case("a sandbox slower than its verifier", key("data.task", "code_stdin", sandbox__wall_s=20.0), "sandbox.wall_s=20", "rewards.timeout_s=10"),
    case("a sandbox that is none", key("sandbox.require", "docker"), "sandbox.require='docker'", "'strong', 'basic' or 'none'"),
    case("an interpreter of programs that is not there", key("data.task", "code_stdin", sandbox__python="/no/python"), "sandbox.python='/no/python'"),
)  # fmt: skip
