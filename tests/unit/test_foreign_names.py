"""Every name and call of vLLM, Megatron-Core and DeepSpeed that our source uses is there in what is installed.

`make gpu-dry` holds the same uses against the official wheels of the versions that pyproject.toml allows.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gpu_dry.library import Library
from tests.gpu_dry.names import complaints, our_uses
from tests.gpu_dry.uses import Use, uses_in

ENGINE = """
class Base:
    def shutdown(self, timeout=None): ...
class AsyncLLM(Base):
    @classmethod
    def from_engine_args(cls, engine_args): ...
    async def pause_generation(self, *, mode="abort", clear_cache=True): ...
"""
ARGUMENTS = """
from dataclasses import dataclass
@dataclass
class EngineArgs:
    model: str
    seed: int = 0
@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture(scope="module")
def uses():
    return our_uses()


@pytest.fixture
def library(tmp_path):
    """A vLLM of three files."""
    for name, text in {
        "__init__.py": 'TABLE = {"LLM": ".engine:AsyncLLM"}\ndef __getattr__(name): return TABLE[name]\n',
        "engine.py": ENGINE,
        "arguments.py": ARGUMENTS,
        "again.py": "if True:\n    from .engine import AsyncLLM as Renamed\n",
    }.items():
        path = tmp_path / "foreign" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Library(tmp_path / "foreign", "vllm")


@pytest.mark.parametrize("package", ["vllm", "megatron.core", "deepspeed"])
def test_what_is_installed_answers_every_name_and_call_of_ours(package, uses):
    name = package.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{package} is not installed")
    # Of the package itself: a namespace such as `megatron` may lie in several places, our own tests among them.
    place = Path(importlib.util.find_spec(package).origin).parent
    root = place.parents[package.count(".")]
    assert complaints(Library(root, name), uses) == []


def test_the_uses_are_those_of_our_source(uses):
    by_name = {use.dotted: use for use in uses}
    pause = by_name["vllm.v1.engine.async_llm.AsyncLLM.pause_generation"]
    assert pause.keywords == {"mode", "clear_cache"}
    arguments = next(use for use in uses if use.dotted.endswith("AsyncEngineArgs") and use.is_call)
    assert {"logprobs_mode", "worker_extension_cls", "kv_cache_memory_bytes"} <= arguments.keywords
    assert not arguments.is_open
    assert "deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check" in by_name  # overridden, never called
    assert "megatron.core.models.gpt.GPTModel._postprocess" in by_name
    assert "vllm.v1.worker.gpu_worker.Worker.model_runner" in by_name
    assert not any(use.dotted.endswith("AsyncLLM.update_weight_version") for use in uses)  # feature-tested


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (Use("a:1", "vllm.engine.AsyncLLM.shutdown", True, 0, frozenset({"timeout"})), ""),
        (Use("a:1", "vllm.again.Renamed.pause_generation", True, 0, frozenset({"mode"})), ""),
        (Use("a:1", "vllm.LLM.shutdown"), ""),
        (Use("a:1", "vllm.engine.AsyncLLM.resume"), "no vllm.engine.AsyncLLM.resume"),
        (Use("a:1", "vllm.engines"), "no vllm.engines"),
        (Use("a:1", "vllm.engine.AsyncLLM.pause_generation", True, 1), "takes 0 positional arguments, is given 1"),
        (Use("a:1", "vllm.engine.AsyncLLM.pause_generation", True, 0, frozenset({"wait"})), "takes no wait"),
        (Use("a:1", "vllm.engine.AsyncLLM.from_engine_args", True), "wants engine_args besides"),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"model", "enable_log_requests"})), ""),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"model", "eager"})), "takes no eager"),
        (Use("a:1", "vllm.arguments.AsyncEngineArgs", True, 0, frozenset({"seed"})), "wants model besides"),
    ],
)
def test_a_name_or_call_that_a_version_does_not_answer_is_told(use, complaint, library):
    found = complaints(library, [use])
    assert (complaint in found[0]) if complaint else (found == [])


def test_imports_annotations_and_overrides_of_a_source_are_its_uses(tmp_path):
    (tmp_path / "rlhpc").mkdir()
    (tmp_path / "rlhpc" / "one.py").write_text(
        "from vllm.engine import AsyncLLM\n"
        "def stop(llm: AsyncLLM): llm.shutdown(timeout=1)\n"
        "class Mine(AsyncLLM):\n"
        "    def hook(self): return self.config\n"
    )
    found = {use.dotted for use in uses_in(tmp_path, ("vllm",), {})}
    assert found == {f"vllm.engine.AsyncLLM{end}" for end in ("", ".shutdown", ".hook", ".config")}
