"""Our models on fixed batches, as workloads to time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import Activation
from lightning_app.blocks.kernels.choose import Form, attention_form
from lightning_app.lab.bench.measure import Work
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.scores.task_facts import DEFAULT_TASK, TASKS
from lightning_app.tasks.base import Task, build_task, to_device

Precision = Literal["32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes shared by all contenders.

    `tokens` is the size of a batch, `length` that of its longest row; both count target tokens if
    there is a target.
    """

    task: str = DEFAULT_TASK
    depth: int = 6
    width: int = 512
    ff_dim: int = 1024
    heads: int = 4
    vocabulary: int = 10_000
    length: int = 128
    tokens: int = 4096
    label_smoothing: float = 0.1
    positions: str = "sinusoidal"
    activation: Activation = "relu"
    device: str = "cpu"
    precision: Precision = "32"
    step: bool = True
    """Whether an optimizer step follows the forward and backward pass."""

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.length)

    def architecture(self) -> ArchitectureConfig:
        """Return the sizes of our model, without dropout, whose positions differ between peers."""
        return ArchitectureConfig(
            kind=TASKS[self.task].architecture,  # pyright: ignore[reportArgumentType]
            encoder_depth=self.depth,
            decoder_depth=self.depth,
            model_dim=self.width,
            ff_dim=self.ff_dim,
            num_heads=self.heads,
            dropout=0.0,
            positions=self.positions,
            activation=self.activation,
            max_positions=max(self.length, 128),
        )


def masked(setting: Setting) -> Setting:
    """Return the setting of masked language modelling with BERT's positions and activation."""
    return replace(
        setting, task="masked_lm", label_smoothing=0.0, positions="learned", activation="gelu"
    )


def causal(setting: Setting) -> Setting:
    """Return the setting of causal language modelling with GPT-2's positions and activation."""
    return replace(
        setting, task="causal_lm", label_smoothing=0.0, positions="learned", activation="gelu"
    )


class Learner(NamedTuple):
    """A model, and its mean loss on a fixed batch."""

    model: nn.Module
    loss: Callable[[], Tensor]


def task_of(setting: Setting) -> Task:
    """Return the task of a setting."""
    return build_task(ObjectiveConfig(kind=setting.task, label_smoothing=setting.label_smoothing))


def batch_of(setting: Setting) -> Any:
    """Return a random batch of the task; it depends on the seed of torch."""
    batch = task_of(setting).random_batch(setting.rows, setting.length, setting.vocabulary)
    return to_device(batch, torch.device(setting.device))


def learner(setting: Setting, block: BlockConfig, batch: Any) -> Learner:
    """Return our model with `block`, and its training loss."""
    task = task_of(setting)
    model = task.build_model(setting.architecture(), block, setting.vocabulary).to(setting.device)
    return Learner(model, lambda: task.sums(model, batch).loss / batch.predicted_tokens)


def work(learner: Learner, setting: Setting) -> Work:
    """Return one training step with fused Adam, or only one forward and backward pass."""
    parameters = list(learner.model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True) if setting.step else None

    def run() -> None:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss = learner.loss()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return Work(run, sum(parameter.numel() for parameter in parameters))


def preset_work(setting: Setting, preset: str, form: Form | None = None) -> Work:
    """Return the work of our model with `preset`, with attention in `form` unless None."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    free = work(learner(setting, BlockConfig(preset=preset), batch), setting)
    if form is None:
        return free

    def run() -> None:
        with attention_form(form):
            free.run()

    return free._replace(run=run)
