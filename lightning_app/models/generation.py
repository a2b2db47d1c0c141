"""Continue a text with a causal language model, token by token, from its caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_app.models.heads import CausalLanguageModel


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from ``softmax(logits / temperature)``.

    Attributes:
        temperature: 0 takes the likeliest token, as its limit does.
        top_k: Only the `top_k` likeliest tokens are drawn; 0 for all.
        top_p: Only the likeliest tokens are drawn, as few as have a probability of `top_p` together
            (Holtzman et al. 2020, 1904.09751); 1 for all. It follows `top_k`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature}: at least 0, which is greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: at least 1, or 0 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p}: above 0 and at most 1")


def probabilities(
    logits: Float[Tensor, "text vocabulary"], how: Sampling
) -> Float[Tensor, "text vocabulary"]:
    """Return the probability with which each token is drawn."""
    logits = logits.double()
    if how.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    ordered, order = (logits / how.temperature).sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        ordered[:, how.top_k :] = -torch.inf
    p = ordered.softmax(dim=-1)
    # A token is out where those before it have enough together.
    p = p.masked_fill(p.cumsum(dim=-1) - p >= how.top_p, 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p).scatter_(1, order, p)


@torch.no_grad()
def sample_texts(
    model: CausalLanguageModel,
    prompt: Sequence[int],
    *,
    texts: int,
    tokens: int,
    how: Sampling,
    never: Sequence[int],
    generator: torch.Generator,
) -> Int[Tensor, "text token"]:
    """Return `texts` continuations of `prompt`, each of `tokens` tokens.

    Args:
        model: In evaluation mode.
        prompt: At least one token.
        texts: The number of continuations.
        tokens: The number of new tokens of each.
        how: How the next token is drawn.
        never: Tokens that are not drawn.
        generator: Of the draws, on the device of the model.
    """
    device = model.embedding.tokens.weight.device
    newest = torch.tensor(prompt, device=device).expand(texts, -1)
    state, found = model.start(texts), []
    logits = None
    for place in range(newest.shape[1]):
        logits, state = model.step(newest[:, place : place + 1], state)
    for drawn in range(tokens):
        assert logits is not None
        logits[:, list(never)] = -torch.inf
        found.append(torch.multinomial(probabilities(logits, how), 1, generator=generator))
        if drawn + 1 < tokens:
            logits, state = model.step(found[-1], state)
    return torch.cat(found, dim=1)
