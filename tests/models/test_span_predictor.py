"""The model that marks answers, against Hugging Face's BERT and by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import bert_like
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.models.encoder_heads import CUT, STD, SpanPredictor
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.tasks.base import build_task
from lightning_app.tasks.labelled import LabelledBatch
from tests import tiny
from tests.models.test_classifier import BERT, LENGTHS, classifier, texts

SPANS = [[4, 5], [0, 0], [6, 9]]


def predictor(preset: str, **changes: Any) -> SpanPredictor:
    architecture = tiny.architecture(kind="encoder", **changes)
    task = build_task(ObjectiveConfig(kind="squad"))
    model = task.build_model(architecture, BlockConfig(preset=preset), tiny.VOCABULARY)
    assert isinstance(model, SpanPredictor)
    return model


def rows(labels: list[list[int]] = SPANS) -> LabelledBatch:
    """Three rows with padding."""
    return texts([0.0] * 3)._replace(labels=torch.tensor(labels))


@torch.no_grad()
def hugging_face(ours: SpanPredictor) -> Any:
    """BERT with our weights."""
    pytest.importorskip("transformers")
    theirs = bert_like(ours, "BertForQuestionAnswering", attn_implementation="eager")
    theirs.qa_outputs.weight.copy_(ours.output.weight)
    theirs.qa_outputs.bias.copy_(ours.output.bias)
    return theirs


@pytest.mark.usefixtures("float64")
def test_it_is_bert_of_hugging_face() -> None:
    """Logits, loss and gradients. Their softmax has the padding in it, so each row comes alone."""
    ours = tiny.randomise(predictor("post_ln", **BERT))
    with torch.no_grad():
        ours.embedding.tokens.weight[tiny.PAD] = 0.0
    theirs, batch = hugging_face(ours), rows()
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
    found = theirs(
        batch.tokens,
        attention_mask=(batch.tokens != tiny.PAD).long(),
        token_type_ids=batch.segments,
    )
    logits = ours(batch.tokens, batch.segments)
    losses = []
    for row, length in enumerate(LENGTHS):
        for place, side in enumerate((found.start_logits, found.end_logits)):
            torch.testing.assert_close(logits[row, place, :length], side[row, :length], **near)
            assert logits[row, place, length:].isneginf().all()
        start, end = SPANS[row]
        alone = theirs(
            batch.tokens[row : row + 1, :length],
            token_type_ids=batch.segments[row : row + 1, :length],
            start_positions=torch.tensor([start]),
            end_positions=torch.tensor([end]),
        )
        losses.append(alone.loss)
    loss = build_task(ObjectiveConfig(kind="squad")).sums(ours, batch).loss / batch.predicted_tokens
    torch.testing.assert_close(loss, torch.stack(losses).mean(), **near)
    loss.backward()
    torch.stack(losses).mean().backward()
    pairs = {
        ours.output.weight: theirs.qa_outputs.weight,
        ours.output.bias: theirs.qa_outputs.bias,
        ours.embedding.norm.weight: theirs.bert.embeddings.LayerNorm.weight,
    }
    for mine, other in pairs.items():
        torch.testing.assert_close(mine.grad, other.grad, **near)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_changes_nothing(preset: str) -> None:
    """Neither logits nor losses; the views of the probes are the rows of the batch."""
    model = tiny.randomise(predictor(preset, max_positions=19)).eval()
    batch, task = rows(), build_task(ObjectiveConfig(kind="squad"))
    whole = task.predictions(model, batch)
    assert whole.labels.tolist() == [place for span in SPANS for place in span]
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-11}
    with torch.no_grad():
        sums = task.sums(model, batch)
    assert sums.by_token is not None
    torch.testing.assert_close(task.mean_loss(whole), sums.loss / 3, **near)
    for row, length in enumerate(LENGTHS):
        tokens, segments = (of[row : row + 1, :length] for of in (batch.tokens, batch.segments))
        logits = model(tokens, segments)[0]
        torch.testing.assert_close(logits, whole.logits[2 * row : 2 * row + 2, :length], **near)
        nll = -logits.log_softmax(dim=1)[[0, 1], SPANS[row]].mean()
        torch.testing.assert_close(sums.by_token[0, row], nll, **near)
        for place in (0, 1):
            alone = task.predictions(model, task.alone(batch, 2 * row + place))
            assert len(alone.labels) == place + 1
            assert int(alone.labels[-1]) == SPANS[row][place]
            torch.testing.assert_close(alone.logits[-1], whole.logits[2 * row + place], **near)
    assert torch.equal(task.longest(batch).tokens, batch.tokens[2:])
    assert not torch.allclose(
        model(batch.tokens, 1 - batch.segments), model(batch.tokens, batch.segments)
    )


class Constant(nn.Module):
    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        logits = torch.zeros(3, 2, 11)
        logits[:, 0, 4] = math.log(11.0)  # 11 of 21
        logits[2, 1, 9] = math.log(31.0)  # 31 of 41
        return logits


def test_losses_by_hand() -> None:
    """The mean of start and end; a blank row counts nowhere; right is a row with both places."""
    task = build_task(ObjectiveConfig(kind="squad"))
    batch = rows([[4, 5], [4, 4], [4, 9]])._replace(index=torch.tensor([4, -1, 7]))
    with torch.no_grad():
        sums = task.sums(Constant(), batch)
    each = [(-math.log(11 / 21) + math.log(11)) / 2, (-math.log(11 / 21) - math.log(31 / 41)) / 2]
    assert float(sums.loss) == pytest.approx(sum(each))
    assert float(sums.nll) == pytest.approx(sum(each))
    assert (int(sums.tokens), int(sums.correct)) == (2, 1)  # pyright: ignore[reportArgumentType]
    assert sums.by_token is not None
    assert sums.by_token[1].tolist() == [1, 0, 1]
    assert sums.by_token[0].tolist() == pytest.approx([each[0], 0.0, each[1]])
    assert task.rows_of(batch).tolist() == [4, -1, 7]
    assert task.real_tokens(batch)["encoder"].sum(dim=1).tolist() == [7, 0, 11]
    assert task.predictions(Constant(), batch).labels.tolist() == [4, 5, 4, 9]
    assert task.alone(batch, 2).labels.tolist() == [[4, -1]]


@pytest.mark.parametrize("build", [predictor, partial(classifier, "RTE")])
def test_initial_values_of_the_output(build: Callable[..., Any]) -> None:
    """N(0, 0.02^2) cut at two standard deviations, whose own deviation is 0.0176; bias 0."""
    output = build("pre_ln", model_dim=1000, num_heads=1).output
    assert float(output.weight.detach().abs().max()) <= CUT * STD
    assert float(output.weight.detach().std()) == pytest.approx(0.02 * 0.8796, rel=0.05)
    assert not output.bias.any()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "squad", "label_smoothing": 0.1}, "kind squad predicts"),
        ({"kind": "squad", "intermediate_weight": 0.5}, "kind squad takes"),
        ({"kind": "glue", "glue": "STS-B", "label_smoothing": 0.1}, "STS-B"),
        ({"kind": "glue", "glue": "RTE", "intermediate_weight": 0.5}, "kind glue takes"),
        ({"kind": "glue", "glue": "RTE", "second_target_weight": 0.5}, "kind glue takes"),
    ],
)
def test_mistakes_of_the_objective(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ObjectiveConfig(**fields)
    ObjectiveConfig(kind="glue", glue="RTE", label_smoothing=0.1)
