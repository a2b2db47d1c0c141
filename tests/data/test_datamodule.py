"""The data module under a real Lightning Trainer: epochs, resume, ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_app.data import moses
from lightning_app.data.tokenizer import unigram_entropy
from lightning_app.training.datamodule import TextDataModule
from tests import runs

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:.*callbacks used to create the checkpoint need to be provided.*",
    "ignore:.*You're resuming from a checkpoint that ended before the epoch ended.*",
)


class Recorder(pl.LightningModule):
    """Learns nothing; writes down the rows of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch, _) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.index.tolist()))
        return self.weight * 1.0

    def validation_step(self, batch, _) -> None:
        self.validated.append(batch.index.tolist())

    def predict_step(self, batch, _):
        return batch.index

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**fields: Any) -> pl.Trainer:
    return runs.trainer(Path(), **{"num_sanity_val_steps": 0, "limit_val_batches": 1.0, **fields})


@pytest.fixture
def make(write_pairs, tmp_path: Path):
    # 60 pairs in 3 lengths; 9 batches an epoch
    root = write_pairs()

    def make(**fields) -> TextDataModule:
        given: dict[str, Any] = {"name": "text", "tokenizer": "word", "vocab_size": None}
        given |= {"root": str(root), "cache": str(tmp_path / "cache"), "tokens_per_batch": 49}
        return TextDataModule(**(given | fields))

    return make


def run(data: TextDataModule, ckpt_path: str | None = None, **fields) -> Recorder:
    model = Recorder()
    trainer(**fields).fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return model


def test_lightning_sets_the_epoch(make):
    """Every epoch has every row once, in an order of its own; the same in a second run."""
    model = run(make(), max_epochs=3)
    epochs = [[rows for e, rows in model.seen if e == epoch] for epoch in range(3)]
    for batches in epochs:
        assert sorted(i for rows in batches for i in rows) == list(range(60))
        assert len(batches) == len(epochs[0])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    data = make()
    one, other = data.train_dataloader(), data.train_dataloader()
    one.sampler.set_epoch(2)
    assert [rows.index.tolist() for rows in other] == epochs[0]
    assert [rows.index.tolist() for rows in one] == epochs[2]
    assert run(data, max_epochs=3).seen == run(data, max_epochs=3).seen == model.seen
    assert run(make(seed=2), max_epochs=3).seen != model.seen


