"""What `rlhpc check` finds out of a run without a GPU, torch, or the weights themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, Olmo2Config

from launch.checks.bias import unusual
from launch.checks.model_files import other_tokens, refuse_made_up_tensors
from launch.checks.preflight import (
    first_prompt,
    form_of_calls,
    preflight,
    prompt_warnings,
    refuse_heads_of_gpus,
    stop_tokens,
)
from launch.cli import main
from launch.plan.gpu_map import GpuMap
from launch.plan.processes import describe_plan
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, sections
from rlhpc.config.rules import Config, with_values
from rlhpc.config.setting import AnySize, Usual, marks_of
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import DatasetSummary
from rlhpc.protocol.errors import ConfigError
from tests import build
from tests.ring.run_kit import ROOT, command_environment
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.data.checkpoints import CHATML, make_chat_model, make_tokenizer_files
from tests.unit.launch.bad_inputs.desk import SITE, Desk
from tests.unit.launch.public_models import CONFIGS, NUM_PARAMETERS, make_model_directory
from tests.unit.launch.test_memory_plan import EXAMPLE_SITE, check_words, config_of

# -------------------------- What `rlhpc check` finds out of a large run without a GPU, torch, or the weights themselves


def test_preflight_knows_the_shape_of_the_model(tmp_path):
    model = make_model_directory(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    findings = preflight(load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths))
    assert findings.shape is not None
    assert findings.shape.num_parameters == NUM_PARAMETERS["Qwen2.5-7B"]
    assert (findings.model_type, findings.max_positions, findings.datasets[0].num_records) == ("qwen2", 32768, 1)


def test_a_token_beyond_the_model_is_found_in_any_record(tmp_path):
    model = make_model_directory(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    document = json.loads((model / "tokenizer.json").read_text())
    document["model"]["vocab"]["new"] = 200_000
    (model / "tokenizer.json").write_text(json.dumps(document))
    rows = [{"question": text, "answer": "2"} for text in ("add", "add new", "new")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    with pytest.raises(ConfigError, match=r"the prompt of .*train\.jsonl:2 has token 200000, which was added"):
        preflight(load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths), roles_run_here=False)


def test_heads_that_only_gpus_compute_are_refused_where_there_are_none(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(tmp_path)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    config = load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths)
    model = CONFIGS["Qwen2.5-7B"]
    refuse_heads_of_gpus(config, model)
    odd = {**model, "head_dim": 72}
    for shown in (odd, {"text_config": odd}, {**model, "hidden_size": 72 * model["num_attention_heads"]}):
        with pytest.raises(ConfigError, match=r"config\.json: heads of 72 .*legal: 32, 64, "):
            refuse_heads_of_gpus(config, shown)
    refuse_heads_of_gpus(config, {**odd, "kv_lora_rank": 512})
    refuse_heads_of_gpus(with_values(config, {"generation.engine": "scripted"}), odd)


@pytest.mark.starts
def test_a_large_run_is_checked_without_loading_torch_or_megatron(tmp_path):
    code = (
        "import sys; from launch.cli import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'megatron.core', 'deepspeed', 'vllm'} & set(sys.modules);"
        "sys.exit(status)"
    )
    words = [sys.executable, "-c", code, *check_words("large/qwen2.5-72b-tp8-pp4", tmp_path)]
    assert str(EXAMPLE_SITE) in words
    done = subprocess.run(words, capture_output=True, text=True, env=command_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fits        79.1 GiB of trainer.gpu='h100'" in done.stdout


def test_the_plan_says_how_the_trainer_is_laid_out_and_names_a_critic_where_there_is_one():
    def plan(config: Config) -> str:
        return describe_plan(config, RunLayout(Path("/run")), GpuMap())

    wide = {"num_ranks": 16, "context_parallel": 2, "pipeline_parallel": 4, "chunks_per_stage": 2}
    for trainer, words in (
        ({"backend": "reference"}, "reference, 1 rank;"),
        ({"backend": "reference", "num_ranks": 2}, "reference, 2 ranks: data 2;"),
        ({"backend": "deepspeed", "num_ranks": 2, "zero_stage": 3}, "deepspeed, 2 ranks: data 2, ZeRO-3;"),
        ({"num_ranks": 8, "tensor_parallel": 2, "sequence_parallel": True},
         "megatron, 8 ranks: tensor 2 × data 4, sequence-parallel;"),
        (wide, "megatron, 16 ranks: context 2 × data 2 × pipeline 4, 2 blocks of layers a stage;"),
        ({"num_ranks": 8, "expert_parallel": 8}, "megatron, 8 ranks: data 8, experts over 8;"),
    ):  # fmt: skip
        assert f"trainer     {words} 8192 tokens" in plan(config_of(**trainer))
    assert "critic" not in plan(config_of())
    values = {"algorithm.advantage": "gae", "critic.path": Path("/models/judge"), "critic.head_start_steps": 5}
    said = "critic      beside it, from /models/judge; learning rate 1e-05, alone for 5 steps"
    assert said in plan(with_values(config_of(), values))


# ---------------------------------------------------------------------------------- What `rlhpc check` shows of prompts

CONFIG = build.config(data={"path": "train.jsonl", "task": "regex", "max_completion_tokens": 7})


def found(text: str, longer: int = 0) -> DatasetSummary:
    return DatasetSummary(40, 9, 9.0, "train.jsonl:3", text, "train.jsonl:1", 1234, 40, longer)


def test_a_prompt_is_shown_with_its_tokens_and_without_what_a_terminal_obeys():
    assert first_prompt(CONFIG, 0, found("Q:\x1b[2J  two  blanks\nA:")) == [
        "prompt      train.jsonl:1, 1,234 tokens:",
        "  | Q:?[2J  two  blanks",
        "  | A:",
    ]
    lines = first_prompt(CONFIG, 0, found("\n".join(str(n) for n in range(100))))
    assert len(lines) == 13
    assert lines[-2:] == ["  | … 89 lines …", "  | 99"], "a long one is shown by its ends"


def test_references_that_do_not_fit_are_a_warning():
    assert first_prompt(CONFIG, 0, found("Q", longer=3))[-1] == (
        "warning     7.5% of the references have more tokens than completions may have (7)"
    )


def test_a_prompt_that_does_not_say_how_to_mark_an_answer_is_a_warning():
    config = CONFIG.model_copy(update={"data": (CONFIG.data[0].model_copy(update={"task": "math_answer"}),)})
    warned = "warning     this prompt asks for no \\boxed{…} and no ####"
    assert first_prompt(config, 0, found("1+1=?"))[-1].startswith(warned)
    for text in ("1+1=? Answer in \\boxed{}.", "1+1=?\n#### "):
        assert not any("warning" in line for line in first_prompt(config, 0, found(text)))
    assert not any("warning" in line for line in first_prompt(CONFIG, 0, found("1+1=?")))


def test_prompts_that_tell_their_answer_are_a_warning():
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_showing_reference=40))[2:]
    assert line.startswith(
        "warning     40 of 40 prompts tell the answer that is looked for (data.reference_field='answer')"
    )
    assert len(first_prompt(CONFIG, 0, replace(found("Q"), num_showing_reference=20))) == 2


def test_prompts_that_are_all_the_same_are_a_warning():
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_distinct=4))[2:]
    assert line.startswith(
        "warning     only 4 prompts of 40 differ: prompt_template='{prompt}' may name the wrong field"
    )
    assert len(first_prompt(CONFIG, 0, replace(found("Q"), num_distinct=39))) == 2


def test_places_for_pictures_are_a_warning():
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_with_pictures=3, picture_field="images"))[2:]
    assert "3 of 40 prompts have a place for a picture" in line
    assert "and records have 'images', which nobody reads" in line


def test_tools_of_records_of_which_prompts_do_not_tell_are_a_warning():
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), tools_field="functions"))[2:]
    assert line.startswith("warning     records have 'functions', schemas of tools, of which prompts do not tell")


def test_fewer_records_than_a_step_takes_are_a_warning(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    (line,) = prompt_warnings(CONFIG, tokenizer, [replace(found("Q"), num_records=1)])
    assert "admission.groups_per_step=2, and the datasets have 1 record" in line
    assert [*prompt_warnings(CONFIG, tokenizer, [found("Q")])] == []


def test_a_prompt_that_ends_in_a_blank_which_moves_into_the_answer_is_a_warning(tmp_path):
    def tokenizer(name: str, merges: list[tuple[str, str]]) -> PromptTokenizer:
        letters = {letter: number for number, letter in enumerate("Answer: 7Th")}
        merged = {"".join(pair): len(letters) + number for number, pair in enumerate(merges)}
        (directory := tmp_path / name).mkdir()
        Tokenizer(BPE(letters | merged, merges)).save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text("{}")
        return PromptTokenizer(directory)

    config, merging = build.config(data={"prompt_template": "{prompt}\nAnswer: "}), tokenizer("words", [(" ", "T")])
    (line,) = prompt_warnings(config, merging, [found("Answer: ")])
    assert "ends in a blank (data.prompt_template='{prompt}\\nAnswer: ')" in line
    assert [*prompt_warnings(config, merging, [found("Answer:")])] == []
    assert [*prompt_warnings(config, tokenizer("letters", []), [found("Answer: ")])] == []


def test_tools_that_no_prompt_names_are_a_warning(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    settings = {"task": "regex", "environment": "tools", "use_chat_template": True}
    config = build.config(data=settings, environment={"tools": ["calculator"]})
    (line,) = prompt_warnings(config, tokenizer, [found("Q")])
    assert "the prompt names no calculator" in line
    assert [*prompt_warnings(config, tokenizer, [found("You have a calculator.")])] == []


@pytest.mark.parametrize(("family", "form"), [("qwen3.5", "qwen3_coder"), ("qwen2.5", ""), ("llama3", "")])
def test_calls_in_another_form_than_the_template_s_are_a_warning(tmp_path, family, form):
    """The other two templates of tests write no calls."""
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, family))
    assert form_of_calls(tokenizer) == form
    settings = {"task": "regex", "environment": "tools", "use_chat_template": True}
    for asked, num in (("hermes", 1 if form else 0), ("qwen3_coder", 0)):
        config = build.config(data=settings, environment={"tools": ["calculator"], "call_form": asked})
        lines = [*prompt_warnings(config, tokenizer, [found("You have a calculator.")])]
        assert len(lines) == num
        assert (
            not lines
            or "environment.call_form='hermes', and the chat template writes calls as 'qwen3_coder'" in lines[0]
        )


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("'<tool_call>' + call | tojson + '</tool_call>'", "hermes"),
        ("{'name': call.name, 'parameters': call.arguments} | tojson", "llama3"),
        ("'call ' + call.name", ""),
        ("raise_exception('no calls')", ""),
    ],
)
def test_the_form_of_calls_is_read_off_the_template(tmp_path, written, form):
    calls = "{% for each in message.tool_calls or [] %}{% set call = each.function %}{{ " + written + " }}{% endfor %}"
    template = "{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}: {{ message.content }}" + calls
    template += "</turn>{% endfor %}{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    assert form_of_calls(PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=template))) == form


def test_a_date_in_prompts_is_a_warning_unless_it_is_set(tmp_path):
    template = "{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}"
    make_tokenizer_files(tmp_path, chat_template=template)
    chat = CONFIG.model_copy(update={"data": (CONFIG.data[0].model_copy(update={"use_chat_template": True}),)})
    (line,) = prompt_warnings(chat, PromptTokenizer(tmp_path), [found("Q")])
    assert "writes today's date" in line
    assert [*prompt_warnings(chat, PromptTokenizer(tmp_path, {"day": "1"}), [found("Q")])] == []
    assert [*prompt_warnings(CONFIG, PromptTokenizer(tmp_path), [found("Q")])] == []


def test_thinking_that_is_judged_too_is_a_warning_unless_it_is_left_out(tmp_path):
    thinks = PromptTokenizer(make_tokenizer_files(tmp_path / "thinks", chat_template=CHATML + "<think></think>"))
    plain = PromptTokenizer(make_tokenizer_files(tmp_path / "plain", chat_template=CHATML))

    def config(**changes: object) -> Config:
        data = CONFIG.data[0].model_copy(update={"use_chat_template": True, **changes})
        return CONFIG.model_copy(update={"data": (data,)})

    assert [*prompt_warnings(config(), thinks, [found("Q")])] == [
        "train: regex may judge the model's thinking too; "
        'data.thinking_end = "</think>" leaves it out, if the model thinks'
    ]
    for settings in (
        config(thinking_end="</think>"),
        config(task="math_answer"),
        config(use_chat_template=False),
        config(environment="tools"),
    ):
        assert [*prompt_warnings(settings, thinks, [found("Q")])] == []
    assert [*prompt_warnings(config(), plain, [found("Q")])] == []


def test_a_model_without_an_end_is_a_warning(tmp_path):
    assert stop_tokens(PromptTokenizer(make_tokenizer_files(tmp_path / "model"))) == "stop        '<eos>' (2)"
    nameless = PromptTokenizer(make_tokenizer_files(tmp_path / "nameless", eos_token=None))
    ends = DialogueTemplate(PromptTokenizer(make_tokenizer_files(tmp_path / "chat", chat_template=CHATML)))
    assert stop_tokens(PromptTokenizer(tmp_path / "chat")) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(PromptTokenizer(tmp_path / "chat"), ends) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(nameless).startswith("warning     the model names no end-of-sequence token")


# ------------------- What Megatron's layers do not compute is found by `rlhpc check`, not by ranks that have waited for

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2.5-7B", {"rope_scaling": None}),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Qwen2.5-7B", {"layer_types": ["full_attention"] * 28, "hidden_act": "silu", "use_sliding_window": False}),
    ("Qwen2.5-7B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", **YARN}}),
    ("Qwen2.5-7B", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}),
    ("Olmo-3-7B", {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 5e5}),
    ("Llama-3.1-8B", {"rope_scaling": LLAMA3}),
    ("Qwen3-30B-A3B", {"norm_topk_prob": True}),
]
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2.5-7B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'"),
    (
        "Qwen2.5-7B",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor=0.5",
    ),
    ("Qwen3-30B-A3B", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 20}, "sliding_window=0"),
    ("Olmo-3-7B", {"sliding_window": None}, "sliding_window=None"),
    ("Llama-3.1-8B", {"attention_bias": True}, "attention_bias=True"),
    ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias=True"),
    ("Llama-3.1-8B", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (
        "Qwen2.5-7B",
        {"layer_types": ["full_attention"] * 27 + ["linear_attention"]},
        r"layer_types=\['linear_attention'\]",
    ),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
]


def checked(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Raises what both `rlhpc check` and the trainer say; fails if one of them has no objection."""
    import torch

    from rlhpc.training.megatron.model_config import read_model, transformer_config

    model = make_model_directory(tmp_path / "model", CONFIGS[name] | changes)
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    config = load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"sequence_parallel": True})})
    refusals = []
    for ask in (
        lambda: transformer_config(read_model(model), config.trainer, torch.bfloat16),
        lambda: preflight(config, roles_run_here=False),
    ):
        try:
            ask()
        except ConfigError as error:
            refusals.append(error)
    assert len(refusals) != 1, refusals
    if refusals:
        raise refusals[1]


