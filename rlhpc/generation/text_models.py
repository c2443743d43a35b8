"""Let vLLM load the language model alone of a model that also sees (Qwen3.5), and, without torchvision, load it at all.

Input: a checkpoint directory, before vLLM starts on it.  Output: engine arguments; vLLM's registry of models.

vLLM skips what a model sees by when it is told that it gets texts only.  But its file of Qwen3.5, that of the language
model alone included, imports its file of Qwen3-VL, and that needs torchvision, whose usual wheels do not load beside a
torch for CPUs.  There an empty module stands in for the file of Qwen3-VL during the import, and vLLM is given the
classes of the language model, which use nothing of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rlhpc.base.hf_config import language_model
from rlhpc.models.shape import WRAPPED
from rlhpc.models.weights import object_in
from rlhpc.protocol.errors import EngineError

CPU_HEADS = (64, 128)  # sizes of heads that vLLM's kernels of Gated DeltaNets know on a CPU
_FILE = "vllm.model_executor.models.qwen3_5"
_VISION_FILE = "vllm.model_executor.models.qwen3_vl"
_VISION = (
    "Qwen3_VisionTransformer", "Qwen3VLDummyInputsBuilder", "Qwen3VLMultiModalProcessor", "Qwen3VLProcessingInfo",
)  # fmt: skip
_TEXT_CLASSES = {  # architecture → the class of its language model
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def text_args(path: Path, *, dtype: str, device: str, is_in_process: bool) -> dict[str, Any]:
    """Engine arguments by which vLLM loads the language model of a checkpoint; {} for most of them.

    device: "cpu" or "cuda".  is_in_process: the core is in this process.  Without torchvision vLLM's registry changes.
    Raises EngineError for a model that vLLM would compute wrongly, or not at all; or that needs torchvision, and the
    core, in another process, has none.
    """
    file = path / "config.json"
    model = language_model(object_in(file)) if file.is_file() else {}
    for key, value, legal in _not_computed(model, dtype, device):
        raise EngineError(f"{file}: {key}={value}, which vLLM does not compute{legal}")
    architecture = next(iter(model.get("architectures") or ()), "")
    if architecture not in _TEXT_CLASSES:
        return {}
    if importlib.util.find_spec("torchvision") is not None:
        return {"language_model_only": True} if model.get("model_type") in WRAPPED else {}
    if not is_in_process:
        raise EngineError(
            f"{file}: architectures has {architecture!r}, for which vLLM needs torchvision; legal: install the one of "
            "this build of torch, or on a CPU generation.tensor_parallel=1"
        )
    return {"hf_overrides": {"architectures": [_registered(_TEXT_CLASSES[architecture])]}}


def _not_computed(model: Mapping[str, Any], dtype: str, device: str) -> Iterator[tuple[str, Any, str]]:
    """Key, value, and where, with what is legal instead."""
    if model.get("model_type") == "qwen3_next" and model.get("tie_word_embeddings"):
        yield "tie_word_embeddings", "true", " for qwen3_next, whose head it leaves unset; legal: a head of its own"
    if device != "cpu" or "linear_num_value_heads" not in model:
        return
    if dtype != "bfloat16":
        yield "model_type", f"{model.get('model_type')!r} with model.dtype={dtype!r}", " on a CPU; legal: 'bfloat16'"
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if (size := model.get(key, 128)) not in CPU_HEADS:
            yield key, size, f" on a CPU; legal: {', '.join(map(str, CPU_HEADS))}"


def _registered(name: str) -> str:
    """Register a class of vLLM's for a language model; return the architecture that it has in vLLM's registry."""
    from vllm.model_executor.models import ModelRegistry  # vLLM reads its environment when it is imported
    from vllm.model_executor.models.utils import WeightsMapper

    with _without_vision():
        theirs: Any = getattr(importlib.import_module(_FILE), name)
    mapper = theirs.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix={"model.visual.": None})
    ModelRegistry.register_model(name, type(name, (theirs,), {"hf_to_vllm_mapper": mapper}))
    return name


@contextmanager
def _without_vision() -> Iterator[None]:
    """A block in which vLLM's file of Qwen3-VL is empty classes, if it was not imported before."""
    if _VISION_FILE in sys.modules or _FILE in sys.modules:
        yield
        return
    from vllm.model_executor.models.utils import WeightsMapper  # as above

    empty: Any = ModuleType(_VISION_FILE)
    for name in _VISION:
        setattr(empty, name, type(name, (), {}))
    members = {"hf_to_vllm_mapper": WeightsMapper(), "packed_modules_mapping": {}}
    empty.Qwen3VLForConditionalGeneration = type("Qwen3VLForConditionalGeneration", (nn.Module,), members)
    empty.mrope_positions_factor = lambda vllm_config: 1
    sys.modules[_VISION_FILE] = empty
    try:
        yield
    finally:
        del sys.modules[_VISION_FILE]
