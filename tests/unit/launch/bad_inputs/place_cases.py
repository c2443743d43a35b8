"""Devices, transports, run directories, evaluations, site files; and what is legal and seldom meant."""

from __future__ import annotations

from typing import Any

from tests.unit.launch.bad_inputs.code_cases import CHAT, DEF, MINE, SAYS, game, tools
from tests.unit.launch.bad_inputs.desk import RECORDS, SITE, Desk, both, case, key, module, site, text


def _exists(desk: Desk) -> None:
    (desk.root / "runs" / "first").mkdir(parents=True)
    (desk.root / "runs" / "first" / "notes.txt").write_text("mine")


def _file_in_the_way(desk: Desk) -> None:
    (desk.root / "runs").write_text("")


def _evaluation(*records: object, **table: Any) -> Any:
    def spoil(desk: Desk) -> None:
        desk.write_records(records or RECORDS, "test.jsonl")
        desk.settings["evaluation"] = {"path": "test.jsonl"} | table

    return spoil


DEVICES = (
    case("CUDA without a GPU", key("trainer.device", "cuda"), "trainer.device='cuda'", "0 visible", "legal: 'auto', 'cpu'"),
    case("NCCL without a GPU", key("weights.transport", "nccl"), "weights.transport='nccl'", "legal: auto, gloo"),
    case("a transport that is none", key("weights.transport", "rdma"), "weights.transport='rdma'", "legal: 'auto'"),
    case("sockets that are none", key("transport.kind", "http"), "transport.kind='http'", "legal: 'auto', 'ipc' or 'tcp'"),
    case("TransformerEngine that is not installed", key("trainer.backend", "megatron", trainer__transformer_engine=True), "trainer.transformer_engine=true", "not installed"),
    case("a cache for not one sequence", key("generation.engine", "vllm", generation__kv_cache_bytes=1024), "generation.kv_cache_bytes=1024", "legal"),
    case("a tensor-parallel engine without GPUs", key("generation.engine", "vllm", generation__tensor_parallel=3), "generation.tensor_parallel=3", "legal"),
)  # fmt: skip

DIRECTORIES = (
    case("a directory of the kernel", key("run.directory", "/proc/first"), "run.directory='/proc/first'", "keeps no files", "legal: a directory of yours"),
    case("a directory that is not of a run", _exists, "runs/first", "not a run directory", "another run.directory"),
    case("a file in the way", _file_in_the_way, "runs", "not a directory"),
    case("a name that no filesystem takes", key("run.directory", "runs/" + "x" * 300), "run.directory=", "long"),
)  # fmt: skip

EVALUATIONS = (
    case("a file that is not there", key("evaluation.path", "tset.jsonl"), "[evaluation]", "tset.jsonl does not exist"),
    case("between two checkpoints", _evaluation(every_steps=3), "evaluation.every_steps=3", "legal: a multiple"),
    case("a dataset that is none", _evaluation(dataset="tran"), "evaluation.dataset='tran'", "legal: 'train'"),
    case("a figure that is none", _evaluation(keep_best="pass@8"), "evaluation.keep_best='pass@8'", "legal: 'pass@1'"),
    case("an end without a figure", _evaluation(stop_after=2), "evaluation.stop_after=2", "keep_best"),
    case("several samples that are the same", _evaluation(temperature=0.0, samples=4), "evaluation.temperature=0", "legal: samples=1"),
    case("an average that nobody keeps", _evaluation(ema=True), "evaluation.ema=true", "trainer.ema_decay"),
    case("a prompt that is too long", _evaluation({"prompt": "1000+1000+1000=", "answer": "3000"}), "[evaluation] test", "test.jsonl:1", "15 tokens"),
    case("a reference that cannot be read", _evaluation({"prompt": "1+1=", "answer": "two"}), "[evaluation] test", "test.jsonl:1", "'two'"),
    case("a record without the field", _evaluation({"question": "1+1=", "answer": "2"}), "[evaluation] test", "test.jsonl:1", "no field 'prompt'"),
    case("a reward function that is not there", _evaluation(task="yours:judge"), "[evaluation] test", "'yours:judge'", "PYTHONPATH"),
    case("longer than the context", _evaluation(max_completion_tokens=5000), "[evaluation] test", "context of 4096"),
)  # fmt: skip