@pytest.mark.parametrize(("name", "changes"), SUPPORTED)
def test_check_and_trainer_take_the_same_models(tmp_path, name, changes):
    checked(tmp_path, name, changes)


@pytest.mark.parametrize(("name", "changes", "why"), UNSUPPORTED)
def test_check_refuses_what_the_trainer_would_refuse(tmp_path, name, changes, why):
    legal = "which trainer.backend='megatron' does not compute; legal: .*trainer.backend='deepspeed'"
    with pytest.raises(ConfigError, match=rf"model/config\.json: {why}.*, {legal}"):
        checked(tmp_path, name, changes)


# ---------------------------------------------------- What transformers makes of a model, beside what a run makes of it

LOST = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.starts
def test_words_that_the_library_parts_otherwise_are_told(tmp_path):
    """Of qwen2, transformers takes its own class whatever tokenizer_config.json names."""
    model = make_tiny_checkpoint(tmp_path, "qwen2")
    tokenizer = PromptTokenizer(model)
    (line,) = other_tokens(model, tokenizer, ["1+1=", "a b"])
    assert "AutoTokenizer takes Qwen2Tokenizer for this model, and reads the prompt 'a b' as 2 tokens" in line
    assert "by tokenizer.json, as a run reads it, it is 3" in line
    (line,) = other_tokens(model, tokenizer, ["1+1="])
    assert 'reads the text "The answer is 12345' in line


