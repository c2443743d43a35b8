"""Where a run runs: devices, transports, directories, evaluations, site files."""

from __future__ import annotations

from typing import Any

from tests.unit.launch.bad_inputs.desk import RECORDS, SITE, Desk, case, key, site


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
    case("a placement that is none", site(SITE.replace("[cluster]", '[cluster]\nplacement = "array"')), "cluster.placement='array'", "'hetjob' or 'jobs'"),
    case("two environments", site(SITE + '[prologue]\nvenv = "/a"\nconda = "/b"\n'), "prologue.conda='/b'", "legal: one"),
    case("a model too large for the GPU", site("[trainer]\ngpu_memory_gib = 0.5\ngpu = 'mine'\n[generation]\ngpu = 'mine'\ngpu_memory_gib = 80.0\n"), "0.5 GiB", "trainer.gpu='mine'"),
    case("UTF-16", lambda desk: [(desk.root / "site.toml").write_bytes(SITE.encode("utf-16")), "--site", "site.toml"][1:], "site.toml", "UTF-8"),
)  # fmt: skip
