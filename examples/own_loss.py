# %% [markdown]
# # A policy loss of one's own
#
# A policy loss is any callable with the signature of `rlhpc.contracts.PolicyLoss`: tensors over packed tokens in, a
# *sum* over loss tokens and summed metrics out. This one is tapered off-policy REINFORCE (Le Roux et al. 2025,
# arXiv:2503.14286): what got a positive advantage is learnt from with weight 1, what got a negative one with the
# importance weight truncated at 1, so that a policy that has moved away from a bad sample is not pushed further.
# Differs from the paper: the weight is one of tokens, not of whole sequences.
#
# A plain program, `python examples/own_loss.py`; its `# %%` marks make it a notebook in editors that know them. The
# run file has no key for a loss of the reader's yet: CONTRIBUTING.md says which three files make it one.

# %%
import torch
from torch import Tensor

from rlhpc.algorithms.losses import DecoupledLoss
from rlhpc.contracts import PolicyLoss


class TaperedLoss:
    """Tapered off-policy REINFORCE over tokens.  A PolicyLoss; `proximal` is not looked at."""

    def __call__(
        self, current: Tensor, *, behaviour: Tensor, proximal: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All float32 [T] (loss_mask bool [T]) → loss and metrics, both summed over loss tokens."""
        # Behind the mask may stand anything, nan too: it goes first, before 0 · nan reaches the gradient.
        current, behaviour, advantages = (
            torch.where(loss_mask, values, 0.0) for values in (current, behaviour, advantages)
        )
        ratio = (current.detach() - behaviour).clamp(max=20.0).exp()
        weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0))
        # A number that is not finite makes loss and gradient nan: then all ranks skip the step together.
        one_or_nan = 1.0 + ((current + behaviour + advantages).detach() * 0.0).sum()
        loss = -(weight * advantages * current).sum() * one_or_nan
        tapered = loss_mask & (advantages < 0) & (ratio > 1.0)
        return loss, {"importance_weight": (weight * loss_mask).sum(), "importance_capped": tapered.sum().float()}


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
built_in = DecoupledLoss(clip_low=0.2, clip_high=0.28, importance_cap=None)  # PPO's, around the sampler

for name, candidate in {"tapered": loss, "clipped": built_in}.items():
    current = now.clone().requires_grad_()
    total, _ = candidate(current, behaviour=behaviour, proximal=behaviour, advantages=advantages, loss_mask=mask)
    total.backward()
    print(name, [round(-value, 2) for value in current.grad.tolist()])

# %% [markdown]
# Tapered: what is good is always learnt from, the bad token that has become unlikely is pushed half as much. Clipped:
# the good token that is likely already and the bad one that is unlikely already are left alone.
#
# ## What every loss has to keep to
#
# `tests/unit/algorithms/test_losses.py` has these checks, and more, for the built-in losses.

# %%
noisy = now.clone()
noisy[3] = float("nan")
mask[3] = False
current = noisy.requires_grad_()
total, metrics = loss(current, behaviour=behaviour, proximal=behaviour, advantages=advantages, loss_mask=mask)
total.backward()
assert torch.isfinite(total), "a masked token has no influence, whatever stands there"
assert current.grad[3] == 0
halves = [
    loss(
        now[part],
        behaviour=behaviour[part],
        proximal=behaviour[part],
        advantages=advantages[part],
        loss_mask=mask[part],
    )
    for part in (slice(0, 2), slice(2, 4))
]
assert torch.isclose(sum(part for part, _ in halves), total), "a sum: micro-batches add up to the batch"
assert not any(value.requires_grad for value in metrics.values()), "metrics carry no gradient"
behaviour[0] = float("nan")
broken, _ = loss(now, behaviour=behaviour, proximal=behaviour, advantages=advantages, loss_mask=mask)
assert torch.isnan(broken), "a loss token that is not finite makes all ranks skip the step"
print("masked tokens count for nothing; micro-batches add up; metrics are detached; nan is not hidden")
