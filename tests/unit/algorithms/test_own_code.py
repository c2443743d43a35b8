"""A loss and an estimator of the user's own are tried before anything is trained with them."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_rows import ragged_row
from torch.utils._python_dispatch import TorchDispatchMode

from launch.checks import own_code
from rlhpc.algorithms.estimators import make_estimator
from rlhpc.algorithms.objectives import doubts_of_loss, load_own_loss
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import ADVANTAGES, LOSSES, AlgorithmConfig
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.metrics.names import find_metric
from rlhpc.protocol.contracts import AdvantageEstimator, PolicyLoss, RewardFunction
from rlhpc.protocol.environment import Environment, Step
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.registry import resolve

GOOD = """
import torch

def loss(current, row):
    kept = torch.where(row.loss_mask, current, 0.0)
    advantages = torch.where(row.loss_mask, row.advantages * row.weights, 0.0)
    return -(advantages * kept).sum(), {"kept": row.loss_mask.sum().float()}

def median(rewards, lengths):
    import numpy as np
    return rewards - np.median(rewards)
"""
RATIO = """
import torch

def ratio(above, below, row):
    above, below = (torch.where(row.loss_mask, values, 0.0) for values in (above, below))
    return (above - below).exp()

"""
BROKEN_LOSSES = {
    "a mean": (
        "torch.where(row.loss_mask, current, 0.0).mean(), {}",
        "two sequences apart give -2.5, together -1.25: not a sum over sequences",
    ),
    "nan behind the mask": ("-(row.loss_mask * row.advantages * current).sum(), {}", "nan off the loss mask changes"),
    "hidden nan": (
        "torch.where(row.loss_mask, current, 0.0).nan_to_num().sum(), {}",
        "a log-probability of nan gives a finite loss",
    ),
    "metrics per token": (
        "torch.where(row.loss_mask, current, 0.0).sum(), {'ratio': current.detach()}",
        "metrics are not scalars",
    ),
    "metrics with gradient": (
        "(s := torch.where(row.loss_mask, current, 0.0).sum()), {'s': s}",
        "metrics are not scalars without gradient",
    ),
    "fails without loss tokens": (
        "torch.where(row.loss_mask, row.weights * current, 0.0).sum(), {'highest': row.weights[row.loss_mask].max()}",
        r"tried on a row without loss tokens, .*: RuntimeError\(.max",
    ),
    "nan without loss tokens": (
        "torch.where(row.loss_mask, row.weights * current, 0.0).sum() / row.loss_mask.any(), {}",
        "tried on a row without loss tokens, as a rank without samples has: loss or gradient is not 0",
    ),
    "raises": ("undefined, {}", r"tried on a row of four tokens: NameError\("),
    "no gradient": (
        "-(row.advantages * current.detach()).sum(), {}",
        r"the loss carries no gradient; legal: a torch expression of `current`",
    ),
    "a gradient of something else": (
        "row.weights.clone().requires_grad_().sum(), {}",
        r"the loss carries no gradient; legal: a torch expression of `current`",
    ),
    "no gradient without loss tokens": (
        "(torch.where(row.loss_mask, row.weights * current, 0).sum() if row.loss_mask.any() else torch.zeros(())), {}",
        "without loss tokens, .*: the loss carries no gradient; legal: .* where no token is on the loss mask",
    ),
    "a ratio without bound": (
        "(row.weights * row.advantages * row.loss_mask * ratio(current, row.behaviour, row)).sum(), {}",
        r"has become e\^100 times as likely.*: loss or gradient is not finite.*clamp\(-20, 20\)",
    ),
    "a ratio of another policy without bound": (
        "(row.weights * row.loss_mask * ratio(row.reference, current, row)).sum(), {}",
        r"has become e\^100 times as likely",
    ),
    "a change of its row": (
        "torch.where(row.loss_mask, current * row.advantages.mul_(2), 0.0).sum(), {}",
        "it changes row.advantages in place; legal: to leave its arguments as they are",
    ),
    "a change of what carries the gradient": (
        "torch.where(row.loss_mask, current.clamp_(min=-1), 0.0).sum(), {}",
        "it changes current in place; legal",
    ),
    "a loss per token": (
        "torch.where(row.loss_mask, current, 0.0), {}",
        r"the loss is a tensor of shape \(4,\); legal: one number, as a tensor: the sum",
    ),
    "no weights": (
        "-(torch.where(row.loss_mask, row.advantages * current, 0.0)).sum(), {}",
        r"twice row\.weights give 1 in place of 2, .* algorithm\.aggregation would not be .*; legal: each loss token",
    ),
    "weights of one term only": (
        "torch.where(row.loss_mask, current * row.weights * row.advantages + current, 0.0).sum(), {}",
        r"twice row\.weights give .*; legal: each loss token times row\.weights",
    ),
    "no pair": ("current.sum()", "it returned Tensor; legal: the loss and its metrics"),
    "no tensor": ("0.0, {}", "the loss is float; legal: one number, as a tensor"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A file that can be imported under its name, which no other test uses."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"own_{abs(hash(request.node.name))}.py"


@pytest.mark.parametrize(("heading", "names"), [("Advantages", ADVANTAGES), ("Policy loss", LOSSES)])
def test_every_built_in_name_has_its_row_in_the_page_of_algorithms(heading: str, names: tuple[str, ...]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for name in names:
        assert f"\n| `{name}` " in section, f"docs/algorithms.md, {heading}, has no row for {name}"


def test_the_loss_of_the_page_passes_its_trial_and_is_the_reinforce_that_it_says(module: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    code = page.partition("## A loss of your own")[2].split("```python\n", 1)[1].split("```", 1)[0]
    imports = "import torch\nfrom torch import Tensor\nfrom rlhpc.protocol.contracts import TokenRow\n"
    module.write_text(imports + code)
    current, row = ragged_row(0)
    value, _ = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7)(current, row)
    torch.testing.assert_close(value, -(row.weights * row.advantages * current)[row.loss_mask].sum())


def example_of(contract: type) -> str:
    """Return the code in the docstring of a contract: what is indented further than the rest."""
    lines = (contract.__doc__ or "").splitlines()[1:]
    found = [line for line in lines if line.startswith(" " * 8) or not line]
    return "import re\nimport numpy as np\nimport torch\n" + textwrap.dedent("\n".join(found))


def test_the_examples_of_the_contracts_pass_their_trials(module: Path) -> None:
    module.write_text("\n".join(map(example_of, (PolicyLoss, AdvantageEstimator, RewardFunction))))
    make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 0)
    make_estimator(AlgorithmConfig(advantage=f"{module.stem}:centred"), 8)
    judge = resolve(f"{module.stem}:judge")
    assert [judge(text, "7") for text in ("3 + 4 = 7 #### 7", "7", "#### 7 #### 8")] == [1.0, 0.0, 0.0]


def test_the_example_of_environments_plays() -> None:
    module: dict[str, Any] = {"Environment": Environment, "Step": Step}
    exec(example_of(Environment), module)
    echo = module["Echo"].open(EnvironmentConfig())
    assert asyncio.run(echo.reset({"answer": "yes"})) == [{"role": "user", "content": "Say yes."}]
    assert asyncio.run(echo.step(" yes\n")) == Step(reward=1.0, is_done=True)


def test_a_loss_of_ones_own_is_used_and_its_metrics_have_a_family(module: Path) -> None:
    module.write_text(GOOD)
    current, row = ragged_row(0)
    value, metrics = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7)(current, row)
    expected = -(row.weights * row.advantages * current)[row.loss_mask].sum()
    torch.testing.assert_close(value, expected)
    assert metrics == {"own_loss/kept": row.loss_mask.sum().float()}


def test_metrics_that_it_hands_on_from_a_loss_of_ours_have_names_that_are_known(module: Path) -> None:
    module.write_text(
        "from rlhpc.algorithms.policy_loss import make_policy_loss\n"
        "from rlhpc.config.tables_algorithm import AlgorithmConfig\n"
        "loss = make_policy_loss(AlgorithmConfig(), 2)\n"
    )
    _, metrics = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 2)(*ragged_row(0))
    assert "own_loss/age_clipped_0" in metrics
    assert {find_metric(name).unit for name in metrics} == {"-"}


def test_a_metric_that_a_row_has_no_occasion_for_is_0_there(module: Path) -> None:
    """Metrics are summed over rows and ranks by name: KeyError."""
    module.write_text(GOOD.replace(".float()}", ".float()} if advantages.any() else {}"))
    current, row = ragged_row(0)
    loss = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7)
    _, metrics = loss(current, replace(row, advantages=torch.zeros_like(row.advantages)))
    assert metrics == {"own_loss/kept": 0}


LATER = {
    "a metric that is new": ("value, {'late': value.detach()}", "metric 'late' is new; legal, as when it was tried"),
    "a loss per token": ("(value * torch.ones(3), {})", r"the loss is a tensor of shape \(3,\)"),
    "metrics per token": ("value, {'late': torch.ones(3)}", "metrics are not scalars"),
    "nothing": ("None", "it returned NoneType"),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_loss_that_returns_something_else_in_a_run_says_so(module: Path, kind: str) -> None:
    """With more tokens than it is tried on."""
    expression, message = LATER[kind]
    module.write_text(
        "import torch\ndef loss(current, row):\n"
        "    value = torch.where(row.loss_mask, row.weights * current, 0.0).sum()\n"
        f"    if len(current) > 4:\n        return {expression}\n    return value, {{}}\n"
    )
    loss = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7)
    with pytest.raises(ConfigError, match=rf"algorithm\.loss='{module.stem}:loss' in a run: {message}"):
        loss(*ragged_row(0))


def in_a_run(module: Path, statement: str) -> Callable[[], object]:
    """A call of a loss that does this with more tokens than it is tried on."""
    module.write_text(
        "import numpy as np, torch\ndef loss(current, row):\n    if len(current) > 4:\n"
        f"        {statement}\n    return torch.where(row.loss_mask, row.weights * current, 0.0).sum(), {{}}\n"
    )
    return partial(make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7), *ragged_row(0))


@pytest.mark.parametrize("statement", ["raise KeyError('late')", "np.zeros(3)[7]", "raise SystemExit"])
def test_a_loss_that_fails_in_a_run_is_named_with_its_line_and_not_tried_again(module: Path, statement: str) -> None:
    with pytest.raises(ConfigError) as refused:  # which no supervisor tries again
        in_a_run(module, statement)()
    said = str(refused.value)
    assert said.startswith(f"algorithm.loss='{module.stem}:loss', tried on a row of ")
    assert said.endswith(f" ({module}:4)")


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "torch.AcceleratorError", "torch.distributed.DistError"])
def test_a_device_that_fails_under_a_loss_is_not_the_losss_fault(module: Path, error: str) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        in_a_run(module, f"raise {error}('gone')")()


@pytest.mark.parametrize("error", ["OSError(28, 'gone')", "MemoryError('gone')"])
def test_a_machine_that_fails_under_a_loss_is_not_the_losss_fault(module: Path, error: str) -> None:
    """A full disk under what torch.compile writes, say: another attempt may do better."""
    with pytest.raises((OSError, MemoryError), match="gone"):
        in_a_run(module, f"raise {error}")()


class Operations(TorchDispatchMode):
    """Names of what torch computes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_loss_of_ones_own_costs_no_operation_more_than_it_has(module: Path) -> None:
    module.write_text(GOOD)
    own = make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 7)
    made = []
    for loss in (importlib.import_module(module.stem).loss, own):
        with Operations() as operations:
            loss(*ragged_row(0))
        made.append(operations.names)
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", BROKEN_LOSSES)
def test_a_loss_that_breaks_the_contract_is_refused_with_what_is_wrong(module: Path, kind: str) -> None:
    expression, message = BROKEN_LOSSES[kind]
    module.write_text(f"{RATIO}def loss(current, row):\n    return {expression}\n")
    with pytest.raises(ConfigError, match=message) as error:
        make_policy_loss(AlgorithmConfig(loss=f"{module.stem}:loss"), 0)
    assert str(error.value).startswith(f"algorithm.loss='{module.stem}:loss'")