SITES = (
    case("a site file that is not there", lambda desk: ["--site", "none.toml"], "none.toml", "no such site file"),
    case("not TOML", site("[trainer\n"), "site.toml", "line 1"),
    case("without a trainer", site('[generation]\ngpu = "h100"\n'), "site.toml", "trainer: missing"),
    case("a GPU that is not known", site(SITE.replace('"h100"', '"h900"', 1)), "trainer.gpu='h900'", "gpu_memory_gib"),
    case("a slip in a key", site(SITE + "[common]\npartitoin = 'gpu'\n"), "common.partitoin='gpu'", "did you mean partition?"),
    case("a time that reads two ways", site(SITE + '[common]\ntime = "4:00"\n'), "common.time='4:00'", '"4:00:00"'),
    case("a time without quotes", site(SITE + "[common]\ntime = 04:00:00\n"), "common.time=04:00:00", '"H:MM:SS"'),
    case("a home directory as in a shell", site(SITE + '[prologue]\nconda = "~/miniconda"\n'), "prologue.conda='~/miniconda'", "not expanded"),
    case("no time", site(SITE + "[common]\ntime = 0\n"), "common.time=0", "longer than 0"),
    case("25 hours of a day", site(SITE + '[common]\ntime = "1-25:00:00"\n'), "common.time='1-25:00:00'", "legal"),
    case("negative memory", site(SITE + "[controller]\nmemory_gib_per_task = -1\n"), "memory_gib_per_task=-1", "legal: 0 or more"),
    case("memory as a text", site(SITE + '[controller]\nmemory_gib_per_task = "4G"\n'), "memory_gib_per_task='4G'", "legal: a whole number"),
    case("a partition of two words", site(SITE + '[common]\npartition = "gpu long"\n'), "common.partition='gpu long'"),
    case("a relative shared directory", site(SITE.replace('"/"', '"scratch"')), "shared_directory='scratch'", "legal: an absolute path"),
    case("a directive that a key writes", site(SITE + '[common]\nextra = ["--mem=4G"]\n'), "common.extra.0='--mem=4G'", "legal: memory_gib"),
    case("a section of the run file", site(SITE + "[admission]\ngroup_size = 4\n"), "admission=", "run file"),
    case("a run file in its place", site('[run]\nnum_steps = 3\n[trainer]\n[generation]\n'), "a run file, not a site file; legal: the run file first"),
    case("itself in the place of the run file", text(SITE), "a site file, not a run file; legal: the run file first"),
    case("a placement that is none", site(SITE.replace("[cluster]", '[cluster]\nplacement = "array"')), "cluster.placement='array'", "'hetjob' or 'jobs'"),
    case("two environments", site(SITE + '[prologue]\nvenv = "/a"\nconda = "/b"\n'), "prologue.conda='/b'", "legal: one"),
    case("a model too large for the GPU", site("[trainer]\ngpu_memory_gib = 0.5\ngpu = 'mine'\n[generation]\ngpu = 'mine'\ngpu_memory_gib = 80.0\n"), "0.5 GiB", "trainer.gpu='mine'"),
    case("UTF-16", lambda desk: [(desk.root / "site.toml").write_bytes(SITE.encode("utf-16")), "--site", "site.toml"][1:], "site.toml", "UTF-8"),
)  # fmt: skip


