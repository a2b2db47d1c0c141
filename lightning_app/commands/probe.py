"""The work of `ablate probe`: build models as `ablate fit` does, measure them, draw figures."""

import csv
import hashlib
import io
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_app.commands.options import EXPERIMENTS, as_checkpoint
from lightning_app.config.config import data_module, transformer_module
from lightning_app.config.experiment import cell_id
from lightning_app.config.identity import require_of, without_evaluation_limits
from lightning_app.core.errors import UserError, named
from lightning_app.core.files import output_folder, write_whole
from lightning_app.grids.display import plain_console
from lightning_app.models.initialization import needs_profiling, profile
from lightning_app.models.optim import build_optimizer, parameter_groups
from lightning_app.models.optimizers import OPTIMIZERS, Library, Rule
from lightning_app.probes.coordinates import Sizes, coordinates, slopes, write_figure
from lightning_app.probes.figures import undrawn_curves, write_probe_figures
from lightning_app.probes.hooks import HEADER, MODEL, Probed, Row, cells
from lightning_app.probes.probe import preconditioned_sharpness, probe
from lightning_app.tasks.base import to_device
from lightning_app.training.checkpoint import (
    NAMED,
    Checkpoint,
    check_checkpoint,
    check_data,
    find_checkpoint,
)
from lightning_app.training.module import TransformerModule, mix
from lightning_app.training.run import evaluated_run, run_name, set_chatter

COLUMNS = {
    "norm": "sum_norm",
    "cosine": "token_cosine",
    "rank": "token_rank",
    "entropy": "attention_entropy",
    "JSD": "attention_matched",
    "W1 grad": "w1_expected_gradient",
    "W2 grad": "w2_expected_gradient",
    "one position": "w2_position_gradient",
}
"""The columns of the table on the terminal, for each layer."""
STEPS = 10  # of a coordinate check
LEGEND = (
    "norm: squared, by dimension, before the layer's last norm; cosine: of two tokens; rank: "
    "effective; entropy: nats; JSD: bits, to the layer below, heads matched; gradients: expected "
    "ones, and that of W2 for the loss of one position"
)


class Subject(NamedTuple):
    """A model to probe, with its batches."""

    name: str
    module: TransformerModule
    batches: list[Any]
    step: int
    second_moments: list[Tensor] | None


def probe_models(
    configs: Sequence[Path],
    trees: Sequence[dict[str, Any]],
    checkpoint: str | None,
    batches: int,
    *,
    sharpness: bool,
    out: Path | None,
) -> int:
    """Probe the model of each config: print a table, write ``probes.csv`` and figures.

    `trees` are the contents of `configs` with overrides. Raises `UserError` for a mistake in a
    checkpoint.
    """
    set_chatter(logging.ERROR)
    names = variant_names(configs, trees)
    checkpoints = [
        None if checkpoint is None else checkpoint_of(checkpoint, config, tree)
        for config, tree in zip(configs, trees, strict=True)
    ]
    when = "" if checkpoint is None else f"-{Path(checkpoint).stem[:60]}"
    folder = out or EXPERIMENTS / "probe" / f"{probe_name(names, trees)}{when}"
    console = plain_console()
    probed = []
    with output_folder(folder):
        for config, name, tree, start in zip(configs, names, trees, checkpoints, strict=True):
            with named(config):
                subject = build(name, tree, start, batches)
                measured = look(subject, tree, sharpness=sharpness)
            probed.append(measured)
            show_probed(console, measured, subject)
    console.print(LEGEND, markup=False, soft_wrap=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("variant", *HEADER))
    for variant in probed:
        writer.writerows([variant.name, *cells(row)] for row in variant.rows)
    write_whole(folder / "probes.csv", text.getvalue())
    drawings = write_probe_figures(probed, folder / "figures")
    console.print(f"numbers: {folder / 'probes.csv'}", markup=False)
    for path in drawings:
        console.print(f"figure: {path}", markup=False)
    for line in undrawn_curves(probed):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def check_coordinates(
    configs: Sequence[Path], trees: list[dict[str, Any]], widths: Sequence[int], out: Path | None
) -> int:
    """Train a model of each width for ten steps at the config's rate; print slopes, draw them.

    The feed-forward widens in proportion; heads keep their number. Raises `UserError`.
    """
    names, console = variant_names(configs, trees), plain_console()
    folder = out or EXPERIMENTS / "probe" / f"{probe_name(names, trees)}-coordinates"
    with output_folder(folder):
        for name, tree in zip(names, trees, strict=True):
            sizes = {width: _of_width(tree, width) for width in widths}
            table = Table("layer", *map(str, widths), "slope", "slope of change", title=name)
            for layer, (size, change) in slopes(sizes).items():
                changes = (f"{of[layer][1]:.3g}" for of in sizes.values())
                table.add_row(layer, *changes, f"{size:.2f}", f"{change:.2f}")
            console.print(table)
            path = write_figure(sizes, name, folder / f"{name}.svg")
            console.print(f"figure: {path}", markup=False)
    return 0