@pytest.mark.parametrize("limit", [1, 4, 0.5])
@pytest.mark.parametrize("task", ["translation", "masked_lm", "causal_lm"])
def test_a_part_of_the_validation_is_a_sample_with_a_floor(make, task: str, limit: float) -> None:
    """Not the shortest sentences, whose tokens are others; the same ones in every run."""
    data = make(task=task, window=8)
    model = run(data, max_epochs=2, limit_val_batches=limit)
    half = len(model.validated) // 2
    assert model.validated[:half] == model.validated[half:]
    rows = [row for batch in model.validated[:half] for row in batch]
    whole = make(task=task, window=8)
    every = run(whole, max_epochs=1, limit_val_batches=1.0).validated
    assert half == (limit if isinstance(limit, int) else int(len(every) * limit))
    assert rows != [row for batch in every[:half] for row in batch]
    dataset = data.val_dataloader().dataset
    assert data.floor == unigram_entropy(dataset.targets(np.array(rows)))
    assert data.floor != whole.floor == unigram_entropy(dataset.targets())
    said = f"; {len(rows)} of {len(dataset)} rows of valid are evaluated"
    assert data.description["protocol"] == whole.description["protocol"] + said


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("task", ["translation", "masked_lm", "causal_lm"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_after_any_step(make, tmp_path: Path, num_workers: int, task: str):
    data = {"num_workers": num_workers, "task": task, "window": 16}
    saved = {"dirpath": tmp_path / "ckpt", "filename": "{step}", "save_top_k": -1}
    callback = ModelCheckpoint(**saved, every_n_train_steps=1)
    limits: dict[str, Any] = {"max_steps": 20, "max_epochs": -1, "limit_val_batches": 0}
    whole = run(make(**data), enable_checkpointing=True, callbacks=[callback], **limits)
    assert len(whole.seen) == 20
    assert len({epoch for epoch, _ in whole.seen}) >= 2
    last = max(i for i, (epoch, _) in enumerate(whole.seen) if epoch == 0) + 1
    steps = (1, 5, last - 1, last, last + 1, 19) if num_workers == 0 else (5, last)
    for step in steps:
        path = str(tmp_path / "ckpt" / f"step={step}.ckpt")
        rest = run(make(**data), ckpt_path=path, **limits)
        assert [rows for _, rows in rest.seen] == [rows for _, rows in whole.seen[step:]], step


def test_resume_after_validation_in_mid_epoch(make, tmp_path: Path):
    callback = ModelCheckpoint(
        dirpath=tmp_path / "ckpt", filename="{step}", save_top_k=-1, save_on_train_epoch_end=False
    )
    fields: dict[str, Any] = {"max_steps": 20, "max_epochs": -1, "val_check_interval": 3}
    whole = run(make(), enable_checkpointing=True, callbacks=[callback], **fields)
    checkpoints = sorted((tmp_path / "ckpt").iterdir())
    assert len(checkpoints) >= 4
    for path in checkpoints:
        step = int(path.stem.split("=")[1])
        rest = run(make(), ckpt_path=str(path), **fields)
        assert [rows for _, rows in rest.seen] == [rows for _, rows in whole.seen[step:]], step


def ready(data: TextDataModule, rank: int = 0, world_size: int = 1) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    limits = {"limit_val_batches": 1.0, "limit_test_batches": 1.0}
    ranks = {"global_rank": rank, "world_size": world_size}
    data.trainer = SimpleNamespace(**ranks, **limits, strategy=strategy, lightning_module=None)  # pyright: ignore
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader", "test_dataloader"])
def test_ranks_take_the_same_number_of_steps(make, world: int, loader: str):
    loaders = [getattr(ready(make(), rank, world), loader)() for rank in range(world)]
    whole = list(getattr(ready(make()), loader)())
    assert len(whole) == len(getattr(ready(make()), loader)())
    for one, shares in zip(whole, zip(*loaders, strict=True), strict=True):
        rows = [i for of in shares for i in of.index.tolist() if i >= 0]
        assert sorted(rows) == sorted(one.index.tolist())


def test_attributes_and_that_predict_is_the_test_split(make):
    data = ready(make())
    assert data.vocab_size == data.tokenizer.vocab_size == data.description["vocab_size"]
    ids = torch.cat([of.target[:, 1:].flatten() for of in data.val_dataloader()])
    assert data.floor == pytest.approx(unigram_entropy(ids[ids != 0].numpy()))
    assert data.references("test")[0] == "the dog sees the cat ."
    assert set(data.description) == {
        *("name", "protocol", "sizes", "vocab_size", "tokenizer_sha256", "checksum", "digest")
    }
    assert data.description["digest"] == data.corpus.digest
    assert data.description["sizes"] == {"train": 60, "valid": 60, "test": 60}
    predicted: Any = trainer().predict(Recorder(), datamodule=make())
    assert sorted(torch.cat(predicted).tolist()) == list(range(60))


def test_the_synthetic_corpus_is_detokenized_and_has_the_protocol_of_earlier_results(cache: str):
    data = ready(TextDataModule(tokenizer="word", vocab_size=None, cache=cache))
    for target, reference in zip(data.targets("valid"), data.references("valid"), strict=True):
        assert moses.detokenize(target, "en") == reference
        assert not reference.endswith(" .")
    # With another wording, a report of old and new cells would name two protocols.
    earlier = Path("tests/grids/made_at_4ea995c/former/runs").glob("*/result.json")
    known = {json.loads(path.read_text(encoding="utf-8"))["data"]["protocol"] for path in earlier}
    assert known == {data.description["protocol"]}


def test_training_processes_only_read(make, monkeypatch: pytest.MonkeyPatch):
    """After preparation neither `datasets` nor training of a tokenizer is needed."""
    import sys

    data = make()
    data.prepare_data()
    monkeypatch.setitem(sys.modules, "datasets", None)
    data.setup()
    next(iter(data.train_dataloader()))
