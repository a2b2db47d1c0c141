"""The head of next sentences, against Hugging Face's BERT and against its own parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers import bert_like
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.spans import auxiliary_terms
from lightning_app.models.encoder_heads import (
    NEXT,
    RANDOM,
    MaskedLanguageModel,
    NextSentenceHead,
    add_next_sentence,
)
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.tasks.base import build_task
from lightning_app.tasks.masked_lm import MaskedBatch
from tests import tiny
from tests.models.test_classifier import body_pairs, check_gradients

CONFIG = ObjectiveConfig(kind="masked_lm", label_smoothing=0.0, next_sentence=True)
LENGTHS = (7, 5, 11)
POSITIONS = torch.tensor([1, 5, 12, 23, 30])


def paired_model(block: BlockConfig | str, **changes: Any) -> Any:
    model = tiny.masked_model(block, **changes)
    add_next_sentence(model)
    return model


def pairs() -> Any:
    """Three rows with padding; BOS first, EOS after each text."""
    tokens, segments = tiny.rows_of_pairs(LENGTHS)
    follows = torch.tensor([NEXT, RANDOM, NEXT])
    return MaskedBatch(
        tokens,
        POSITIONS,
        tiny.words(5),
        torch.arange(3),
        torch.tensor(5),
        segments,
        follows,
        torch.tensor(3),
    )


def losses(model: MaskedLanguageModel, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
    """The mean loss of the masked tokens and of the pairs, as a step takes them."""
    sums = build_task(CONFIG).sums(model, batch)
    terms = auxiliary_terms(model, batch.predicted_tokens.to(sums.loss))
    return sums.loss / batch.predicted_tokens, terms["next_sentence"]


@torch.no_grad()
def hugging_face(ours: Any) -> Any:
    """BERT with our weights; the norm of its embedding cancels our factor sqrt(width)."""
    pytest.importorskip("transformers")
    body: Any = SimpleNamespace(
        encoder=ours.encoder,
        embedding=ours.embedding,
        output=ours.next_sentence.output,
        pad=tiny.PAD,
    )
    theirs = bert_like(body, "BertForPreTraining", attn_implementation="eager")
    head, ours_head = theirs.cls, ours.next_sentence
    head, ours_head = theirs.cls, ours.next_sentence
    head.predictions.transform.dense.load_state_dict(ours.transform.state_dict())
    head.predictions.transform.LayerNorm.load_state_dict(ours.norm.state_dict())
    head.predictions.transform.LayerNorm.eps = ours.norm.eps
    head.predictions.bias.copy_(ours.output_bias)
    theirs.bert.pooler.dense.load_state_dict(ours_head.pooler.state_dict())
    head.seq_relationship.load_state_dict(ours_head.output.state_dict())
    return theirs


@pytest.mark.usefixtures("float64")
def test_it_is_bert_of_hugging_face() -> None:
    """Logits, loss and gradients, with padding, random tables and biases."""
    ours = tiny.randomise(
        paired_model(
            "post_ln",
            positions="learned",
            embedding_norm="layer_norm",
            activation="gelu",
            max_positions=19,
        )
    )
    with torch.no_grad():
        ours.embedding.tokens.weight[tiny.PAD] = 0.0
    theirs, batch = hugging_face(ours), pairs()
    labels = torch.full_like(batch.tokens, -100)
    labels.view(-1)[batch.positions] = batch.labels
    real = (batch.tokens != tiny.PAD).long()
    given: dict[str, Any] = {"attention_mask": real, "token_type_ids": batch.segments}
    found = theirs(batch.tokens, labels=labels, next_sentence_label=batch.follows, **given)
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
    logits = found.prediction_logits.flatten(0, 1)[batch.positions]
    torch.testing.assert_close(ours(batch.tokens, batch.positions, batch.segments), logits, **near)
    states = ours.states_of_heads(batch.tokens, batch.positions, batch.segments)
    torch.testing.assert_close(
        ours.next_sentence(states.first), found.seq_relationship_logits, **near
    )
    masked, next_sentence = losses(ours, batch)
    torch.testing.assert_close(masked + next_sentence, found.loss, **near)

    (masked + next_sentence).backward()
    found.loss.backward()
    check_gradients(
        *body_pairs(ours, theirs.bert),
        (ours.next_sentence.pooler.weight, theirs.bert.pooler.dense.weight, 1.0),
        (ours.next_sentence.output.bias, theirs.cls.seq_relationship.bias, 1.0),
        (ours.transform.weight, theirs.cls.predictions.transform.dense.weight, 1.0),
        (ours.output_bias, theirs.cls.predictions.bias, 1.0),
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", PRESETS)
def test_states_of_heads_are_those_of_the_whole_block_whatever_the_padding(preset: str) -> None:
    model, batch = tiny.randomise(paired_model(preset)), pairs()
    whole = model(batch.tokens, batch.positions, batch.segments)
    states = model.states_of_heads(batch.tokens, batch.positions, batch.segments)
    logits = model.embedding.logits(states.predicted) + model.output_bias
    torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)
    firsts = torch.arange(3) * batch.tokens.shape[1]
    other = model.states_of_heads(batch.tokens, firsts, batch.segments)
    torch.testing.assert_close(states.first, other.first, rtol=1e-12, atol=1e-12)
    # Padding changes nothing.
    every = torch.tensor([1])
    for row, length in enumerate(LENGTHS):
        alone = batch.tokens[row : row + 1], every, batch.segments[row : row + 1]
        cut = alone[0][:, :length], every, alone[2][:, :length]
        torch.testing.assert_close(model(*alone), model(*cut), rtol=1e-9, atol=1e-9)
        one, two = model.states_of_heads(*alone).first, model.states_of_heads(*cut).first
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_segments_are_read_where_there_is_a_table_and_other_tasks_predict_no_sentence() -> None:
    batch = pairs()
    with pytest.raises(AssertionError, match="a table of"):
        paired_model("pre_ln")(batch.tokens, batch.positions)
    with pytest.raises(AssertionError, match="a table of"):
        tiny.masked_model("pre_ln")(batch.tokens, batch.positions, batch.segments)
    with pytest.raises(ValueError, match=r"next_sentence true:.*masked_lm"):
        ObjectiveConfig(kind="causal_lm", next_sentence=True)


def test_other_initial_values_stay() -> None:
    """The head and the table are drawn last; without them the model has neither."""
    torch.manual_seed(3)
    plain = tiny.masked_model("pre_ln").state_dict()
    torch.manual_seed(3)
    paired = paired_model("pre_ln").state_dict()
    added = {name: value for name, value in paired.items() if name not in plain}
    assert all(torch.equal(paired[name], value) for name, value in plain.items())
    assert sorted(added) == [
        "embedding.segments.weight",
        *(f"next_sentence.{part}" for part in ("output.bias", "output.weight")),
        *(f"next_sentence.{part}" for part in ("pooler.bias", "pooler.weight")),
    ]
    assert not paired["next_sentence.pooler.bias"].any()
    assert not paired["next_sentence.output.bias"].any()
    assert 0.005 < paired["embedding.segments.weight"].std() < 0.05


def test_loss_of_pairs_is_a_mean_over_the_pairs_of_all_ranks() -> None:
    """Shares of a batch add up, and a blank row counts nothing but has gradients of zero."""
    model, batch = tiny.randomise(paired_model("post_ln")), pairs()
    whole = losses(model, batch)[1]
    parts = []
    for rows in ([0, 2], [1]):
        found = [None if of is None or not of.dim() else of for of in batch]
        tokens, segments, follows = (found[at][rows] for at in (0, 5, 6))  # pyright: ignore[reportOptionalSubscript]
        mine = batch._replace(
            tokens=tokens,
            positions=POSITIONS[:1],
            labels=batch.labels[:1],
            index=torch.tensor(rows),
            segments=segments,
            follows=follows,
        )
        parts.append(losses(model, mine)[1])
    torch.testing.assert_close(sum(parts), whole)
    nothing = losses(model, batch._replace(index=torch.full((3,), -1)))[1]
    assert nothing == 0.0
    nothing.backward()
    gradient = model.next_sentence.pooler.weight.grad
    assert not gradient.any()


def test_loss_is_hand_worked() -> None:
    """With z = (1, 0) for each pair, NEXT costs log(1 + 1/e) and RANDOM log(1 + e)."""
    head = NextSentenceHead(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.output.bias.copy_(torch.tensor([1.0, 0.0]))
    counted = torch.tensor([True, True, False, True])
    labels = torch.tensor([NEXT, RANDOM, RANDOM, NEXT])
    found = head.score(torch.randn(4, 4), labels, counted, torch.tensor(3), torch.tensor(50))
    low, high = torch.tensor(-1.0).exp().log1p(), torch.tensor(1.0).exp().log1p()
    torch.testing.assert_close(found.nll, torch.stack([low, high, high, low]))
    assert found.correct.tolist() == [True, False, False, True]
    (term,) = auxiliary_terms(head, torch.tensor(50.0)).values()
    torch.testing.assert_close(term, (2 * low + high) / 3)
    with pytest.raises(AssertionError, match="scores every batch"):
        head.auxiliary_terms()
