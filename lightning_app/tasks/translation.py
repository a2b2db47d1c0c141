"""Translation: pairs of sentences, cross-entropy in training, search and BLEU in evaluation."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack, final

import numpy as np
import sacrebleu
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_app.core.errors import UserError
from lightning_app.data import moses
from lightning_app.data.batching import EpochSampler, Item, padded, reshuffled
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, global_batches, share
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.loss import (
    Evaluated,
    LossSums,
    ObjectiveConfig,
    output_sums,
    sums_of_all_heads,
)
from lightning_app.models.search import Hypothesis, Marks, SearchConfig, search
from lightning_app.tasks.base import Predictions, Reading, Task, join_ranks, task

GREEDY = SearchConfig(beam=1)
_SEEN = 1000  # lines whose script is checked
MARKS = Marks(bos=BOS, eos=EOS, mask=MASK)

UNSPACED = ("bo", "dz", "km", "lo", "my", "th")
"""Languages without spaces between words for which sacreBLEU has no tokenizer of their own."""
_OTHER_CODES = {
    **dict.fromkeys(("chi", "cmn", "cn", "yue", "zho"), "zh"),
    **dict.fromkeys(("jp", "jpn"), "ja"),
    **dict.fromkeys(("kor", "kr"), "ko"),
    **{"bod": "bo", "tib": "bo", "dzo": "dz", "khm": "km", "lao": "lo", "bur": "my", "mya": "my"},
    "tha": "th",
}
"""The code of ISO 639-1 of the languages of which BLEU does not split words at spaces."""
_UNSPACED_LETTERS = re.compile(
    # Thai, Lao, Tibetan; Burmese; Khmer; kana; Chinese characters
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
)


def language_code(suffix: str) -> str:
    """Return the language that the suffix of a file names: ``zh`` for ``zh-CN`` and ``cmn``."""
    code = re.split("[-_]", suffix.lower())[0]
    return _OTHER_CODES.get(code, code)


def bleu(language: str, *, tokenized: bool = False, lowercase: bool = True) -> sacrebleu.BLEU:
    """Return BLEU of a target language, with sacreBLEU's tokenizer for it unless `tokenized`.

    Characters are the tokens of `UNSPACED`. As in fairseq, tokenised text is split at spaces.

    Raises:
        UserError: for Japanese or Korean without their tokenizer.
    """
    if tokenized:
        # `force` only suppresses the advice to detokenise at every validation.
        return sacrebleu.BLEU(tokenize="none", lowercase=lowercase, force=True)
    code = language_code(language)
    how = "char" if code in UNSPACED else None
    try:
        return sacrebleu.BLEU(tokenize=how, lowercase=lowercase, trg_lang=code)
    except RuntimeError as error:
        raise UserError(
            f"data.target_language: {language}: BLEU needs its tokenizer; run "
            f"pip install 'sacrebleu[{code}]'"
        ) from error


def check_language(language: str, lines: Sequence[str]) -> None:
    """Refuse text without spaces between words whose language BLEU would split at spaces.

    Raises:
        UserError: if most characters of the lines are of such a script and `language` is not.
    """
    if language_code(language) in ("zh", "ja", "ko", *UNSPACED):
        return
    text = "".join("".join(lines).split())
    share = len(_UNSPACED_LETTERS.findall(text)) / len(text) if text else 0.0
    if share > 0.5:
        raise UserError(
            f"data.target_language: {language}: {share:.0%} of its characters are of a script "
            f"without spaces between words, at which BLEU would split; expected the language's "
            f"code, one of zh, ja, {', '.join(UNSPACED)}"
        )


class TranslationBatch(NamedTuple):
    """One rank's share of a global batch of pairs.

    Attributes:
        source: (batch, source) int64, each row ended by EOS, padded with PAD.
        target: (batch, target) int64, BOS ... EOS, padded with PAD.
        index: (batch,) int64, row of the split; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts over all ranks.
    """

    source: Tensor
    target: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor


@final
class TranslationRows:
    """A split of pairs: (epoch, rows of a global batch) -> this rank's `TranslationBatch`.

    Args:
        corpus: A prepared corpus of pairs.
        split: train, valid or test.
        seed: The seed of the order of batches; None to order by length.
        rank: The rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._source = corpus.ids(split, "source"), np.array(corpus.offsets(split, "source"))
        self._target = corpus.ids(split, "target"), np.array(corpus.offsets(split, "target"))
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __len__(self) -> int:
        return len(self._source[1]) - 1

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        ids, offsets = self._target
        if rows is None:
            return ids
        return np.concatenate([ids[offsets[row] : offsets[row + 1]] for row in rows])

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch; the longer side's tokens count, with padding."""
        source, target = np.diff(self._source[1]), np.diff(self._target[1])
        return reshuffled(self._seed, partial(global_batches, source, target, tokens_per_batch))

    def __getitem__(self, item: Item) -> TranslationBatch:
        _, rows = item
        offsets = self._target[1]
        # every id after BOS is predicted
        predicted = torch.tensor(int((offsets[rows + 1] - offsets[rows]).sum()))
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return TranslationBatch(
                source=torch.full((1, 1), EOS),
                target=torch.full((1, 2), PAD),
                index=torch.full((1,), -1),
                predicted_tokens=predicted,
            )
        return TranslationBatch(
            source=padded(*self._source, mine, fill=PAD),
            target=padded(*self._target, mine, fill=PAD, bos=BOS),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=predicted,
        )


