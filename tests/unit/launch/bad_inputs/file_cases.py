"""Model directories and datasets: files, forms, records, fields, lengths, references."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.unit.launch.bad_inputs.desk import (
    RECORDS,
    Desk,
    Spoil,
    both,
    case,
    config_json,
    data_file,
    key,
    model_file,
    records,
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


def _teacher_of_other_tokens(desk: Desk) -> None:
    """A copy of the policy in which two tokens have changed places."""
    shutil.copytree(desk.own_model(), desk.root / "teacher")
    path = desk.root / "teacher" / "tokenizer.json"
    document = json.loads(path.read_text())
    tokens = document["model"]["vocab"]
    tokens["1"], tokens["2"] = tokens["2"], tokens["1"]
    path.write_text(json.dumps(document))
    desk.settings["service"] = [{"name": "big", "kind": "teacher", "path": "teacher"}]
    desk.settings["algorithm"] = {"advantage": "distillation"}
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
    case("adapters of layers that are not there", key("lora.rank", 8, lora__targets=["q_prjo"]), "lora.targets=", "no layer of the model is 'q_prjo' (did you mean q_proj?)", "legal: attention, mlp, output"),
    case("adapters of experts that are not there", key("lora.rank", 8, lora__targets=["attention", "experts"]), "no layer of the model is 'experts'", "legal: attention, mlp, output"),
    case("an adapter that is not there", key("lora.rank", 8, lora__initial="nowhere"), "lora.initial=", "nowhere'", "there is no adapter_config.json in it"),
    case("a stage without adapters", key("lora.rank", 8, lora__targets=["output"], trainer__backend="megatron", trainer__num_ranks=2, trainer__pipeline_parallel=2), "trainer.pipeline_parallel=2 with lora.targets=['output']", "would have nothing to train", "legal: pipeline_parallel=1"),
    case("a merged head that is the embedding", key("lora.rank", 8, lora__targets=["output"], weights__form="merged"), "weights.form='merged'", "legal: weights.form='adapter', or other lora.targets"),
    case("an adapter without its model", _lora, "model'", "adapter", "merge"),
    case("config.json cut off", model_file("config.json", '{"model_type": "qwen2",'), "config.json", "not JSON", "line 1"),
    case("config.json with a list", model_file("config.json", "[]"), "config.json", "a list", "object"),
    case("config.json without the family", config_json(model_type=None), "config.json", "model_type"),
    case("config.json without a size", config_json(num_hidden_layers=None), "config.json", "num_hidden_layers"),
    case("config.json with a size that is a text", config_json(hidden_size="64"), "config.json", "hidden_size='64'"),
    case("config.json with zero layers", config_json(num_hidden_layers=0), "config.json", "num_hidden_layers=0"),
    case("config.json without an architecture", both(config_json(architectures=None), key("generation.engine", "vllm")), "config.json", "architectures"),
    case("heads that do not divide the width", config_json(num_attention_heads=3), "config.json", "num_attention_heads=3"),
    case("another family for Megatron", both(config_json(model_type="gemma9"), key("trainer.backend", "megatron")), "model_type='gemma9'", "legal: llama, mistral"),
    case("a family that transformers does not know", config_json(model_type="gemma9"), "model_type='gemma9'", "transformers"),
    case("logits with a scale", config_json(model_type="granite", logits_scaling=8.0), "config.json", "logits_scaling=8", "legal"),
    case("an encoder", config_json(model_type="bert", architectures=["BertModel"]), "config.json", "'bert'"),
    case("a model of pictures", config_json(model_type="qwen2_vl"), "config.json", "'qwen2_vl'"),
    case("quantised weights", config_json(quantization_config={"quant_method": "fp8"}), "config.json", "quantization_config", "fp8", "legal"),
    case("a window of no tokens for Megatron", both(config_json(use_sliding_window=True, sliding_window=0), key("trainer.backend", "megatron")), "sliding_window=0", "legal: 1 or more tokens, or trainer.backend='deepspeed'"),
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
    case("a teacher of other tokens", _teacher_of_other_tokens, "service.path=", "has another tokenizer than model.path=", "'2'", "'1' of the policy", "legal: "),
)  # fmt: skip


GOOD = '{"prompt": "1+1=", "answer": "2"}'


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


VERL = _parquet(
    [{"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}]
)


def _directory(*names: str) -> Any:
    def spoil(desk: Desk) -> None:
        (desk.root / "set").mkdir()
        for name in names:
            desk.write_records(RECORDS, f"set/{name}")
        desk.settings["data"]["path"] = "set"

    return spoil


def _two(**second: Any) -> Any:
    def spoil(desk: Desk) -> None:
        first = desk.settings["data"]
        desk.settings["data"] = [first, first | second]

    return spoil


FILES = (
    case("no such file", key("data.path", "trian.jsonl"), "data.path=", "trian.jsonl does not exist", "did you mean train.jsonl?"),
    case("a pattern of files", key("data.path", "train*.jsonl"), "train*.jsonl does not exist", "patterns and lists are not expanded; legal", "[[data]]"),
    case("braces of a shell", key("data.path", "{train,more}.jsonl"), "patterns and lists are not expanded; legal"),
    case("two files in one text", key("data.path", "train.jsonl,more.jsonl"), "patterns and lists are not expanded; legal"),
    case("an indented document called JSON lines", data_file("train.jsonl", '{\n  "prompt": "1+1=",\n  "answer": "2"\n}\n'), "train.jsonl:1", "one record a line", "named .json"),
    case("an array over several lines called JSON lines", data_file("train.jsonl", '[\n' + GOOD + ',\n' + GOOD + '\n]\n'), "train.jsonl:1", "one record a line", "named .json"),
    case("an array on a line called JSON lines", data_file("train.jsonl", f"[{GOOD}, {GOOD}]\n"), "train.jsonl:1", "a list", "a file named .json"),
    case("indented records one after the other", data_file("train.json", '{\n  "prompt": "1+1=",\n  "answer": "2"\n}\n' * 2), "train.json:1", "one record a line"),
    case("a comma behind each line", data_file("train.jsonl", f"{GOOD},\n{GOOD}\n"), "train.jsonl:1", "with nothing behind it"),
    case("a comment in JSON lines", data_file("train.jsonl", f"// sums\n{GOOD}\n"), "train.jsonl:1", "JSON has no comments"),
    case("a form that is not known", data_file("train.txt", "1+1=2"), "train.txt", "legal: a file of .jsonl"),
    case("an Excel sheet", data_file("train.xlsx", b"PK\x03\x04"), "train.xlsx", "legal: a file of .jsonl"),
    case("an empty file", records(), "train.jsonl", "has no records"),
    case("blank lines", data_file("train.jsonl", "\n  \n\n"), "train.jsonl", "has no records"),
    case("a directory with nothing", _directory(), "set holds no file of .jsonl"),
    case("a directory with training and validation", _directory("train.jsonl", "validation.jsonl"), "set has the splits train, validation", "data.split"),
    case("a split that is not there", both(_directory("train.jsonl", "test.jsonl"), key("data.split", "validation")), "data.split='validation'", "test, train"),
    case("a split of one file", key("data.split", "train"), "data.split='train'", "legal: leave it out"),
    case("the name of gz without its content", data_file("train.jsonl.gz", GOOD), "train.jsonl.gz", "gzip"),
    case("a gz that is cut off", data_file("train.jsonl.gz", gzip.compress(GOOD.encode() * 999)[:-20]), "train.jsonl.gz", "damaged"),
    case("a zst that is none", data_file("train.jsonl.zst", GOOD), "train.jsonl.zst"),
    case("a Parquet that is cut off", data_file("train.parquet", VERL[:-30]), "train.parquet", "Parquet"),
    case("JSON lines called Parquet", data_file("train.parquet", GOOD), "train.parquet", "Parquet"),
    case("a Parquet without rows", data_file("train.parquet", _parquet([])), "train.parquet", "has no records"),
    case("an Arrow that is none", data_file("train.arrow", b"ARROW1" * 9), "train.arrow", "Arrow"),
    case("a pointer of Git LFS", data_file("train.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"), "train.parquet", "Git LFS"),
    case("JSON lines that are not UTF-8", data_file("train.jsonl", GOOD.replace("1+1=", "é").encode("latin-1")), "train.jsonl:1", "not UTF-8"),
    case("UTF-16", data_file("train.jsonl", GOOD.encode("utf-16")), "train.jsonl:1", "UTF-16; legal: UTF-8"),
    case("a JSON document that is a number", data_file("train.json", "42"), "train.json", "legal: an array of objects"),
    case("a JSON array of texts", data_file("train.json", '["1+1="]'), "train.json:1", "legal: an object"),
    case("CSV with semicolons", data_file("train.csv", "prompt;answer\n1+1=;2\n"), "train.csv:1", "semicolons", "legal: commas"),
    case("CSV without a header", data_file("train.csv", "1+1=,2\n1+2=,3\n"), "train.csv:2", "no field", "'1+1=', '2'"),
    case("CSV with a comma that is not quoted", data_file("train.csv", "prompt,answer\n1+1=,2\nadd 1, 2,3\n"), "train.csv:3", "3 values", "2 columns"),
    case("CSV with a quote that is not closed", data_file("train.csv", 'prompt,answer\n"1+1=,2\n'), "train.csv", "malformed"),
    case("CSV with one name twice", data_file("train.csv", "prompt,prompt\na,b\n"), "train.csv:1", "'prompt'", "legal: a name of its own"),
    case("CSV with pandas' index", data_file("train.csv", ",prompt,answer\n0,1+1=,2\n"), "train.csv:1", "index=False", "legal: a name"),
    case("CSV with an empty answer", data_file("train.csv", "prompt,answer\n1+1=,\n"), "train.csv:2", "answer", "legal"),
    case("two datasets of one name", _two(), "data.0 and data.1", "'train'", "another name"),
)  # fmt: skip

LINES = (
    case("a blank prompt", records(GOOD, '{"prompt": " ", "answer": "3"}'), "train.jsonl:2", "field 'prompt'", "is empty"),
    case("a line that is cut off", records(GOOD, '{"prompt": "1+2=", "answer": "3"'), "train.jsonl:2", "malformed JSON", "column"),
    case("single quotes", records(GOOD, "{'prompt': '1+2=', 'answer': '3'}"), "train.jsonl:2", "malformed JSON", "column 2"),
    case("an array", records(GOOD, "[1, 2]"), "train.jsonl:2", "a list", "legal: an object"),
    case("two records on a line", records(GOOD, GOOD + GOOD), "train.jsonl:2", "malformed JSON"),
    case("a line without the answer", records(GOOD, '{"prompt": "1+2="}'), "train.jsonl:2", "no field 'answer'", "data.reference_field"),
    case("a null", records('{"prompt": "1+1=", "answer": null}'), "train.jsonl:1", "'answer' is null", "legal"),
    case("a prompt that is a list", records('{"prompt": ["1+1="], "answer": "2"}'), "train.jsonl:1", "'prompt' is a list", "legal"),
    case("an empty prompt", records('{"prompt": "", "answer": "2"}'), "train.jsonl:1", "is empty"),
    case("half of a character", records('{"prompt": "\\ud800", "answer": "2"}'), "train.jsonl:1", "surrogate"),
    case("a NUL byte in a line", data_file("train.jsonl", GOOD + "\n" + "\x00" * 20 + "\n"), "train.jsonl:2", "NUL"),
    case("a prompt that is too long", records(GOOD, '{"prompt": "1000+1000+1000=", "answer": "3000"}'), "train.jsonl:2", "15 tokens", "legal: 1 to generation.max_prompt_tokens=12"),
    case("a column of another name", records('{"question": "1+1=", "answer": "2"}'), "train.jsonl:1", "no field 'prompt'", "'question', 'answer'"),
    case("the answer has another name", key("data.reference_field", "solution"), "no field 'solution'", "'prompt', 'answer'"),
    case("a nested key that is not there", data_file("train.parquet", VERL, prompt_field="prompt", reference_field="reward_model.answer"), "train.parquet:1", "'reward_model.answer'", "'ground_truth'"),
    case("a nested key into a text", key("data.reference_field", "answer.value"), "train.jsonl:1", "'answer.value'", "a string"),
    case("a template that names no field", key("data.prompt_template", "Add!"), "data.prompt_template='Add!'", "names no field"),
    case("a template with another field", key("data.prompt_template", "{question}"), "train.jsonl:1", "no field 'question'"),
    case("a template with a lone brace", key("data.prompt_template", "Give {prompt} as {"), "data.prompt_template=", "brace"),
    case("a template with a place without a name", key("data.prompt_template", "Add {}"), "data.prompt_template='Add {}'", "name"),
    case("chat messages where text is meant", data_file("train.parquet", VERL, reference_field="reward_model.ground_truth"), "train.parquet:1", "'prompt' is a list", "data.prompt_field"),
    case("chat without a message", records({"prompt": [], "answer": "2"}, prompt_field="prompt"), "train.jsonl:1", "'prompt' is a list without a message", "legal"),
    case("chat messages of a strange role", records({"prompt": [{"role": "human", "content": "1+1="}], "answer": "2"}, prompt_field="prompt"), "train.jsonl:1", "'human'", "user"),
    case("a strange role in ShareGPT's words", records({"prompt": [{"from": "critic", "value": "1+1="}], "answer": "2"}, prompt_field="prompt"), "train.jsonl:1", "role is 'critic'"),
    case("a field of tasks that nobody has", key("data.task_field", "source", data__tasks={"a": "math_answer"}), "data.task_field='source'", "'prompt', 'answer'"),
    case("a value of no task", records('{"prompt": "1+1=", "answer": "2", "source": "b"}', task_field="source", tasks={"a": "integer_arithmetic"}), "train.jsonl:1", "'source' is 'b'", "'a'"),
    case("a difficulty that is a text", both(records('{"prompt": "1+1=", "answer": "2", "difficulty": "hard"}'), key("curriculum.stages", [0.5])), "train.jsonl:1", "'difficulty'", "legal: a number"),
    case("a source that is none", key("data.path", None, data__source="gym:sums"), "data.source", "'gym:sums'", "legal"),
    case("neither a file nor a source", key("data.path", None), "data.path is not set", "legal: one of them"),
)  # fmt: skip

REFERENCES = (
    case("no number", records('{"prompt": "1+1=", "answer": "no number here"}', task="math_answer"), "train.jsonl:1", "'answer'", "legal"),
    case("a word for a whole number", records('{"prompt": "1+1=", "answer": "two"}'), "train.jsonl:1", "'two'", "legal"),
    case("two letters for a choice", records('{"prompt": "A or B?", "answer": "AB"}', task="multiple_choice"), "train.jsonl:1", "legal: B, (B) or B."),
    case("a pattern that is none", records('{"prompt": "1+1=", "answer": "(2"}', task="regex"), "train.jsonl:1", "regular expression"),
    case("a schema that is none", records({"prompt": "1+1=", "answer": "{"}, task="json_schema"), "train.jsonl:1", "json_schema"),
    case("tests that are none", both(records({"prompt": "1+1=", "answer": "2"}, task="code_stdin"), key("sandbox.require", "none")), "train.jsonl:1", "code_stdin", is_tried=True),
    case("instructions that are unknown", records({"prompt": "1+1=", "answer": {"instruction_id_list": ["no:such"], "kwargs": [{}]}}, task="instruction_following"), "train.jsonl:1", "no:such"),
    case("an empty reference", records('{"prompt": "1+1=", "answer": ""}', task="exact_match"), "train.jsonl:1", "legal"),
)  # fmt: skip
