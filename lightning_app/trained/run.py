"""A finished run, opened to use its model: for the commands that work with text, and for Python."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_app.config.classes import named_class
from lightning_app.data.config import DataConfig
from lightning_app.data.corpus import resolved_data
from lightning_app.data.tokenizer import Tokenizer, load_tokenizer, sha256
from lightning_app.errors import UserError
from lightning_app.plugin_copies import require, require_of
from lightning_app.records import Unsound, read_result, read_yaml
from lightning_app.run_folder import NAMED, RunFolder
from lightning_app.saved import data_state, read_checkpoint
from lightning_app.task_facts import task_facts
from lightning_app.tasks.base import Task
from lightning_app.trained.generating import continue_text, sampling
from lightning_app.trained.scoring import TextScore, score_pairs, score_text
from lightning_app.trained.translating import check_beam, translate


class TrainedRun:
    """A trained model with the tokenizer of its run, in evaluation mode, on a GPU if there is one.

    `load_run` makes it. A method that the task of the run does not have raises `UserError`.

    Attributes:
        folder: The folder of the run.
        checkpoint: The file that the weights are from.
        model: The model, a plain `torch.nn.Module`.
        task: Its task: loss, batches, decoding.
        tokenizer: The tokenizer of its data.
        vocab_size: The size of the vocabulary.
        device: Where the model is.
    """

    def __init__(
        self,
        folder: RunFolder,
        checkpoint: Path,
        task: Task,
        model: Any,
        tokenizer: Tokenizer,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.folder = folder.path
        self.checkpoint = checkpoint
        self.model = model
        self.task = task
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.device = device
        self._files = folder

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r}, checkpoint={str(self.checkpoint)!r})"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the run with every default, as `config.yaml` holds it."""
        path = self._files.config
        try:
            return read_yaml(path)
        except FileNotFoundError as error:
            raise UserError(f"{path}: is missing; a finished run has it") from error
        except Unsound as error:
            raise UserError(f"{path}: {error}") from error

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics at the end of the run by name, None where one was not finite.

        They belong to its last step, whichever checkpoint is loaded.
        """
        return dict(result_of(self._files)["metrics"])

    def translate(self, lines: Sequence[str], *, beam: int | None = None) -> list[str]:
        """Return the translation of each line; an empty line stays empty.

        ::

            load_run("experiments/fit/runs/RUN").translate(["vielen dank ."])

        Args:
            lines: Lines in the form of the run's corpus: tokenised and lower-cased for IWSLT14.
            beam: The width of the search, 1 for greedy; None for that of the run's config.
        """
        check_beam(beam, self.vocab_size)
        self._needs("translation")
        _check_lines("lines", lines)
        how = self.task.config.search(beam)
        return translate(self.model, self.tokenizer, lines, how, self.device)

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        texts: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> list[str]:
        """Return `prompt` with what the model writes after it, `texts` times.

        ::

            load_run("experiments/fit/runs/RUN").generate("the", tokens=30, top_p=0.9)

        Args:
            prompt: The begin of the text.
            tokens: The number of new tokens.
            texts: The number of texts.
            temperature: 0 for the likeliest token.
            top_k: Only the likeliest `top_k` tokens are drawn; 0 for all.
            top_p: Only the likeliest tokens that have this probability together are drawn.
            seed: Of the draws.
        """
        how = sampling(
            texts=texts, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        self._needs("causal_lm")
        return continue_text(
            self.model,
            self.tokenizer,
            prompt,
            how,
            self.device,
            texts=texts,
            tokens=tokens,
            seed=seed,
        )

    def score(self, lines: Sequence[str], targets: Sequence[str] | None = None) -> list[TextScore]:
        """Return the negative log-likelihood of each text, in nats, and its number of tokens.

        ::

            load_run("experiments/fit/runs/RUN").score(["the dog sees the cat ."])

        and of a translation model::

            load_run("experiments/fit/runs/RUN").score(["der hund ."], ["the dog ."])

        A text is read as an evaluation reads a split: nll is ``-sum ln p(token)`` over every token
        of the text and the end mark of each of its lines, without label smoothing and in the
        precision of the weights. Over the rows of a split, ``sum nll / sum tokens`` is the `nll` of
        an evaluation of these weights.

        - Causal language model: each text is a text alone, whose first token is predicted from the
          end of a line; it may have several lines. It is cut into windows of `data.window` tokens
          that begin every `data.evaluation_stride` tokens, as in an evaluation; with
          `model.block.memory` the segments are those of one stream. To get the loss of a split,
          give it as one text.
        - Translation: each target line given its source line.

        Args:
            lines: Texts; of a translation model the source lines.
            targets: Of a translation model, the target lines.
        """
        kind = self.task.config.kind
        if kind not in ("translation", "causal_lm"):
            raise UserError(
                f"score: {self.folder} holds a model for {task_facts(kind).title}, which gives no "
                "probability of a text"
            )
        _check_lines("lines", lines)
        if kind == "causal_lm":
            if targets is not None:
                raise UserError("targets: of a model for translation alone")
            return [
                score_text(self.task, self.model, self.tokenizer, text, self._data, self.device)
                for text in lines
            ]
        if targets is None or isinstance(targets, str) or len(targets) != len(lines):
            found = "none" if targets is None else len(targets)
            raise UserError(f"targets: expected a line for each of {len(lines)}, found {found}")
        for name, each in (("lines", lines), ("targets", targets)):
            if any("\n" in line for line in each):
                raise UserError(f"{name}: a pair is two lines, and one of them has a line break")
        if not lines:
            return []
        return score_pairs(
            self.task, self.model, self.tokenizer, lines, targets, self._data, self.device
        )

    @property
    def _data(self) -> DataConfig:
        return resolved_data(self.config["data"])

    def _needs(self, kind: str) -> None:
        if self.task.config.kind != kind:
            found, wanted = (task_facts(name).title for name in (self.task.config.kind, kind))
            raise UserError(f"{self.folder} holds a model for {found}, not for {wanted}")


def load_run(path: str | Path, checkpoint: str | Path = "best") -> TrainedRun:
    """Open a finished run with the weights of one of its checkpoints.

    ::

        from lightning_app import load_run

        run = load_run("experiments/fit/runs/RUN", checkpoint="last")
        run.metrics["val/nll"], run.config["model"]["block"]["preset"]

    Args:
        path: The folder of a run, of `fit` or of a cell of a grid.
        checkpoint: `best`, `last`, or the path of a checkpoint of this run.

    Raises:
        UserError: if a file is missing or damaged, or the checkpoint is of other data.
    """
    folder = RunFolder(Path(path))
    held = str(checkpoint) in NAMED
    file = folder.checkpoint(str(checkpoint)) if held else Path(checkpoint)
    for needed in (file, folder.tokenizer):
        if not needed.is_file():
            raise UserError(
                f"{needed} is missing: needed is a finished run's folder whose grid keeps that "
                "checkpoint (checkpoints: all, last or best)"
            )
    require(folder.path)
    require_of(file)
    if folder.result.is_file():
        result_of(folder)  # refuses a run whose files were changed
    stored = read_checkpoint(file, folder.path)
    data = data_state(stored)
    if data is not None and sha256(folder.tokenizer.read_bytes()) != data["tokenizer_sha256"]:
        raise UserError(f"{folder.tokenizer}: damaged, or not the tokenizer of {file.name}")
    # Lightning is imported here, so that the checks above are fast.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = named_class("model", stored["hyper_parameters"])
    module = kind.load_from_checkpoint(file, map_location=device, weights_only=True)
    assert module.model is not None
    module.model.eval()
    tokenizer = load_tokenizer(folder.tokenizer)
    return TrainedRun(
        folder, file, module.objective, module.model, tokenizer, module.vocab_size, device
    )


def result_of(folder: RunFolder) -> dict[str, Any]:
    """Return `result.json` of a finished run.

    Raises:
        UserError: if it is missing or damaged.
    """
    try:
        tree = read_result(folder.result, None)
    except Unsound as error:
        raise UserError(f"{folder.result}: {error}") from error
    if tree is None:
        raise UserError(f"{folder.result}: is missing; the run has not finished")
    return tree


def _check_lines(name: str, lines: Sequence[str]) -> None:
    """Refuse one text, whose characters would each be taken for a line."""
    if isinstance(lines, str):
        raise UserError(f"{name}: expected a list of texts, found one text; put it into a list")
