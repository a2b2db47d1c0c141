"""The only LightningModule: a thin system around a plain model and its objective."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Self, final

import lightning.pytorch as pl
import numpy as np
import torch
from jaxtyping import Float, Int
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric, SumMetric

from lightning_app.blocks.block import Block
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.norm import FollowsSteps, acts_after_steps, at_step
from lightning_app.blocks.residual import RisingGain
from lightning_app.blocks.spans import AuxiliaryTerms, auxiliary_terms
from lightning_app.config.parents import load_parent
from lightning_app.config.rules import check_traits, declared
from lightning_app.config.trainer import whole_batches
from lightning_app.core.errors import UserError
from lightning_app.core.schema import read
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import needs_profiling, profile
from lightning_app.models.loss import Evaluated, LossSums, ObjectiveConfig
from lightning_app.models.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    set_rates,
    training_of,
)
from lightning_app.models.optimizers import Averaged, averages
from lightning_app.models.positions import Embedding
from lightning_app.models.stack import BlockStack, count_tokens_of, step_counts
from lightning_app.runs.parent import is_finite
from lightning_app.tasks.base import build_task, join_ranks
from lightning_app.training.datamodule import training_steps
from lightning_app.training.hardware import keep_freed_blocks


@final
class TokenCount(Metric):
    """A sum of counts, an exact integer on every device and in every precision of the model.

    A sum in float32 stops being exact at 2^24, one in bfloat16 at 2^8.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, count: Int[Tensor, ""]) -> None:
        self.total += count

    def compute(self) -> Tensor:
        return self.total


PARTS = 50
TRAINED = "trained_weights"
"""The field of a checkpoint with the weights from which a training goes on, where `state_dict` has
those that are evaluated."""


@final
class PartSums(Metric):
    """Sums of losses and tokens over `PARTS` parts of a split, each of consecutive rows.

    Neighbouring rows often come from the same text and are alike. A part of consecutive rows keeps
    them together, so that the differences between parts show how much another sample of texts
    would change a mean. With R rows, row r is in part ``r PARTS // R``, whatever the batches and
    the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor
        self.add_state("sums", torch.zeros(2, PARTS), dist_reduce_fx="sum")

    def update(
        self, by_token: Float[Tensor, "2 token"], rows: Int[Tensor, " token"], size: int
    ) -> None:
        """Add the tokens of a batch.

        Args:
            by_token: The loss of each token in nats, and 1 if it counts, otherwise 0; a token that
                does not count has the loss 0.
            rows: The row of the split for each token; arbitrary for tokens that do not count.
            size: The number of rows of the split.
        """
        parts = rows.clamp(min=0) * PARTS // size
        # Token by token, a float32 sum would stop growing at 2^24 tokens.
        self.sums += torch.zeros_like(self.sums).index_add_(1, parts, by_token.to(self.sums))

    def compute(self) -> dict[str, list[Any]]:
        """Return `nll` and `tokens` of each part that has tokens, in the order of the split."""
        nll, tokens = self.sums[:, self.sums[1] > 0].tolist()
        return {"nll": nll, "tokens": [int(count) for count in tokens]}


def is_logged(trainer: pl.Trainer, step: int) -> bool:
    """Whether optimizer step `step`, from 1, is logged: the first, then every n-th."""
    interval: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return step == 1 or step % interval == 0


def reserve(trainer: pl.Trainer, tags: Iterable[str], *, others: bool = False) -> None:
    """Refuse a tag that the package logs to `others`: Lightning would log the mean of both."""
    module: Any = trainer.lightning_module
    module.tags[others].update(tags)
    if both := sorted(module.tags[0] & module.tags[1]):
        by = f"{type(module).__name__} or a callback"
        raise UserError(f"{both[0]}: logged by this program and by {by}; use another tag")


Values = Mapping[str, float]


def tell_all(trainer: pl.Trainer, metrics: Values, step: int, shown: Values | None = None) -> None:
    """Log values of the package; event files get only those in `shown`, if it is given."""
    reserve(trainer, metrics)
    for logger in trainer.loggers:
        few = shown if isinstance(logger, TensorBoardLogger) else None
        logger.log_metrics(dict(metrics if few is None else few), step)


def loss_of(outputs: Any) -> Tensor:
    """Return the training loss that Lightning passes to callbacks after a step."""
    return outputs["loss"].detach()


def mix(*numbers: int) -> int:
    """Return a 64-bit seed that depends on every bit of `numbers`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


