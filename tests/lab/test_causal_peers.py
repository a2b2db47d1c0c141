"""Decoder-only models of public code are our `pre_ln`: logits, loss, gradients, cached texts."""

from typing import Any

import pytest
import torch

from benchmarks.peers import XCausal, causal_loss, gpt2
from lightning_app.blocks.config import BlockConfig
from lightning_app.lab.bench.peers import (
    Setting,
    batch_of,
    causal,
    learner,
)
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.search import Sampling, sample_texts
from tests.lab.test_peers import without_biases
from tests.tiny import randomise

TINY = causal(Setting(depth=3, width=20, ff_dim=28, heads=2, vocabulary=31, length=28, tokens=84))


def ours() -> tuple[CausalLanguageModel, Any]:
    batch = batch_of(TINY)
    model = learner(TINY, BlockConfig(preset="pre_ln"), batch).model
    assert isinstance(model, CausalLanguageModel)
    return randomise(model), batch


@pytest.mark.usefixtures("float64")
def test_gpt2_is_our_pre_ln() -> None:
    """Radford et al. 2019, by Hugging Face: learned positions, GELU, norms before, a final norm."""
    pytest.importorskip("transformers")
    model, batch = ours()
    theirs = gpt2(model, TINY)
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
    theirs = gpt2(model.eval(), TINY).eval()
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
    theirs = XCausal(model, TINY)
    # x-transformers takes the softmax in float32.
    torch.testing.assert_close(theirs(batch.tokens), model(batch.tokens), rtol=1e-5, atol=1e-5)
