"""The tables and event files of a run: what they hold, and that training never notices."""

import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import picture
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.report.tensorboard import write_index
from lightning_app.training.callbacks.loggers import Curves, Events, Pictures, Throughput, example
from lightning_app.training.callbacks.probes import GainLogger, SignalProbe
from lightning_app.training.module import TransformerModule
from tests.report.conftest import FakeGrid
from tests.runs import data, module, trainer
from tests.training.test_probes import Watch, assert_unnoticed

ROWS = (
    (1, {"train/loss": 5.0, "epoch": 0.0}),
    (2, {"train/loss": 4.0, "epoch": 0.0}),
    (2, {"val/nll": 4.5, "epoch": 0.0}),  # a column before the others
    (3, {"train/loss": 3.0, "epoch": 1.0}),
    (3, {"test/nll": 3.5, "a": 1.0}),
)


def logged(logger: CSVLogger, rows: tuple[tuple[int, dict[str, float]], ...]) -> bytes:
    for step, metrics in rows:
        logger.log_metrics({**metrics}, step)
        logger.save()
    return Path(logger.log_dir, "metrics.csv").read_bytes()


def test_it_is_the_table_of_lightning(tmp_path: Path) -> None:
    ours, theirs = (kind(tmp_path / kind.__name__, "", "") for kind in (Curves, CSVLogger))
    assert logged(ours, ROWS) == logged(theirs, ROWS)


@pytest.mark.parametrize("method", ["writeheader", "writerows"])
def test_a_kill_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    logger = Curves(tmp_path, "", "")
    before = logged(logger, ROWS[:4])

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, method, kill)
    with pytest.raises(KeyboardInterrupt):
        logged(logger, ROWS[4:])
    assert (tmp_path / "metrics.csv").read_bytes() == before


PRESET = "model.block.preset"


def fit(
    folder: Path, cache: str, callbacks: list[pl.Callback], kind: str = "translation"
) -> tuple[Watch, TransformerModule]:
    pl.seed_everything(5, verbose=False)
    trained = module(kind, preset="sas", dropout=0.3)
    watch, logger = Watch(), Events(folder)
    settings: dict[str, Any] = {"logger": logger, "max_steps": 6, "limit_val_batches": 1}
    fitter = trainer(folder, callbacks=[*callbacks, watch], **settings)
    fitter.fit(trained, datamodule=data(cache, kind))
    return watch, trained


def event_file(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"images": 0})
    found.Reload()
    return found


def tags(folder: Path) -> dict[str, list[str]]:
    """The tags of a folder by kind; `distributions` are the histograms once more."""
    found = event_file(folder).Tags()
    return {kind: found[kind] for kind in ("scalars", "images", "histograms", "tensors")}


@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
def test_pictures_and_histograms_change_no_loss(tmp_path: Path, cache: str, kind: str) -> None:
    plain, left = fit(tmp_path / "plain", cache, [], kind)
    state = torch.get_rng_state()
    watched, right = fit(tmp_path / "drawn", cache, [GainLogger(), Pictures()], kind)
    assert torch.equal(state, torch.get_rng_state())
    assert_unnoticed((plain, left), (watched, right), 6)
    assert tags(tmp_path / "plain")["images"] == []
    assert not (tmp_path / "plain" / "block.svg").exists()
    svg = (tmp_path / "drawn" / "block.svg").read_text(encoding="utf-8")
    stacks: Any = right.architecture.stacks(right.block)
    assert svg == picture("sas", [stack_drawing(spec, side) for side, spec in stacks.items()])
    found = tags(tmp_path / "drawn")
    assert found["images"] == ["attention"]
    assert found["histograms"] == ["gains/alpha", "gains/beta", "gains/gamma"]


def test_the_sentence_is_the_same_at_any_time_and_drawn_where_probed(tmp_path, cache: str) -> None:
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append(example(trainer, pl_module))

    fit(tmp_path, cache, [Pictures(), SignalProbe(steps=[1, 3]), Look()])
    assert len(seen) == 6
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))
    source, target = seen[0][:2]
    assert len(source) == len(target) == 1
    assert source.shape[1] > 4
    images = event_file(tmp_path).Images("attention")
    assert [image.step for image in images] == [1, 3, 6]
    sizes = {Image.open(io.BytesIO(image.encoded_image_string)).size for image in images}
    assert sizes == {(images[0].width, images[0].height)}


@pytest.mark.parametrize("preset", ["sas", "layer_scale"])
def test_a_run_has_forty_tags_at_most(tmp_path: Path, cache: str, preset: str) -> None:
    """The presets with most gains, and every other source of tags at once."""
    scores = {"val/bleu": 1.0, "test/nll": 2.0, "test/perplexity": 7.4, "test/accuracy": 0.5}
    scores |= {"test/bleu": 1.0, "test/sacrebleu": 1.0}
    grid = FakeGrid(tmp_path / "grid", lambda axes: 2.0, {PRESET: [preset]}, metrics=scores)
    run = grid.run(grid.cells[0])
    trained = module(preset=preset)
    trained.objective.config = ObjectiveConfig(beam=1, validation_bleu=2)
    fitter = trainer(
        run,
        callbacks=[Throughput(), GainLogger(), SignalProbe(steps=[1]), Pictures()],
        logger=Events(run),
        max_steps=4,
        limit_val_batches=1,
        val_check_interval=2,
    )
    fitter.fit(trained, datamodule=data(cache))
    for logger in fitter.loggers:  # as a test of the trained model does
        logger.log_metrics({key: scores[key] for key in scores if key[:4] == "test"}, step=4)
        logger.finalize("success")
    write_index(grid.folder)
    found = tags(run)
    expected = {"val/bleu", "test/nll", "test/sacrebleu", f"delta/{grid.folder.name}", "train/nll"}
    assert expected <= {*found["scalars"]}
    assert f"run/{grid.folder.name}" in found["tensors"]
    assert found["images"] == ["attention"]
    whole = [tag for kind in found.values() for tag in kind]
    assert len(whole) == len(set(whole)) <= 40, whole
