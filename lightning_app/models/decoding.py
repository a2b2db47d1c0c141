"""Cached decoding: one more token of each text, without computing earlier tokens again."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.masks import full_mask, mask_of
from lightning_app.blocks.memory import LayerCache
from lightning_app.blocks.placed import Places
from lightning_app.models.embedding import Embedding
from lightning_app.models.stack import BlockStack, Memory

FEWEST_STEPS = 8  # a moved cache has room for at least this number of steps


class DecodingState(NamedTuple):
    """The state of cached decoding between steps, one row for each sentence.

    The beams of a sentence share its caches: a token's keys and values are written once, into a
    separate slot, and stay there for all later beams. `beam_ancestry` records which
    slots hold the prefix of which beam, `places` the positions of their tokens. Steps write into
    the caches, so a state is stepped once.
    """

    memory: Memory | None
    caches: list[LayerCache]
    beam_ancestry: Bool[Tensor, "sentence beam slot"]
    places: Int[Tensor, "sentence slot"]
    length: int

    @classmethod
    def start(
        cls, stack: BlockStack, memory: Memory | None, sentences: int, beams: int
    ) -> "DecodingState":
        """Return the state before the first token of `beams` texts of each sentence."""
        device = next(stack.parameters()).device
        beam_ancestry = torch.empty(sentences, beams, 0, dtype=torch.bool, device=device)
        places = torch.empty(sentences, 0, dtype=torch.long, device=device)
        return cls(memory, [LayerCache() for _ in stack.layers], beam_ancestry, places, 0)

    def select(self, rows: Int[Tensor, " kept"]) -> "DecodingState":
        """Return the state of the sentences `rows`, which may repeat."""
        return self._replace(
            memory=None if self.memory is None else self.memory.select(rows),
            caches=[cache.select(rows) for cache in self.caches],
            beam_ancestry=self.beam_ancestry.index_select(0, rows),
            places=self.places.index_select(0, rows),
        )

    def reorder(self, beams: Int[Tensor, "sentence beam"]) -> "DecodingState":
        """Return the state in which each beam continues the prefix of `beams`."""
        every = beams[:, :, None].expand(-1, -1, self.beam_ancestry.shape[2])
        return self._replace(beam_ancestry=self.beam_ancestry.gather(1, every))

    def with_room(self, tokens: int, first: int = 0) -> "DecodingState":
        """Return a state whose caches have room for `tokens` more a sentence.

        If there is no room, slots that no beam's prefix holds, and those of positions before
        `first`, are dropped, and the others move to caches of twice their number. So between two
        moves as many slots are written as one move copies, and a search of n tokens reads little
        more than n slots a sentence instead of beam * n.
        """
        filled = self.beam_ancestry.shape[2]
        if not filled or filled + tokens <= self.caches[0].room:
            return self
        held = self.beam_ancestry.any(dim=1) & (self.places >= first)
        kept = int(held.sum(dim=1).max())
        slots = held.long().argsort(dim=1, descending=True, stable=True)[:, :kept]
        room = max(2 * kept, kept + FEWEST_STEPS * tokens)
        return self._replace(
            caches=[cache.moved(slots, room) for cache in self.caches],
            beam_ancestry=self.beam_ancestry.gather(
                2, slots[:, None].expand(-1, self.beam_ancestry.shape[1], -1)
            ),
            places=self.places.gather(1, slots),
        )


def step(
    embedding: Embedding,
    stack: BlockStack,
    tokens: Int[Tensor, "sentence beam"],
    state: DecodingState,
) -> tuple[Float[Tensor, "sentence*beam vocabulary"], DecodingState]:
    """Append one token to each beam and return the logits of the next, beam after beam."""
    sentences, beams = tokens.shape
    state = state.with_room(beams, stack.first_seen(state.length))
    own = torch.eye(beams, dtype=torch.bool, device=tokens.device).expand(sentences, -1, -1)
    beam_ancestry = torch.cat([state.beam_ancestry, own], dim=2)
    slots = beam_ancestry.shape[2]
    mask = full_mask(slots, tokens.device) if beams == 1 else mask_of(beam_ancestry[:, None])
    # All the newest tokens have the same position.
    newest = torch.full((1,), state.length, device=tokens.device)
    keys = torch.cat([state.places, newest.expand(sentences, beams)], dim=1)
    x = embedding(tokens.reshape(-1, 1), start=state.length).view(sentences, beams, -1)
    states = stack(x, mask, state.memory, state.caches, Places(newest, keys, state.length))
    grown = state._replace(beam_ancestry=beam_ancestry, places=keys, length=state.length + 1)
    return embedding.logits(states.flatten(0, 1)), grown
