"""Our models on fixed batches, as pieces of work that can be timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_app.bench.measure import Work
from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.kernels import Form, attention_form
from lightning_app.data.batching import MaskedBatch, TranslationBatch
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.objectives import build_objective
from lightning_app.objectives.base import ObjectiveConfig

Precision = Literal["32", "bf16"]
PADDED = 1 / 14
"""The shortest sentence of a batch is shorter by this share, so that 3.6 % of it is padding."""
PREDICTED = 0.15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is common to everything that is compared.

    `tokens` is the size of a batch, `length` that of its longest row; both count target tokens
    where there is a target.
    """

    kind: Literal["encoder_decoder", "encoder"] = "encoder_decoder"
    depth: int = 6
    width: int = 512
    ff_dim: int = 1024
    heads: int = 4
    vocabulary: int = 10_000
    length: int = 128
    tokens: int = 4096
    label_smoothing: float = 0.1
    device: str = "cpu"
    precision: Precision = "32"
    step: bool = True
    """Whether a step of the optimizer follows the forward and backward pass."""

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.length)

    def architecture(self) -> ArchitectureConfig:
        """Return the sizes of our model, without dropout: peers drop entries elsewhere."""
        return ArchitectureConfig(
            kind=self.kind,
            encoder_depth=self.depth,
            decoder_depth=self.depth,
            model_dim=self.width,
            ff_dim=self.ff_dim,
            num_heads=self.heads,
            dropout=0.0,
            positions="learned" if self.kind == "encoder" else "sinusoidal",
            activation="gelu" if self.kind == "encoder" else "relu",
            max_positions=max(self.length, 128),
        )


class Learner(NamedTuple):
    """A model, and its mean loss on a batch that it always gets."""

    model: nn.Module
    loss: Callable[[], Tensor]


def translation_batch(setting: Setting) -> TranslationBatch:
    """Return sentences of random pieces whose lengths differ as in a batch of like lengths."""
    longest, rows = setting.length, setting.rows
    shortest = max(2, round(longest * (1 - PADDED)))
    lengths = torch.linspace(longest, shortest, rows).round().long()[:, None]
    place = torch.arange(longest + 1)
    source, target = (
        torch.randint(SPECIALS, setting.vocabulary, (rows, longest + extra)) for extra in (0, 1)
    )
    target[:, 0] = BOS
    # The target has one place more: its last token is predicted and never read.
    for text, end in ((source, lengths - 1), (target, lengths)):
        here = place[: text.shape[1]]
        text[here == end] = EOS
        text[here > end] = PAD
    batch = TranslationBatch(source, target, torch.arange(rows), lengths.sum().float())
    return TranslationBatch(*(part.to(setting.device) for part in batch))


def masked_batch(setting: Setting) -> MaskedBatch:
    """Return full windows of random pieces, 15 % of their places masked and predicted."""
    shape = (setting.rows, setting.length)
    tokens = torch.randint(SPECIALS, setting.vocabulary, shape)
    count = max(1, round(PREDICTED * tokens.numel()))
    positions = torch.randperm(tokens.numel())[:count].sort().values
    labels = tokens.flatten()[positions]
    tokens.view(-1)[positions] = MASK
    index, normalizer = torch.arange(setting.rows), torch.tensor(float(count))
    batch = MaskedBatch(tokens, positions, labels, index, normalizer)
    return MaskedBatch(*(part.to(setting.device) for part in batch))


def batch_of(setting: Setting) -> TranslationBatch | MaskedBatch:
    """Return the batch that belongs to the kind of model; it depends on the seed of torch."""
    return masked_batch(setting) if setting.kind == "encoder" else translation_batch(setting)


def learner(setting: Setting, block: BlockConfig, batch: TranslationBatch | MaskedBatch) -> Learner:
    """Return our model with `block`, and the loss that it is trained with."""
    architecture = setting.architecture()
    model = build_model(architecture, block, setting.vocabulary, PAD).to(setting.device)
    objective = build_objective(
        ObjectiveConfig(
            kind="masked_lm" if setting.kind == "encoder" else "translation",
            label_smoothing=setting.label_smoothing,
        )
    )
    return Learner(model, lambda: objective.sums(model, batch).loss / batch.normalizer)


def work(learner: Learner, setting: Setting) -> Work:
    """Return one training step, with fused Adam, or one forward and backward pass alone."""
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
    """Return the work of our model with `preset`, its attention in `form` where one is given."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    free = work(learner(setting, BlockConfig(preset=preset), batch), setting)
    if form is None:
        return free

    def run() -> None:
        with attention_form(form):
            free.run()

    return free._replace(run=run)
