"""The sharpness under Adam: the top eigenvalue of the preconditioned Hessian."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_app.blocks.kernels import attention_form
from lightning_app.probes.probe import untouched
from lightning_app.tasks.base import Task

TOLERANCE = 1e-2  # for the norm of the residual, relative to the eigenvalue
ITERATIONS = 200
SEED = 1  # the seed of the start vector


Vector = list[Tensor]
"""One tensor a parameter; together they are one vector."""


class Sharpness(NamedTuple):
    """The eigenvalue, and whether the iteration converged to `TOLERANCE` within `ITERATIONS`."""

    value: float
    converged: bool


def preconditioned_sharpness(
    model: nn.Module,
    task: Task,
    batch: Any,
    eps: float,
    second_moments: Sequence[Tensor] | None = None,
) -> Sharpness:
    """Return the largest eigenvalue of ``P^(-1/2) H P^(-1/2)``, H the Hessian of the mean loss.

    It has the eigenvalues of ``P^(-1) H`` (Kalra & Barkeshli 2024, 2406.09405). With P held fixed,
    Adam diverges on a quadratic if ``eta lambda > (2 + 2 beta1) / (1 - beta1)``, 38 at beta1 = 0.9
    (Cohen et al. 2022, 2207.14484). P is ``sqrt(v) + eps``: `second_moments` holds v for each
    parameter, with bias correction; without them v is the squared gradient of this batch, as after
    the first step of Adam. Then the entries with the smallest gradients dominate, and the value is
    large. Parameters on which the loss does not depend are left out.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    # The fused kernels of attention have no second derivative.
    with (
        untouched(model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        attention_form("plain"),
    ):
        loss = task.mean_loss(task.predictions(model, batch))
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [i for i, g in enumerate(found) if g is not None and g.requires_grad]
        gradients, parameters = [found[i] for i in used], [parameters[i] for i in used]
        if second_moments is None:
            roots = [gradient.detach().abs() for gradient in gradients]
        else:
            roots = [second_moments[i].sqrt() for i in used]
        scales = [(root + eps).rsqrt() for root in roots]

        def product(v: Vector) -> Vector:
            scaled = [s * part for s, part in zip(scales, v, strict=True)]
            curved = torch.autograd.grad(
                gradients,
                parameters,
                grad_outputs=scaled,
                retain_graph=True,
                materialize_grads=True,
            )
            return [s * part for s, part in zip(scales, curved, strict=True)]

        return top_eigenvalue(product, parameters)


def top_eigenvalue(product: Callable[[Vector], Vector], like: Sequence[Tensor]) -> Sharpness:
    """Return the largest eigenvalue, with its sign, of the symmetric matrix A behind `product`.

    Power iteration made locally optimal (Knyazev 2001, LOBPCG with one vector). Each step takes
    one product and moves x to the best vector of the span of x, its residual ``A x - lambda x``
    and the step before. Plain power iteration would find the eigenvalue of largest size, which
    for this Hessian is as often the most negative one.
    """
    generator = torch.Generator().manual_seed(SEED)
    start = [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in like]
    x = orthonormal([(start, start)])[0][0]
    basis = [(x, product(x))]  # pairs (v, A v), the first of them x
    value = math.nan
    for _ in range(ITERATIONS):
        x, image = basis[0]
        value = float(inner(x, image))
        residual = combined([(1.0, image), (-value, x)])
        distance = float(inner(residual, residual)) ** 0.5
        # Some eigenvalue is nearer than this distance.
        if not distance > TOLERANCE * abs(value):
            return Sharpness(value, math.isfinite(value))
        direction = orthonormal([*((v, v) for v, _ in basis), (residual, residual)])[-1][0]
        basis = orthonormal([*basis[:1], (direction, product(direction)), *basis[1:]])
        if len(basis) == 1:  # vectors that are not finite were dropped
            break
        table = torch.tensor(
            [[float(inner(v, image)) for _, image in basis] for v, _ in basis], dtype=torch.float64
        )
        weights = torch.linalg.eigh((table + table.T) / 2).eigenvectors[:, -1].tolist()
        # The new x, and the part of it that is new; each with its image.
        best = list(zip(weights, basis, strict=True))
        terms = [[(w, v) for w, (v, _) in best], [(w, image) for w, (_, image) in best]]
        x, image = (combined(of) for of in terms)
        step, step_image = (combined(of[1:]) for of in terms)
        basis = orthonormal([(x, image), (step, step_image)])
    return Sharpness(value, False)


def orthonormal(pairs: Sequence[tuple[Vector, Vector]]) -> list[tuple[Vector, Vector]]:
    """Make the first parts orthonormal, in their order; the second parts are combined alike.

    A vector that lies in the span of those before it is dropped.
    """
    kept: list[tuple[Vector, Vector]] = []
    for v, image in pairs:
        length = float(inner(v, v)) ** 0.5
        for _ in range(2):  # the second pass removes rounding errors
            for other, other_image in kept:
                part = float(inner(v, other))
                v = combined([(1.0, v), (-part, other)])
                image = combined([(1.0, image), (-part, other_image)])
        left = float(inner(v, v)) ** 0.5
        if left > 1e-5 * length:
            kept.append((combined([(1 / left, v)]), combined([(1 / left, image)])))
    return kept


def combined(terms: Sequence[tuple[float, Vector]]) -> Vector:
    """Return the sum of factor times vector."""
    (factor, vector), *rest = terms
    total = [factor * part for part in vector]
    for factor, vector in rest:
        total = [a + factor * b for a, b in zip(total, vector, strict=True)]
    return total


def inner(a: Vector, b: Vector) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
