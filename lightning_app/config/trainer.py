"""The section `trainer` of a config: every flag of Lightning's Trainer. Fast to import."""

import re
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ClassSpec:
    """A class by its import path, and its arguments."""

    class_path: str
    """The path, such as lightning.pytorch.callbacks.LearningRateMonitor; the last word suffices for
    a known class."""
    init_args: dict[str, Any] | None = None
    """The arguments of its constructor; others keep their defaults."""
    dict_kwargs: dict[str, Any] | None = None
    """Arguments that it passes on without naming them in its signature."""


Classes = ClassSpec | list[ClassSpec] | None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The arguments of Lightning's Trainer, under its names.

    The defaults are Lightning's, except those of steps, validations, precision and samplers.
    """

    accelerator: str | ClassSpec = "auto"
    """auto, cpu, gpu, cuda, mps or tpu."""
    strategy: str | ClassSpec = "auto"
    """How several devices share the work: auto, ddp, fsdp, or a class with its arguments."""
    devices: list[int] | str | int = "auto"
    """The number of devices, their numbers, or auto."""
    num_nodes: int = 1
    """The number of hosts of a distributed run; srun or torchrun starts it on each of them."""
    precision: (
        Literal[64, 32, 16]
        | Literal["transformer-engine", "transformer-engine-float16"]
        | Literal["16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true"]
        | Literal["64", "32", "16", "bf16"]
        | None
    ) = "32-true"
    """32-true, bf16-mixed, 16-mixed, or another precision of Lightning."""
    logger: bool | ClassSpec | list[ClassSpec] | None = None
    """Loggers in addition to those of every run (TensorBoard and CSV); false: none at all."""
    callbacks: Classes = None
    """Callbacks in addition to those of every run."""
    fast_dev_run: int | bool = False
    """Must be false: such a run leaves no result."""
    max_epochs: int | None = None
    """End after this many epochs; -1 or null: no limit."""
    min_epochs: int | None = None
    """Train at least this many epochs."""
    max_steps: int = 20000
    """End after this many optimizer steps; -1: no limit."""
    min_steps: int | None = None
    """Train at least this many steps."""
    max_time: str | dict[str, int] | None = None
    """End after this time, as 'DD:HH:MM:SS' in quotes."""
    limit_train_batches: int | float | None = None
    """Batches per epoch: a number, or a share up to 1.0."""
    limit_val_batches: int | float | None = None
    """Batches per validation: a number, or a share up to 1.0."""
    limit_test_batches: int | float | None = None
    """Batches of the test: a number, or a share up to 1.0."""
    limit_predict_batches: int | float | None = None
    """Batches of a prediction: a number, or a share up to 1.0."""
    overfit_batches: int | float = 0.0
    """Must be 0: it would replace the samplers of batches."""
    val_check_interval: int | float | str | dict[str, int] | None = 1000
    """Steps between validations; a share of an epoch needs check_val_every_n_epoch."""
    check_val_every_n_epoch: int | None = None
    """Epochs between validations; null: validations are counted in steps, across epochs."""
    num_sanity_val_steps: int | None = 0
    """Batches to validate before training."""
    log_every_n_steps: int | None = 50
    """Steps between logged values."""
    enable_checkpointing: bool | None = None
    """Whether last.ckpt and best.ckpt are written; null: yes."""
    enable_progress_bar: bool | None = None
    """Whether a progress bar is shown; null: yes."""
    enable_model_summary: bool | None = None
    """Whether a table of the model is printed; null: yes."""
    accumulate_grad_batches: int = 1
    """Must be 1: data.tokens_per_batch is the batch of a step."""
    gradient_clip_val: int | float | None = None
    """The largest norm, or value, of the gradient; null or 0: not clipped."""
    gradient_clip_algorithm: str | None = None
    """norm or value; null: norm."""
    deterministic: bool | Literal["warn"] | None = None
    """Whether only deterministic operations of torch are used; warn: a warning for others."""
    benchmark: bool | None = None
    """torch.backends.cudnn.benchmark; null: torch's own setting."""
    inference_mode: bool = True
    """Whether evaluations run in torch.inference_mode; false: in torch.no_grad."""
    use_distributed_sampler: bool = False
    """Must be false: our samplers divide the data between ranks."""
    profiler: str | ClassSpec | None = None
    """simple, advanced, pytorch, or a class with its arguments."""
    detect_anomaly: bool = False
    """Whether torch looks for anomalies in the backward pass."""
    barebones: bool = False
    """Whether Lightning skips everything that costs time besides training."""
    plugins: Classes = None
    """Lightning's plug-ins for precision, checkpoints or a cluster."""
    sync_batchnorm: bool = False
    """Whether batch norms are synchronised between ranks."""
    reload_dataloaders_every_n_epochs: int = 0
    """The number of epochs after which the loaders are rebuilt."""
    default_root_dir: str | None = None
    """The folder of the run; null: one in experiments/fit/runs, named by the config."""
    enable_autolog_hparams: bool = True
    """Whether Lightning logs hyperparameters by itself."""
    model_registry: str | None = None
    """The name of the model in Lightning's registry."""

    def __post_init__(self) -> None:
        if self.fast_dev_run:
            raise ValueError(
                f"fast_dev_run: {self.fast_dev_run!r} leaves no checkpoint and no curves; set "
                "max_steps and limit_val_batches"
            )
        if self.overfit_batches:
            raise ValueError(
                f"overfit_batches: {self.overfit_batches!r} replaces the samplers, which batches "
                "of equal lengths need; use limit_train_batches and limit_val_batches"
            )
        for name, least in (("max_steps", "1 step"), ("max_epochs", "1 epoch")):
            count = getattr(self, name)
            if count is not None and (count == 0 or count < -1):
                raise ValueError(
                    f"{name}: {count} trains nothing; at least {least}, or -1 for no limit"
                )
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", str(self.max_time))
        if self.max_time is not None and not (match and any(map(int, match.groups()))):
            raise ValueError(
                f"max_time: expected 'DD:HH:MM:SS' in quotes, above 0, found {self.max_time!r}"
            )
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches"):
            share = getattr(self, name)
            if share is not None and (share <= 0 or (isinstance(share, float) and share > 1.0)):
                raise ValueError(
                    f"{name}: expected batches from 1, or a share above 0.0 and up to 1.0, found "
                    f"{share}"
                )
        if self.val_check_interval == 0:
            raise ValueError("val_check_interval: 0; it must be at least 1 step")
        if self.use_distributed_sampler:
            raise ValueError("use_distributed_sampler: must be false: our samplers split the data")
        if self.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches: {whole_batches(self.accumulate_grad_batches)}"
            )


def whole_batches(batches: int) -> str:
    """Say why gradients are not accumulated: the means of unequal batches would be averaged, and no
    run could continue from a checkpoint in the middle of such a step."""
    return (
        f"{batches}; must be 1: the batch of a step is data.tokens_per_batch, so make "
        f"data.tokens_per_batch {batches} times as large"
    )
