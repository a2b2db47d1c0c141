"""The profiling pass over one batch that initialises Admin's skips."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_app.blocks.residual import LearnedGain, Residual
from lightning_app.models.transformer import stacks


def needs_profiling(model: nn.Module) -> bool:
    """Whether a skip of `model` is initialised by a pass over a batch."""
    return any(isinstance(m, LearnedGain) and m.profiled for m in model.modules())


@torch.no_grad()
def profile(
    model: nn.Module,
    run: Callable[[], Any],
    total: Callable[[Tensor], Tensor] = lambda moments: moments,
) -> None:
    """Set the profiled skips of `model` while `run` calls it once (Liu et al. 2020, Admin).

    In each stack ``omega_1 = 1`` and ``omega_(k+1) = sqrt(Var(omega_k x_k) + Var(f_k))``, k the
    sub-layer, x its input and f its branch as it joins the sum: with dropout when the model is in
    training mode, as the authors profile. The variance is over all entries of real tokens.
    `total` sums moments over the ranks of a distributed run, so that each sets the same skips.

    Call it once, before the first step: a later pass would overwrite what has been trained.
    """
    pass_ = _Pass(total)
    handles = [model.register_forward_pre_hook(pass_.see_inputs)]
    for name, stack in stacks(model).items():
        for residual in stack.modules():
            if not isinstance(residual, Residual):
                continue
            if isinstance(residual.skip, LearnedGain) and residual.skip.profiled:
                handles += pass_.watch(name, residual.branch, residual.skip)
    try:
        # Hooks must not become part of a compiled graph.
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()


class _Pass:
    """The state of the profiling pass while the batch runs through the stacks."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        self.total = total
        self.present: dict[str, Bool[Tensor, "batch token"]] = {}
        self.omega: dict[str, Tensor] = {}
        self.added: Tensor | None = None

    def see_inputs(self, model: Any, inputs: tuple[Tensor, ...]) -> None:
        self.present = model.present(*inputs)

    def watch(self, stack: str, branch: nn.Module, skip: LearnedGain) -> list[Any]:
        def see_branch(module: nn.Module, inputs: Any, added: Tensor) -> None:
            self.added = added

        def set_skip(module: nn.Module, inputs: tuple[Tensor]) -> None:
            assert self.added is not None
            omega = self.omega.get(stack, torch.ones((), device=skip.gain.device))
            skip.gain.fill_(omega)
            (x,) = inputs
            variance = omega**2 * self.variance(x, stack) + self.variance(self.added, stack)
            self.omega[stack] = variance.sqrt()

        return [
            branch.register_forward_hook(see_branch),
            skip.register_forward_pre_hook(set_skip),
        ]

    def variance(self, x: Float[Tensor, "batch token model"], stack: str) -> Float[Tensor, ""]:
        """Return the variance of all entries at real tokens, over all ranks."""
        entries = x[self.present[stack]].double()
        count = torch.tensor(float(entries.numel()), device=x.device, dtype=torch.float64)
        count, total, squares = self.total(
            torch.stack([count, entries.sum(), entries.square().sum()])
        )
        return (squares / count - (total / count) ** 2).to(torch.get_default_dtype())
