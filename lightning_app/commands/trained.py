"""The model and the tokenizer of a finished run, for commands that work with text."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_app.commands.named_run import check_saved
from lightning_app.data.tokenizer import Tokenizer, load_tokenizer, sha256
from lightning_app.errors import UserError
from lightning_app.saved import read_checkpoint
from lightning_app.task_facts import task_facts
from lightning_app.tasks.base import Task


class Trained(NamedTuple):
    """A trained model in evaluation mode, on a GPU if there is one."""

    task: Task
    model: Any
    tokenizer: Tokenizer
    vocab_size: int
    device: torch.device


def load_trained(command: str, run: str | Path, checkpoint: str, kind: str) -> Trained:
    """Return what `run` has trained, for `command`.

    Args:
        command: The name of the command, for messages.
        run: A run, as `find_run` takes it.
        checkpoint: best, last or a file.
        kind: The task that the command needs.

    Raises:
        UserError: a file is missing or damaged, or the run is of another task.
    """
    folder, path = check_saved(command, run, checkpoint)
    vocabulary = folder.tokenizer
    if not vocabulary.is_file():
        raise UserError(f"{command}: {vocabulary} is missing: --run takes a finished run")
    # Lightning is imported here, so that the checks above are fast.
    from lightning_app.datamodule import TextDataModule
    from lightning_app.module import TransformerModule

    try:
        data = read_checkpoint(path).get(TextDataModule.__qualname__)
    except UserError as error:
        raise UserError(f"{command}: {error}") from error
    if data is not None and sha256(vocabulary.read_bytes()) != data["tokenizer_sha256"]:
        raise UserError(f"{command}: {vocabulary}: damaged, or not the tokenizer of {path.name}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = TransformerModule.load_from_checkpoint(path, map_location=device, weights_only=True)
    task, model = module.objective, module.model
    if task.config.kind != kind:
        found, wanted = (task_facts(name).title for name in (task.config.kind, kind))
        raise UserError(f"{command}: {run} holds a model for {found}, not for {wanted}")
    assert model is not None
    model.eval()
    return Trained(task, model, load_tokenizer(vocabulary), module.vocab_size, device)
