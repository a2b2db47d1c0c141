"""The same models from other libraries, with the same weights.

Each peer gets the weights of our model if the mathematics is the same, so that a comparison can
first assert equal outputs. It runs with its fastest setting.
"""

import importlib
import warnings
from types import ModuleType
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.bench.compare import Missing
from lightning_app.bench.learners import (
    Learner,
    Setting,
    batch_of,
    learner,
    work,
)
from lightning_app.bench.measure import Work
from lightning_app.blocks.attention import Attention
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.data.tokenizer import PAD
from lightning_app.models.heads import EncoderDecoder, MaskedLanguageModel
from lightning_app.models.transformer import BlockStack
from lightning_app.tasks.translation import TranslationBatch


def needed(module: str, package: str) -> ModuleType:
    """Import `module`, or raise `Missing` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(
            f"{package} is not installed; run pip install 'transformer-ablations[bench]'"
        ) from error


class Projections(NamedTuple):
    """Weights and biases of one of our attentions."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    @classmethod
    def of(cls, attention: Attention) -> "Projections":
        parts = (attention.query, attention.key, attention.value, attention.output)
        assert all(isinstance(part, nn.Linear) for part in parts)
        return cls(*parts)  # pyright: ignore[reportArgumentType]


def translation_loss(logits: Tensor, batch: TranslationBatch, label_smoothing: float) -> Tensor:
    """Return the mean loss of the target tokens, padding left out."""
    labels = batch.target[:, 1:].flatten()
    return F.cross_entropy(
        logits.flatten(0, 1), labels, ignore_index=PAD, label_smoothing=label_smoothing
    )


@final
class TorchTranslator(nn.Module):
    """`torch.nn.Transformer` with embeddings like ours.

    With post-norm, and without its norms after each stack, it is our `post_ln`. With the hint
    `is_causal` attention needs no mask, and then the targets need no padding mask.
    """

    def __init__(self, ours: EncoderDecoder, setting: Setting) -> None:
        super().__init__()
        self.embedding = ours.embedding
        with warnings.catch_warnings():
            # An odd number of heads avoids nested tensors, which training never uses.
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            self.transformer = nn.Transformer(
                setting.width,
                setting.heads,
                setting.depth,
                setting.depth,
                setting.ff_dim,
                dropout=0.0,
                activation="relu",
                batch_first=True,
            )
        self.transformer.encoder.norm = None
        self.transformer.decoder.norm = None
        self._copy(ours)

    @torch.no_grad()
    def _copy(self, ours: EncoderDecoder) -> None:
        for side in ("encoder", "decoder"):
            blocks: Any = getattr(ours, side).blocks
            layers: Any = getattr(self.transformer, side).layers
            for block, layer in zip(blocks, layers, strict=True):
                _copy_attention(block.self_attention, layer.self_attn)
                norms = [layer.norm1, layer.norm2]
                sources = [block.around_self, block.around_ff]
                if side == "decoder":
                    _copy_attention(block.cross_attention, layer.multihead_attn)
                    norms.append(layer.norm3)
                    sources.insert(1, block.around_cross)
                first, second = linears(block.feed_forward)
                layer.linear1.load_state_dict(first.state_dict())
                layer.linear2.load_state_dict(second.state_dict())
                for norm, source in zip(norms, sources, strict=True):
                    norm.load_state_dict(source.norm_sum.state_dict())

    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocabulary"]:
        padding = source == PAD
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], target.device, self.embedding.tokens.weight.dtype
        )
        states = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.embedding.logits(states)


@final
class XTranslator(nn.Module):
    """x-transformers with embeddings like ours and flash attention.

    With post-norm it is our `post_ln` while the biases that it lacks are zero, as at the start.
    """

    def __init__(self, ours: EncoderDecoder, setting: Setting) -> None:
        super().__init__()
        package = needed("x_transformers", "x-transformers")
        self.embedding = ours.embedding
        common: dict[str, Any] = {
            "dim": setting.width,
            "depth": setting.depth,
            "heads": setting.heads,
            "attn_dim_head": setting.width // setting.heads,
            "attn_flash": True,
            "ff_mult": setting.ff_dim / setting.width,
            "ff_custom_activation": nn.ReLU(),
            "pre_norm": False,
        }
        self.encoder = package.Encoder(**common)
        self.decoder = package.Decoder(cross_attend=True, **common)
        _copy_layers(self.encoder, ours.encoder.blocks)
        _copy_layers(self.decoder, ours.decoder.blocks)

    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocabulary"]:
        present = source != PAD
        memory = self.encoder(self.embedding(source), mask=present)
        states = self.decoder(self.embedding(target), context=memory, context_mask=present)
        return self.embedding.logits(states)


