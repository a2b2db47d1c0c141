import pytest
import torch

from lightning_app.blocks.norm import build_norm
from tests import reference, tiny

pytestmark = pytest.mark.usefixtures("float64")


# The second scale makes epsilon count: x^2 is as small as epsilon.
@pytest.mark.parametrize("scale", [1.0, 3e-3])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_is_the_equation(kind: str, scale: float) -> None:
    norm = tiny.randomise(build_norm(kind, 7))
    x = scale * torch.randn(3, 5, 7) + scale
    parameters = [p.detach().numpy() for p in norm.parameters()]
    expected = torch.from_numpy(getattr(reference, kind)(x.numpy(), *parameters))
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "parameters"), [("dyt", 15), ("derf", 16)])
def test_a_bound_is_the_equation_and_starts_as_published(kind: str, parameters: int) -> None:
    norm = build_norm(kind, 7)
    x = 3.0 * torch.randn(3, 5, 7)
    bound = torch.tanh if kind == "dyt" else torch.erf
    torch.testing.assert_close(norm(x), bound(0.5 * x))
    assert sum(p.numel() for p in norm.parameters()) == parameters
    tiny.randomise(norm)
    given = {f"n.{name}": p.detach().numpy() for name, p in norm.named_parameters()}
    expected = torch.from_numpy(reference.norm(given, "n", x.numpy()))
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_none_is_the_identity_without_parameters() -> None:
    norm = build_norm("none", 7)
    x = torch.randn(3, 5, 7)
    assert norm(x) is x
    assert not list(norm.parameters())
