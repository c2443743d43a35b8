"""configs/other_systems.md says of keys of other systems what a message about them says: both have one table.

`python -m tests.unit.test_coming_from` prints the tables, and that of reward functions in docs/coming_from.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from rlhpc.config.file import sections, settled
from rlhpc.config.foreign import SUPERVISED, SYSTEMS, USUAL, Counterpart
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.registry import FOREIGN, Foreign, foreign_reward, wrapper
from tests.unit.doc_pages import ROOT

PAGE, KEYS = ROOT / "docs" / "coming_from.md", ROOT / "configs" / "other_systems.md"
OF_THE_STAGE = "## TRL: SFTTrainer, DPOTrainer (beside `[[demonstrations]]`)"
LEAST = 40  # keys of each system


def table_of(keys: Mapping[str, Counterpart]) -> str:
    """Markdown: their key, ours, a note."""
    rows = [f"| `{theirs}` | {_ours(each.ours)} | {_shown(each)} |" for theirs, each in keys.items()]
    return "\n".join(["| theirs | here | |", "|---|---|---|", *rows])


def _ours(key: str) -> str:
    if not key:
        return "no counterpart"
    return key if key.startswith("`") else f"`{key}`"


def _shown(each: Counterpart) -> str:
    return each.note if each.ours or not each.note else f"because {each.note}"


def table_of_rewards() -> str:
    """Markdown: the parameters of a reward function of theirs, and the function here that calls it."""
    rows = {f"{each.system}: `{', '.join(each.arguments or each.named)}`": each for each in FOREIGN}
    lines = [f"| {theirs} | {_called(each)} |" for theirs, each in rows.items()]
    return "\n".join(["| parameters | here |", "|---|---|", *lines])


def _called(each: Foreign) -> str:
    note = f"; {each.note}" if each.note else ""
    return f"`{wrapper('f', each, [*each.arguments])}`{note}" if each.ours else each.note


def test_the_page_has_the_reward_functions_that_messages_know() -> None:
    assert table_of_rewards() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("each", FOREIGN, ids=lambda each: f"{each.system}: {each.named[-1]}")
def test_the_line_that_calls_a_reward_function_of_theirs_calls_it(each: Foreign) -> None:
    if not each.ours:
        return
    record = {name: name for name in ("data_source", "verification_info", "prompt", "answer")}
    records = [record | {"reward_model": {"ground_truth": "7"}}]
    given: dict[str, Any] = {}
    names: dict[str, Any] = {"f": lambda **arguments: given.update(arguments), "parser": None}
    exec(wrapper("f", each, [*each.arguments]), names)
    of_ours = {"completion": "c", "completions": ["c"], "record": records[0], "records": records}
    names["judge"](*(of_ours[name] for name in each.ours.split(", ")))
    assert {*given} == {*each.arguments}
    assert "c" in given.values() or ["c"] in given.values() or ["promptc"] in given.values()


@pytest.mark.parametrize(
    "names", [("completion", "reference"), ("solution_str", "ground_truth"), ("completion", "answer"), ("a", "b")]
)
def test_a_function_of_two_parameters_is_called_as_it_is(names: tuple[str, ...]) -> None:
    assert foreign_reward("f", names, names) == ""
    assert foreign_reward("f", names, (*names, "info", "parser", "state")) == ""  # with defaults
    assert foreign_reward("f", (), ()) == ""  # unknown


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_the_table_that_messages_use(system: str) -> None:
    assert len(SYSTEMS[system]) >= LEAST
    assert f"## {system}\n\n{table_of(SYSTEMS[system])}\n" in KEYS.read_text(encoding="utf-8")


def test_the_page_has_the_keys_of_supervised_fine_tuning_that_messages_use() -> None:
    assert f"{OF_THE_STAGE}\n\n{table_of(SUPERVISED)}\n" in KEYS.read_text(encoding="utf-8")


@pytest.mark.parametrize("theirs", SUPERVISED)
def test_a_message_about_a_key_of_supervised_fine_tuning_never_names_one_of_rl(theirs: str) -> None:
    said, each = refusal(f"sft.{theirs}"), SUPERVISED[theirs]
    assert (f"(did you mean {each.ours}?" if each.ours else each.note) in said
    if theirs in ("packing", "assistant_only_loss", "reference_free"):
        assert each.note in refusal(f"trainer.{theirs}")


@pytest.mark.parametrize("keys", [*SYSTEMS.values(), SUPERVISED, USUAL])
def test_what_takes_the_place_of_a_key_is_a_key_or_a_command(keys: Mapping[str, Counterpart]) -> None:
    for theirs, each in keys.items():
        assert each.ours or each.note, theirs
        if each.ours and not re.fullmatch(r"`rlhpc [a-z].*`", each.ours):
            section, _, key = each.ours.partition(".")
            assert key.removeprefix("NAME.") in sections()[section].model_fields, (theirs, each.ours)


@pytest.mark.parametrize(
    ("theirs", "each"), [(theirs, each) for keys in SYSTEMS.values() for theirs, each in keys.items()]
)
def test_a_message_about_a_key_says_what_the_page_says(theirs: str, each: Counterpart) -> None:
    """As an override, with the name that the other system has."""
    said = refusal(theirs)
    if each.ours == theirs:
        return
    section, _, key = each.ours.partition(".")
    if theirs.partition(".")[0] in sections() and "unknown key" not in said and "unknown section" not in said:
        assert theirs in said  # our own key, of that name
    elif each.ours:
        assert each.ours in said or (key and key in said and section in said), said
    else:
        assert each.note in said


def refusal(word: str) -> str:
    document: dict[str, Any] = {"run": {"name": "a"}}
    with pytest.raises(ConfigError) as refused:
        settled(document, [f"{word}=17"], "run.toml")
    return "\n".join(line for line in str(refused.value).splitlines() if "missing; it has no default" not in line)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lora_rank", "(did you mean lora.rank? 0: all weights are trained"),
        ("trainer.lora_dropout", "(no counterpart, because there is no dropout"),
        ("report_to", "(did you mean `rlhpc metrics RUN_DIR --wandb DIR`?"),
        ("wandb", "(did you mean `rlhpc metrics RUN_DIR --wandb DIR`?"),
        ("use_wandb", "(did you mean `rlhpc metrics RUN_DIR --wandb DIR`?"),
        ("run.wandb", "(did you mean `rlhpc metrics RUN_DIR --wandb DIR`?"),
        ("trainer.gradient_accumulation_steps", "(did you mean trainer.token_budget?"),
        ("generation.n", "(did you mean admission.group_size?)"),
        ("generation.stop_strings", "(did you mean generation.stop?"),
        ("trainer.total_epochs", "(did you mean run.num_steps?"),
        ("trainer.group_size", "(did you mean admission.group_size?)"),
        ("actor_rollout_ref.rollout.n", "of another system; here actor_rollout_ref.rollout.n: admission.group_size"),
        ("trainer.optim.lr", "of another system; here trainer.optim.lr: trainer.learning_rate"),
    ],
)
def test_a_key_of_another_system_is_answered_with_ours(word: str, said: str) -> None:
    assert said in refusal(word)


if __name__ == "__main__":
    sys.stdout.write(f"## Reward functions\n\n{table_of_rewards()}\n\n")
    for name, keys in SYSTEMS.items():
        sys.stdout.write(f"## {name}\n\n{table_of(keys)}\n\n")
    sys.stdout.write(f"{OF_THE_STAGE}\n\n{table_of(SUPERVISED)}\n")