def _of_width(tree: dict[str, Any], width: int) -> Sizes:
    own = tree["model"]["architecture"]
    factor = width / own["model_dim"]
    wide = {**own, "model_dim": width, "ff_dim": round(own["ff_dim"] * factor)}
    tree = {**tree, "model": {**tree["model"], "architecture": wide}}
    try:
        module = build(str(width), tree, None, 1).module
    except ValueError as error:
        raise UserError(f"probe: width {width}: {error}") from error
    data = data_module(tree["data"])
    data.prepare_data()
    data.setup("fit")
    factor = module.architecture.width_factor
    assert module.model is not None
    optimizer = build_optimizer(module.optimizer, module.model, fused=False, width_factor=factor)
    batches = list(islice(data.train_dataloader(), STEPS))
    return coordinates(module.model, module.objective, optimizer, batches)


def variant_names(configs: Sequence[Path], trees: Sequence[dict[str, Any]]) -> list[str]:
    """Return a name for each variant: its preset if unique, otherwise its file."""
    presets = [str(tree["model"]["block"]["preset"]) for tree in trees]
    if len(set(presets)) == len(presets):
        return presets
    # A run's config.yaml takes its name from the run's folder.
    names = [p.absolute().parent.name if p.name == "config.yaml" else p.stem for p in configs]
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names


def probe_name(names: Sequence[str], trees: Sequence[dict[str, Any]]) -> str:
    """Return the folder name of a probe: the run's for one config, the names for several.

    Variants that differ in an axis of the block or an override get different folders.
    """
    if len(trees) == 1:
        return run_name(trees[0], cell_id(without_evaluation_limits(trees[0])))
    identity = hashlib.sha256(" ".join(map(cell_id, trees)).encode()).hexdigest()[:8]
    return f"{'-'.join(names)[:100]}-{identity}"


