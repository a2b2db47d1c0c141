"""More models of other libraries: BERT with the heads of its classes, and decoder-only models.

Each has the weights of our model; the decoder-only ones equal our `pre_ln`.
"""

from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.config import BlockConfig
from lightning_app.lab.bench.measure import Work
from lightning_app.lab.bench.peers import (
    Learner,
    Projections,
    Setting,
    batch_of,
    copy_bert_body,
    learner,
    linears,
    needed,
    same_loss,
    work,
)
from lightning_app.models.encoder_heads import SpanPredictor, TextClassifier
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.tasks.causal_lm import CausalBatch


def bert_like(ours: TextClassifier | SpanPredictor, kind: str, **fields: Any) -> Any:
    """Return a Hugging Face model with our model's embedding and encoder.

    It equals our `post_ln` with learned positions, GELU and the norm of the embedding.

    Args:
        ours: Our model, on the CPU.
        kind: Its class, such as `BertForQuestionAnswering`, with as many outputs as ours.
        fields: Additional fields of `BertConfig`; by default attention is SDPA without dropout.
    """
    package = needed("transformers", "Hugging Face transformers")
    block: Any = ours.encoder.blocks[0]
    first, _ = linears(block.feed_forward)
    outputs, width = ours.output.weight.shape
    positions: Any = ours.embedding.position_table
    own = {
        "vocab_size": len(ours.embedding.tokens.weight),
        "hidden_size": width,
        "num_hidden_layers": len(ours.encoder.blocks),
        "num_attention_heads": block.self_attention.num_heads,
        "intermediate_size": first.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": len(positions.weight),
        "pad_token_id": ours.pad,
        "layer_norm_eps": 1e-5,
        "attn_implementation": "sdpa",
        "num_labels": outputs,
    }
    theirs = getattr(package, kind)(package.BertConfig(**{**own, **fields}))
    theirs = theirs.to(ours.output.weight.dtype).train()
    copy_bert_body(ours, theirs.bert)
    return theirs


def bert_classifier(ours: TextClassifier, **fields: Any) -> Any:
    """Return `bert_like` as `BertForSequenceClassification`, with our pooler and output layer.

    One output is a score, with the mean squared error as its loss.
    """
    theirs = bert_like(ours, "BertForSequenceClassification", **fields)
    theirs.bert.pooler.dense.load_state_dict(ours.pooler.state_dict())
    theirs.classifier.load_state_dict(ours.output.state_dict())
    return theirs


def gpt2(ours: CausalLanguageModel, setting: Setting) -> Any:
    """Return Hugging Face's GPT-2 of the same sizes, with SDPA, which equals our `pre_ln`.

    GPT-2 has no factor sqrt(width) on its embedding, which is also the output layer: its table is
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

    It equals our `pre_ln` while the biases that it lacks are zero, as initially.
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
    """Return the mean loss of full windows."""
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