@pytest.mark.parametrize(("key", "given"), [("loss", "current, row"), ("advantage", "rewards, lengths")])
@pytest.mark.parametrize(
    ("header", "why"),
    [("mine(logprobs, old, mask)", "missing a required argument: 'mask'"), ("mine(one)", "too many positional")],
)
def test_one_of_another_signature_is_refused_with_its_line_and_the_legal_one(
    module: Path, key: str, given: str, header: str, why: str
) -> None:
    module.write_text(f"\ndef {header}:\n    return None\n")
    config = AlgorithmConfig.model_validate({key: f"{module.stem}:mine"})
    with pytest.raises(ConfigError, match=why) as error:
        make_policy_loss(config, 0) if key == "loss" else make_estimator(config)
    said = str(error.value)
    assert said.startswith(f"algorithm.{key}='{module.stem}:mine': {header}, called as mine({given}): ")
    assert f"({module}:2); legal: f({given}), with other parameters in algorithm.{key}_arguments" in said


def test_arguments_of_the_run_file_reach_a_loss_and_an_estimator(module: Path) -> None:
    module.write_text(
        "import torch\n"
        "def loss(current, row, sign, *, factor=1.0):\n"
        "    return sign * factor * torch.where(row.loss_mask, row.weights * row.advantages * current, 0.0).sum(), {}\n"
        "def scaled(rewards, lengths, scale=1.0):\n    return scale * (rewards - rewards.mean())\n"
    )
    path, (current, row) = module.stem, ragged_row(0)
    values = [
        make_policy_loss(AlgorithmConfig(loss=f"{path}:loss", loss_arguments={"sign": -1, "factor": factor}), 0)(
            current, row
        )[0]
        for factor in (1.0, 3.0)
    ]
    torch.testing.assert_close(values[1], 3 * values[0])
    estimator = make_estimator(AlgorithmConfig(advantage=f"{path}:scaled", advantage_arguments={"scale": 4}))
    assert estimator(np.array([0, 1], np.float32), np.ones(2, np.int32)).tolist() == [-2, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"scal": 4},
            r"algorithm\.advantage_arguments\.scal=4: mine has no such parameter \(.*:1\); legal: scale, shift",
        ),
        (
            {"rewards": 4},
            r"algorithm\.advantage_arguments\.rewards=4: mine has no such parameter .*legal: scale, shift",
        ),
        ({}, r"algorithm\.advantage='.*': mine\(.*\), called as .*: missing a required argument: 'scale'"),
    ],
)
def test_arguments_that_do_not_fit_name_the_key_the_value_and_the_legal_names(
    module: Path, arguments: dict[str, Any], said: str
) -> None:
    module.write_text("def mine(rewards, lengths, scale, *, shift=0):\n    return rewards - rewards.mean()\n")
    with pytest.raises(ConfigError, match=said):
        make_estimator(AlgorithmConfig(advantage=f"{module.stem}:mine", advantage_arguments=arguments))