UNUSUAL = (
    case("a KL coefficient for a fraction", key("algorithm.kl_coefficient", 100.0), "algorithm.kl_coefficient=100 is unusual (usual: 1e-6 to 1, or 0)"),
    case("a learning rate of another exponent", key("trainer.learning_rate", 1e-30), "trainer.learning_rate=1e-30 is unusual (usual: 1e-8 to 0.01)"),
    case("a learning rate at which models diverge", key("trainer.learning_rate", 0.5), "trainer.learning_rate=0.5 is unusual", "diverge"),
    case("a critic's learning rate", key("critic.learning_rate", 0.5, algorithm__advantage="gae", admission__active_sampling=False), "critic.learning_rate=0.5 is unusual"),
    case("a weight decay in percent", key("trainer.weight_decay", 100.0), "trainer.weight_decay=100 is unusual (usual: 1e-5 to 1, or 0)"),
    case("an entropy coefficient above rewards", key("algorithm.entropy_coefficient", 10.0), "algorithm.entropy_coefficient=10 is unusual"),
    case("a limit of decades", key("rewards.timeout_s", 1e9), "rewards.timeout_s=1e+09 is unusual (usual: 0.1 to 3600): it is in seconds"),
    case("a task's limit of decades", key("rewards.task_timeout_s", {"integer_arithmetic": 1e9}), "rewards.task_timeout_s.integer_arithmetic=1e+09 is unusual"),
    case("memory in gigabytes", key("generation.kv_cache_bytes", 4), "generation.kv_cache_bytes=4 is unusual (usual: 1e6 to 1e12): it is in bytes"),
    case("milliseconds", key("admission.lease_deadline_s", 600000.0), "admission.lease_deadline_s=600000 is unusual", "in seconds"),
    case("a cap of ratios without a point", key("algorithm.importance_cap", 20000.0), "algorithm.importance_cap=20000 is unusual"),
    case("an epsilon that stops learning", key("trainer.adam_eps", 1e8), "trainer.adam_eps=1e+08 is unusual"),
    case("a discount for whole answers", key("algorithm.discount", 0.1, algorithm__advantage="gae", admission__active_sampling=False), "algorithm.discount=0.1 is unusual (usual: 0.5 to 1)"),
    case("checkpoints that never come", key("checkpoint.every_steps", 50_000_000), "checkpoint.every_steps=50000000 is unusual"),
    case("a weight of a composite", key("data.task", "two", composite__two={"tasks": {"a": "integer_arithmetic", "b": "regex"}, "correct": "a", "weights": {"b": 1e6}}), "composite.two.weights.b=1e+06 is unusual"),
)  # fmt: skip

BESIDE_OTHERS = (
    case("staleness that no run of this length has", key("admission.max_staleness", 20), "admission.max_staleness=20 with run.num_steps=6"),
    case("a stop that cuts the answer off", both(key("generation.stop", ["\n####"]), key("data.task", "math_answer")), "generation.stop='\\n####' ends a completion before '####', behind which data.task='math_answer' looks for the answer"),
    case("more ranks than samples", key("trainer.num_ranks", 32), "trainer.num_ranks=32", "16 have none"),
    case("more workers than a machine has room for", key("rewards.workers_per_replica", 4000), "rewards.num_replicas × workers_per_replica = 4000", "--site"),
    case("more generators than a machine has room for", key("generation.num_replicas", 3000), "generation.num_replicas=3000", "--site"),
    case("large groups that weigh more", key("curriculum.max_group_size", 8), "curriculum.max_group_size=8", "'prompt'"),
    case("an evaluation of what is trained on", key("evaluation", [{"path": "train.jsonl"}]), "[evaluation] train", "what data.path trains on"),
    case("an evaluation of more prompts than there are", key("evaluation", [{"path": "train.jsonl", "prompts": 500}]), "prompts=500, and the dataset has 8 records"),
    case("more prompts a step than there are", key("admission.groups_per_step", 9), "admission.groups_per_step=9", "8 records"),
)  # fmt: skip

