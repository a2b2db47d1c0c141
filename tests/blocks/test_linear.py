"""Linear maps by oneDNN: the equation, its gradients, and when it is taken."""

import pytest
import torch
from torch import Tensor

from lightning_app.blocks import linear as module
from lightning_app.blocks.linear import Linear, SpectralLinear, linear, product, takes_onednn
from tests import tiny

SHAPES = [(1, 1, 1), (5, 7, 3), (2, 3, 11, 4), (64, 32, 48), (40, 3, 50)]
"""The last one's gradient by the weight is computed transposed."""


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Products of any size in float32 by one library or the other, on any processor."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(module, "prefers_onednn", lambda: request.param)
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(module, "SMALL_TURNED", 0)
    monkeypatch.setattr(module, "SMALL_TURNED_ZEN_4", 0)
    return request.param


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_equation_and_slopes(onednn: bool, shape: tuple[int, ...], biased: bool) -> None:
    *rows, inner, outer = shape
    x, weight = torch.randn(*rows, inner), torch.randn(outer, inner)
    bias, upstream = torch.randn(outer), torch.randn(*rows, outer)
    leaves = [x, weight, bias] if biased else [x, weight]
    for leaf in leaves:
        leaf.requires_grad_()
    assert takes_onednn(x, weight) == onednn
    ours = linear(x, weight, bias if biased else None)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    close(ours, exact)
    with torch.no_grad():
        close(linear(x, weight, bias if biased else None), exact)
    found = torch.autograd.grad(ours, leaves, upstream)
    for mine, own in zip(found, torch.autograd.grad(exact, leaves, upstream.double()), strict=True):
        close(mine, own.double())
        assert mine.is_contiguous()  # otherwise `backward` copies it


@pytest.mark.parametrize("width", [5, 2])
def test_the_second_derivative_is_that_of_the_equation(onednn: bool, width: int) -> None:
    x, weight = torch.randn(6, width).requires_grad_(), torch.randn(4, width).requires_grad_()

    def curvature(y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), x)[0]

    exact = curvature(x.double() @ weight.double().T)
    torch.testing.assert_close(curvature(linear(x, weight)), exact, rtol=1e-3, atol=1e-2)


def test_products_take_matrices_as_they_lie_and_the_rest_goes_as_usual(onednn, monkeypatch) -> None:
    a, b = torch.randn(9, 6).t(), torch.randn(7, 9).t()
    close(product(a, b), a.double() @ b.double())
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert takes_onednn(x, weight) == onednn
    assert not takes_onednn(x.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes_onednn(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16
    monkeypatch.setattr(module, "SMALL", x.numel() * len(weight) + 1)
    assert not takes_onednn(x, weight)


def largest(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach(), 2).item()


def test_a_learned_singular_value_starts_at_that_of_the_matrix_and_stays_its_own() -> None:
    """Zhai et al. 2023: the largest singular value of the map is gamma, however W moves."""
    torch.manual_seed(0)
    plain = Linear(6, 9)
    spectral = SpectralLinear(plain)
    spectral.start()
    x = torch.randn(4, 6)
    torch.testing.assert_close(spectral(x), plain(x))
    optimizer = torch.optim.SGD(spectral.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (spectral(x) - 1.0).square().mean().backward()
        optimizer.step()
    gamma = abs(spectral.size.gamma.item())
    assert abs(largest(spectral.weight) - gamma) > 0.01
    assert largest(spectral.matrix) == pytest.approx(gamma, rel=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert largest(spectral.matrix) == pytest.approx(gamma, rel=1e-3)
    kept = spectral.vector.clone()
    spectral.eval()(x)
    assert torch.equal(spectral.vector, kept)
    again = SpectralLinear(Linear(6, 9))
    again.load_state_dict(spectral.state_dict())
    assert torch.equal(again.eval()(x), spectral(x))


def test_a_model_starts_as_without_sigma_reparam() -> None:
    models = []
    for preset in ("post_ln", "sigma_reparam"):
        torch.manual_seed(3)
        models.append(tiny.translator(preset).eval())
    source, target = tiny.sentences()
    ours, theirs = (model(source, target) for model in models)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gate", ["element", "head"])
def test_every_matrix_of_a_block_has_a_learned_singular_value(gate: str) -> None:
    model = tiny.translator(tiny.BlockConfig(preset="sigma_reparam", output_gate=gate))
    blocks = [block for stack in (model.encoder, model.decoder) for block in stack.blocks]
    maps = [part for block in blocks for part in block.modules() if isinstance(part, Linear)]
    assert {type(part) for part in maps} == {SpectralLinear}
    gates = [path for path, _ in blocks[0].named_modules() if path.endswith("output_gate.matrix")]
    assert gates == ["self_attention.output_gate.matrix"]