DOUBTS = {
    "zero": ("advantage", "0 * rewards", r"\[0\. 0\. 0\.\], no advantage though rewards differ"),
    "random": ("advantage", "np.random.rand() * (rewards - rewards.mean())", "usual: the same advantages for the same"),
    "flipped": ("advantage", "rewards.mean() - rewards", "the lower the higher the reward"),
    "sound": ("advantage", "rewards - rewards.mean()", ""),
    "flipped loss": ("loss", "flipped(rewards, lengths)", "usual: the other sign"),
    "sound loss": ("loss", "(-flipped(rewards, lengths)[0], {})", ""),
}


@pytest.mark.parametrize("kind", DOUBTS)
def test_what_is_legal_and_seldom_meant_is_doubted(module: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    key, expression, doubt = DOUBTS[kind]
    module.write_text(
        "import numpy as np, torch\n"
        "def flipped(current, row):\n"
        "    return torch.where(row.loss_mask, row.weights * row.advantages * current, 0.0).sum(), {}\n"
        f"def mine(rewards, lengths):\n    return {expression}\n"
    )
    assert own_code.main(f"algorithm.{key}", f"{module.stem}:mine", 3, {}) == 0
    doubts = json.loads(capsys.readouterr().out)["doubts"]
    assert bool(doubts) == bool(doubt)
    assert not doubt or re.search(rf"algorithm\.{key}='{module.stem}:mine', tried on .*{doubt}", doubts[0])


@pytest.mark.parametrize("proximal", ["current", "behaviour", "loglinear"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_ours_would_pass_the_trial(module: Path, name: str, proximal: str) -> None:
    module.write_text(
        "from rlhpc.algorithms.policy_loss import make_policy_loss\n"
        "from rlhpc.config.tables_algorithm import AlgorithmConfig\n"
        f"config = AlgorithmConfig(loss={name!r}, proximal={proximal!r}, importance_cap='off', kl_coefficient=0.1)\n"
        "loss = make_policy_loss(config, 2)\n"
    )
    loss = load_own_loss(f"{module.stem}:loss")
    assert not doubts_of_loss(loss)


def test_an_estimator_of_ones_own_is_used(module: Path) -> None:
    module.write_text(GOOD)
    estimator = make_estimator(AlgorithmConfig(advantage=f"{module.stem}:median"))
    found = estimator(np.array([1, 0, 0, 5], np.float32), np.ones(4, np.int32))
    assert found.tolist() == [0.5, -0.5, -0.5, 4.5]
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("rewards.sum()", "returned 1.5 for 3 rewards"),
        ("rewards * float('nan')", "returned"),
        ("rewards[:2]", "for 3 rewards"),
        ("np.subtract(rewards, rewards.mean(), out=rewards)", "it changes rewards in place; legal"),
        ("(lengths.sort(), rewards - rewards.mean())[1]", "it changes lengths in place; legal"),
    ],
)
def test_an_estimator_that_does_not_fit_is_refused(module: Path, expression: str, message: str) -> None:
    module.write_text(f"import numpy as np\ndef mine(rewards, lengths):\n    return {expression}\n")
    with pytest.raises(ConfigError, match=f"tried on rewards 1, 0, 0.5 of 3, 1, 2 tokens: .*{message}"):
        make_estimator(AlgorithmConfig(advantage=f"{module.stem}:mine"))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(rewards - rewards.mean()) / rewards.std()", "rewards 0, 0, 0 of 3, 1, 2 tokens: .*legal: one finite number"),
        ("rewards - 0.5", "rewards 0, 0, 0 of 3, 1, 2 tokens: .*where all rewards are equal.*legal: zeros there"),
        ("rewards * (rewards.max() > 0)", "rewards 1, 1, 1 of 3, 1, 2 tokens: .*legal: zeros there"),
        ("rewards - np.average(rewards, weights=lengths)", "rewards 1, 0, 0.5 of 0, 0, 0 tokens: ZeroDivisionError"),
        ("(rewards - rewards.mean()) / lengths", "rewards 1, 0, 0.5 of 3, 0, 0 tokens: .*legal: one finite number"),
    ],
)
def test_an_estimator_that_fails_where_rewards_are_equal_or_tokens_are_missing_is_refused(
    module: Path, expression: str, message: str
) -> None:
    module.write_text(f"import numpy as np\ndef mine(rewards, lengths):\n    return {expression}\n")
    with pytest.raises(ConfigError, match=f"tried on {message}"):
        make_estimator(AlgorithmConfig(advantage=f"{module.stem}:mine"))


