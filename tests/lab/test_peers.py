"""Peers compute what our models compute, on random values; the rest of a comparison is speed."""

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.data.tokenizer import PAD
from lightning_app.lab.bench.measure import Contender, How, Missing, Work, compare
from lightning_app.lab.bench.peers import (
    Setting,
    TorchTranslator,
    XTranslator,
    batch_of,
    bert,
    learner,
    masked,
    needed,
    same_loss,
    translation_learner,
    with_embedding_norm,
    x_encoder,
)
from lightning_app.models.heads import EncoderDecoder, MaskedLanguageModel
from tests.tiny import randomise

TINY = Setting(depth=2, width=20, ff_dim=28, heads=2, vocabulary=31, length=28, tokens=84)
MASKED = masked(TINY)


def without_biases(model: torch.nn.Module) -> None:
    """x-transformers has no biases in its attention and its norms."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and "feed_forward" not in name:
            parameter.data.zero_()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("peer", [TorchTranslator, XTranslator])
def test_a_translator_is_our_post_ln(peer) -> None:
    if peer is XTranslator:
        pytest.importorskip("x_transformers")
    batch = batch_of(TINY)
    ours = learner(TINY, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, EncoderDecoder)
    randomise(ours.model)
    if peer is XTranslator:
        without_biases(ours.model)
    theirs = peer(ours.model, TINY)
    inputs = batch.source, batch.target[:, :-1]
    real = batch.target[:, 1:] != PAD
    torch.testing.assert_close(theirs(*inputs)[real], ours.model(*inputs)[real])
    pair = translation_learner(theirs, batch, TINY).loss(), ours.loss()
    torch.testing.assert_close(*pair, rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("predicted_only", [False, True])
def test_bert_is_our_post_ln_under_a_norm_of_the_embedding(predicted_only: bool) -> None:
    pytest.importorskip("transformers")
    batch = batch_of(MASKED)
    ours = learner(MASKED, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, MaskedLanguageModel)
    with_embedding_norm(randomise(ours.model))
    theirs = bert(ours.model, MASKED, batch, predicted_only=predicted_only)
    # Hugging Face takes the loss of float32 logits.
    torch.testing.assert_close(theirs.loss().double(), ours.loss(), rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("float64")
def test_residual_attention_of_x_transformers_is_our_realformer() -> None:
    pytest.importorskip("x_transformers")
    ours = learner(MASKED, BlockConfig(preset="realformer"), batch_of(MASKED)).model
    assert isinstance(ours, MaskedLanguageModel)
    without_biases(randomise(ours))
    theirs = x_encoder(ours.encoder, MASKED)
    x = torch.randn(3, 7, MASKED.width)
    # x-transformers takes the softmax in float32.
    expected = ours.encoder(x, full_mask(7, x.device))
    torch.testing.assert_close(theirs(x), expected, rtol=1e-5, atol=1e-5)


def test_another_model_is_distinguished_from_the_same() -> None:
    batch = batch_of(TINY)
    ours = learner(TINY, BlockConfig(preset="post_ln"), batch)
    other = learner(TINY, BlockConfig(preset="sas"), batch)
    same_loss(ours, ours)
    with pytest.raises(AssertionError, match="not the same"):
        same_loss(ours, other)


def test_a_peer_that_is_missing_is_a_line() -> None:
    def build() -> Work:
        needed("no_such_package_here", "Nobody's package")
        raise AssertionError

    with pytest.raises(Missing, match=r"Nobody's package is"):
        build()
    contenders = [Contender("ours", lambda: Work(lambda: torch.ones(3))), Contender("it", build)]
    ours, absent = compare("", contenders, How(rounds=1)).results
    assert ours.time == (1.0, 1.0, 1.0)
    assert absent.time is None
    assert "[bench]" in (absent.missing or "")
