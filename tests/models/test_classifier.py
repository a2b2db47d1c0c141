"""The classifier of texts, against Hugging Face's BERT and against its own parts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import bert_classifier, linears
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.core.errors import UserError
from lightning_app.models.encoder_heads import TextClassifier
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.tasks.base import build_task
from lightning_app.tasks.labelled import LabelledBatch
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
    tokens, segments = tiny.rows_of_pairs(LENGTHS)
    given = torch.tensor(labels, dtype=torch.float64)
    return LabelledBatch(tokens, segments, given, torch.arange(3), torch.tensor(3))


def body_pairs(ours: Any, theirs: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Parameters of ours and of `BertModel`, and by how much smaller the gradients of ours are."""
    block, own = ours.encoder.blocks[0], ours.embedding
    layer, embeddings, root = theirs.encoder.layer[0], theirs.embeddings, own.model_dim**0.5
    return [
        (own.tokens.weight, embeddings.word_embeddings.weight, 1.0),
        (own.position_table.weight, embeddings.position_embeddings.weight, root),
        (own.segments.weight, embeddings.token_type_embeddings.weight, root),
        (own.norm.weight, embeddings.LayerNorm.weight, 1.0),
        (block.self_attention.query.weight, layer.attention.self.query.weight, 1.0),
        (block.self_attention.value.bias, layer.attention.self.value.bias, 1.0),
        (block.self_attention.output.bias, layer.attention.output.dense.bias, 1.0),
        (linears(block.feed_forward)[1].weight, layer.output.dense.weight, 1.0),
        (block.around_ff.norm_sum.weight, layer.output.LayerNorm.weight, 1.0),
    ]


def check_gradients(tokens: tuple[Any, Any, float], *others: tuple[Any, Any, float]) -> None:
    """Compare gradients; the row of padding in the table of tokens has none in ours."""
    tokens[0].grad[tiny.PAD] = tokens[1].grad[tiny.PAD]
    for mine, theirs, factor in (tokens, *others):
        torch.testing.assert_close(mine.grad * factor, theirs.grad, rtol=0.0, atol=1e-10)
        assert theirs.grad.abs().max() > 1e-6


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
    pytest.importorskip("transformers")
    theirs, batch = bert_classifier(ours, attn_implementation="eager"), texts(labels)
    given = batch.labels if outputs == 1 else batch.labels.long()
    real = (batch.tokens != tiny.PAD).long()
    mine: dict[str, Tensor] = {}
    ours.pooler.register_forward_hook(lambda _, __, out: mine.update(pooled=torch.tanh(out)))
    found = theirs(batch.tokens, attention_mask=real, token_type_ids=batch.segments, labels=given)
    how = {"attention_mask": real, "token_type_ids": batch.segments}
    pooled = theirs.bert(batch.tokens, **how).pooler_output
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
    torch.testing.assert_close(ours(batch.tokens, batch.segments), found.logits, **near)
    torch.testing.assert_close(mine["pooled"], pooled, **near)
    problem = "regression" if outputs == 1 else "single_label_classification"
    assert theirs.config.problem_type == problem
    loss = build_task(objective(name)).sums(ours, batch).loss / batch.predicted_tokens
    torch.testing.assert_close(loss, found.loss, **near)
    loss.backward()
    found.loss.backward()
    check_gradients(
        *body_pairs(ours, theirs.bert),
        (ours.output.weight, theirs.classifier.weight, 1.0),
        (ours.output.bias, theirs.classifier.bias, 1.0),
        (ours.pooler.weight, theirs.bert.pooler.dense.weight, 1.0),
        (ours.pooler.bias, theirs.bert.pooler.dense.bias, 1.0),
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_and_order_change_nothing_and_training_has_the_same_outputs(preset: str) -> None:
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
    # In training the last block computes less after its map: the same outputs and gradients.
    model, batch = tiny.randomise(classifier("RTE", preset, max_positions=19)), texts([0.0] * 3)
    given, gradients = (batch.tokens, batch.segments), []
    whole, outputs = model(*given), model.outputs(*given)
    torch.testing.assert_close(outputs, whole, rtol=1e-12, atol=1e-12)
    for found in (whole, outputs):
        gradients.append(torch.autograd.grad(found.pow(3).sum(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


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
        def outputs(self, tokens: Tensor, segments: Tensor) -> Tensor:
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
        def outputs(self, tokens: Tensor, segments: Tensor) -> Tensor:
            return torch.tensor([[0.0, math.log(3.0)]] * 3)

    classes = build_task(objective("RTE"))
    with torch.no_grad():
        sums = classes.sums(Logits(), texts([1.0, 0.0, 1.0])._replace(index=scores.index))
    assert float(sums.nll) == pytest.approx(-2 * math.log(0.75))
    assert (int(sums.tokens), int(sums.correct)) == (2, 2)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def test_outputs_that_are_not_finite_have_no_score() -> None:
    """The argmax of NaN is class 0, which is the most frequent one of RTE."""

    class Diverged(nn.Module):
        def outputs(self, tokens: Tensor, segments: Tensor) -> Tensor:
            return torch.tensor([[0.5, 0.0], [math.nan, math.nan], [0.0, 1.0]])

    task, batch = build_task(objective("MRPC")), texts([0.0, 0.0, 1.0])
    found = {}
    for rows in ([0, 2], [0, 1, 2]):
        index = torch.tensor([row if row in rows else -1 for row in range(3)])
        task.start_decoding()
        task.sums(Diverged(), batch._replace(index=index))
        task.decode(Diverged(), batch, "val")
        found[len(rows)] = task.scores("val", None, Evaluated(0.0, len(rows)))
    scores = {"val/accuracy": 1.0, "val/f1": 1.0, "val/majority_accuracy": 0.5}
    assert found[2] == scores
    assert found[3].pop("val/majority_accuracy") == pytest.approx(2 / 3)
    assert set(found[3]) == {"val/accuracy", "val/f1"}
    assert all(map(math.isnan, found[3].values()))


@torch.no_grad()
@pytest.mark.parametrize(("name", "said"), [("RTE", ["1", "0", "1"]), ("STS-B", ["0.5000"] * 3)])
def test_outputs_that_are_not_finite_predict_nothing(name: str, said: list[str]) -> None:
    """They would be the first class in `ablate predict`."""
    width = 1 if name == "STS-B" else 2
    outputs = torch.tensor([[0.5, 0.75], [0.5, 0.25], [0.5, 1.0]])[:, :width]

    class Given(nn.Module):
        def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
            return outputs

    task, batch = build_task(objective(name)), texts([0.0, 0.0, 1.0])
    assert task.answers(dict(task.predict(Given(), batch, None)), None) == dict(enumerate(said))
    outputs = outputs.clone()
    outputs[1] = math.nan
    with pytest.raises(UserError, match="the outputs of"):
        task.answers(dict(task.predict(Given(), batch, None)), None)
