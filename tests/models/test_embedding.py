import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_app.core.errors import UserError
from lightning_app.models.heads import EncoderDecoder, build_model
from lightning_app.models.positions import POSITIONS, Embedding, EmbeddingSpec
from lightning_app.testing import check_cached_translation
from tests import reference, tiny

DIM = 10
EVERY = ("sinusoidal", "learned", "rope")
every_kind = pytest.mark.parametrize("positions", EVERY)


def build(positions: Any = "sinusoidal", dropout: float = 0.0, norm: Any = "none") -> Embedding:
    order = POSITIONS[positions](model_dim=DIM, num_heads=5, max_positions=19)
    spec = EmbeddingSpec(vocab_size=tiny.VOCABULARY, pad=tiny.PAD, positions=order, norm=norm)
    return tiny.randomise(Embedding(spec, DIM, dropout))


def test_embedding_is_scaled_and_has_its_position(float64: None) -> None:
    """``sqrt(d) E[token] + PE(position)``, also from a later start and past the first table."""
    embedding = build()
    tokens = tiny.words(3, 7)
    halves = build("sinusoidal_fairseq")
    for start in (0, 5, 1000):
        place, rates = np.arange(start, start + 7)[:, None] + 2, 1e4 ** -(np.arange(5) / 4)
        wanted = np.concatenate([np.sin(place * rates), np.cos(place * rates)], axis=1)
        rows = halves.tokens.weight.detach().numpy()[tokens.numpy()]
        expected = torch.from_numpy(math.sqrt(DIM) * rows + wanted)
        torch.testing.assert_close(halves(tokens, start), expected, rtol=1e-11, atol=1e-11)
        table = reference.sinusoids(start + 7, DIM)[start:]
        rows = embedding.tokens.weight.detach().numpy()[tokens.numpy()]
        expected = torch.from_numpy(math.sqrt(DIM) * rows + table)
        torch.testing.assert_close(embedding(tokens, start), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("length", "start"), [(20, 0), (7, 13), (1, 19)])
def test_text_beyond_the_learned_table_is_refused(length: int, start: int) -> None:
    embedding = build("learned")
    embedding(tiny.words(2, length - 1), start)
    message = rf"max_positions is 19, and a text has {length + start} tokens"
    with pytest.raises(UserError, match=message):
        embedding(tiny.words(2, length), start)


@every_kind
def test_a_norm_is_on_the_sum_dropout_after_it_and_logits_are_tied(float64, positions: str) -> None:
    """As in BERT's official code."""
    embedding = build(positions, dropout=0.5, norm="layer_norm")
    plain = build(positions)
    plain.load_state_dict(embedding.state_dict(), strict=False)
    tokens = tiny.words(3, 7)
    norm = embedding.norm
    assert isinstance(norm, torch.nn.LayerNorm)
    expected = torch.nn.functional.layer_norm(plain(tokens), (DIM,), norm.weight, norm.bias)
    torch.testing.assert_close(embedding.eval()(tokens), expected)
    dropped = embedding.train()(tokens)
    kept = dropped != 0.0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2.0 * expected[kept])
    embedding = build(positions)
    states = torch.randn(3, 7, DIM)
    torch.testing.assert_close(embedding.logits(states), states @ embedding.tokens.weight.T)
    learned = ["position_table.weight"] if positions == "learned" else []
    assert [name for name, _ in embedding.named_parameters()] == ["tokens.weight", *learned]


def test_no_buffer_depends_on_the_lengths_seen_and_those_of_evaluation_serve_training() -> None:
    """Distributed training broadcasts buffers: ranks that saw other lengths must agree in shape."""
    short, long = build(), build()
    short(tiny.words(3, 7))
    long(tiny.words(3, 300))
    shapes = [[(name, b.shape) for name, b in e.named_buffers()] for e in (short, long)]
    assert shapes[0] == shapes[1]
    # The sanity check of a run evaluates in inference mode before the first training step.
    embedding = build()
    with torch.inference_mode():
        embedding(tiny.words(3, 7))
    embedding(tiny.words(3, 7)).sum().backward()
    assert embedding.tokens.weight.grad is not None


@pytest.mark.parametrize("preset", ["post_ln", "ngpt"])
def test_a_source_with_a_table_of_its_own_equals_one_large_table(float64, preset: str) -> None:
    """By the reference, whose one table has the rows of the target before those of the source."""
    sizes, block = tiny.architecture(), tiny.BlockConfig(preset=preset)
    model = build_model(sizes, block, 7, tiny.PAD, source_vocab=tiny.VOCABULARY)
    if preset != "ngpt":  # whose rows have length 1
        tiny.randomise(model)
    source, target = tiny.sentences()
    target = target.clamp(max=6)
    model(source, target).sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []
    assert source.max() > 6
    assert isinstance(model, EncoderDecoder)
    check_cached_translation(model, source, target, target.shape[1])
    if preset == "ngpt":  # its lengths hold after each step, and from the start
        assert model.source_embedding is not None
        lengths = model.source_embedding.tokens.weight[tiny.PAD + 1 :].norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))
        return
    parameters = tiny.numpy_parameters(model)
    tables = [parameters.pop(f"{name}.tokens.weight") for name in ("embedding", "source_embedding")]
    parameters["embedding.tokens.weight"] = np.concatenate(tables)
    moved = torch.where(source == tiny.PAD, source, source + 7).numpy()
    given = (tiny.reference_sizes(sizes), moved, target.numpy())
    expected = reference.translate(reference.REFERENCE[preset], parameters, *given).logits[..., :7]
    found = model(source, target).detach().numpy()
    assert np.abs(found - expected)[target != tiny.PAD].max() < 1e-11