def checkpoint_of(name: str, config: Path, tree: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of ``--checkpoint`` after checking that it has this config's model.

    ``last`` and ``best`` belong to the run: in the folder of a run's own config.yaml, otherwise in
    the folder that `ablate fit` makes for this config.
    """
    root = tree["trainer"]["default_root_dir"]
    folder = Path(root) if root else evaluated_run(tree).path
    if config.name == "config.yaml" and (config.parent / "checkpoints").is_dir():
        folder = config.parent
    with named(config), as_checkpoint():
        if name not in NAMED and not Path(name).is_file():
            raise UserError(f"--checkpoint {name}: there is no file {name}; a file, last or best")
        path = find_checkpoint(name, folder)
        require_of(path)
        return check_checkpoint(path, tree["model"])


def build(name: str, tree: dict[str, Any], checkpoint: Checkpoint | None, batches: int) -> Subject:
    """Return the model with the initial weights of `ablate fit`, or those of a checkpoint.

    The batches are the first ones of the validation split.
    """
    pl.seed_everything(int(tree["seed_everything"]), workers=True, verbose=False)
    module = transformer_module(tree["model"])
    data = data_module(tree["data"])
    data.prepare_data()
    data.setup("fit")
    doubles = tree["trainer"]["precision"] == "64-true"
    module.build(data.vocab_size, data.source_vocab, doubles=doubles)
    model = module.model
    assert model is not None
    step, moments = 0, None
    if checkpoint is not None:
        with as_checkpoint():
            check_data(checkpoint, data)
        stored = torch.load(checkpoint.path, map_location="cpu", weights_only=True)
        module.load_state_dict(stored["state_dict"])
        step = int(stored["global_step"])
        moments = second_moments(stored.get("optimizer_states", []), model)
    elif not module.profiled and needs_profiling(model):
        model.train()
        data.trained = module  # whose first batch may be a part of one
        first = next(iter(data.train_dataloader()))
        torch.manual_seed(mix(int(tree["seed_everything"]), 0, 0, 0))  # the seed of the first step
        profile(model, lambda: module(first))
    # The first GPU if the Trainer would use one.
    wanted = tree["trainer"]["accelerator"] in ("auto", "gpu", "cuda")
    device = torch.device("cuda" if wanted and torch.cuda.is_available() else "cpu")
    module.to(device)
    chosen = [to_device(batch, device) for batch in islice(data.val_dataloader(), batches)]
    if moments is not None:
        moments = [moment.to(device) for moment in moments]
    return Subject(name, module, chosen, step, moments)


def second_moments(states: Sequence[dict[str, Any]], model: nn.Module) -> list[Tensor] | None:
    """Return Adam's ``v / (1 - beta2^t)`` of each parameter of `model`, in the model's order.

    None if the optimizer keeps no second moment (sgd).
    """
    if not states or not states[0]["state"]:
        return None
    # The optimizer numbers its parameters group by group.
    first = next(iter(states[0].get("param_groups", ())), {})
    groups = parameter_groups(model, 0.0, by_role="role" in first)
    order = [parameter for group in groups for parameter in group["params"]]
    moments: dict[Tensor, Tensor] = {}
    for number, state in states[0]["state"].items():
        if not {"exp_avg_sq", "step"} <= state.keys():
            return None
        corrected = first.get("bias_correction", True)
        bias = first["betas"][1] ** float(state["step"]) if corrected else 0.0
        moments[order[int(number)]] = state["exp_avg_sq"] / (1.0 - bias)
    return [moments[p] if p in moments else torch.zeros_like(p) for p in model.parameters()]


def _check_scaled(model: dict[str, Any]) -> None:
    """Refuse a sharpness relative to Adam's second moment for steps that it does not scale."""
    optimizer, rates = model["optimizer"], model.get("architecture", {}).get("parametrization")
    kind, factor = optimizer["kind"], optimizer.get("block_rate", 1.0)
    said = "architecture.parametrization mup" if rates == "mup" else ""
    if said := f"optimizer.block_rate {factor}" if factor != 1.0 else said:
        raise UserError(
            f"probe: --sharpness with model.{said}: its steps have several "
            "rates, by one of which the Hessian is divided; leave --sharpness out"
        )
    rule = OPTIMIZERS[kind]
    unlike_adam = isinstance(rule, Rule) and (rule.on or "eps" not in rule.reads)
    if unlike_adam or isinstance(rule, Library):
        raise UserError(
            f"probe: --sharpness with model.optimizer.kind {kind}: its steps are not those of "
            "Adam, by whose second moment the Hessian is divided; leave --sharpness out"
        )


def look(subject: Subject, tree: dict[str, Any], *, sharpness: bool) -> Probed:
    """Probe one model."""
    name, module, batches, step, moments = subject
    assert module.model is not None
    if sharpness:
        _check_scaled(tree["model"])
    rows = probe(module.model, module.objective, batches, step)
    if sharpness:
        eps = float(tree["model"]["optimizer"]["eps"])
        top = preconditioned_sharpness(module.model, module.objective, batches[0], eps, moments)
        value = top.value if top.converged else float("nan")
        rows.append(Row(step, MODEL, None, "preconditioned_sharpness", None, value))
    return Probed(name, rows)


def show_probed(console: Console, probed: Probed, subject: Subject) -> None:
    """Print the quantities of each layer of one model, and those of the whole model."""
    when = f"after step {subject.step}" if subject.step else "at initialisation"
    table = Table("stack", "layer", title=f"{probed.name} {when}", title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for stack in ("encoder", "decoder"):
        columns = [probed.values(quantity, stack) for quantity in COLUMNS.values()]
        layers = sorted({layer for column in columns for layer in column if layer})
        for layer in layers:
            texts = [f"{c[layer]:.3g}" if layer in c else "" for c in columns]
            table.add_row(stack, str(layer), *texts, end_section=layer == layers[-1])
    console.print(table)
    whole = {"loss": "loss", "nll": "nll", "output information": "output_information"}
    whole["sharpness"] = "preconditioned_sharpness"
    measured = {row.quantity for row in probed.rows}
    values = {h: probed.number(quantity) for h, quantity in whole.items() if quantity in measured}
    text = ", ".join(f"{heading} {value:.4g}" for heading, value in values.items())
    if "sharpness" in values and values["sharpness"] != values["sharpness"]:
        text += " (the iteration did not converge)"
    count = len(subject.batches)
    noun = "batch" if count == 1 else "batches"
    console.print(f"{text} (nats; {count} validation {noun})", markup=False, soft_wrap=True)
