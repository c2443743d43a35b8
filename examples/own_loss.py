import torch
from torch import Tensor

from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import PolicyLoss, TokenRow

# %% [markdown]
# # A policy loss of one's own
#
# A policy loss is any callable with the signature of `PolicyLoss` (rlhpc/protocol/contracts.py): packed tokens in, a
# *sum* over loss tokens and summed metrics out. This one is tapered off-policy REINFORCE (Le Roux et al. 2025,
# arXiv:2503.14286): what got a positive advantage is learnt from with weight 1, what got a negative one with the
# importance weight truncated at 1, so that a policy that has moved away from a bad sample is not pushed further.
# Differs from the paper: the weight is one of tokens, not of whole sequences.
#
# A plain program, `python examples/own_loss.py`; its `# %%` marks make it a notebook in editors that know them. With
# this file on PYTHONPATH a run trains with it by `algorithm.loss = "own_loss:loss"`; its metrics are then
# `own_loss/weight` and `own_loss/tapered` in TensorBoard.

# %%


class TaperedLoss:
    """Tapered off-policy REINFORCE over tokens.  A PolicyLoss; `row.proximal` is not looked at."""

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss: loss and metrics, both summed over loss tokens."""
        # Behind the mask may stand anything, nan too: it goes first, before 0 · nan reaches the gradient.
        current, behaviour, advantages = (
            torch.where(row.loss_mask, values, 0.0) for values in (current, row.behaviour, row.advantages)
        )
        ratio = (current.detach() - behaviour).clamp(max=20.0).exp()
        weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0))
        # A number that is not finite makes loss and gradient nan: then all ranks skip the step together.
        one_or_nan = 1.0 + ((current + behaviour + advantages).detach() * 0.0).sum()
        loss = -(row.weights * weight * advantages * current).sum() * one_or_nan
        tapered = row.loss_mask & (advantages < 0) & (ratio > 1.0)
        return loss, {"weight": (weight * row.loss_mask).sum(), "tapered": tapered.sum().float()}


loss: PolicyLoss = TaperedLoss()

# %% [markdown]
# ## Beside the built-in loss
#
# Four tokens of the same probability then; the policy has since made two of them twice as likely and two half as
# likely. The gradient is what matters: by how much each token is pushed, per unit of advantage.

# %%
behaviour = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2]))
now = torch.log(torch.tensor([0.4, 0.1, 0.4, 0.1]))
advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
mask = torch.ones(4, dtype=torch.bool)
built_in = make_policy_loss(AlgorithmConfig(proximal="behaviour", importance_cap="off"), policy_version=1)  # PPO's


def row(part: slice = slice(None)) -> TokenRow:
    """The four tokens as one sequence, or some of them."""
    size = len(mask[part])
    return TokenRow(
        behaviour=behaviour[part],
        proximal=behaviour[part],
        reference=behaviour[part],
        entropy=torch.zeros(size),
        advantages=advantages[part],
        loss_mask=mask[part],
        versions=torch.zeros(size, dtype=torch.int32),
        weights=torch.ones(size),
        sequence=torch.zeros(size, dtype=torch.int64),
        num_sequences=1,
    )


for name, candidate in {"tapered": loss, "clipped": built_in}.items():
    current = now.clone().requires_grad_()
    total, _ = candidate(current, row())
    total.backward()
    print(name, [round(-value, 2) for value in current.grad.tolist()])

# %% [markdown]
# Tapered: what is good is always learnt from, the bad token that has become unlikely is pushed half as much. Clipped:
# the good token that is likely already and the bad one that is unlikely already are left alone.
#
# ## What every loss has to keep to
#
# A run tries a loss of your own for these before it trains with it; `tests/unit/algorithms/test_policy_loss.py` has
# them, and more, for the built-in losses.

# %%
noisy = now.clone()
noisy[3] = float("nan")
mask[3] = False
current = noisy.requires_grad_()
total, metrics = loss(current, row())
total.backward()
assert torch.isfinite(total), "a masked token has no influence, whatever stands there"
assert current.grad[3] == 0
halves = [loss(now[part], row(part)) for part in (slice(0, 2), slice(2, 4))]
assert torch.isclose(sum(part for part, _ in halves), total), "a sum: micro-batches add up to the batch"
assert not any(value.requires_grad for value in metrics.values()), "metrics carry no gradient"
behaviour[0] = float("nan")
broken, _ = loss(now, row())
assert torch.isnan(broken), "a loss token that is not finite makes all ranks skip the step"
print("masked tokens count for nothing; micro-batches add up; metrics are detached; nan is not hidden")
