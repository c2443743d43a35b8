"""A tiny model in the place of a real one: any text, any run file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Gemma3TextConfig

from launch.cli import main
from launch.demo.stand_in import END_ID, make_byte_tokenizer, make_stand_in
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.tiny_models import make_tiny_checkpoint

TOKENIZER = make_byte_tokenizer()
SEARCH = {"type": "function", "function": {"name": "search", "description": "Find it.", "parameters": {}}}


@given(st.text(max_size=60))
def test_every_text_has_tokens_and_comes_back_from_them(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_template_shows_system_message_tools_and_turns() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    answered = [*turns, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    text = TOKENIZER.apply_chat_template(answered, tools=[SEARCH], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\nTools")
    assert '"name": "search"' in text
    assert text.count("Be brief.") == 1
    begun = TOKENIZER.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = TOKENIZER.apply_chat_template(answered, tokenize=False, add_generation_prompt=True)
    assert begun.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert whole.startswith(begun)  # as dialogues need it: what was sampled stays where it was


def test_one_command_writes_a_model_for_which_check_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run_file = tmp_path / "train.jsonl", tmp_path / "run.toml"
    data.write_text(
        "".join(f'{{"question": "Wie viel macht {n} × 7, „genau“?", "answer": "#### {7 * n}"}}\n' for n in range(40))
    )
    run_file.write_text(
        f'[run]\nname = "try"\nnum_steps = 2\ndirectory = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n'
        f'dtype = "float32"\n[data]\npath = "{data}"\ntask = "math_answer"\nprompt_template = "{{question}}"\n'
        'system_prompt = "Rechne."\nuse_chat_template = true\n'
        "[generation]\nmax_prompt_tokens = 256\nmax_completion_tokens = 64\n"
        "[admission]\ngroups_per_step = 2\ngroup_size = 4\nmax_staleness = 1\n[trainer]\ntoken_budget = 1024\n"
    )
    assert main(["demo", "--model-only", str(tmp_path / "model")]) == 0
    assert f"model.path={tmp_path / 'model'}" in capsys.readouterr().out
    assert main(["check", str(run_file)]) == 0
    out = capsys.readouterr().out
    assert "Rechne." in out
    assert f"({END_ID})" in out


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_stand_in_of_a_model_has_its_architecture_and_its_tokenizer(tmp_path: Path, family: str) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", family, hidden=128, layers=4, heads=4)
    (model / "model.safetensors").unlink()  # of a model of 60 GB one copies the small files
    assert make_stand_in(tmp_path / "small", model) > 0
    config, theirs = (json.loads((at / "config.json").read_bytes()) for at in (tmp_path / "small", model))
    assert config["architectures"] == theirs["architectures"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 64)
    assert config["vocab_size"] == theirs["vocab_size"]
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    text = "two words"
    ours, of_model = (AutoTokenizer.from_pretrained(at)(text).input_ids for at in (tmp_path / "small", model))
    assert ours == of_model == Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def test_of_layers_of_several_kinds_one_of_each_is_left(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=96, num_hidden_layers=12, layer_types=kinds, architectures=["Gemma3ForCausalLM"]
    )
    config.save_pretrained(tmp_path / "model")
    make_stand_in(tmp_path / "small", tmp_path / "model")
    small = json.loads((tmp_path / "small" / "config.json").read_bytes())
    assert small["layer_types"] == ["sliding_attention", "full_attention"]


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already; legal: a new or empty directory"):
        make_stand_in(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--like", "model"], "has a meaning only with --model-only DIR"),
        (["--model-only", "new", "--slurm"], "writes a model and runs nothing"),
        (["--model-only", "new", "run.seed=3"], "writes a model and runs nothing"),
        (["--model-only", "new", "--like", "nowhere"], "--like nowhere: no small model can be made of it"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *words]) == EXIT_CONFIG
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
