"""Model directories: files that are missing, cut off, of another model, or of a kind that is not trained here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.launch.bad_inputs.desk import (
    Desk,
    Spoil,
    both,
    case,
    config_json,
    key,
    model_file,
    weights,
    with_header,
)

INDEX = "model.safetensors.index.json"


FIRST = "model.layers.0."


def _cut(share: float) -> Any:
    def cut(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return cut


def _other_shape(header: dict[str, Any]) -> None:
    rows, columns = header["model.embed_tokens.weight"]["shape"]
    header["model.embed_tokens.weight"]["shape"] = [rows // 2, columns * 2]


def _without(part: str) -> Spoil:
    """No tensor that has this in its name."""

    def change(header: dict[str, Any]) -> None:
        for name in [name for name in header if part in name]:
            del header[name]

    return weights(with_header(change))


def _named(rename: Callable[[str], str]) -> Spoil:
    """Every tensor under another name."""

    def change(header: dict[str, Any]) -> None:
        for name in [name for name in header if name != "__metadata__"]:
            header[rename(name)] = header.pop(name)

    return weights(with_header(change))


def _with(name: str, **entry: Any) -> Spoil:
    """A tensor like the last norm, or another one of that name."""
    return weights(with_header(lambda header: header.update({name: header["model.norm.weight"] | entry})))


def _tokens(number: int) -> Callable[[Path], object]:
    """An embedding of another number of tokens."""
    return with_header(lambda header: header["model.embed_tokens.weight"].update(shape=[number, 64]))


def _shards(path: Path) -> None:
    path.rename(path.with_name("model-00001-of-00001.safetensors"))


def _lora(desk: Desk) -> None:
    model = desk.own_model()
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (model / "config.json").unlink()


def _pytorch(desk: Desk) -> None:
    model = desk.own_model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _one_level_up(desk: Desk) -> None:
    model = desk.own_model()
    (desk.root / "hub").mkdir()
    shutil.move(model, desk.root / "hub" / "small")
    desk.settings["model"]["path"] = "hub"


def _critic_of_another_vocabulary(desk: Desk) -> None:
    model = desk.own_model()
    critic = desk.root / "critic"
    shutil.copytree(model, critic)
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    _tokens(50)(critic / "model.safetensors")
    desk.settings["critic"] = {"path": "critic"}
    desk.settings["algorithm"] = {"advantage": "gae"}
    desk.settings["admission"]["active_sampling"] = False


def _ends_every_text(desk: Desk) -> None:
    file = desk.own_model() / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    special = {"<eos>": {"id": "<eos>", "ids": [2], "tokens": ["<eos>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, end], "pair": [text, end], "special_tokens": special
    }  # fmt: skip
    file.write_text(json.dumps(tokenizer))


def _index(*names: str, **more: Any) -> str:
    return json.dumps(
        {"weight_map": dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight"), names[0])} | more
    )


def _no_template(desk: Desk) -> None:
    model = desk.own_model()
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))


MODEL = (
    case("no such directory", key("model.path", "nowhere"), "model.path=", "nowhere'", "no such directory"),
    case("a file in place of the directory", key("model.path", "train.jsonl"), "model.path=", "train.jsonl'", "a file"),
    case("the directory above the model", _one_level_up, "model.path=", "hub'", "small"),
    case("no config.json", model_file("config.json", None), "model'", "config.json missing"),
    case("no tokenizer", model_file("tokenizer.json", None), "model'", "tokenizer.json missing"),
    case("no weights", model_file("model.safetensors", None), "model'", "*.safetensors missing"),
    case("weights of PyTorch's own format", _pytorch, "model'", "pytorch_model.bin", "save_pretrained"),
    case("an adapter without its model", _lora, "model'", "adapter", "merge"),
    case("config.json cut off", model_file("config.json", '{"model_type": "qwen2",'), "config.json", "not JSON", "line 1"),
    case("config.json with a list", model_file("config.json", "[]"), "config.json", "a list", "object"),
    case("config.json without the family", config_json(model_type=None), "config.json", "model_type"),
    case("config.json without a size", config_json(num_hidden_layers=None), "config.json", "num_hidden_layers"),
    case("config.json with a size that is a text", config_json(hidden_size="64"), "config.json", "hidden_size='64'"),
    case("config.json with zero layers", config_json(num_hidden_layers=0), "config.json", "num_hidden_layers=0"),
    case("config.json without an architecture", both(config_json(architectures=None), key("generation.engine", "vllm")), "config.json", "architectures"),
    case("heads that do not divide the width", config_json(num_attention_heads=3), "config.json", "num_attention_heads=3"),
    case("another family for Megatron", both(config_json(model_type="gemma9"), key("trainer.backend", "megatron")), "model_type='gemma9'", "legal: llama, qwen2"),
    case("a family that transformers does not know", config_json(model_type="gemma9"), "model_type='gemma9'", "transformers"),
    case("attention with a soft cap", config_json(model_type="gemma2", attn_logit_softcapping=50.0), "config.json", "attn_logit_softcapping=50", "legal"),
    case("an encoder", config_json(model_type="bert", architectures=["BertModel"]), "config.json", "'bert'"),
    case("a model of pictures", config_json(model_type="qwen2_vl"), "config.json", "'qwen2_vl'"),
    case("quantised weights", config_json(quantization_config={"quant_method": "fp8"}), "config.json", "quantization_config", "fp8", "legal"),
    case("a sliding window for Megatron", both(config_json(use_sliding_window=True, sliding_window=8), key("trainer.backend", "megatron")), "use_sliding_window=True", "legal: False, or trainer.backend='deepspeed'"),
    case("weights cut off", weights(_cut(0.5)), "model.safetensors", "cut off", "bytes"),
    case("weights that are empty", weights(lambda path: path.write_bytes(b"")), "model.safetensors", "0 bytes"),
    case("a page of HTML for weights", weights(lambda path: path.write_text("<html>404</html>" * 9)), "model.safetensors", "safetensors"),
    case("a pointer of Git LFS for weights", weights(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")), "model.safetensors", "Git LFS", "git lfs pull"),
    case("weights of another shape", weights(with_header(_other_shape)), "model.embed_tokens.weight", "[50, 128]", "[100, 64]"),
    case("a matrix of another shape", _with(f"{FIRST}mlp.down_proj.weight"), "model.safetensors", "mlp.down_proj.weight", "[64]", "[64, 128]"),
    case("weights of fewer layers", _without(".layers.1."), "model.safetensors", "model.layers.1."),
    case("weights without a matrix", _without(f"{FIRST}self_attn.k_proj.weight"), f"no tensor {FIRST}self_attn.k_proj.weight", "make up numbers"),
    case("weights without a bias", _without(f"{FIRST}self_attn.v_proj.bias"), f"no tensor {FIRST}self_attn.v_proj.bias"),
    case("weights without any bias", _without(".bias"), f"no tensor {FIRST}self_attn.q_proj.bias", "5 more of qwen2"),
    case("weights without a norm", _without("model.norm.weight"), "no tensor model.norm.weight"),
    case("weights without a head", config_json(tie_word_embeddings=False), "no tensor lm_head.weight", "tie_word_embeddings is false"),
    case("weights of a compiled model", _named("_orig_mod.{}".format), "_orig_mod.model.", "torch.compile", "save the model"),
    case("weights of a model with an adapter", _named("base_model.model.{}".format), "base_model.model.model.", "merge_and_unload()"),
    case("weights of a larger model's part", _named("policy.{}".format), "every name has 'policy.' in front"),
    case("weights of a model without its head", _named(lambda name: name.removeprefix("model.")), "no tensor model.embed_tokens.weight", "AutoModelForCausalLM"),
    case("weights of another head", _with("score.weight"), "model.safetensors: score.weight", "legal: the tensors of this model alone"),
    case("more layers than config.json has", config_json(num_hidden_layers=1, layer_types=None, max_window_layers=None), "model.layers.1.", "num_hidden_layers=1"),
    case("matrices of integers without their scales", _with(f"{FIRST}mlp.down_proj.weight", dtype="I8", shape=[64, 128]), f"{FIRST}mlp.down_proj.weight is stored as I8", "quantised"),
    case("shards without their index", weights(_shards), "model-00001-of-00001.safetensors without model.safetensors.index.json", "legal"),
    case("another file of weights beside the model", weights(lambda path: path.with_name("other.safetensors").write_bytes(path.read_bytes())), "other.safetensors: beside model.safetensors", "legal: model.safetensors alone"),
    case("more layers than weights", config_json(num_hidden_layers=3, layer_types=None, max_window_layers=None), "model.layers.2."),
    case("an index that names a file that is not there", model_file(INDEX, _index("model-00002.safetensors")), "model-00002.safetensors", INDEX),
    case("two saves in one directory", both(weights(lambda path: path.with_name("model-00001.safetensors").write_bytes(path.read_bytes())), model_file(INDEX, _index("model-00001.safetensors"))), "model.safetensors", INDEX, "legal: the files of one checkpoint"),
    case("an index that is not JSON", model_file(INDEX, "{"), INDEX, "JSON"),
    case("an index without a map", model_file(INDEX, "{}"), INDEX, "weight_map"),
    case("tokenizer.json cut off", model_file("tokenizer.json", '{"version": "1.0"'), "tokenizer.json", "not a tokenizer"),
    case("tokenizer_config.json cut off", model_file("tokenizer_config.json", "{"), "tokenizer_config.json", "JSON"),
    case("generation_config.json cut off", model_file("generation_config.json", "{"), "generation_config.json", "JSON"),
    case("a tokenizer of a larger model", both(weights(_tokens(60)), config_json(vocab_size=60)), "tokenizer.json", "vocab_size=60", "100"),
    case("an end of sequence that is no token", both(config_json(eos_token_id=5000), model_file("generation_config.json", '{"eos_token_id": 5000}')), "eos_token_id", "5000", "legal: 0 to 99"),
    case("an end of sequence that is a text", both(config_json(eos_token_id="<eos>"), model_file("generation_config.json", "{}")), "config.json", "eos_token_id='<eos>'"),
    case("a chat without a template", both(_no_template, key("data.use_chat_template", True)), "model.path=", "chat template", "use_chat_template=false"),
    case("a chat template with an error", both(model_file("chat_template.jinja", "{% for m in messages %}{{ m.content }}"), key("data.use_chat_template", True)), "chat_template", "endfor"),
    case("a chat template that leaves the question out", both(model_file("chat_template.jinja", "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<eos>{% endfor %}"), key("data.use_chat_template", True)), "train.jsonl:1", "leaves what the user says out of the prompt", "legal"),
    case("a system prompt for a template that knows none", both(model_file("chat_template.jinja", "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"), key("data.use_chat_template", True, data__system_prompt="Be brief.")), "leaves out the system message (data.system_prompt)", "no effect", "legal"),
    case("a tokenizer that ends every text", _ends_every_text, "tokenizer.json puts '<eos>'", "train.jsonl:1", "legal: a post_processor that adds none"),
    case("a critic of another vocabulary", _critic_of_another_vocabulary, "critic.path=", "vocab_size=50", "100"),
)  # fmt: skip
