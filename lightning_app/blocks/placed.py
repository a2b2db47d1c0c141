"""The effect of positions in attention: biases of scores, rotations of queries and keys."""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

Heads = Float[Tensor, "batch head token dim"]


class Places(NamedTuple):
    """The positions of the tokens of one pass, counted from 0."""

    newest: Int[Tensor, " #token"]
    """Positions of the tokens that run through the stack."""
    keys: Int[Tensor, "#batch key"]
    """Positions of all tokens that these may see: first those in the caches, then the newest."""
    start: int
    """The position of the first of the newest tokens, which are consecutive."""
    in_document: Int[Tensor, "batch token"] | None = None
    """Positions of the newest counted from the start of their document; None if a row is a
    document."""

    @classmethod
    def whole(cls, length: int, device: torch.device) -> "Places":
        """Return the places of a whole text."""
        places = torch.arange(length, device=device)
        return cls(places, places[None], start=0)


def within_documents(documents: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
    """Return the positions of tokens within their documents, from 0.

    Neighbours with the same number belong to one document; if it begins before its row, it is
    counted from the start of the row.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = documents[:, 1:] != documents[:, :-1]
    first = (begins * places[1:]).cummax(dim=1).values
    return places - torch.nn.functional.pad(first, (1, 0))


class Placed:
    """How the tokens of one pass enter the scores: ``f(q_i) . g(k_j) / sqrt(d_k) + b_ij``.

    Here f and g are the identity and b is None. A subclass overrides the terms that its positions
    use. The cache holds g(k); b is computed at each step.
    """

    bias: Float[Tensor, "#batch #head #query key"] | None = None
    """b, added to scaled scores; masks are applied after it."""

    def at(self, layer: int) -> "Placed":
        """Return the effect in a layer, counted from 1."""
        return self

    def added(
        self, query: Float[Tensor, "batch head token feature"]
    ) -> Float[Tensor, "batch head token key"] | None:
        """Return an additional term of the scores for the features f(q); None without one."""
        return None

    def queries(self, x: Heads) -> Float[Tensor, "batch head token _"]:
        """Return the features f(q) of the newest tokens."""
        return x

    def keys(self, x: Heads) -> Float[Tensor, "batch head token _"]:
        """Return the features g(k) of the newest tokens."""
        return x


@final
@dataclass(frozen=True)
class Rotation(Placed):
    """Cosines and sines of the angles by which rotary positions rotate the pairs of a head."""

    cos: Float[Tensor, "*batch token pair"]
    sin: Float[Tensor, "*batch token pair"]

    def queries(self, x: Heads) -> Heads:
        return rotate(x, self)

    def keys(self, x: Heads) -> Heads:
        return rotate(x, self)


def rotation(position: Int[Tensor, " token"], dim: int) -> Rotation:
    """Return the angles ``i * 10000^(-2k/dim)`` of positions i."""
    rate = 10000.0 ** (torch.arange(0, dim, 2, device=position.device, dtype=torch.float64) / -dim)
    angle = torch.outer(position.double(), rate)
    dtype = torch.get_default_dtype()
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Heads, by: Rotation) -> Heads:
    """Rotate the pairs (2k, 2k+1) of each head by the angle of its token (Su et al. 2021, RoPE,
    2104.09864, equation 34), so that the score of a query and a key depends only on i - j."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * by.cos - odd * by.sin, even * by.sin + odd * by.cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