GRAPHS = 8  # of a block: for lengths, paddings and states that a first batch does not show


def compile_blocks(model: torch.nn.Module, **how: Any) -> None:
    """Compile the forward pass of every block in place, so that parameter names stay the same.

    Lengths are symbolic from the first batch: a batch of other lengths needs no new compilation.
    More than `GRAPHS` graphs for each block are an error, not a run that is slower unseen. `how`
    are additional arguments of `torch.compile`.
    """
    # Torch counts the graphs of all blocks together, and by default runs what needs more than eight
    # uncompiled; where a layer depends on its place, as in `denseformer`, each has its own.
    limits = torch.compiler.config
    limits.fail_on_recompile_limit_hit = True
    for part in model.modules():
        if isinstance(part, Block):
            limits.recompile_limit += GRAPHS
            limits.accumulated_recompile_limit += GRAPHS
            part.compile(dynamic=True, **how)
        elif isinstance(part, BlockStack):
            part.recomputes_norms = False


class TransformerModule(pl.LightningModule):
    """A Transformer with the wiring `block`, trained for `objective`.

    The model is built once the data is known, since the vocabulary sets its size. Gradients are
    those of the sum of token losses over the global batch divided by its number of predicted
    tokens, for any number of devices: each rank divides its share by tokens / world, and
    DDP averages. A step uses one global batch: gradients are not accumulated over several.

    After a validation `validation_parts` has its loss part by part (`PartSums`), and after
    `Trainer.predict` `predicted` has the text of every row of the split, on every rank.

    Args:
        block: The wiring: a preset and axes on top of it. This and the other parts may be
            mappings, as in a config.
        architecture: The sizes.
        objective: The task, such as translation, and its evaluation.
        optimizer: The optimizer.
        schedule: The learning-rate schedule.
        pack: The number of models that are stacked and trained together, for small models on a GPU:
            cells of a grid that differ in rate and warm-up only (`training.packs`); 1: each alone.
        compile: `blocks` trains with every block compiled by `torch.compile`, meant for GPUs;
            evaluation, decoding and probes are not compiled. Not part of a run's identity.
        init_from: The run from which a fine-tuned model starts: the folder of a finished run, which
            means its `checkpoints/last.ckpt`, or a checkpoint file. Weights and tokenizer come from
            the parent, whose block and sizes must match; heads start fresh. null: from initial
            values.
        class_path: The subclass that the config names, for its checkpoints; null for this class.
        init_args: The arguments of that subclass that are not listed here.
    """

    def __init__(
        self,
        block: BlockConfig | Mapping[str, Any] = BlockConfig(),
        architecture: ArchitectureConfig | Mapping[str, Any] = ArchitectureConfig(),
        objective: ObjectiveConfig | Mapping[str, Any] = ObjectiveConfig(),
        optimizer: OptimizerConfig | Mapping[str, Any] = OptimizerConfig(),
        schedule: ScheduleConfig | Mapping[str, Any] = ScheduleConfig(),
        compile: Literal["none", "blocks"] = "none",
        pack: int = 1,
        init_from: str | None = None,
        class_path: str | None = None,
        init_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        parts: dict[str, Any] = {
            name: read(kind, given, at=f"model.{name}") if isinstance(given, Mapping) else given
            for name, kind, given in (
                ("block", BlockConfig, block),
                ("architecture", ArchitectureConfig, architecture),
                ("objective", ObjectiveConfig, objective),
                ("optimizer", OptimizerConfig, optimizer),
                ("schedule", ScheduleConfig, schedule),
            )
        }
        # Plain values, so that checkpoints load with weights_only=True.
        hyperparameters: dict[str, Any] = {name: asdict(part) for name, part in parts.items()}
        if class_path is not None:
            named = {"class_path": class_path, "init_args": init_args}
            hyperparameters |= {**named, **(init_args or {})}
        self.save_hyperparameters(hyperparameters, logger=False)
        self.block: BlockConfig = parts["block"]
        self.architecture: ArchitectureConfig = parts["architecture"]
        self.schedule: ScheduleConfig = parts["schedule"]
        self.optimizer: OptimizerConfig = parts["optimizer"]
        self.compilation = compile
        self.init_from = init_from
        self.parent_name: str | None = None  # the parent as named in the id of the run
        self.objective = build_task(parts["objective"])
        self.model: torch.nn.Module | None = None
        self.vocab_size, self.source_vocab = 0, None
        self.profiled = False
        self.total_steps = 0  # number of steps of the run, fixed when it starts
        self._has_terms = self._follows_steps = True  # until fit has checked for them
        self._seed = 0
        # Keep NaNs: by default they would be dropped from the sum, and the loss would be 0.
        self.total_nll = SumMetric(nan_strategy="disable")
        self.total_correct, self.total_tokens = TokenCount(), TokenCount()
        self.part_sums = PartSums()
        self.validation_parts: dict[str, list[Any]] = {}
        self.predicted: dict[int, Any] = {}
        self.trained_by: list[dict[str, Any]] = []  # the result of `training_of`
        self._averaged: Averaged | None = None  # of an optimizer that evaluates other weights
        self.tags: tuple[set[str], set[str]] = set(), set()  # of this package, and of others

    @classmethod
    def load_from_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, checkpoint_path: Any, map_location: Any = None, **changed: Any
    ) -> Self:
        """Return the module of a checkpoint, even if it names LightningCLI's instantiator.

        Args:
            checkpoint_path: The file.
            map_location: The device for the weights; None: where they were.
            changed: Arguments of the module that replace those in the checkpoint. Only plain values
                are read, whatever `weights_only` is.
        """
        changed.pop("weights_only", None)
        saved = torch.load(checkpoint_path, map_location=map_location, weights_only=True)
        arguments = {k: v for k, v in saved["hyper_parameters"].items() if k != "_instantiator"}
        module = cls(**{**arguments, **changed})
        saved.pop(TRAINED, None)
        module.on_load_checkpoint(saved)
        module.load_state_dict(saved["state_dict"])
        devices = (value.device for value in saved["state_dict"].values())
        return module.to(next(devices, torch.device("cpu")))

    def ensure_built(self) -> None:
        """Build the model for the Trainer's data, if it does not exist yet."""
        if self.model is None:
            doubles = self.trainer.precision == "64-true"
            data: Any = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            self.build(data.vocab_size, data.source_vocab, doubles=doubles)

    def setup(self, stage: str) -> None:
        self.ensure_built()
        if stage == "fit" and self.compilation == "blocks":
            assert self.model is not None
            compile_blocks(self.model)

    def build(
        self, vocab_size: int, source_vocab: int | None = None, *, doubles: bool = False
    ) -> None:
        """Build the model with its initial values.

        Args:
            vocab_size: The number of tokens.
            source_vocab: That of source texts with a vocabulary of their own.
            doubles: Whether the model has float64.
        """
        self.vocab_size, self.source_vocab = vocab_size, source_vocab
        sizes = vocab_size, source_vocab
        self.model = self.objective.built(self.architecture, self.block, *sizes)
        if doubles:  # Lightning does it after weights are read into the model, which rounds them
            self.model.double()
        if self.init_from is not None:
            load_parent(self.model, self.init_from, self.parent_name)
            # Both are already done, in the run of the parent.
            self.profiled = True
            for part in self.model.modules():
                if isinstance(part, RisingGain):
                    part.rises = False

    @property
    def weight_type(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.parameters()).dtype

    @property
    def _grouping(self) -> dict[str, Any]:
        """The arguments of `build_optimizer` for groups that are warmed up and scaled apart."""
        width = self.architecture.width_factor
        return {"by_role": self.schedule.warmup_of != "all", "width_factor": width}

    def forward(self, batch: Any) -> torch.Tensor:
        return self.objective.logits(self.model, batch)

    def on_fit_start(self) -> None:
        self._seed = torch.initial_seed()
        # Checked once: at each step it would take a hundredth of a small model's time.
        self._has_terms = any(isinstance(part, AuxiliaryTerms) for part in self.modules())
        self._follows_steps = any(isinstance(part, FollowsSteps) for part in self.modules())
        if self.device.type == "cpu":
            keep_freed_blocks()

    def on_train_start(self) -> None:
        """Fix the steps of the run at its start; a continued run takes its checkpoint's.

        Raises:
            UserError: for a warm-up of the batch if a class of one's own makes the batches.
        """
        if rising := self.schedule.batch_warmup_steps:
            sampler = getattr(self.trainer.train_dataloader, "sampler", None)
            if not getattr(sampler, "grows", False):
                raise UserError(
                    f"model.schedule.batch_warmup_steps: {rising}, but the train_dataloader of "
                    "this run makes batches of its own; use 0"
                )
        if self._follows_steps and not (self.global_step and self.total_steps):
            self.total_steps = training_steps(self.trainer)
        for config in self.trainer.lr_scheduler_configs:
            if type(config.scheduler) is LambdaLR:  # a class of one's own may have other rates
                set_rates(config.scheduler)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the batch's draws; profile the skips that need it (Admin), once, on all ranks.

        Dropout depends only on (seed, step, batch, rank), so that a run resumed from a
        checkpoint draws the same numbers as an uninterrupted run.
        """
        assert self.model is not None
        if (batches := self.trainer.accumulate_grad_batches) != 1:  # changed by a callback
            raise UserError(f"trainer.accumulate_grad_batches: {whole_batches(batches)}")
        # `torch.manual_seed` visits every kind of accelerator, and without one keeps a formatted
        # stack trace on every call: half a millisecond.
        seed = mix(self._seed, self.global_step, batch_idx, self.global_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)
        if not self.profiled and needs_profiling(self.model):
            strategy = self.trainer.strategy
            real = self.objective.real_tokens(batch)
            total = partial(strategy.reduce, reduce_op="sum")
            profile(self.model, lambda: self(batch), total, real)  # pyright: ignore[reportArgumentType]
        self.profiled = True
        if self._follows_steps:
            at_step(self.model, self.global_step, self.total_steps)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        assert self.model is not None
        mean: Any = partial(self.trainer.strategy.reduce, reduce_op="mean")
        if self._has_terms:
            count_tokens_of(self.model, self.objective.real_tokens(batch), mean)
        sums = self.objective.sums(self.model, batch)
        # The mean of the ranks' gradients then equals the gradient of the global batch's mean.
        normalizer = batch.predicted_tokens.to(sums.loss.dtype) / self.trainer.world_size
        loss, nll = sums.loss / normalizer, sums.nll / normalizer
        terms = auxiliary_terms(self.model, normalizer) if self._has_terms else {}
        for term in terms.values():
            loss = loss + term
        step = self.global_step + 1
        if is_logged(self.trainer, step):
            parts = {"train/loss": loss, "train/nll": nll}
            parts |= {f"train/aux/{name}": term for name, term in terms.items()}
            if self.schedule.batch_warmup_steps:
                parts["train/batch_tokens"] = batch.predicted_tokens.to(loss.dtype)
            # The mean over ranks of (share / (tokens / world)) is the global loss.
            stacked = torch.stack([part.detach() for part in parts.values()])
            groups = self.trainer.optimizers[0].param_groups
            warmed = (group for group in groups if group.get("role") == self.schedule.warmup_of)
            rate = next(warmed, groups[0])["lr"]
            logged = {**dict(zip(parts, mean(stacked).tolist(), strict=True)), "train/lr": rate}
            tell_all(self.trainer, logged, step)
            self._log_steps(step)
        return {"loss": loss, "nll": nll}

    def _log_steps(self, step: int) -> None:
        """Log the mean steps per token and the share of tokens at the maximum, over all ranks."""
        assert self.model is not None
        for name, counts in step_counts(self.model).items():
            sums = torch.stack(counts).to(torch.float64)
            totals = self.trainer.strategy.reduce(sums, reduce_op="sum")  # pyright: ignore[reportArgumentType]
            steps, at_limit, tokens = totals.tolist()  # pyright: ignore[reportAttributeAccessIssue]
            logged = {f"train/steps/{name}": steps / tokens}
            logged[f"train/steps_at_limit/{name}"] = at_limit / tokens
            tell_all(self.trainer, logged, step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.global_step + 1
        if is_logged(self.trainer, step):
            # In float32 at least, also for gradients in bfloat16.
            gradients = [
                p.grad.to(torch.promote_types(p.grad.dtype, torch.float32))
                for p in self.parameters()
                if p.grad is not None
            ]
            norm = torch.nn.utils.get_total_norm(gradients)
            tell_all(self.trainer, {"train/grad_norm": float(norm)}, step)

    def on_validation_start(self) -> None:
        if self._averaged is not None:
            self._averaged.evaluate()

    def on_validation_end(self) -> None:
        # Callbacks, which come first, have written their checkpoints.
        if self._averaged is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._averaged.train()

    def on_fit_end(self) -> None:
        if self._averaged is not None:
            self._averaged.evaluate()

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation("valid")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = len(self.trainer.val_dataloaders.dataset)  # pyright: ignore[reportOptionalMemberAccess]
        with self._eager():
            sums = self.objective.sums(self.model, batch)
            self._add(sums)
            assert sums.by_token is not None
            self.part_sums.update(sums.by_token, self.objective.rows_of(batch), size)
            self.objective.decode(self.model, batch, "val")

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")
        self.validation_parts = self.part_sums.compute()
        self.part_sums.reset()

    def on_test_epoch_start(self) -> None:
        self._start_evaluation("test")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        with self._eager():
            self._add(self.objective.sums(self.model, batch))
            self.objective.decode(self.model, batch, "test")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def on_predict_epoch_start(self) -> None:
        self.predicted = {}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with self._eager():
            predictions = self.objective.predict(self.model, batch, self.trainer.datamodule)  # pyright: ignore[reportAttributeAccessIssue]
        self.predicted |= dict(predictions)
        return predictions

    def on_predict_epoch_end(self) -> None:
        datamodule = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self.predicted = self.objective.answers(join_ranks(self.predicted), datamodule)

    def _eager(self) -> AbstractContextManager[Any]:
        """Do not use compiled blocks: shapes change at every step of a search."""
        if self.compilation == "none":
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    def _start_evaluation(self, split: str) -> None:
        """Sum losses in the type of the model, but never in bfloat16, which keeps 8 bits."""
        for sums in (self.total_nll, self.part_sums):
            sums.set_dtype(torch.promote_types(self.weight_type, torch.float32))
        datamodule = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self.objective.evaluated = getattr(datamodule, "evaluated", {}).get(split)
        self.objective.start_decoding()

    def _add(self, sums: LossSums) -> None:
        self.total_nll.update(sums.nll)
        assert sums.correct is not None
        self.total_correct.update(sums.correct)
        self.total_tokens.update(sums.tokens)

    def _log_evaluation(self, stage: str) -> None:
        nll = float(self.total_nll.compute())
        correct, tokens = int(self.total_correct.compute()), int(self.total_tokens.compute())
        for total in (self.total_nll, self.total_correct, self.total_tokens):
            total.reset()
        metrics = self.metrics_of(stage, nll, correct, tokens)
        metrics["step"] = float(self.global_step)
        reserve(self.trainer, metrics)
        for name, value in metrics.items():
            # The same number on every rank: its parts were already summed or gathered.
            super().log(name, value, rank_zero_only=False)

    def metrics_of(self, stage: str, nll: float, correct: int, tokens: int) -> dict[str, float]:
        """Return the metrics of an evaluation from its sums over the predicted tokens."""
        mean = nll / tokens
        metrics = {f"{stage}/nll": mean, f"{stage}/perplexity": float(torch.tensor(mean).exp())}
        if self.objective.classifies:
            metrics[f"{stage}/accuracy"] = correct / tokens
        datamodule = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        return metrics | self.objective.scores(stage, datamodule, Evaluated(nll, tokens))

    def log(self, name: str, value: Any, *others: Any, **how: Any) -> None:
        """Log a value of a subclass or a callback, under a tag of its own."""
        reserve(self.trainer, [name], others=True)
        super().log(name, value, *others, **how)

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        # Lightning refuses to clip gradients of a fused optimizer in bf16-mixed.
        clipped = self.trainer.precision == "bf16-mixed" and bool(self.trainer.gradient_clip_val)
        fused = self.trainer.precision != "16-mixed" and not clipped
        optimizer = build_optimizer(self.optimizer, self.model, fused=fused, **self._grouping)
        schedule = build_schedule(self.schedule, optimizer, training_steps(self.trainer))
        traits = [*self._traits()]
        if averages(optimizer):  # of a plug-in's class, a config does not know it
            traits.append(("averages", f"model.optimizer.kind: {self.optimizer.kind}"))
        check_traits(traits)
        if averages(optimizer):
            self._check_kept()
            self._averaged = Averaged(optimizer)
        self.trained_by = training_of(optimizer, self.schedule, self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _traits(self) -> Iterator[tuple[str, str]]:
        """The declarations of its parts and the Trainer's, once all of them are built."""
        assert self.model is not None
        blocks = [part.spec for part in self.model.modules() if isinstance(part, Block)]
        callbacks: list[Any] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        names = [kind.__name__ for callback in callbacks for kind in type(callback).__mro__]
        parts = (*blocks, self.optimizer, self.schedule)
        yield from declared(parts, names, type(self.trainer.strategy).__name__)

    def _check_kept(self) -> None:
        """Refuse parts, also of a plug-in, to which an average of their weights may not belong."""
        for path, part in self.named_modules():
            if isinstance(part, Block | Embedding):
                continue  # they act after a step with `unit_matrices` alone, which was refused
            follows = isinstance(part, FollowsSteps) and not isinstance(part, AuxiliaryTerms)
            if follows or acts_after_steps(part):
                raise UserError(
                    f"model.optimizer.kind: {self.optimizer.kind} evaluates an average of weights, "
                    f"and {path} sets or follows them after each step; use another kind"
                )

    def _save_both(self, checkpoint: dict[str, Any], averaged: Averaged) -> None:
        """Store the evaluated weights as the model's, beside those from which training resumes."""

        def weights() -> dict[str, torch.Tensor]:
            return {name: value.clone() for name, value in self.state_dict().items()}

        evaluates = averaged.evaluates
        averaged.evaluate()
        checkpoint["state_dict"] = weights()
        averaged.train()
        if "optimizer_states" in checkpoint:
            checkpoint |= {TRAINED: weights()}
            checkpoint["optimizer_states"] = [averaged.optimizer.state_dict()]
        if evaluates:
            averaged.evaluate()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._averaged is not None:
            self._save_both(checkpoint, self._averaged)
        checkpoint["vocab_size"] = self.vocab_size
        if self.source_vocab is not None:
            checkpoint["source_vocab"] = self.source_vocab
        checkpoint["profiled"] = self.profiled
        if self._follows_steps:
            checkpoint["total_steps"] = self.total_steps
        checkpoint["finite"] = is_finite(checkpoint["state_dict"])
        if streams := join_ranks(self.objective.streams()):
            checkpoint["streams"] = streams
        # A run killed after this resumes here, so its logged values must be on disk by now.
        for logger in self.loggers:
            logger.save()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.model is None:
            weights = [v for v in checkpoint["state_dict"].values() if v.is_floating_point()]
            doubles = all(weight.dtype == torch.float64 for weight in weights)
            sizes = checkpoint["vocab_size"], checkpoint.get("source_vocab")
            self.build(*sizes, doubles=doubles)
        if TRAINED in checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
            checkpoint["state_dict"] = checkpoint[TRAINED]
        self.profiled = checkpoint["profiled"]
        self.total_steps = checkpoint.get("total_steps", 0)
        self.objective.load_streams(checkpoint.get("streams", {}))
