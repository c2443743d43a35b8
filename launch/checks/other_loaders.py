"""Whether a model is what a run takes it for where others load it: transformers, and all that load by it.

Input: the directory of a model.  Output: lines that warn of texts that AutoTokenizer reads as other tokens than
tokenizer.json, by which a run reads them; a ConfigError for tensors that transformers would make up.  Transformers
takes seconds to import: it is asked in a process of its own, and its answer is kept while the files are the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.common.counted import counted
from rlhpc.data.cache import cached
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.megatron_models import FAMILIES
from rlhpc.model_weights import refuse_other_weights
from rlhpc.python_child import child_command, child_environment

# What pre-tokenizers and normalizers part over: words, numbers, spaces, lines, marks, letters of several bytes.
PROBES = (
    "The answer is 12345, isn't it?",
    "  two  spaces\n\n\tand a tab",
    "x = (3.14 * y)**2  # z",
    "Straße, naïve, e\u0301t\u00e9, 東京",
)
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MOST_S = 300.0  # an import of transformers from a slow disk
_LONGEST_TEXT = 60  # characters that are shown


class _NoAnswer(Exception):
    """Why transformers says nothing of a model."""


def refuse_made_up_tensors(directory: Path, model: Mapping[str, Any]) -> None:
    """model: config.json.  Of families that ModelShape does not know: read_model has looked at the others.

    Raises ConfigError for tensors that are missing, or of another shape.
    """
    if model.get("model_type") in FAMILIES or not _has_transformers():
        return
    try:
        tensors = _view(directory, ())["tensors"]
    except _NoAnswer:  # a trainer is told the same when it loads the model, and an engine may know more families
        return
    refuse_other_weights(directory, model, tensors)


def other_tokens(directory: Path, tokenizer: PromptTokenizer, prompts: Sequence[str] = ()) -> list[str]:
    """A warning where AutoTokenizer reads one of these prompts, or of a few other texts, as other tokens."""
    if not _has_transformers():
        return []
    texts = (*prompts, *PROBES)
    try:
        found = _view(directory, texts)
    except _NoAnswer as error:
        return [f"warning     AutoTokenizer, by which others load {directory}, does not load it: {error}"]
    for text, (plain, rendered) in zip(texts, found["tokens"], strict=True):
        for theirs, own in ((rendered, tokenizer.encode_rendered(text)), (plain, tokenizer.encode(text))):
            if theirs != own.tolist():
                return [_difference(text, theirs, own.tolist(), found["tokenizer"], is_prompt=text in prompts)]
    return []


def _difference(text: str, theirs: list[int], own: list[int], name: str, *, is_prompt: bool) -> str:
    shown = f"{text[:_LONGEST_TEXT]!r}{'…' if len(text) > _LONGEST_TEXT else ''}"
    what = "the prompt" if is_prompt else "the text"
    return (
        f"warning     AutoTokenizer takes {name} for this model, and reads {what} {shown} as "
        f"{counted(len(theirs), 'token')} ({_first(theirs)}); by tokenizer.json, as a run reads it, it is {len(own)} "
        f"({_first(own)}). Whoever loads the model by its directory feeds it what it was not trained on (vLLM's "
        "server, lm-eval). Load the tokenizer with PreTrainedTokenizerFast, or give the model a family whose "
        "tokenizer_class transformers respects (llama or qwen3; of qwen2 it does not)"
    )


def _first(tokens: list[int]) -> str:
    return ", ".join(map(str, tokens[:6])) + ("…" if len(tokens) > 6 else "")


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _view(directory: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Return what rlhpc/training/hf_view.py says, now or before, of files with this content."""
    files = {name: _digest(directory / name) for name in _FILES}
    made_of = json.dumps([_version_of("transformers"), files, list(texts), _digest(Path(__file__))])
    content = cached("loaders", made_of, lambda: _asked(directory, texts), is_whole=_is_answer)
    answer: dict[str, Any] = json.loads(content)
    return answer


def _asked(directory: Path, texts: Sequence[str]) -> bytes:
    question = json.dumps({"directory": str(directory.absolute()), "texts": list(texts)})
    environment = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    try:
        done = subprocess.run(
            child_command("rlhpc.training.hf_view"), input=question, capture_output=True, text=True, env=environment,
            timeout=_MOST_S, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(f"no answer within {_MOST_S:g} s") from error
    if done.returncode or not _is_answer(done.stdout.encode()):
        raise _NoAnswer((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:300])
    return done.stdout.encode()


def _is_answer(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def _digest(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except FileNotFoundError:
        return ""


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