@pytest.mark.starts
def test_a_family_whose_class_is_respected_is_read_alike(tmp_path):
    model = make_tiny_checkpoint(tmp_path, "llama")
    assert other_tokens(model, PromptTokenizer(model), ["1+1=", "a b"]) == []


@pytest.mark.starts
def test_a_tokenizer_that_the_library_does_not_load_is_told(tmp_path):
    model = make_tiny_checkpoint(tmp_path, "llama")
    document = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(document | {"hidden_size": "wide"}))
    (line,) = other_tokens(model, PromptTokenizer(model))
    assert "does not load it: " in line
    assert "hidden_size" in line


@pytest.mark.starts
def test_a_tensor_that_the_library_would_make_up_is_refused_in_any_family(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Olmo2Config(**sizes, num_key_value_heads=2, intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    refuse_made_up_tensors(tmp_path, document)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != LOST}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"no tensor {LOST}, for which loaders would make up numbers"):
        refuse_made_up_tensors(tmp_path, document)


# ---------------------------- Usual values of keys, and who warns of others: tests/golden/mistakes.md shows them

FIELDS = {
    f"{section}.{key}": field for section, model in sections().items() for key, field in model.model_fields.items()
}

RUN_FILES = [
    path
    for path in (*sorted((ROOT / "configs").rglob("*.toml")), *sorted((ROOT / "examples").glob("*.toml")))
    if "[trainer]" in path.read_text(encoding="utf-8") and "[cluster]" not in path.read_text(encoding="utf-8")
]


