"""The demo: its problems, tokenizers and warm start, its closing words, and the stand-in for a real model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

from launch.cli import main
from launch.demo import lookup, stages
from launch.demo import run as demo
from launch.demo.stand_in import END_ID, make_byte_tokenizer, make_stand_in
from launch.demo.task import (
    BOS_ID,
    CHARACTERS,
    EOS_ID,
    MAX_ANSWER_CHARACTERS,
    MAX_DIGITS,
    MAX_PROMPT_CHARACTERS,
    MIN_DIGITS,
    PAD_ID,
    VOCAB_SIZE,
    Problem,
    careless_answer,
    draw_learning_curve,
    draw_problem,
    encode,
    make_tokenizer,
    problems,
    running_mean,
    save_tokenizer,
    write_dataset,
)
from launch.demo.warm_start import MARKER, WarmStartRecipe, make_model
from launch.plan.gpu_map import VisibleGpus, map_gpus
from launch.run_files.run_state import figures_table
from rlhpc.config.file import load_config
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.record_source import read_records
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments import container
from rlhpc.environments.tools import ToolEnvironment
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from rlhpc.rewards.environments import VARIABLE
from rlhpc.rewards.math_answer import integer_arithmetic
from tests.task_directories import reachable_directory
from tests.tiny_models import make_tiny_checkpoint

# ----------------------------------------------------- The demo's problems, their worked answers and the careless ones

drawn_problems = st.integers(0, 2**32).map(lambda seed: draw_problem(random.Random(seed)))


def worked_answer(problem):
    """Answer with all its columns, without a slip."""
    return careless_answer(problem, 0.0, random.Random(0))


def test_the_example_of_the_module_docstring_holds():
    assert worked_answer(Problem(4827, 9356)) == "7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183"


@given(drawn_problems)
def test_the_last_field_of_a_worked_answer_is_the_sum(problem):
    assert worked_answer(problem).split(";")[-1] == str(problem.left + problem.right) == problem.answer


@given(drawn_problems)
def test_every_column_of_a_worked_answer_adds_up(problem):
    for column in worked_answer(problem).split(";")[:-1]:
        question, written = column.split("=")
        assert sum(map(int, question.split("+"))) == int(written)


@given(drawn_problems, st.integers())
def test_a_careless_pupil_who_never_slips_answers_as_worked(problem, seed):
    assert careless_answer(problem, 0.0, random.Random(seed)) == worked_answer(problem)


@given(drawn_problems, st.integers())
def test_slips_keep_the_form_of_the_answer(problem, seed):
    num_columns = len(str(problem.left))
    fields = careless_answer(problem, 1.0, random.Random(seed)).split(";")
    assert len(fields) == num_columns + 1
    for column in fields[:-1]:
        question, written = column.split("=")
        assert 0 <= int(written) <= 19
        assert abs(int(written) - sum(map(int, question.split("+")))) in (1, 10)


@given(drawn_problems, st.integers())
def test_no_prompt_or_answer_is_longer_than_announced(problem, seed):
    assert len(problem.prompt) <= MAX_PROMPT_CHARACTERS
    assert len(careless_answer(problem, 0.5, random.Random(seed))) <= MAX_ANSWER_CHARACTERS


def test_the_reward_agrees_with_the_task_about_right_and_wrong():
    rng = random.Random(0)
    for problem in problems(0, 200):
        assert integer_arithmetic(worked_answer(problem), problem.answer).is_correct
        written = careless_answer(problem, 0.3, rng)
        assert integer_arithmetic(written, problem.answer).is_correct == (written.split(";")[-1] == problem.answer)


def test_right_answers_become_as_rare_as_the_slip_rate_says():
    rng = random.Random(0)
    right = [careless_answer(p, 0.25, rng).endswith(f";{p.answer}") for p in problems(1, 3000)]
    expected = sum(0.75**n for n in range(MIN_DIGITS, MAX_DIGITS + 1)) / (MAX_DIGITS - MIN_DIGITS + 1)
    assert sum(right) / len(right) == pytest.approx(expected, abs=0.03)


def test_problems_depend_on_the_seed_alone_and_do_not_repeat():
    assert problems(3, 500) == problems(3, 500) != problems(4, 500)
    assert len(set(problems(3, 500))) == 500


def test_training_and_held_out_problems_are_disjoint():
    assert not set(problems(0, 5000)) & set(problems(1, 500, held_out=True))


def test_all_lengths_occur_about_equally_often():
    lengths = [len(str(p.left)) for p in problems(0, 3000)]
    for num_digits in range(MIN_DIGITS, MAX_DIGITS + 1):
        assert lengths.count(num_digits) / 3000 == pytest.approx(1 / (MAX_DIGITS - MIN_DIGITS + 1), abs=0.04)


def test_the_dataset_is_json_lines_of_prompt_and_answer(tmp_path):
    path = tmp_path / "new" / "train.jsonl"
    write_dataset(path, 20, seed=5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"prompt": p.prompt, "answer": p.answer} for p in problems(5, 20)]


# ----------------------------------------------------- The character tokenizer, in memory and read back from its files

TOKENIZER = make_tokenizer()


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_texts_come_back_as_they_went_in_one_token_a_character(text):
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text)
    assert TOKENIZER.decode(token_ids) == text


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_the_short_way_to_encode_agrees_with_the_tokenizer(text):
    assert encode(text) == TOKENIZER.encode(text)


def test_the_short_way_refuses_a_character_without_a_token():
    with pytest.raises(KeyError):
        encode("four")


def test_every_row_of_the_embedding_is_a_token():
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert VOCAB_SIZE % 8 == 0


def test_the_saved_files_load_in_both_libraries_with_their_special_tokens(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    problem = problems(0, 1)[0]
    text = problem.prompt + worked_answer(problem)
    through_transformers = AutoTokenizer.from_pretrained(tmp_path)
    through_tokenizers = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert through_transformers.encode(text) == through_tokenizers.encode(text).ids == encode(text)
    assert through_transformers.eos_token_id == EOS_ID
    assert through_transformers.bos_token_id == BOS_ID
    assert through_transformers.pad_token_id == PAD_ID
    assert through_tokenizers.decode([*encode(text), EOS_ID], skip_special_tokens=True) == text


# --------------------------------------- The warm start, with a model so small and steps so few that it learns nothing

SHORT = WarmStartRecipe(
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_kv_heads=1,
    max_clean_steps=4,
    careless_steps=2,
    batch_size=4,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("warm")
    steps = []
    result = make_model(directory, SHORT, on_step=lambda phase, done, loss: steps.append((phase, done, loss)))
    return directory, result, steps


def test_the_checkpoint_loads_as_any_other(made):
    directory, result, _ = made
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.generation_config.eos_token_id == EOS_ID
    assert model.num_parameters() == result.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_every_step_is_reported_with_its_phase(made):
    _, _, steps = made
    assert [step[:2] for step in steps] == [
        *(("facts", i) for i in range(1, 5)),
        *(("carelessness", i) for i in (1, 2)),
    ]
    assert all(0 < loss < 10 for *_, loss in steps)


def test_a_finished_model_is_used_again(made):
    directory, result, _ = made
    before = (directory / "model.safetensors").stat().st_mtime_ns
    again = make_model(directory, SHORT)
    assert again == dataclasses.replace(result, is_reused=True)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_recipe_makes_the_same_weights_and_leaves_torch_as_it_was(made, tmp_path):
    directory, _, _ = made
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    make_model(tmp_path, SHORT)
    assert (tmp_path / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("damage", ["other recipe", "not JSON", "missing", "not ours"])
def test_a_directory_without_this_recipes_marker_is_made_anew(made, tmp_path, damage):
    recipe = dataclasses.replace(SHORT, max_clean_steps=1, careless_steps=0)
    if damage == "other recipe":
        make_model(tmp_path, dataclasses.replace(recipe, seed=1))
    elif damage != "missing":
        (tmp_path / MARKER).write_text({"not JSON": "{", "not ours": "[]"}[damage])
    assert not make_model(tmp_path, recipe).is_reused
    assert json.loads((tmp_path / MARKER).read_text())["fingerprint"] == recipe.fingerprint


def test_the_clean_phase_ends_once_the_facts_are_mastered(tmp_path):
    steps = []
    recipe = dataclasses.replace(SHORT, mastered_loss=100.0, careless_steps=1)  # any model has mastered that
    make_model(tmp_path, recipe, on_step=lambda phase, done, loss: steps.append(phase))
    assert steps == ["carelessness"]


def test_every_field_of_the_recipe_changes_its_fingerprint():
    for field in dataclasses.fields(WarmStartRecipe):
        changed = dataclasses.replace(SHORT, **{field.name: getattr(SHORT, field.name) + 1})
        assert changed.fingerprint != SHORT.fingerprint


# ---------------------------------------------------------------------------------------------------- The demo of tools


def tokenizer_in(directory: Path) -> PromptTokenizer:
    lookup.make_tokenizer().save_pretrained(directory)
    return PromptTokenizer(directory)


def test_the_warm_start_teaches_the_tokens_of_a_dialogue(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    template = DialogueTemplate(tokenizer)
    dialogue = lookup._dialogue(random.Random(3), searches=True)
    ids, first = dialogue.token_ids.tolist(), int(dialogue.loss_mask.argmax())
    key = tokenizer.decode(ids[: first - 2])
    turn = ids[first : ids.index(lookup.EOS_ID) + 1]
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": f"{key} 305"}) + "\n")
    settings = EnvironmentConfig(tools=["search"], corpus=str(tmp_path / "documents.jsonl"))
    step = asyncio.run(ToolEnvironment.open(settings).step(tokenizer.decode(turn[:-1], keep_special_tokens=True)))
    assert [message["content"] for message in step.messages] == [f"{key} 305"]
    before = [*template.prompt(key).tolist(), *template.opening(()).tolist()]
    assert before == ids[:first]
    read = template.observation(
        [{"role": "tool", "content": f"{key} {tokenizer.decode(ids[-4:-1])}"}], last_token=turn[-1]
    )
    assert [*before, *turn, *read.tolist(), *ids[-4:]] == ids
    assert dialogue.token_ids[dialogue.loss_mask].tolist() == [*turn, *ids[-4:]]


def test_a_search_is_a_few_tokens_and_reads_as_it_was_written(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    text = f"{lookup.CALL}{lookup.HEAD}4827{lookup.TAIL}{lookup.CALL_END}"
    tokens = tokenizer.encode_rendered(text)
    assert len(tokens) == 8
    assert tokenizer.decode(tokens, keep_special_tokens=True) == text
    assert tokens.max() < lookup.SEARCH.vocab_size


@pytest.mark.starts
@pytest.mark.parametrize(("looks", "reward"), [(True, 1.0), (False, 0.0)])
def test_the_warm_start_for_containers_teaches_the_tokens_of_a_dialogue(tmp_path, monkeypatch, looks, reward):
    tokens = lookup.SHELL.tokens
    (key,) = lookup.codes(7, 1)
    code = lookup.codes(7, 1)[key] if looks else "999"  # which it cannot know
    with reachable_directory() as base:
        lookup.write_tasks(base, 1, seed=7)
        lookup.make_tokenizer(lookup.SHELL).save_pretrained(base / "model")
        tokenizer = PromptTokenizer(base / "model")
        own = {"images": str(base / "images"), "root_cache": str(base / "cache"), "tests_s": 60.0, "command_s": 60.0}
        monkeypatch.setenv(VARIABLE, json.dumps({"container": own}))
        container.place.cache_clear()
        (record,) = read_records(base / "tasks")
        task = container.ContainerEnvironment(EnvironmentConfig(tools=["shell"]))
        assert asyncio.run(task.reset(record.fields)) == ()
        first, *rest = lookup.SHELL.dialogue(key, code, looks)
        assert "".join(first) == f"{record.fields['prompt']}\n>"
        for turn, observation in zip(rest[::2], [*rest[1::2], None], strict=True):
            ids = np.asarray([tokens.index(each) for each in turn[:-1] if each != "<eos>"], np.int32)
            step = asyncio.run(task.step(tokenizer.decode(ids, keep_special_tokens=True)))
            if observation is not None:
                assert f":{step.messages[0]['content']}\n>" == "".join(observation)
        asyncio.run(task.close())
        container.place().containers.close()
        container.place.cache_clear()
    assert (step.is_done, step.reward) == (True, reward)


def test_every_question_has_one_document_and_answers_cannot_be_guessed(tmp_path):
    lookup.write_dataset(tmp_path, 300, seed=1)
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    documents = [json.loads(line)["text"] for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert sorted(f"{each['prompt']} {each['answer']}" for each in records) == documents
    assert len({each["prompt"] for each in records}) == 300
    assert len({each["answer"] for each in records}) > 200
    assert lookup.codes(1, 300) != lookup.codes(2, 300)


# ----------------------------------------------------------------------------------- The closing table and the picture

SUMMARY = {
    "steps": 160, "rollouts_trained": 15_360, "reward_first_tenth": 0.4296, "reward_last_tenth": 0.9164,
    "staleness_max": 4, "staleness_bound": 4, "rollouts_spanning_update": 0.418, "packing_fill": 0.847,
    "generator_tokens_per_s": 9758.8, "trainer_tokens_per_s": 8130.2, "generator_idle_ratio": 0.046,
    "trainer_idle_ratio": 0.255, "wall_s": 112.1,
}  # fmt: skip


def test_the_table_is_aligned_and_says_every_figure():
    lines = figures_table(SUMMARY).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == len(SUMMARY) + 2
    text = "\n".join(lines)
    for figure in ("160", "15,360", "0.430", "0.916", "42%", "85%", "9,759", "8,130", "5%", "26%", "112"):
        assert figure in text


@pytest.mark.parametrize("value", [None, float("nan"), "?"])
def test_a_figure_that_is_unknown_is_left_out(value):
    text = figures_table({**SUMMARY, "reward_last_tenth": value})
    assert "last tenth" not in text
    assert "first tenth" in text


def test_steps_that_were_skipped_are_in_the_table_and_zero_of_them_are_not():
    assert "skipped" not in figures_table({**SUMMARY, "skipped_steps": 0})
    (line,) = (each for each in figures_table({**SUMMARY, "skipped_steps": 4}).splitlines() if "skipped" in each)
    assert line.split()[-1] == "4"


def test_the_running_mean_is_shorter_at_both_ends():
    assert running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "learning_curve.png"
    rng = np.random.default_rng(0)
    versions = range(160)
    draw_learning_curve(path, versions, [0.9 - 0.6 * np.exp(-v / 40) + rng.normal(0, 0.03) for v in versions])
    assert path.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------- What the demo says of a run that was stopped


def test_a_demo_that_was_stopped_in_good_order_says_so_instead_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "make_model", lambda *_, **__: SimpleNamespace(num_parameters=1, accuracy=0.3))
    overrides = [f"run.directory={tmp_path / 'run'}", f"data.path={tmp_path / 'train.jsonl'}"]
    assert demo.run_demo(lambda config: 0, overrides=overrides) == 0
    said = capsys.readouterr().err
    assert "stopped early" in said
    assert "3/3  results" not in said


@pytest.mark.parametrize("words", [(), ("0",), ("0", "1"), ("GPU-1", "GPU-2", "GPU-3", "GPU-4")])
def test_the_demo_finds_a_place_on_any_number_of_gpus(words: tuple[str, ...]) -> None:
    gpus = VisibleGpus(words, None)
    plan = map_gpus(load_config(demo.RUN_FILE), gpus)
    assert len(plan.devices) == (2 if words else 0), plan


# ----------------------------------------------------- A tiny model in the place of a real one: any text, any run file

BYTES = make_byte_tokenizer()
SEARCH = {"type": "function", "function": {"name": "search", "description": "Find it.", "parameters": {}}}


@given(st.text(max_size=60))
def test_every_text_has_tokens_and_comes_back_from_them(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


def test_the_template_shows_system_message_tools_and_turns() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    answered = [*turns, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    text = BYTES.apply_chat_template(answered, tools=[SEARCH], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\nTools")
    assert '"name": "search"' in text
    assert text.count("Be brief.") == 1
    begun = BYTES.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = BYTES.apply_chat_template(answered, tokenize=False, add_generation_prompt=True)
    assert begun.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert whole.startswith(begun)  # as dialogues need it: what was sampled stays where it was


@pytest.mark.starts
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
        (["--model-only", "new", "--like", "nowhere"], "--like nowhere: no such directory"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *words]) == EXIT_CONFIG
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("8+3+0=11;4+9+1=14;7+7+1=15;1541", 1.0),
        ("8+3+0=11;4+9+1=13;7+7+1=15;1531", 2 / 3),  # a slip
        ("8+3+0=11;4+9+1=14;", 2 / 3),  # cut off
        ("8+3+0=11;3+9+1=13;7+7+1=15;1531", 2 / 3),  # of another problem
        ("141", 0.0),
        ("", 0.0),
        (";;;;", 0.0),
        ("8+3+0=11;" * 9, 1 / 3),
    ],
)
def test_a_judge_learns_the_share_of_right_columns(answer, share):
    assert stages.share_of_right_columns(Problem(748, 793), answer) == pytest.approx(share)


def test_demonstrations_are_careless_answers_to_problems_that_are_not_held_out(tmp_path):
    stages.write_demonstrations(tmp_path / "a" / "b.jsonl", 200, stages.StagesRecipe())
    records = [json.loads(line) for line in (tmp_path / "a" / "b.jsonl").read_text().splitlines()]
    totals = [
        (sum(map(int, each["prompt"][:-1].split("+"))), each["completion"].rpartition(";")[2]) for each in records
    ]
    assert 0.2 < sum(str(total) == said for total, said in totals) / len(totals) < 0.5
    assert len({each["prompt"] for each in records}) == 200


def test_what_a_judge_reads_is_what_it_was_taught(tmp_path):
    """A template file loses a line's end at its end."""
    save_tokenizer(stages.judge_tokenizer(), tmp_path)
    answer = "748+793=8+3+0=11;"
    told = PromptTokenizer(tmp_path).chat_template.render([{"role": "user", "content": answer}])
    assert told == f"{answer}\n"


def test_a_demo_of_stages_makes_a_reward_model_and_a_judge(tmp_path):
    text = (demo.RUN_FILE.with_name("demo_stages.toml")).read_text()
    begin, end = text.index('[[service]]\nname = "strict"'), text.index("[reward_model]")
    text = text[:begin] + text[end:]
    begin, end = text.index("[judge]"), text.index("# Each worker")
    (run_file := tmp_path / "demo.toml").write_text(
        f'{text[:begin]}[judge]\nendpoint = "http://x/v1"\nmodel = "m"\n\n{text[end:]}'
    )
    with pytest.raises(ConfigError, match="with kind='reward' and one with kind='judge', each at a path"):
        demo.run_demo(lambda _: 0, run_file)
