"""Drawing the next token, and texts from caches that equal those without."""

import pytest
import torch

from lightning_app.blocks.presets import PRESETS
from lightning_app.models.search import Sampling, probabilities, sample_texts
from tests.tiny import causal_model, randomise

LOGITS = torch.tensor([[0.5, 3.0, -1.0, 2.0, 2.5], [1.0, 1.0, 1.0, 1.0, 9.0]])


def naive(logits: list[float], how: Sampling) -> list[float]:
    """One token after the other, from the likeliest on, until there are enough."""
    weights = [2.718281828459045 ** (x / how.temperature) for x in logits]
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])[: how.top_k or None]
    total = sum(weights[i] for i in ranked)
    kept: list[int] = []
    for token in ranked:
        if sum(weights[i] for i in kept) / total >= how.top_p:
            break
        kept.append(token)
    whole = sum(weights[i] for i in kept)
    return [weights[i] / whole if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 9])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 1.0])
def test_probabilities_are_the_definition(temperature: float, top_k: int, top_p: float) -> None:
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(LOGITS[:1], how)
    torch.testing.assert_close(found[0], torch.tensor(naive(LOGITS[0].tolist(), how)).double())


def test_temperature_zero_is_the_likeliest_token() -> None:
    found = probabilities(LOGITS, Sampling(temperature=0.0))
    assert found.tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]
    torch.testing.assert_close(probabilities(LOGITS, Sampling(temperature=1e-3)), found)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1.0}, "temperature -1.0: must be at least 0"),
        ({"temperature": float("nan")}, "temperature nan:.*0"),
        ({"top_k": -1}, "top_k -1: must be at least 1"),
        ({"top_p": 0.0}, "top_p 0.0: must be above 0"),
        ({"top_p": 1.5}, "top_p 1.5: must be above 0.*1"),
    ],
)
def test_values_without_meaning_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_texts_are_those_without_a_cache(preset: str) -> None:
    """The same draws from logits that are computed from the whole text each time."""
    model = randomise(causal_model(preset)).eval()
    prompt, never, how = [3, 9, 6], (0, 1, 2, 4), Sampling(temperature=1.5, top_k=12, top_p=0.9)
    settings = {"texts": 3, "tokens": 8, "how": how, "never": never}
    found = sample_texts(model, prompt, generator=torch.Generator().manual_seed(1), **settings)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(1)
    texts = torch.tensor(prompt).expand(3, -1)
    for _ in range(8):
        logits = model(texts)[:, -1]
        logits[:, list(never)] = -torch.inf
        drawn = torch.multinomial(probabilities(logits, how), 1, generator=generator)
        texts = torch.cat([texts, drawn], dim=1)
    assert found.tolist() == texts[:, 3:].tolist()
    assert not set(never) & set(found.flatten().tolist())