def numbers(annotation: object) -> list[tuple[object, list[object]]]:
    """Return type and constraints of each number among the alternatives of a type."""
    if annotation in (int, float):
        return [(annotation, [])]
    if typing.get_origin(annotation) is typing.Annotated:
        base, *more = typing.get_args(annotation)
        own = [each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else (one,))]
        return [(kind, [*inner, *own]) for kind, inner in numbers(base)]
    return [each for one in typing.get_args(annotation) for each in numbers(one)]


def is_open(field: FieldInfo) -> bool:
    """Whether a number may be as large as it likes, or as near to 0."""
    for kind, inner in numbers(field.annotation):
        own = [*field.metadata, *inner]
        has_top = any(isinstance(each, Le | Lt) for each in own)
        has_floor = any(
            isinstance(each, Ge) or (isinstance(each, Gt) and (kind is int or each.gt != 0)) for each in own
        )
        if not (has_top and has_floor):
            return True
    return False


@pytest.fixture
def desk(lab, tmp_path, monkeypatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(lab, tmp_path)


def test_only_keys_that_hold_numbers_have_usual_values():
    marked = [key for key, field in FIELDS.items() if marks_of(field, Usual)]
    assert len(marked) > 100
    assert [key for key in marked if not numbers(FIELDS[key].annotation)] == []


def test_every_number_without_a_bound_on_some_side_has_usual_values_or_is_excused():
    for key, field in FIELDS.items():
        marks = (*marks_of(field, Usual), *marks_of(field, AnySize))
        assert len(marks) <= 1, key
        assert marks or not is_open(field), key


def test_every_default_is_usual():
    odd = {
        key: field.default
        for key, field in FIELDS.items()
        for usual in marks_of(field, Usual)
        if isinstance(field.default, int | float) and field.default not in usual
    }
    assert odd == {}


@pytest.mark.parametrize("run_file", RUN_FILES, ids=lambda path: path.name)
def test_run_files_of_ours_have_usual_values(run_file):
    assert unusual(load_config(run_file)) == []


def test_values_among_several_are_named_with_their_place(desk):
    one, two = ({"path": "train.jsonl", "task": "regex", "name": name} for name in ("a", "b"))
    desk.settings["data"] = [one, two | {"weight": 1e-30}]
    desk.write_run_file()
    assert [line.partition(" is unusual")[0] for line in unusual(load_config(desk.run_file))] == ["data.1.weight=1e-30"]


def test_a_local_run_warns_before_it_makes_anything(desk, capsys):
    desk.settings["algorithm"] = {"kl_coefficient": 100.0}
    desk.write_run_file()
    (desk.root / "runs" / "first").mkdir(parents=True)
    (desk.root / "runs" / "first" / "notes.txt").write_text("not a run")  # so that the run is refused afterwards
    assert main(["run", "run.toml"]) != 0
    assert "warning: algorithm.kl_coefficient=100 is unusual (usual: 1e-6 to 1, or 0)" in capsys.readouterr().err


@pytest.mark.starts
def test_a_submission_warns_before_it_asks_slurm(desk, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(desk.root))  # no sbatch
    desk.settings["algorithm"] = {"kl_coefficient": 100.0}
    desk.write_run_file()
    (desk.root / "site.toml").write_text(f'{SITE}[common]\ntime = "1:00:00"\n')
    assert main(["submit", "run.toml", "site.toml"]) != 0
    said = capsys.readouterr()
    assert "warning     algorithm.kl_coefficient=100 is unusual (usual: 1e-6 to 1, or 0)" in said.out + said.err
