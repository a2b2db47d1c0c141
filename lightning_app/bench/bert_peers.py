"""Hugging Face's BERT with our weights, with the heads of its classes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.bench.learners import Learner, Setting, batch_of, learner, work
from lightning_app.bench.measure import Work
from lightning_app.bench.peers import Projections, linears, needed, same_loss
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.data.tokenizer import PAD
from lightning_app.models.classifier import TextClassifier
from lightning_app.models.heads import MaskedLanguageModel
from lightning_app.models.span_predictor import SpanPredictor
from lightning_app.tasks.masked_lm import MaskedBatch


def bert(
    ours: MaskedLanguageModel, setting: Setting, batch: MaskedBatch, *, predicted_only: bool
) -> Learner:
    """Return Hugging Face's BERT of the same sizes, with SDPA.

    Its own loss computes the logits of every position; with `predicted_only` its body and its head
    are combined so that they do not. It is our `post_ln` except for the norm of its embedding,
    which our model gets for the comparison: see `with_embedding_norm`.
    """
    package = needed("transformers", "Hugging Face transformers")
    config = package.BertConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        num_hidden_layers=setting.depth,
        num_attention_heads=setting.heads,
        intermediate_size=setting.ff_dim,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=setting.architecture().max_positions,
        pad_token_id=PAD,
        layer_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    model = package.BertForMaskedLM(config).to(setting.device)
    model.train()
    _copy_bert(ours, model)
    labels = torch.full_like(batch.tokens, -100)
    labels.view(-1)[batch.positions] = batch.labels

    def loss() -> Tensor:
        if not predicted_only:
            return model(input_ids=batch.tokens, labels=labels).loss
        states = model.bert(input_ids=batch.tokens).last_hidden_state.flatten(0, 1)
        logits = model.cls(states.index_select(0, batch.positions))
        return F.cross_entropy(logits, batch.labels)

    return Learner(model, loss)


@torch.no_grad()
def _copy_bert(ours: MaskedLanguageModel, theirs: Any) -> None:
    copy_bert_body(ours, theirs.bert)
    head = theirs.cls.predictions
    head.transform.dense.load_state_dict(ours.transform.state_dict())
    head.transform.LayerNorm.load_state_dict(ours.norm.state_dict())
    head.transform.LayerNorm.eps = ours.norm.eps
    head.bias.copy_(ours.output_bias)


def with_embedding_norm(ours: MaskedLanguageModel) -> MaskedLanguageModel:
    """Insert BERT's norm of the embedding before our first block."""
    weight = ours.embedding.tokens.weight
    ours.encoder.input_norm = nn.LayerNorm(weight.shape[1]).to(weight.device, weight.dtype)
    return ours


@torch.no_grad()
def copy_bert_body(ours: MaskedLanguageModel | TextClassifier | SpanPredictor, theirs: Any) -> None:
    """Copy the weights of our embedding and blocks to `theirs`, a `BertModel`.

    The norm of BERT's embedding cancels our factor sqrt(width).
    """
    embeddings, width, own = theirs.embeddings, ours.embedding.model_dim, ours.embedding
    embeddings.word_embeddings.weight.copy_(own.tokens.weight)
    assert own.position_table is not None
    embeddings.position_embeddings.weight.copy_(own.position_table.weight / width**0.5)
    embeddings.token_type_embeddings.weight.zero_()
    if own.segments is not None:
        embeddings.token_type_embeddings.weight.copy_(own.segments.weight / width**0.5)
    if isinstance(own.norm, nn.LayerNorm):
        embeddings.LayerNorm.load_state_dict(own.norm.state_dict())
    embeddings.LayerNorm.eps = embeddings.LayerNorm.eps / width
    for block, layer in zip(ours.encoder.blocks, theirs.encoder.layer, strict=True):
        part: Any = block
        parts = Projections.of(part.self_attention)
        attention = layer.attention
        targets = [getattr(attention.self, name) for name in ("query", "key", "value")]
        for target, source in zip([*targets, attention.output.dense], parts, strict=True):
            target.load_state_dict(source.state_dict())
        attention.output.LayerNorm.load_state_dict(part.around_self.norm_sum.state_dict())
        first, second = linears(part.feed_forward)
        layer.intermediate.dense.load_state_dict(first.state_dict())
        layer.output.dense.load_state_dict(second.state_dict())
        layer.output.LayerNorm.load_state_dict(part.around_ff.norm_sum.state_dict())


def bert_like(ours: TextClassifier | SpanPredictor, kind: str, **fields: Any) -> Any:
    """Return a model of Hugging Face with the embedding and the encoder of ours.

    It is our `post_ln` with learned positions, GELU and the norm of the embedding.

    Args:
        ours: On the CPU.
        kind: Its class, such as `BertForQuestionAnswering`, which has as many outputs as ours.
        fields: Further fields of `BertConfig`; by default attention is SDPA, without dropout.
    """
    package = needed("transformers", "Hugging Face transformers")
    block: Any = ours.encoder.blocks[0]
    first, _ = linears(block.feed_forward)
    outputs, width = ours.output.weight.shape
    positions: Any = ours.embedding.position_table
    given = {
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
    theirs = getattr(package, kind)(package.BertConfig(**{**given, **fields}))
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


def bert_peer(setting: Setting, *, predicted_only: bool) -> Work:
    """Return the work of BERT; with `predicted_only` its head has the same inputs as ours."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, MaskedLanguageModel)
    with_embedding_norm(ours.model)
    theirs = bert(ours.model, setting, batch, predicted_only=predicted_only)
    same_loss(ours, theirs)
    return work(theirs, setting)
