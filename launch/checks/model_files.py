"""Check the directory of a model without loading it: files, sizes, headers of the weights.

Input: an HF checkpoint directory and the key that names it.  Output: the content of config.json; a ConfigError that
names the file, its value and what is legal.  Reads headers of safetensors files, not their tensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.common.text import counted
from rlhpc.base.hf_config import language_model
from rlhpc.base.processes import child_command, child_environment
from rlhpc.data.record_source import cached
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.models.shape import FAMILIES, LAYER_TYPES, WRAPPED
from rlhpc.models.weights import INDEX, ONE_FILE, is_mxfp4, object_in, refuse_other_weights
from rlhpc.protocol.errors import ConfigError

# -------------------------------------------------------------------------------------------------------- other loaders
#
# Check that transformers, and libraries that load by it, see a model as a run does.
#
# Input: the directory of a model.  Output: warnings of texts that AutoTokenizer tokenises differently from
# tokenizer.json, which a run uses; a ConfigError for tensors that transformers would draw at random.  Transformers
# takes seconds to import: it runs in a process of its own, and its answer is cached while the files are the same.


# Texts on which pre-tokenizers and normalizers differ: words, numbers, spaces, lines, marks, multi-byte letters.
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
    """Reason why transformers gives no answer about a model."""


def refuse_made_up_tensors(directory: Path, model: Mapping[str, Any]) -> None:
    """Check tensors of families that ModelShape does not know, which read_model does not check; model: config.json.

    Raises ConfigError for tensors that are missing, or of another shape.
    """
    if model.get("model_type") in FAMILIES or not _has_transformers():
        return
    try:
        tensors = _view(directory, ())["tensors"]
    except _NoAnswer:  # a trainer fails alike when it loads the model, and an engine may know more families
        return
    refuse_other_weights(directory, model, tensors)


def other_tokens(directory: Path, tokenizer: PromptTokenizer, prompts: Sequence[str] = ()) -> list[str]:
    """Warning if AutoTokenizer tokenises one of these prompts, or of a few other texts, differently."""
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
    """Return the answer of rlhpc/training/hf_view.py, cached by the content of the files."""
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


# ---------------------------------------------------------------------------------------------------------- model files

_NEEDED = ("config.json", "tokenizer.json")
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "max_position_embeddings", "head_dim",
)  # fmt: skip
# Features that the trainer does not compute: keys of config.json, and their values without effect.
_NOT_COMPUTED: Mapping[str, tuple[object, ...]] = {
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
}


def read_model(directory: Path, key: str = "model.path", *, has_words: bool = True) -> dict[str, Any]:
    """config.json of a checkpoint whose files are whole and fit it, as language_model has it.  Raises ConfigError.

    has_words: False of a model without a head for tokens, such as a reward model.
    """
    value = f"{key}={str(directory)!r}"
    _refuse_incomplete(directory, value)
    place = directory / "config.json"
    document = language_model(object_in(place))
    _refuse_sizes(document, place)
    if has_words:
        refuse_other_weights(directory, document)
    return document


def refuse_other_vocabulary(model: Mapping[str, Any], place: Path, vocabulary: int, eos: Iterable[object]) -> None:
    """Raise ConfigError for a tokenizer of a larger model, and for end tokens that this model lacks.

    vocabulary: tokens of the tokenizer, without added ones.  eos: tokens that end a completion.
    """
    size = model.get("vocab_size")
    if not isinstance(size, int):
        return
    if vocabulary > size:
        raise ConfigError(
            f"{place.parent / 'tokenizer.json'}: {vocabulary:,} tokens, and {place} has vocab_size={size}: they belong "
            "to different models; legal: the tokenizer of this model"
        )
    for token in eos:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise ConfigError(
                f"{place}, or generation_config.json beside it: eos_token_id={token!r}; legal: 0 to {size - 1} "
                f"(vocab_size={size})"
            )


def refuse_unknown_tokens(model: Mapping[str, Any], directory: Path, highest: int, source: str) -> None:
    """Raise ConfigError for tokens that were added to the tokenizer, but not to the model.

    highest: of all tokens of prompts, in the prompt of the record at `source`.
    """
    size = model.get("vocab_size")
    if isinstance(size, int) and highest >= size:
        raise ConfigError(
            f"{directory / 'config.json'}: vocab_size={size}, and the prompt of {source} has token {highest}, which "
            "was added to the tokenizer and not to the model; legal: a model that was resized (resize_token_embeddings)"
        )


# --------------------------------------------------------------------------------------------------------------- files


def _refuse_incomplete(directory: Path, value: str) -> None:
    if not directory.is_dir():
        why = "a file" if directory.is_file() else "no such directory"
        raise ConfigError(
            f"{value}: {why}; legal: an HF checkpoint directory (download one from the hub first: hf download NAME "
            "--local-dir DIRECTORY)"
        )
    missing = [name for name in _NEEDED if not (directory / name).exists()]
    names = {file.name for file in directory.iterdir()}
    if "adapter_config.json" in names and ONE_FILE not in names and INDEX not in names:
        raise ConfigError(
            f"{value}: an adapter (adapter_config.json) without its model; legal: merge it, and save that"
        )
    if missing or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{value}: not a complete HF checkpoint: {', '.join(missing) or '*.safetensors'} missing; "
            "transformers' save_pretrained, of model and of fast tokenizer, writes all files into it"
            f"{_what_is_there(directory)}"
        )


def _what_is_there(directory: Path) -> str:
    """Hint that may explain a missing file."""
    inner = sorted(each.name for each in directory.iterdir() if (each / "config.json").is_file())
    if inner:
        return f" (did you mean {directory / inner[0]}?)"
    other = sorted(each.name for each in directory.iterdir() if each.suffix in (".bin", ".pth", ".pt", ".gguf"))
    return f" (there is {other[0]}, of a format that is not read here)" if other else ""


# -------------------------------------------------------------------------------------------------------- config.json


def _refuse_sizes(model: Mapping[str, Any], place: Path) -> None:
    if not isinstance(model.get("model_type"), str):
        raise ConfigError(f"{place}: model_type={model.get('model_type')!r}; legal: the family's name, such as 'qwen2'")
    for name in _SIZES:
        size = model.get(name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
            raise ConfigError(f"{place}: {name}={size!r}; legal: a whole number above 0")
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    if heads and hidden and not model.get("head_dim") and hidden % heads:
        raise ConfigError(f"{place}: num_attention_heads={heads} does not divide hidden_size={hidden}")
    if heads and (key_heads := model.get("num_key_value_heads")) and heads % key_heads:
        raise ConfigError(f"{place}: num_key_value_heads={key_heads} does not divide num_attention_heads={heads}")


def refuse_untrainable(model: Mapping[str, Any], place: Path) -> None:
    """Raise ConfigError for models that every trainer backend would refuse after loading, judged by config.json."""
    quantised = model.get("quantization_config")
    if quantised and not is_mxfp4(model):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{place}: quantization_config has quant_method={method!r}: quantised weights are not trained; legal: the "
            "checkpoint in bfloat16 or float32"
        )
    family, architectures = model["model_type"], model.get("architectures") or ()
    if not architectures:
        raise ConfigError(f'{place}: no architectures, by which engines know the model; legal: ["…ForCausalLM"]')
    endings = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if family in WRAPPED else ()))
    if not any(str(name).endswith(endings) for name in architectures):
        raise ConfigError(
            f"{place}: architectures={list(architectures)}, of model_type={family!r}: not a causal language model; "
            "legal: one that ends in ForCausalLM"
        )
    known = _families_of_transformers()
    if known and family not in known:
        raise ConfigError(
            f"{place}: model_type={family!r} is not a causal language model of the transformers installed here; legal: "
            "one of its model types, or a newer transformers"
        )
    for name, harmless in _NOT_COMPUTED.items():
        if model.get(name) not in harmless:
            raise ConfigError(f"{place}: {name}={model[name]!r}, which the trainer does not compute; legal: none of it")
    if strange := sorted({*(model.get("layer_types") or ())} - LAYER_TYPES):
        raise ConfigError(
            f"{place}: layer_types has {strange[0]!r}; legal: {', '.join(map(repr, sorted(LAYER_TYPES)))}"
        )


def _families_of_transformers() -> set[str]:
    """Model types with a causal language model, from the text of the library, which takes seconds to import."""
    spec = importlib.util.find_spec("transformers")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(place) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        except OSError:
            continue
        _, _, table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
        return set(re.findall(r'\(\s*"([^"]+)",\s*"', table.partition("\n)")[0]))
    return set()
