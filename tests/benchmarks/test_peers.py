"""Peers compute what our models compute, on random values; the rest of a comparison is speed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.measure import Contender, How, Missing, Work, compare
from benchmarks.peers import (
    Setting,
    TorchTranslator,
    XCausal,
    XTranslator,
    batch_of,
    bert,
    causal,
    causal_loss,
    gpt2,
    learner,
    masked,
    needed,
    same_loss,
    translation_learner,
    with_embedding_norm,
    x_encoder,
)
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.models.heads import CausalLanguageModel, EncoderDecoder, MaskedLanguageModel
from lightning_app.models.search import Sampling, sample_texts
from tests.tiny import randomise

TINY = Setting(depth=2, width=20, ff_dim=28, heads=2, vocabulary=31, length=28, tokens=84)
MASKED = masked(TINY)
CAUSAL = replace(causal(TINY), depth=3)


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


def ours() -> tuple[CausalLanguageModel, Any]:
    batch = batch_of(CAUSAL)
    model = learner(CAUSAL, BlockConfig(preset="pre_ln"), batch).model
    assert isinstance(model, CausalLanguageModel)
    return randomise(model), batch


@pytest.mark.usefixtures("float64")
def test_gpt2_is_our_pre_ln() -> None:
    """Radford et al. 2019, by Hugging Face: learned positions, GELU, norms before, a final norm."""
    pytest.importorskip("transformers")
    model, batch = ours()
    theirs = gpt2(model, CAUSAL)
    logits = theirs(input_ids=batch.tokens).logits
    torch.testing.assert_close(logits, model(batch.tokens), rtol=1e-10, atol=1e-10)
    causal_loss(logits, batch).backward()
    causal_loss(model(batch.tokens), batch).backward()
    block: Any = model.decoder.blocks[1]
    expected = block.feed_forward.inner.weight.grad.t()
    found = theirs.transformer.h[1].mlp.c_fc.weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_cached_texts_are_those_of_gpt2() -> None:
    pytest.importorskip("transformers")
    model, _ = ours()
    theirs = gpt2(model.eval(), CAUSAL).eval()
    for prompt in ([3, 9, 14], [7]):
        found = sample_texts(
            model,
            prompt,
            texts=1,
            tokens=20,
            how=Sampling(temperature=0.0),
            never=(),
            generator=torch.Generator(),
        )
        tokens = torch.tensor([prompt])
        expected = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found.tolist()[0] == expected.tolist()[0][len(prompt) :]


@pytest.mark.usefixtures("float64")
def test_the_decoder_of_x_transformers_is_our_pre_ln() -> None:
    pytest.importorskip("x_transformers")
    model, batch = ours()
    without_biases(model)
    theirs = XCausal(model, CAUSAL)
    # x-transformers takes the softmax in float32.
    torch.testing.assert_close(theirs(batch.tokens), model(batch.tokens), rtol=1e-5, atol=1e-5)


def test_a_translation_batch_is_as_the_data_module_makes_them() -> None:
    batch = batch_of(TINY)
    assert batch.source.shape == (3, 28)
    assert batch.target.shape == (3, 29)
    assert (batch.target[:, 0] == BOS).all()
    lengths = (28, 27, 26)
    for row, length in enumerate(lengths):
        for text, start in ((batch.source[row], 0), (batch.target[row], 1)):
            assert (text[start : start + length - 1] >= SPECIALS).all()
            assert text[start + length - 1] == EOS
            assert (text[start + length :] == PAD).all()
    assert batch.predicted_tokens == sum(lengths)


def test_a_masked_batch_predicts_what_it_hides() -> None:
    batch = batch_of(MASKED)
    places = batch.tokens.flatten()
    assert (places[batch.positions] == MASK).all()
    assert int((places == MASK).sum()) == len(batch.positions) == round(0.15 * 84)
    assert (batch.labels >= SPECIALS).all()
    assert batch.predicted_tokens == len(batch.labels)
