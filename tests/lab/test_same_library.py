"""Both models of a comparison multiply by the library that is asked for."""

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.linear import prefers_onednn
from lightning_app.lab.bench import measure as module
from lightning_app.lab.bench.measure import onednn_everywhere, same_library


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


def test_transposed_maps_of_gpt2_take_our_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks use them, so a comparison without them would be with another library."""
    transformers = pytest.importorskip("transformers")
    seen = []

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(weight.shape))
        result = x @ weight.t()
        return result if bias is None else result + bias

    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=1, n_head=2)
    peer, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.arange(8)[None]
    expected = peer(input_ids=tokens).logits
    monkeypatch.setattr(module, "linear", ours)
    monkeypatch.setattr(module, "takes_onednn", lambda x, weight: True)
    with onednn_everywhere():
        torch.testing.assert_close(peer(input_ids=tokens).logits, expected)
    assert seen == [(18, 6), (6, 6), (24, 6), (6, 24), (11, 6)]
    peer(input_ids=tokens)
    assert len(seen) == 5


def test_each_library_is_in_force_in_its_context() -> None:
    contexts = same_library()
    assert bool(contexts) == prefers_onednn()
    for name, context in contexts.items():
        with context():
            assert prefers_onednn() == (name == "oneDNN")
