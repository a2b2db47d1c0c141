"""Decoder-only models of other libraries, with the weights of our `pre_ln`."""

from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.bench.learners import Learner, Setting, batch_of, learner, work
from lightning_app.bench.measure import Work
from lightning_app.bench.peers import Projections, linears, needed, same_loss
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.tasks.causal_windows import CausalBatch


def gpt2(ours: CausalLanguageModel, setting: Setting) -> Any:
    """Return Hugging Face's GPT-2 of the same sizes, with SDPA, which is our `pre_ln`.

    GPT-2 has no factor sqrt(width) on its embedding, which serves the output too: its table is
    sqrt(width) times ours, and the final norm makes the states smaller by the same factor.
    """
    package = needed("transformers", "Hugging Face transformers")
    config = package.GPT2Config(
        vocab_size=setting.vocabulary,
        n_positions=setting.architecture().max_positions,
        n_embd=setting.width,
        n_layer=setting.depth,
        n_head=setting.heads,
        n_inner=setting.ff_dim,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    model = package.GPT2LMHeadModel(config).to(setting.device)
    model.train()
    _copy_gpt2(ours, model)
    return model


@torch.no_grad()
def _copy_gpt2(ours: CausalLanguageModel, theirs: Any) -> None:
    body, root = theirs.transformer, ours.embedding.model_dim**0.5
    body.wte.weight.copy_(ours.embedding.tokens.weight * root)
    assert ours.embedding.position_table is not None
    body.wpe.weight.copy_(ours.embedding.position_table.weight)
    for block, layer in zip(ours.decoder.blocks, body.h, strict=True):
        part: Any = block
        parts = Projections.of(part.self_attention)
        # Its matrices are transposed.
        layer.attn.c_attn.weight.copy_(torch.cat([each.weight for each in parts[:3]]).t())
        layer.attn.c_attn.bias.copy_(torch.cat([each.bias for each in parts[:3]]))
        targets = (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
        for target, source in zip(
            targets, (parts.output, *linears(part.feed_forward)), strict=True
        ):
            target.weight.copy_(source.weight.t())
            target.bias.copy_(source.bias)
        layer.ln_1.load_state_dict(part.around_self.norm_input.state_dict())
        layer.ln_2.load_state_dict(part.around_ff.norm_input.state_dict())
    final: Any = ours.decoder.final_norm
    body.ln_f.weight.copy_(final.weight / root)
    body.ln_f.bias.copy_(final.bias / root)


@final
class XCausal(nn.Module):
    """x-transformers' decoder with an embedding like ours and flash attention.

    It is our `pre_ln` while the biases that it lacks are zero, as at the start.
    """

    def __init__(self, ours: CausalLanguageModel, setting: Setting) -> None:
        super().__init__()
        package = needed("x_transformers", "x-transformers")
        self.embedding = ours.embedding
        self.decoder = package.Decoder(
            dim=setting.width,
            depth=setting.depth,
            heads=setting.heads,
            attn_dim_head=setting.width // setting.heads,
            attn_flash=True,
            ff_mult=setting.ff_dim / setting.width,
            ff_custom_activation=nn.GELU(),
        )
        self._copy(ours)

    @torch.no_grad()
    def _copy(self, ours: CausalLanguageModel) -> None:
        layers = iter(self.decoder.layers)
        for block in ours.decoder.blocks:
            part: Any = block
            norms, attention, _ = next(layers)
            self._norm(norms[0], part.around_self.norm_input)
            for name, source in zip(
                ("q", "k", "v", "out"), Projections.of(part.self_attention), strict=True
            ):
                getattr(attention, f"to_{name}").weight.copy_(source.weight)
            norms, feed_forward, _ = next(layers)
            self._norm(norms[0], part.around_ff.norm_input)
            theirs = [each for each in feed_forward.modules() if isinstance(each, nn.Linear)]
            for target, source in zip(theirs, linears(part.feed_forward), strict=True):
                target.load_state_dict(source.state_dict())
        self._norm(self.decoder.final_norm, ours.decoder.final_norm)

    @staticmethod
    def _norm(theirs: Any, ours: Any) -> None:
        theirs.gamma.copy_(ours.weight - float(theirs.unit_offset))

    def forward(
        self, tokens: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch token vocabulary"]:
        return self.embedding.logits(self.decoder(self.embedding(tokens)))


def causal_loss(logits: Tensor, batch: CausalBatch) -> Tensor:
    """Return the mean loss of windows that are full."""
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def causal_peer(setting: Setting, *, hugging_face: bool) -> Work:
    """Return the work of GPT-2, or of x-transformers' decoder, with the weights of our `pre_ln`."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="pre_ln"), batch)
    assert isinstance(ours.model, CausalLanguageModel)
    if hugging_face:
        model: Any = gpt2(ours.model, setting)
        theirs = Learner(model, lambda: causal_loss(model(input_ids=batch.tokens).logits, batch))
    else:
        decoder = XCausal(ours.model, setting).to(setting.device)
        theirs = Learner(decoder, lambda: causal_loss(decoder(batch.tokens), batch))
    same_loss(ours, theirs)
    return work(theirs, setting)