COUNTED = "calls = []\n" + DEF + "    calls.append(completion)\n"
CODE = (
    case("a reward that is another one each time", module(COUNTED + "    return float(len(calls))\n", **MINE), "with the reference twice: 1 and 3", "train.jsonl:1", is_tried=True),
    case("a batched reward that is another one each time", module("calls = []\ndef judge(completions, references):\n    calls.append(1)\n    return [float(len(calls))] * len(completions)\n", **MINE), "with the reference twice: 1 and 2", is_tried=True),
    case("a reward that fails the second time", module(COUNTED + "    assert len(calls) < 3, 'no more'\n    return 1.0\n", **MINE), "with the reference twice: 1, and then an error: ", "AssertionError: no more", is_tried=True),
    case("a reward that is always the same", module(DEF + "    return 1.0\n", **MINE), "data.task='mine:judge'", "1 for 'I do not know.'", "nothing is learnt", is_tried=True),
    case("a reward that differs by less than counts", module(DEF + "    return 1e-9 * len(completion)\n", **MINE), "nothing is learnt", is_tried=True),
    case("a reward of absurd size", module(DEF + "    return 1e30 if completion == reference else 0.0\n", **MINE), "a reward of 1e+30 is unusual (usual: -10000 to 10000)", "with the reference", is_tried=True),
    case("a reward that takes most of its time", both(module("import time\n" + DEF + "    time.sleep(4.2 * (completion == reference))\n    return float(completion == reference)\n", **MINE), key("rewards.task_timeout_s", {"mine:judge": 8.0})), "s, more than half of rewards.task_timeout_s of 'mine:judge'=8", is_tried=True),
    case("a loss with its sign flipped", module("import torch\ndef loss(current, row):\n    return torch.where(row.loss_mask, row.weights * row.advantages * current, 0.0).sum(), {}\n", algorithm={"loss": "mine:loss"}), "algorithm.loss='mine:loss'", "usual: the other sign", is_tried=True),
    case("an advantage that is 0 everywhere", module("def mine(rewards, lengths):\n    return 0 * rewards\n", algorithm={"advantage": "mine:mine"}), "algorithm.advantage='mine:mine'", "nothing would be learnt", is_tried=True),
    case("an advantage that is another one each time", module("import itertools\nNUMBERS = itertools.count()\ndef mine(rewards, lengths):\n    return next(NUMBERS) * (rewards - rewards.mean())\n", algorithm={"advantage": "mine:mine"}), "algorithm.advantage='mine:mine'", "twice", "usual: the same", is_tried=True),
    case("an environment that says something else each time", game("async def reset(self, record): return [{'role': 'user', 'content': next(NUMBERS)}]"), "data.environment='mine:Game' twice", "messages", "deterministic", is_tried=True),
    case("tools that nothing describes", both(CHAT, module("from rlhpc.environments.tools import ToolEnvironment\nclass Game(ToolEnvironment):\n    def __init__(self, settings):\n        super().__init__(settings)\n        self.tools['weather'] = str.upper\n", data={"environment": "mine:Game", "use_chat_template": True})), "data.environment='mine:Game': the prompt names no weather, of its tools", "usual: environment.tools names", is_tried=True),
    case("own tools for which a template has no place", tools(f"def weather(city: str):\n{SAYS}", "mine:weather"), "environment.tools: the prompt names no weather: the chat template has no place for tools", is_tried=True),
    case("an environment whose answer is longer than a dialogue", game("async def step(self, completion): return Step([{'role': 'user', 'content': '1+' * 500}])"), "data.environment='mine:Game'", "step('I do not know.')", "tokens, and generation.max_completion_tokens=", "would end before the policy's next turn", is_tried=True),
    case("an environment whose opening is longer than a dialogue", game("async def reset(self, record): return [{'role': 'user', 'content': '1+' * 500}]"), "data.environment='mine:Game'", "reset(record)", "would end before the policy's next turn", is_tried=True),
    case("an environment whose rewards change", game("async def step(self, completion): return Step(reward=float(next(NUMBERS)), is_done=True)"), "data.environment='mine:Game' twice", "rewards", "deterministic", is_tried=True),
    case("an environment with absurd rewards", game("async def step(self, completion): return Step(reward=-1e9, is_done=True)"), "a reward of -1e+09 is unusual", is_tried=True),
    case("an environment that takes most of its time", both(game("async def reset(self, record):\n        time.sleep(4.2)\n        return []", "async def step(self, completion): return Step(reward=0.5)"), key("rewards.timeout_s", 8.0)), "reset(record)", "more than half of rewards.timeout_s=8", is_tried=True),
)  # fmt: skip
