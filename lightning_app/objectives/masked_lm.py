"""Masked language modelling (Devlin et al. 2019, 1810.04805)."""

from typing import Any, final

import torch
from torch import Tensor

from lightning_app.data.batching import MaskedBatch
from lightning_app.data.tokenizer import PAD
from lightning_app.models.heads import MaskedLanguageModel
from lightning_app.objectives.base import Objective, Sums
from lightning_app.objectives.output import output_sums


@final
class MaskedLanguageModelling(Objective):
    """The mean negative log-likelihood of masked tokens; only their positions are scored."""

    pad = PAD

    def logits(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Tensor:
        """Return the logits at the predicted positions, ``(predicted, vocabulary)``."""
        return model(batch.tokens, batch.positions)

    def sums(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Sums:
        """Return the sums over the predicted tokens of `batch`."""
        states = model.states(batch.tokens, batch.positions)
        return output_sums(
            states,
            model.embedding.tokens.weight,
            batch.labels,
            torch.ones(len(batch.labels), device=states.device),
            self.config.label_smoothing,
            bias=model.output_bias,
        )

    def start_decoding(self) -> None:
        """Nothing is decoded."""

    def decode(self, model: MaskedLanguageModel, batch: MaskedBatch, stage: str) -> None:
        """Nothing is decoded."""

    def scores(self, stage: str, datamodule: Any) -> dict[str, float]:
        """There is no score beyond those of the sums."""
        return {}

    def predict(
        self, model: MaskedLanguageModel, batch: MaskedBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (number, text) of each window, masked tokens filled by the likeliest ones."""
        tokens = batch.tokens.flatten().clone()
        tokens[batch.positions] = self.logits(model, batch).argmax(dim=-1)
        rows = tokens.view_as(batch.tokens).tolist()
        return [
            (number, datamodule.tokenizer.decode(row))
            for number, row in zip(batch.index.tolist(), rows, strict=True)
            if number >= 0
        ]
