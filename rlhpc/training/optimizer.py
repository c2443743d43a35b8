"""AdamW on float32 master weights that lie end to end in one buffer, matrices first.

Input: gradients of any floating dtype as autograd makes them, which are summed in float32.  Output: stepped masters,
written back into the model's parameters.  One buffer each for masters, gradients and the two moments: one all-reduce,
one norm and two fused optimiser calls, however many tensors the model has.
Weight decay acts on matrices only (two dimensions or more), not on norms and biases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

STATE_KINDS = ("weights", "exp_avg", "exp_avg_sq")  # what a checkpoint holds of every tensor
NORM_RUN = 4096


class FlatAdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), as torch's fused AdamW.

    Float32 parameters become views of the master buffer; others stay copies of it in their own dtype.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, betas: tuple[float, float], eps: float) -> None:
        self._parameters = dict(parameters)
        ordered = sorted(parameters, key=lambda name: parameters[name].ndim < 2)  # stable: matrices, then the rest
        self._num_decayed = sum(p.numel() for p in parameters.values() if p.ndim >= 2)
        device = next(iter(parameters.values())).device
        num_elements = sum(p.numel() for p in parameters.values())
        self.gradients = torch.zeros(num_elements, dtype=torch.float32, device=device)
        self._buffers = {kind: torch.zeros_like(self.gradients) for kind in STATE_KINDS}
        self._views = {kind: self._named_views(buffer, ordered) for kind, buffer in self._buffers.items()}
        self._optimizer = self._make_optimizer(betas, eps)
        self._adopt_parameters(ordered)

    def _named_views(self, buffer: Tensor, names: list[str]) -> dict[str, Tensor]:
        pieces = buffer.split_with_sizes([self._parameters[name].numel() for name in names])
        return {name: piece.view(self._parameters[name].shape) for name, piece in zip(names, pieces, strict=True)}

    def _make_optimizer(self, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
        """Give torch's optimiser our moments at once, so that a checkpoint before the first step has them too."""
        cut = self._num_decayed
        optimizer = torch.optim.AdamW([{"params": []}, {"params": []}], lr=0.0, betas=betas, eps=eps, fused=True)
        for group, part in zip(optimizer.param_groups, (slice(0, cut), slice(cut, None)), strict=True):
            master = nn.Parameter(self._buffers["weights"][part])
            master.grad = self.gradients[part]
            group["params"] = [master]
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": self._buffers["exp_avg"][part],
                "exp_avg_sq": self._buffers["exp_avg_sq"][part],
            }
        return optimizer

    def _adopt_parameters(self, ordered: list[str]) -> None:
        gradient_views = self._named_views(self.gradients, ordered)
        for name, parameter in self._parameters.items():
            master = self._views["weights"][name]
            master.copy_(parameter.detach())
            if parameter.dtype == torch.float32:
                parameter.data = master
            parameter.register_post_accumulate_grad_hook(_SumInto(gradient_views[name]))  # type: ignore[no-untyped-call]

    @property
    def num_steps_applied(self) -> int:
        """Steps applied so far."""
        return int(self._step_counters[0].item())

    @num_steps_applied.setter
    def num_steps_applied(self, value: int) -> None:
        for counter in self._step_counters:
            counter.fill_(value)

    @property
    def _step_counters(self) -> list[Tensor]:
        return [state["step"] for state in self._optimizer.state.values()]

    def state(self, kind: str) -> dict[str, Tensor]:
        """Float32 views by HF name; write to them only inside load.  `kind`: one of STATE_KINDS."""
        return self._views[kind]

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients."""
        self.gradients.zero_()

    def gradient_norm(self) -> float:
        """Global L2 norm of the accumulated gradients.

        The norm of norms of short runs: on CPU torch sums a long vector sequentially, and loses a millionth for every
        few tens of thousands of elements.
        """
        whole = len(self.gradients) // NORM_RUN * NORM_RUN
        runs = torch.linalg.vector_norm(self.gradients[:whole].view(-1, NORM_RUN), dim=1)
        rest = torch.linalg.vector_norm(self.gradients[whole:])
        return float(torch.linalg.vector_norm(torch.cat([runs, rest[None]])))

    def clip(self, gradient_norm: float, max_norm: float) -> None:
        """Scale the gradients to the norm max_norm if theirs, `gradient_norm`, is larger."""
        if gradient_norm > max_norm:
            self.gradients.mul_(max_norm / gradient_norm)

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Apply the accumulated gradients."""
        decayed, plain = self._optimizer.param_groups
        decayed.update(lr=learning_rate, weight_decay=weight_decay)
        plain.update(lr=learning_rate, weight_decay=0.0)
        self._optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into parameters that are not views of them."""
        copies = {name: p for name, p in self._parameters.items() if p.dtype != torch.float32}
        if copies:
            torch._foreach_copy_(list(copies.values()), [self._views["weights"][name] for name in copies])


class _SumInto:
    """Moves each gradient into the float32 buffer as soon as autograd has it: at most one lives beside the buffer."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._total.add_(parameter.grad)
            parameter.grad = None
