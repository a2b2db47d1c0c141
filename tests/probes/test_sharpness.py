"""The top eigenvalue against that of the whole Hessian, written out."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_app.blocks.kernels.choose import attention_form
from lightning_app.blocks.presets import PRESETS
from lightning_app.core.errors import UserError
from lightning_app.probes.probe import preconditioned_sharpness, top_eigenvalue
from tests.probes.test_probe import losses, objective, pairs
from tests.tiny import randomise, translator

SIZES = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 4, "ff_dim": 3, "num_heads": 2}


def dense(model: nn.Module, batch, scales: Tensor | None, eps: float) -> Tensor:
    """All eigenvalues of P^(-1/2) H P^(-1/2), ascending, from the Hessian row by row."""
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        values = {n: v.view(s) for n, v, s in zip(names, parts, shapes, strict=True)}

        def call(*inputs: Tensor) -> Tensor:
            return functional_call(model, values, inputs)

        return losses(call, batch).mean()  # pyright: ignore[reportArgumentType]

    backend = torch.nn.attention.SDPBackend.MATH
    with torch.nn.attention.sdpa_kernel(backend), attention_form("plain"):
        hessian = torch.autograd.functional.hessian(loss, flat)
        assert isinstance(hessian, Tensor)
        if scales is None:
            gradient = torch.autograd.functional.jacobian(loss, flat)
            assert isinstance(gradient, Tensor)
            scales = gradient.abs()
        root = (scales + eps).rsqrt()
    return torch.linalg.eigvalsh(root[:, None] * hessian * root)


@pytest.mark.in_turn(4)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", ["post_ln", "pre_ln", "realformer", "sas"])
def test_it_is_the_top_of_the_dense_spectrum(preset: str) -> None:
    model, batch = randomise(translator(preset, **SIZES)), pairs()
    found = preconditioned_sharpness(model, objective(), batch, eps=1e-3)
    assert found.converged
    assert found.value == pytest.approx(float(dense(model, batch, None, 1e-3)[-1]), rel=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("float64")
def test_it_takes_the_second_moments_of_a_checkpoint() -> None:
    model, batch = randomise(translator("pre_ln", **SIZES)), pairs()
    moments = [torch.rand_like(parameter) for parameter in model.parameters()]
    flat = torch.cat([moment.flatten() for moment in moments]).sqrt()
    found = preconditioned_sharpness(model, objective(), batch, 1e-8, moments)
    assert found.converged
    assert found.value == pytest.approx(float(dense(model, batch, flat, 1e-8)[-1]), rel=1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "spectrum", [(3.0, 2.9, 0.0, -5.0), (-1.0, -2.0, -30.0), (7.0,), (2.0, 2.0)]
)
def test_the_top_is_found_below_a_larger_negative_end(spectrum: tuple[float, ...]) -> None:
    basis = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum)))[0]
    matrix = basis @ torch.diag(torch.tensor(spectrum)) @ basis.T
    found = top_eigenvalue(lambda v: [matrix @ v[0]], [torch.zeros(len(spectrum))])
    assert found.converged
    assert found.value == pytest.approx(spectrum[0], rel=1e-3)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"gpas", "sigma_reparam"}))
def test_every_preset_has_a_second_derivative(preset: str) -> None:
    model = randomise(translator(preset, **SIZES))
    assert math.isfinite(preconditioned_sharpness(model, objective(), pairs(), eps=1e-3).value)


@pytest.mark.parametrize(
    ("preset", "part"), [("gpas", "residual_rule gpas"), ("sigma_reparam", "sigma_reparam")]
)
def test_a_model_that_stops_gradients_has_no_sharpness(preset: str, part: str) -> None:
    """The second derivative of sigma-Reparam lacks the part of its fixed vectors."""
    with pytest.raises(UserError, match=f"--sharpness with {part}"):
        preconditioned_sharpness(translator(preset, **SIZES), objective(), pairs(), eps=1e-3)


def test_an_overflow_does_not_converge() -> None:
    """The quotient is finite and the residual is not."""

    def product(v: list[Tensor]) -> list[Tensor]:
        image = v[0].clone()
        image[0] = 1e30 * torch.sign(v[0][0])
        return [image]

    assert not top_eigenvalue(product, [torch.zeros(3)]).converged
    assert not top_eigenvalue(lambda v: [v[0] * math.nan], [torch.zeros(3)]).converged
