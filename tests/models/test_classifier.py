"""The classifier of texts, against Hugging Face's BERT and against its own parts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.bench.peers import Projections, linears
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.models.classifier import CUT, STD, TextClassifier
from lightning_app.objectives.base import ObjectiveConfig
from lightning_app.tasks.base import build_task
from lightning_app.tasks.labelled_rows import LabelledBatch
from tests import tiny

LENGTHS = (7, 5, 11)
BERT: dict[str, Any] = {
    "positions": "learned",
    "embedding_norm": "layer_norm",
    "activation": "gelu",
    "max_positions": 19,
}


def objective(name: str, **fields: Any) -> ObjectiveConfig:
    return ObjectiveConfig(kind="glue", glue=name, **fields)


def classifier(name: str, preset: str, **changes: Any) -> TextClassifier:
    architecture = tiny.architecture(kind="encoder", **changes)
    block = BlockConfig(preset=preset)
    model = build_task(objective(name)).build_model(architecture, block, tiny.VOCABULARY)
    assert isinstance(model, TextClassifier)
    return model


def texts(labels: list[float]) -> LabelledBatch:
    """Three rows with padding; BOS first, EOS after each text."""
    tokens = torch.full((3, 11), tiny.PAD)
    segments = torch.zeros(3, 11, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = tiny.words(length)
        tokens[row, 0] = tiny.BOS
        tokens[row, length - 1] = tokens[row, 3] = tiny.EOS
        segments[row, 4:length] = 1
    given = torch.tensor(labels, dtype=torch.float64)
    return LabelledBatch(tokens, segments, given, torch.arange(3), torch.tensor(3))


@torch.no_grad()
def copy_encoder(ours: Any, kind: str, outputs: int) -> Any:
    """A class of theirs with our encoder; the norm of its embedding cancels our sqrt(width)."""
    package = pytest.importorskip("transformers")
    width, table = ours.embedding.model_dim, ours.embedding.position_table
    config = package.BertConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=width,
        num_hidden_layers=len(ours.encoder.blocks),
        num_attention_heads=tiny.NUM_HEADS,
        intermediate_size=13,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=len(table.weight),  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
        pad_token_id=tiny.PAD,
        layer_norm_eps=1e-5,
        attn_implementation="eager",
        num_labels=outputs,
    )
    theirs = getattr(package, kind)(config).double()
    embeddings, segments = theirs.bert.embeddings, ours.embedding.segments
    assert segments is not None
    positions: Any = table
    embeddings.word_embeddings.weight.copy_(ours.embedding.tokens.weight)
    embeddings.position_embeddings.weight.copy_(positions.weight / width**0.5)
    embeddings.token_type_embeddings.weight.copy_(segments.weight / width**0.5)
    embeddings.LayerNorm.load_state_dict(ours.embedding.norm.state_dict())
    embeddings.LayerNorm.eps = 1e-5 / width
    for block, layer in zip(ours.encoder.blocks, theirs.bert.encoder.layer, strict=True):
        part: Any = block
        attention = layer.attention
        targets = [getattr(attention.self, name) for name in ("query", "key", "value")]
        sources = Projections.of(part.self_attention)
        for target, source in zip([*targets, attention.output.dense], sources, strict=True):
            target.load_state_dict(source.state_dict())
        attention.output.LayerNorm.load_state_dict(part.around_self.norm_sum.state_dict())
        inner, outer = linears(part.feed_forward)
        layer.intermediate.dense.load_state_dict(inner.state_dict())
        layer.output.dense.load_state_dict(outer.state_dict())
        layer.output.LayerNorm.load_state_dict(part.around_ff.norm_sum.state_dict())
    return theirs


@torch.no_grad()
def hugging_face(ours: TextClassifier, outputs: int) -> Any:
    """BERT with our weights."""
    theirs = copy_encoder(ours, "BertForSequenceClassification", outputs)
    theirs.bert.pooler.dense.load_state_dict(ours.pooler.state_dict())
    theirs.classifier.load_state_dict(ours.output.state_dict())
    return theirs


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "labels"),
    [("RTE", [1.0, 0.0, 1.0]), ("MNLI", [2.0, 0.0, 1.0]), ("STS-B", [3.8, 0.0, 4.667])],
)
def test_it_is_bert_of_hugging_face(name: str, labels: list[float]) -> None:
    """Pooled state, logits, loss and gradients, with padding, random tables and biases."""
    ours = tiny.randomise(classifier(name, "post_ln", **BERT))
    with torch.no_grad():
        ours.embedding.tokens.weight[tiny.PAD] = 0.0
    outputs = {"RTE": 2, "MNLI": 3, "STS-B": 1}[name]
    theirs, batch = hugging_face(ours, outputs), texts(labels)
    given = batch.labels if outputs == 1 else batch.labels.long()
    real = (batch.tokens != tiny.PAD).long()
    mine: dict[str, Tensor] = {}
    ours.pooler.register_forward_hook(lambda _, __, out: mine.update(pooled=torch.tanh(out)))
    found = theirs(batch.tokens, attention_mask=real, token_type_ids=batch.segments, labels=given)
    pooled = theirs.bert(
        batch.tokens, attention_mask=real, token_type_ids=batch.segments
    ).pooler_output
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
    torch.testing.assert_close(ours(batch.tokens, batch.segments), found.logits, **near)
    torch.testing.assert_close(mine["pooled"], pooled, **near)
    assert theirs.config.problem_type == (
        "regression" if outputs == 1 else "single_label_classification"
    )
    loss = build_task(objective(name)).sums(ours, batch).loss / batch.predicted_tokens
    torch.testing.assert_close(loss, found.loss, **near)
    loss.backward()
    found.loss.backward()
    pairs = {
        ours.output.weight: theirs.classifier.weight,
        ours.pooler.weight: theirs.bert.pooler.dense.weight,
        ours.pooler.bias: theirs.bert.pooler.dense.bias,
        ours.embedding.norm.weight: theirs.bert.embeddings.LayerNorm.weight,
    }
    for mine_, other in pairs.items():
        torch.testing.assert_close(mine_.grad, other.grad, **near)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_and_the_order_of_rows_change_nothing(preset: str) -> None:
    model = tiny.randomise(classifier("RTE", preset, max_positions=19)).eval()
    batch = texts([0.0, 1.0, 1.0])
    whole = model(batch.tokens, batch.segments)
    task = build_task(objective("RTE"))
    for row, length in enumerate(LENGTHS):
        tokens, segments = (of[row : row + 1, :length] for of in (batch.tokens, batch.segments))
        torch.testing.assert_close(model(tokens, segments)[0], whole[row], rtol=0, atol=1e-11)
        alone = task.alone(batch, row)
        torch.testing.assert_close(model(alone.tokens, alone.segments)[0], whole[row])
    assert not torch.allclose(model(batch.tokens, 1 - batch.segments), whole)


def test_initial_values_of_the_output() -> None:
    """N(0, 0.02^2) cut at two standard deviations, whose own deviation is 0.0176; bias 0."""
    model = classifier("RTE", "pre_ln", model_dim=1000, num_heads=1)
    weight = model.output.weight.detach()
    assert float(weight.abs().max()) <= CUT * STD
    assert float(weight.std()) == pytest.approx(0.02 * 0.8796, rel=0.05)
    assert not model.output.bias.any()


def test_dropout_is_between_pooler_and_output() -> None:
    model = classifier("RTE", "pre_ln", dropout=0.5)
    seen: list[Tensor] = []
    model.output.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    batch = texts([0.0, 1.0, 1.0])
    model(batch.tokens, batch.segments)
    assert 0.2 < float((seen[0] == 0).float().mean()) < 0.8
    model.eval()
    model(batch.tokens, batch.segments)
    assert float((seen[1] == 0).float().mean()) == 0


def test_losses_by_hand() -> None:
    """Blank rows count nowhere; nll of a score is that of a normal distribution."""
    scores = texts([3.0, 1.0, 5.0])._replace(index=torch.tensor([4, -1, 7]))
    task = build_task(objective("STS-B"))

    class Constant(nn.Module):
        def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
            return torch.tensor([[2.0], [100.0], [4.5]])

    with torch.no_grad():
        sums = task.sums(Constant(), scores)
    assert float(sums.loss) == pytest.approx(1.0 + 0.25)
    normal = torch.distributions.Normal(torch.tensor([2.0, 4.5]), 1.0)
    expected = -normal.log_prob(torch.tensor([3.0, 5.0])).sum()
    assert float(sums.nll) == pytest.approx(float(expected))
    assert (int(sums.tokens), int(sums.correct)) == (2, 0)  # pyright: ignore[reportArgumentType]
    assert sums.by_token is not None
    assert sums.by_token[:, 1].tolist() == [0.0, 0.0]
    assert float(sums.by_token[0].sum()) == pytest.approx(float(expected))

    class Logits(nn.Module):
        def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
            return torch.tensor([[0.0, math.log(3.0)]] * 3)

    classes = build_task(objective("RTE"))
    with torch.no_grad():
        sums = classes.sums(Logits(), texts([1.0, 0.0, 1.0])._replace(index=scores.index))
    assert float(sums.nll) == pytest.approx(-2 * math.log(0.75))
    assert (int(sums.tokens), int(sums.correct)) == (2, 2)  # pyright: ignore[reportArgumentType]


def test_mistakes_of_the_objective() -> None:
    with pytest.raises(ValueError, match="labels of STS-B are scores"):
        objective("STS-B", label_smoothing=0.1)
    objective("RTE", label_smoothing=0.1)
    for field in ("intermediate_weight", "second_target_weight"):
        with pytest.raises(ValueError, match="kind glue takes 0 for both"):
            objective("RTE", **{field: 0.5})