def x_encoder(ours: BlockStack, setting: Setting) -> nn.Module:
    """Return x-transformers' encoder with residual attention, which is our `realformer`."""
    package = needed("x_transformers", "x-transformers")
    encoder = package.Encoder(
        dim=setting.width,
        depth=setting.depth,
        heads=setting.heads,
        attn_dim_head=setting.width // setting.heads,
        ff_mult=setting.ff_dim / setting.width,
        ff_custom_activation={"gelu": nn.GELU, "relu": nn.ReLU}[setting.activation](),
        pre_norm=False,
        residual_attn=True,
    )
    _copy_layers(encoder, ours.blocks)
    return encoder


@torch.no_grad()
def _copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    parts = Projections.of(ours)
    joined = parts[:3]
    assert theirs.in_proj_weight is not None
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in joined]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in joined]))
    theirs.out_proj.load_state_dict(parts.output.state_dict())


@torch.no_grad()
def _copy_layers(theirs: Any, ours: nn.ModuleList) -> None:
    """Set the weights of the layers of x-transformers, one layer for each sub-layer."""
    layers = iter(zip(theirs.layer_types, theirs.layers, strict=True))
    for block in ours:
        part: Any = block
        kinds = [("a", "self_attention", "around_self"), ("f", None, "around_ff")]
        if part.cross_attention is not None:
            kinds.insert(1, ("c", "cross_attention", "around_cross"))
        for kind, attention, around in kinds:
            found, (norms, layer, _) = next(layers)
            assert found == kind
            if attention is None:
                first, second = linears(part.feed_forward)
                maps = [m for m in layer.modules() if isinstance(m, nn.Linear)]
                maps[0].load_state_dict(first.state_dict())
                maps[1].load_state_dict(second.state_dict())
            else:
                parts = Projections.of(getattr(part, attention))
                for name, source in zip(("q", "k", "v", "out"), parts, strict=True):
                    getattr(layer, f"to_{name}").weight.copy_(source.weight)
            norm = norms[2]  # after the sum
            norm.gamma.copy_(getattr(part, around).norm_sum.weight - float(norm.unit_offset))


def linears(feed_forward: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """Return the two linear maps of one of our feed-forwards."""
    first, second = (m for m in feed_forward.modules() if isinstance(m, nn.Linear))
    return first, second


def translation_learner(model: nn.Module, batch: TranslationBatch, setting: Setting) -> Learner:
    """Return a peer with the usual loss."""
    model = model.to(setting.device)

    def loss() -> Tensor:
        logits = model(batch.source, batch.target[:, :-1])
        return translation_loss(logits, batch, setting.label_smoothing)

    return Learner(model, loss)


def same_loss(ours: Learner, theirs: Learner) -> None:
    """Check that a peer and our model compute the same loss."""
    with torch.no_grad():
        pair = torch.stack([ours.loss(), theirs.loss()]).tolist()
    assert abs(pair[0] - pair[1]) < 1e-3 * pair[0], f"losses {pair}: not the same model"


def translation_peer(setting: Setting, peer: type[TorchTranslator] | type[XTranslator]) -> Work:
    """Return the work of a peer with the weights of our `post_ln`."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, EncoderDecoder)
    theirs = translation_learner(peer(ours.model, setting), batch, setting)
    same_loss(ours, theirs)
    return work(theirs, setting)


def residual_encoder(setting: Setting, *, ours: bool) -> Work:
    """Return the work of an encoder with residual attention: our `realformer`, or x-transformers'.

    There is no padding.
    """
    torch.manual_seed(1)
    block = BlockConfig(preset="realformer")
    model = learner(setting, block, batch_of(setting)).model
    assert isinstance(model, MaskedLanguageModel)
    encoder = model.encoder
    mask = full_mask(setting.length, torch.device(setting.device))
    x = torch.randn(setting.rows, setting.length, setting.width, device=setting.device)
    own = Learner(encoder, lambda: encoder(x, mask).pow(4).mean())
    if ours:
        return work(own, setting)
    theirs = x_encoder(encoder, setting).to(setting.device)
    peer = Learner(theirs, lambda: theirs(x).pow(4).mean())
    same_loss(own, peer)
    return work(peer, setting)
