"""Both models of a comparison multiply by the library that is asked for."""

import pytest
import torch
from torch import Tensor, nn

from lightning_app.bench import same_library as module
from lightning_app.bench.same_library import onednn_everywhere, same_library
from lightning_app.blocks.linear import prefers_onednn


def test_linear_maps_of_peers_take_our_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, seen = nn.Linear(4, 3), []

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(x.shape)
        result = x @ weight.t()
        return result if bias is None else result + bias

    monkeypatch.setattr(module, "linear", ours)
    monkeypatch.setattr(module, "takes_onednn", lambda x, weight: x.shape[0] > 2)
    small, large = torch.randn(2, 4), torch.randn(5, 4)
    expected = peer(small), peer(large)
    with onednn_everywhere():
        torch.testing.assert_close(peer(small), expected[0])
        torch.testing.assert_close(peer(large), expected[1])
    assert seen == [(5, 4)]
    peer(large)
    assert len(seen) == 1


def test_each_library_is_in_force_in_its_context() -> None:
    contexts = same_library()
    assert bool(contexts) == prefers_onednn()
    for name, context in contexts.items():
        with context():
            assert prefers_onednn() == (name == "oneDNN")