def test_an_estimator_is_tried_on_groups_of_the_runs_size(module: Path) -> None:
    """One that takes the four best of eight has nothing to say of three."""
    module.write_text("def mine(rewards, lengths):\n    return rewards - sorted(rewards)[7]\n")
    config = AlgorithmConfig(advantage=f"{module.stem}:mine")
    assert make_estimator(config, 8)(np.ones(8, np.float32), np.ones(8, np.int32)).tolist() == [0] * 8
    with pytest.raises(ConfigError, match=r"tried on rewards 1, 0, 0\.5, 1, … of 3, 1, 2, 3, … tokens: IndexError"):
        make_estimator(config, 7)


def test_a_function_of_python_itself_that_does_not_fit_is_refused() -> None:
    """It has no file, in which a line could be named."""
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='math:gcd', tried on .*: TypeError\("):
        make_estimator(AlgorithmConfig(advantage="math:gcd"))


def test_an_estimator_that_fails_later_says_so(module: Path) -> None:
    module.write_text("def mine(rewards, lengths):\n    return (rewards - rewards.mean())[:3]\n")
    estimator = make_estimator(AlgorithmConfig(advantage=f"{module.stem}:mine"))
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage='{module.stem}:mine' returned .* for 4 rewards"):
        estimator(np.zeros(4, np.float32), np.ones(4, np.int32))


def test_what_an_estimator_raises_later_has_its_name(module: Path) -> None:
    module.write_text(
        "def mine(rewards, lengths):\n"
        "    return (rewards - rewards.mean()) / (1 if len(rewards) == 3 else {}[len(rewards)])\n"
    )
    estimator = make_estimator(AlgorithmConfig(advantage=f"{module.stem}:mine"))
    with pytest.raises(ConfigError, match=rf"{module.stem}:mine', tried on 4 rewards of a run: KeyError\(4"):
        estimator(np.zeros(4, np.float32), np.ones(4, np.int32))


@pytest.mark.parametrize("key", ["loss", "advantage"])
def test_a_name_that_is_none_is_refused_with_those_that_are(key: str) -> None:
    with pytest.raises(ValueError, match=r"legal: (ppo|grpo), .*, or package\.module:name of your own"):
        AlgorithmConfig.model_validate({key: "gppo"})
