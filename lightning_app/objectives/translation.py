"""Translation: cross-entropy in training, search and BLEU in evaluation."""

from typing import Any, final

import sacrebleu
import torch
from torch import Tensor

from lightning_app.data.batching import TranslationBatch
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.search import Marks, SearchConfig, search
from lightning_app.objectives.base import Objective, ObjectiveConfig, Sums
from lightning_app.objectives.output import output_sums

GREEDY = SearchConfig(beam=1)
MARKS = Marks(bos=BOS, eos=EOS, mask=MASK)


def gather(hypotheses: dict[int, list[int]]) -> dict[int, list[int]]:
    """Join the hypotheses of all ranks by the row they translate, each row once."""
    if not torch.distributed.is_initialized():
        return hypotheses
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, hypotheses)
    return {row: tokens for part in parts for row, tokens in part.items()}


@final
class Translation(Objective):
    """Cross-entropy with label smoothing; greedy or beam search; BLEU over the whole split."""

    pad = PAD

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._hypotheses: dict[int, list[int]] = {}

    def logits(self, model: EncoderDecoder, batch: TranslationBatch) -> Tensor:
        """Return the logits of target tokens 1.., ``(batch, target - 1, vocabulary)``."""
        return model(batch.source, batch.target[:, :-1])

    def sums(self, model: EncoderDecoder, batch: TranslationBatch) -> Sums:
        """Return the sums over the target tokens of `batch`, the begin mark left out."""
        labels = batch.target[:, 1:].flatten()
        counted = (labels != PAD).to(torch.get_default_dtype())
        states = model.states(batch.source, batch.target[:, :-1]).flatten(0, 1)
        table = model.embedding.tokens.weight
        return output_sums(states, table, labels, counted, self.config.label_smoothing)

    def start_decoding(self) -> None:
        """Forget the hypotheses of the evaluation before."""
        self._hypotheses = {}

    def decode(self, model: EncoderDecoder, batch: TranslationBatch, stage: str) -> None:
        """Translate what `stage` asks for: all of the test, the first sentences of a validation."""
        if stage == "val":
            found = self._translate(model, batch, GREEDY, limit=self.config.validation_bleu)
        else:
            found = self._translate(model, batch, self.config.search())
        self._hypotheses |= found

    def _translate(
        self,
        model: EncoderDecoder,
        batch: TranslationBatch,
        how: SearchConfig,
        limit: int | None = None,
    ) -> dict[int, list[int]]:
        wanted = batch.index >= 0  # blank rows have none
        if limit is not None:
            wanted &= batch.index < limit
        if not wanted.any():
            return {}
        found = search(model, batch.source[wanted], MARKS, how)
        rows = batch.index[wanted].tolist()
        return {row: hypothesis.tokens for row, hypothesis in zip(rows, found, strict=True)}

    def scores(self, stage: str, datamodule: Any) -> dict[str, float]:
        """Return BLEU of the hypotheses decoded, on the 0-100 scale, the same on every rank.

        ``bleu``: tokenised and lower-cased, as the papers report it. ``sacrebleu`` (test alone):
        detokenised (Post 2018, 1804.08771); its signature is kept.
        """
        hypotheses = gather(self._hypotheses)
        if not hypotheses:
            return {}
        split = "valid" if stage == "val" else stage
        rows = sorted(hypotheses)
        texts = [datamodule.tokenizer.decode(hypotheses[row]) for row in rows]
        targets = datamodule.targets(split)
        how = "none" if datamodule.tokenized else "13a"
        bleu = sacrebleu.BLEU(tokenize=how, lowercase=True)
        targets = [targets[row] for row in rows]
        scores = {f"{stage}/bleu": bleu.corpus_score(texts, [targets]).score}
        if stage == "test":
            # A corpus whose text is lower-cased cannot earn the case of its references.
            metric = sacrebleu.BLEU(lowercase=not any(line != line.lower() for line in targets))
            references = datamodule.references(split)
            plain = [datamodule.detokenize(text) for text in texts]
            raw = [references[row] for row in rows]
            scores["test/sacrebleu"] = metric.corpus_score(plain, [raw]).score
            self.sacrebleu_signature = str(metric.get_signature())
            self.bleu_signature = str(bleu.get_signature())
            self.hypotheses, self.targets = texts, targets
        return scores

    def predict(
        self, model: EncoderDecoder, batch: TranslationBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (row, translation) of every sentence of `batch`."""
        found = self._translate(model, batch, self.config.search())
        return [(row, datamodule.tokenizer.decode(tokens)) for row, tokens in found.items()]