@task("translation")
@final
class Translation(Task):
    """Cross-entropy with label smoothing; greedy or beam search; BLEU over the whole split."""

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._hypotheses: dict[int, Hypothesis] = {}

    @classmethod
    def check(cls, corpus: PreparedCorpus, data: DataConfig) -> None:
        """Refuse a target language that names no tokenizer for its script."""
        if not corpus.meta["tokenized"]:
            check_language(data.target_language, corpus.lines("valid", "target")[:_SEEN])

    @classmethod
    def rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> TranslationRows:
        bleu(data.target_language)  # before anything is trained
        return TranslationRows(corpus, split, **part)

    def logits(self, model: EncoderDecoder, batch: TranslationBatch) -> Tensor:
        """Return the logits of target tokens 1.., ``(batch, target - 1, vocabulary)``."""
        return model(batch.source, batch.target[:, :-1])

    def sums(self, model: EncoderDecoder, batch: TranslationBatch) -> LossSums:
        """Return the sums over the target tokens of `batch`, without the begin mark."""
        labels, seen = batch.target[:, 1:], watched(model.auxiliary)
        states = model.states(batch.source, batch.target[:, :-1], seen)
        smoothing, z_loss = self.config.smoothing, self.config.z_loss
        sums = partial(output_sums, label_smoothing=smoothing, z_loss=z_loss)
        return sums_of_all_heads(sums, model, states, labels, labels != PAD, seen)

    def rows_of(self, batch: TranslationBatch) -> Int[Tensor, " token"]:
        """Return the row of each target token, without the begin mark but with padding."""
        return batch.index.repeat_interleave(batch.target.shape[1] - 1)

    def start_decoding(self) -> None:
        self._hypotheses = {}

    def decode(self, model: EncoderDecoder, batch: TranslationBatch, stage: str) -> None:
        """Translate what `stage` needs: the whole test split, or the first validation sentences."""
        if stage == "val":
            found = self._translate(model, batch, GREEDY, limit=self._decoded())
        else:
            found = self._translate(model, batch, self.config.search())
        self._hypotheses |= found

    def _decoded(self) -> int:
        """Return the row at which decoding ends, so that it has the first evaluated sentences."""
        count = self.config.validation_bleu
        if self.evaluated is None or not count:
            return count
        return int(np.sort(self.evaluated)[:count][-1]) + 1

    def _translate(
        self,
        model: EncoderDecoder,
        batch: TranslationBatch,
        how: SearchConfig,
        limit: int | None = None,
    ) -> dict[int, Hypothesis]:
        wanted = batch.index >= 0  # blank rows have index -1
        if limit is not None:
            wanted &= batch.index < limit
        if not wanted.any():
            return {}
        found = search(model, batch.source[wanted], MARKS, how)
        rows = batch.index[wanted].tolist()
        return dict(zip(rows, found, strict=True))

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return BLEU of the decoded hypotheses, from 0 to 100, the same on every rank.

        ``bleu``: tokenised and lower-cased, as reported in papers. ``sacrebleu`` (only test):
        detokenised (Post 2018, 1804.08771). The signatures of both are kept, and of the test split
        the number of hypotheses that the limit of their length ended.
        """
        hypotheses = join_ranks(self._hypotheses)
        if not hypotheses:
            return {}
        split = "valid" if stage == "val" else stage
        rows = sorted(hypotheses)
        texts = [datamodule.tokenizer.decode(hypotheses[row].tokens) for row in rows]
        lines, language = datamodule.targets(split), datamodule.config.target_language
        on_tokens = bleu(language, tokenized=datamodule.tokenized)
        targets = [lines[row] for row in rows]
        scores = {f"{stage}/bleu": on_tokens.corpus_score(texts, [targets]).score}
        if stage == "test":
            # A lower-cased corpus cannot match the case of its references.
            metric = bleu(language, lowercase=not any(line != line.lower() for line in targets))
            references = datamodule.references(split)
            # Lines of one's own are plain, unless plain ones lie beside them.
            spaced = datamodule.tokenized or references != lines
            plain = [moses.detokenize(text, language) if spaced else text for text in texts]
            raw = [references[row] for row in rows]
            scores["test/sacrebleu"] = metric.corpus_score(plain, [raw]).score
            self.signatures = {
                "bleu_signature": str(on_tokens.get_signature()),
                "sacrebleu_signature": str(metric.get_signature()),
                "cut_hypotheses": sum(hypotheses[row].cut for row in rows),
            }
            self.hypotheses, self.targets = texts, targets
        return scores

    def predict(
        self, model: EncoderDecoder, batch: TranslationBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (row, translation) of every sentence of `batch`."""
        found = self._translate(model, batch, self.config.search())
        decode = datamodule.tokenizer.decode
        return [(row, decode(hypothesis.tokens)) for row, hypothesis in found.items()]

    def predictions(self, model: EncoderDecoder, batch: TranslationBatch) -> Predictions:
        """Return logits and labels of all target tokens, without the begin mark."""
        labels = batch.target[:, 1:]
        counted = labels != PAD
        return Predictions(self.logits(model, batch)[counted], labels[counted])

    def alone(self, batch: TranslationBatch, token: int) -> TranslationBatch:
        """Return the pair of the predicted `token`, with its target cut after that token."""
        row, place = (batch.target[:, 1:] != PAD).nonzero()[token].tolist()
        return batch._replace(
            source=batch.source[row : row + 1], target=batch.target[row : row + 1, : place + 2]
        )

    def real_tokens(self, batch: TranslationBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return the tokens of the source, and the target positions that predict a token."""
        rows = (batch.index >= 0)[:, None]
        target = batch.target[:, 1:]
        return {"encoder": rows & (batch.source != PAD), "decoder": rows & (target != PAD)}

    def longest(self, batch: TranslationBatch) -> TranslationBatch:
        """Return the pair with the most tokens, counting both sides."""
        lengths = [(text != PAD).sum(dim=1) for text in (batch.source, batch.target)]
        row = int((lengths[0] + lengths[1]).argmax())
        source, target = (int(each[row]) for each in lengths)
        return batch._replace(
            source=batch.source[row : row + 1, :source],
            target=batch.target[row : row + 1, :target],
            index=batch.index[row : row + 1],
        )

    def texts(self, batch: TranslationBatch) -> tuple[Int[Tensor, "row token"], ...]:
        return batch.source, batch.target
