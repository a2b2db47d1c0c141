"""Train a preset for some steps; as a program, many of them one after the other.

Tests run it as a separate program if torch traces the code (the checks of shapes under pytest would
be traced too) or if several processes train together.
"""

import json
import math
import os
import sys
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch

from lightning_app.blocks.kernels.choose import Form, attention_form
from lightning_app.models.loss import LossSums
from lightning_app.tasks import causal_lm, masked_lm, translation
from lightning_app.training.module import TransformerModule, loss_of
from tests import tiny
from tests.runs import data, module, trainer

STEPS = 50


class Losses(pl.Callback):
    """The loss of every step of this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        self.losses.append(float(loss_of(outputs)))


def train(
    folder: Path,
    cache: str,
    preset: str,
    task: str,
    precision: str,
    *,
    steps: int = STEPS,
    compiled: bool = False,
    block: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[float], TransformerModule]:
    """Return the losses and the module; check that all are finite and the last below the first."""
    losses = Losses()
    pl.seed_everything(1, verbose=False)
    trained = module(task, preset=preset, **(block or {}))
    if compiled:
        torch.compiler.reset()
        trained.compilation = "blocks"
    fitter = trainer(folder, max_steps=steps, precision=precision, callbacks=[losses], **settings)
    fitter.fit(trained, datamodule=data(cache, task))
    assert len(losses.losses) == steps
    assert all(math.isfinite(loss) for loss in losses.losses), losses.losses
    first, final = losses.losses[:5], losses.losses[-5:]  # batches of a rank differ
    assert steps < STEPS or sum(final) < sum(first), losses.losses
    return losses.losses, trained


def on_two_processes(folder: Path, cache: str, task: str, preset: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    losses, trained = train(folder / preset, cache, preset, task, "32-true", **settings)
    weights = float(sum(p.double().abs().sum() for p in trained.parameters()))
    return {"losses": losses, "weights": weights}


def compiled(folder: Path, cache: str, task: str, preset: str) -> dict[str, Any]:
    plain, _ = train(folder / "plain", cache, preset, task, "32-true", steps=5)
    losses, _ = train(folder / "compiled", cache, preset, task, "32-true", compiled=True)
    return {"plain": plain, "losses": losses}


def graph(folder: Path, cache: str, task: str, preset: str) -> dict[str, Any]:
    """Trace the model into one graph, which fails at the first break; no code is generated."""
    model: Any = tiny.translator(preset) if task == "translation" else tiny.masked_model(preset)
    inputs = tiny.sentences() if task == "translation" else (tiny.words(3, 7), torch.arange(5))
    before = deepcopy(model.state_dict())
    with attention_form("plain"):  # the compiled one
        expected = model(*inputs)
    model.load_state_dict(before)  # a call moves the vectors of sigma_reparam
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=True)
    return {"equal": torch.equal(model(*inputs), expected)}


def naive_sums(states, table, labels, counted, label_smoothing, bias=None, z_loss=0.0) -> LossSums:
    """The loss from all logits at once, instead of `output_sums`."""
    assert not z_loss
    logits = states @ table.T if bias is None else states @ table.T + bias
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    nll = -log_probs[torch.arange(len(labels)), labels]
    loss = (1 - label_smoothing) * nll - label_smoothing * log_probs.mean(dim=-1)
    correct = ((logits.argmax(dim=-1) == labels) * counted).sum()
    return LossSums((loss * counted).sum(), (nll.detach() * counted).sum(), correct, counted.sum())


def forms(folder: Path, cache: str, task: str, carry: str) -> dict[str, Any]:
    """Train 200 steps with the package's code, with the oracles, and compiled."""
    block = {"residual_attention": carry} if carry in ("sum", "mean") else {}
    preset, found = ("post_ln" if block else carry), {}
    for form in ("fast", "plain", "compiled"):
        oracle = form == "plain"
        attention: Form = "plain" if oracle else "reversible"
        objectives = (causal_lm, masked_lm, translation)
        with ExitStack() as held:
            held.enter_context(attention_form(attention))
            for objective in objectives if oracle else ():
                held.enter_context(mock.patch.object(objective, "output_sums", naive_sums))
            found[form], _ = train(
                folder / form,
                cache,
                preset,
                task,
                "32-true",
                steps=200,
                compiled=form == "compiled",
                block=block,
            )
    return found


def main(how: str, folder: Path, cache: str, task: str, presets: list[str]) -> None:
    run = {"ddp": on_two_processes, "compiled": compiled, "graph": graph, "forms": forms}[how]
    found = {preset: run(folder, cache, task, preset) for preset in presets}
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
