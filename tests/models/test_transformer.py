"""Whole stacks: gradients by `gradcheck`, and two roads to one number."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.kernels import Mask, causal_mask, padding_mask
from lightning_app.blocks.presets import PRESETS, Stack
from lightning_app.models.initialization import initialize
from lightning_app.models.transformer import Decoder, Encoder
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

BATCH, SOURCE, TARGET, MODEL = 2, 3, 5, 10
every_preset = pytest.mark.parametrize("preset", PRESETS)


def encoder(block: BlockConfig | str, depth: int = 3, peer_depth: int = 2) -> Encoder:
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    spec = block.resolve(Stack(side="encoder", depth=depth, peer_depth=peer_depth))
    module = Encoder(spec, tiny.architecture(activation="gelu").sizes())
    initialize(module)
    return module


def decoder(block: BlockConfig | str, depth: int = 2) -> Decoder:
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    spec = block.resolve(Stack(side="decoder", depth=depth, peer_depth=3))
    module = Decoder(spec, tiny.architecture(activation="gelu").sizes())
    initialize(module)
    return module


def source_mask() -> Mask:
    return padding_mask(torch.arange(SOURCE) < torch.tensor([3, 2])[:, None])


def decode(module: Decoder, x: Tensor, memory: Tensor) -> Tensor:
    mask = causal_mask(x.shape[1], x.device)
    return module(x, mask, source_mask(), module.start(memory))[0]


def leaves(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Encoding(nn.Module):
    """An encoder as a function of the stream alone."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, source_mask())


class Decoding(nn.Module):
    """A decoder as a function of the stream and of the encoder's output alone."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return decode(self.decoder, x, memory)


def check_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Compare autograd with differences, in `inputs` and in every parameter of `module`."""
    names, parameters = zip(*tiny.randomise(module).named_parameters(), strict=True)

    def run(*tensors: Tensor) -> Tensor:
        values = dict(zip(names, tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(module, values, tensors[: len(inputs)])

    assert torch.autograd.gradcheck(run, (*inputs, *parameters), fast_mode=True)


@every_preset
def test_encoder_passes_gradcheck(preset: str) -> None:
    check_gradients(Encoding(encoder(preset)), leaves(BATCH, SOURCE, MODEL))


@every_preset
def test_decoder_passes_gradcheck(preset: str) -> None:
    inputs = leaves(BATCH, TARGET, MODEL), leaves(BATCH, SOURCE, MODEL)
    check_gradients(Decoding(decoder(preset)), *inputs)


@every_preset
def test_one_block_passes_the_full_gradcheck(preset: str) -> None:
    """Every entry of the Jacobian in the stream, of one block with padding."""
    module = tiny.randomise(encoder(preset, depth=1))
    x = leaves(BATCH, SOURCE, MODEL)
    assert torch.autograd.gradcheck(lambda x: module(x, source_mask()), (x,))


def test_realformer_of_one_layer_is_post_ln() -> None:
    ours, theirs = tiny.randomise(encoder("realformer", depth=1)), encoder("post_ln", depth=1)
    theirs.load_state_dict(ours.state_dict())
    x, memory = torch.randn(BATCH, SOURCE, MODEL), torch.randn(BATCH, SOURCE, MODEL)
    torch.testing.assert_close(ours(x, source_mask()), theirs(x, source_mask()))
    ours, theirs = tiny.randomise(decoder("realformer", depth=1)), decoder("post_ln", depth=1)
    theirs.load_state_dict(ours.state_dict())
    y = torch.randn(BATCH, TARGET, MODEL)
    torch.testing.assert_close(decode(ours, y, memory), decode(theirs, y, memory))


def test_realformer_of_two_layers_is_not_post_ln() -> None:
    ours, theirs = tiny.randomise(encoder("realformer", depth=2)), encoder("post_ln", depth=2)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(BATCH, SOURCE, MODEL)
    assert (ours(x, source_mask()) - theirs(x, source_mask())).abs().max() > 1e-3


@pytest.mark.parametrize("residual_attention", ["sum", "mean"])
def test_residual_scores_vanish_where_queries_start_at_zero(residual_attention: Any) -> None:
    """With W_Q = 0 in every layer all scores are zero: carrying them changes nothing."""
    plain = encoder("sas")
    carried = encoder(BlockConfig(preset="sas", residual_attention=residual_attention))
    carried.load_state_dict(plain.state_dict())
    x = torch.randn(BATCH, SOURCE, MODEL)
    torch.testing.assert_close(plain(x, source_mask()), carried(x, source_mask()))


@pytest.mark.parametrize("mask", ["padding", "causal"])
@pytest.mark.parametrize("preset", ["sas", "sas_p", "sas_p_no_norm"])
def test_simplified_self_attention_starts_as_the_norm(preset: str, mask: str) -> None:
    """Every self-attention gives what it reads, to the last digits, under either mask."""
    module = encoder(preset)
    seen: list[tuple[Tensor, Tensor]] = []
    for block in module.blocks:
        attention = block.get_submodule("self_attention")
        attention.register_forward_hook(lambda _, args, out: seen.append((args[0], out[0])))
    x = 3.0 * torch.randn(BATCH, SOURCE, MODEL)
    module(x, source_mask() if mask == "padding" else causal_mask(SOURCE, x.device))
    assert len(seen) == len(module.blocks)
    for u, attended in seen:
        torch.testing.assert_close(attended, u, rtol=1e-13, atol=1e-13)
    first = module.blocks[0].get_submodule("around_self.norm_input")
    torch.testing.assert_close(seen[0][1], first(x), rtol=1e-13, atol=1e-13)


def test_sas_and_sas_p_start_as_one_function() -> None:
    """Both are ``N(x) + b FF(N(x))`` a layer, up to ``N(N(x)) = N(x)``, which epsilon blurs."""
    ours, theirs = encoder("sas"), encoder("sas_p")
    shared = ours.state_dict()
    theirs.load_state_dict({name: shared[name] for name in theirs.state_dict()})
    x = torch.randn(BATCH, SOURCE, MODEL)
    torch.testing.assert_close(
        ours(x, source_mask()), theirs(x, source_mask()), rtol=1e-3, atol=1e-4
    )


@every_preset
def test_cache_grows_by_the_newest_tokens(preset: str) -> None:
    module = decoder(preset)
    memory = torch.randn(BATCH, SOURCE, MODEL)
    caches = module.start(memory)
    x = torch.randn(BATCH, TARGET, MODEL)
    _, grown = module(x, causal_mask(TARGET, x.device), source_mask(), caches)
    for before, after in zip(caches, grown, strict=True):
        assert before.self_keys.shape[2] == before.self_values.shape[2] == 0
        assert after.self_keys.shape[2] == after.self_values.shape[2] == TARGET
        assert after.cross_keys is before.cross_keys
