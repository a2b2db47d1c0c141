"""`ablate probe`: the model that `ablate fit` would train, looked at; every mistake in one line."""

import csv
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_app.cli import main, overrides_of
from lightning_app.commands.probe import (
    Subject,
    build,
    look,
    probe_name,
    second_moments,
    variant_names,
)
from lightning_app.config.config import resolve
from lightning_app.config.experiment import cell_id
from lightning_app.core.errors import UserError
from lightning_app.probes.probe import probe
from lightning_app.training.datamodule import TextDataModule
from lightning_app.training.module import TransformerModule
from lightning_app.training.run import TrainingRun
from tests.told import told

BASE = Path("ablations/base/synthetic.yaml").resolve()
MLM = Path("ablations/base/synthetic_mlm.yaml").resolve()
SMALL = {"encoder_depth": 2, "decoder_depth": 1, "model_dim": 16, "ff_dim": 24, "num_heads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", cache)
    return tmp_path


def written(base: Path = BASE, preset: str = "pre_ln", **trainer: Any) -> dict[str, Any]:
    tree = yaml.safe_load(base.read_text())
    tree["model"]["architecture"] |= {**SMALL, "dropout": 0.2}
    tree["model"]["block"] = {"preset": preset}
    tree["model"]["schedule"]["warmup_steps"] = 0
    tree["trainer"] |= {"enable_progress_bar": False, **trainer}
    return tree


def test_coordinates_have_slopes_and_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(config("c.yaml", written()))
    assert main(["probe", "--config", path, "--coordinates", "16", "8", "--out", "out"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"layer.* 8 .* 16 .*slope", table)
    assert table.count("decoder.blocks.0") == table.count("logits") == 1
    assert "<svg" in Path("out/pre_ln.svg").read_text()
    for wrong in (["8"], ["8", "9"]):
        assert main(["probe", "--config", path, "--coordinates", *wrong]) == 2


def config(name: str, tree: dict[str, Any]) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train(tree: dict[str, Any], run: Path, *callbacks: pl.Callback) -> TrainingRun:
    complete = resolve(tree, "test")
    fitter = TrainingRun(complete, folder=run.resolve(), attempt=1)
    fitter.trainer.callbacks += list(callbacks)  # pyright: ignore[reportAttributeAccessIssue]
    fitter.fit()
    return fitter


# Over 5 s: two models are probed with their sharpness.
@pytest.mark.slow
def test_variants_stand_in_one_table_and_the_same_figures(capsys, folder: Path) -> None:
    first = config("first.yaml", written(preset="realformer"))
    second = config("second.yaml", written(preset="sas"))
    words = ["probe", "--config", first, "--config", second, "--batches", "2", "--sharpness"]
    assert main([str(word) for word in words]) == 0
    (out,) = (folder / "experiments" / "probe").iterdir()
    assert re.fullmatch("realformer-sas-[0-9a-f]{8}", out.name)
    rows = table(out / "probes.csv")
    assert {row["variant"] for row in rows} == {"realformer", "sas"}
    assert {row["step"] for row in rows} == {"0"}
    assert all(math.isfinite(float(row["value"])) for row in rows)
    quantities = {row["quantity"] for row in rows if row["variant"] == "realformer"}
    assert quantities >= {
        *("hidden_norm", "token_cosine", "token_rank", "w1_gradient", "w2_gradient"),
        *("w2_expected_gradient", "w2_position_gradient", "output_information"),
        *("attention_entropy", "attention_distance", "attention_matched", "score_ratio"),
        *("largest_logit", "peaked_rows", "preconditioned_sharpness", "cross_attention_entropy"),
    }
    said = capsys.readouterr().out
    figures = sorted(path.name for path in (out / "figures").iterdir())
    assert figures == [
        *("attention_distance.svg", "attention_entropy.svg", "gains.svg", "gradient_norm.svg"),
        *("hidden_norm.svg", "logits.svg", "score_ratio.svg", "token_cosine.svg"),
    ]
    for name in ("probes.csv", *figures):
        assert name in said
    assert "realformer at initialisation" in said
    assert "sharpness" in said


def test_masked_lm_with_overrides(capsys, folder: Path) -> None:
    path = config("mlm.yaml", written(MLM))
    words = ["probe", "--config", str(path), "--model.block.preset", "peri_ln", "--out", "there"]
    assert main([*words, "--model.architecture.encoder_depth=3", "--batches", "1"]) == 0
    assert "1 validation batch)" in capsys.readouterr().out
    rows = table(folder / "there" / "probes.csv")
    assert {row["variant"] for row in rows} == {"peri_ln"}
    assert {row["stack"] for row in rows} == {"encoder", "model"}
    assert {row["layer"] for row in rows if row["quantity"] == "token_rank"} == set("0123")
    assert not (folder / "experiments").exists()


@pytest.mark.slow
def test_the_same_call_gives_the_same_files(folder: Path) -> None:
    path = config("mine.yaml", written(preset="rezero"))
    for out in ("a", "b"):
        assert main(["probe", "--config", str(path), "--batches", "1", "--out", out]) == 0
    names = [p.relative_to("a") for p in Path("a").rglob("*") if p.is_file()]
    assert len(names) > 5
    for name in names:
        assert (Path("a") / name).read_bytes() == (Path("b") / name).read_bytes()


class AtStart(pl.Callback):
    """The weights of the first step, as its gradient sees them."""

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == 0:
            state = pl_module.state_dict()
            self.weights = {k.removeprefix("model."): v.clone() for k, v in state.items()}


@pytest.mark.parametrize("preset", ["post_ln", "v_skipinit", "admin", "admin, a small batch first"])
def test_it_is_the_model_that_fit_starts_from(folder: Path, preset: str) -> None:
    preset, _, small = preset.partition(",")
    tree = written(preset=preset, max_steps=4 if small else 1, limit_val_batches=1)
    if small:  # by which Admin profiles
        tree["model"]["schedule"] |= {"batch_warmup_steps": 3, "batch_start": 0.1}
    tree["model"]["architecture"]["dropout"] = 0.3  # Admin's profiling pass goes through it
    start = AtStart()
    train(tree, folder / "run", start)
    subject = build("x", resolve(tree, "test"), None, 1)
    model: Any = subject.module.model
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, start.weights[name], rtol=0.0, atol=0.0, msg=name)


def test_a_checkpoint_of_a_run(capsys, folder: Path) -> None:
    tree = written(max_steps=3, limit_val_batches=1, val_check_interval=3)
    fitter = train(tree, folder / "run")
    words = ["probe", "--config", "run/config.yaml", "--checkpoint", "last", "--sharpness"]
    assert main([*words, "--batches", "1", "--out", "there"]) == 0
    rows = table(folder / "there" / "probes.csv")
    assert {row["step"] for row in rows} == {"3"}
    assert "pre_ln after step 3" in capsys.readouterr().out
    found = {
        row["quantity"]: float(row["value"])
        for row in rows
        if row["stack"] == "decoder" and row["layer"] == "1" and not row["head"]
    }
    model = fitter.model.model
    splits = fitter.datamodule.config.splits
    source = TextDataModule(**{**resolve(tree, "test")["data"], "splits": splits})
    source.setup()
    batch = next(iter(source.val_dataloader()))
    for row in probe(model.cpu(), fitter.model.objective, [batch]):
        if row.place[1:] == ("decoder", 1, None):
            assert found[row.quantity] == pytest.approx(row.value, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["lion", "muon", "lamb", "adamh"])
def test_sharpness_is_relative_to_the_steps_of_adam_only(kind: str) -> None:
    module: Any = SimpleNamespace(model=nn.Linear(1, 1))
    tree = {"model": {"optimizer": {"kind": kind, "eps": 1e-9}}}
    with pytest.raises(UserError, match=rf"--sharpness with model\.optimizer\.kind {kind}"):
        look(Subject("a", module, [], 0, None), tree, sharpness=True)


def test_second_moments_are_those_of_the_optimizer(folder: Path) -> None:
    fitter = train(written(preset="sas", max_steps=2, limit_val_batches=1), folder / "run")
    optimizer = fitter.trainer.optimizers[0]
    stored = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)
    model = fitter.model.model
    found: Any = second_moments(stored["optimizer_states"], model)
    beta2 = fitter.model.optimizer.betas[1]
    for parameter, moment in zip(model.parameters(), found, strict=True):
        expected = optimizer.state[parameter]["exp_avg_sq"] / (1 - beta2**2)
        torch.testing.assert_close(moment.cpu(), expected.cpu())
    assert second_moments([], model) is None
    plain: list[dict[str, Any]] = [{"state": {0: {"momentum_buffer": Tensor()}}}]
    assert second_moments(plain, model) is None


def test_folders_and_variants_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    trees = [resolve(written(preset="sas"), "test") for _ in range(3)]
    trees[1]["model"]["block"]["norm"] = "layer_norm"
    trees[2]["model"]["block"]["norm"] = "rms_norm"
    names = [probe_name(["sas"], [tree]) for tree in trees]
    assert len(set(names)) == 3
    assert names[0] == f"sas-w0-s1-{cell_id(trees[0])[:8]}"
    assert probe_name(["sas"], [resolve(written(preset="sas"), "test")]) == names[0]
    pairs = [probe_name(["one", "two"], [trees[0], tree]) for tree in trees[1:]]
    assert len(set(pairs)) == 2
    assert all(re.fullmatch("one-two-[0-9a-f]{8}", pair) for pair in pairs)
    assert len(probe_name(["x" * 200] * 3, trees)) < 120
    trees = [{"model": {"block": {"preset": preset}}} for preset in ("sas", "sas", "sas_p")]
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "one").symlink_to("0123456789abcdef")
    files = [tmp_path / "one/config.yaml", Path("two.yaml"), Path("b/two.yaml")]
    assert variant_names(files[:1], trees[:1]) == ["sas"]
    assert variant_names(files[1:], trees[1:]) == ["sas", "sas_p"]
    assert variant_names(files, trees) == ["one", "two", "two (2)"]


@pytest.mark.parametrize("out", ["/proc/x", "mine.yaml/inside"])
def test_a_folder_that_cannot_be_made_is_reported_at_once(refused, monkeypatch, out: str) -> None:
    path = config("mine.yaml", written())
    place = "lightning_app.commands.probe.build"
    monkeypatch.setattr(place, lambda *_: pytest.fail("the work began"))
    refused(f"ablate: {out}: cannot be written: ", "probe", "--config", path, "--out", out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--config", BASE, "--batch", "3"], "did you mean '--batches'"),
        (["--config", BASE, "--batches", "0"], "--batches 0"),
        (["--config", BASE, "--batches", "few"], "--batches"),
        (["--config", BASE, "stray"], "stray"),
        (["--config", BASE, "--data.vocab_size", "100000"], "100000"),
        (["--config", BASE, "--checkpoint", "last"], "--checkpoint last:"),
        (["--config", BASE, "--checkpoint", "nowhere.ckpt"], "nowhere.ckpt"),
        (["--config", BASE, "--checkpoint", BASE], "not a complete"),
    ],
)
def test_a_mistake_is_one_line(capsys, folder: Path, words: list[Any], expected: str) -> None:
    assert main(["probe", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("ablate: ")]
    assert len(lines) == 1, captured.err
    assert told(expected).search(lines[0])
    assert "--ckpt_path" not in lines[0]
    assert "Traceback" not in captured.err
    assert not (folder / "experiments").exists()


def test_a_checkpoint_of_another_model_is_refused(capsys, folder: Path) -> None:
    fitter = train(written(max_steps=1, limit_val_batches=1), folder / "run")
    assert isinstance(fitter.model, TransformerModule)
    capsys.readouterr()
    last = "run/checkpoints/last.ckpt"
    other = config("other.yaml", written(preset="post_ln"))
    assert main(["probe", "--config", str(other), "--checkpoint", last]) == 2
    assert "model.block.preset is pre_ln there" in capsys.readouterr().err
    words = ["probe", "--config", "run/config.yaml", "--checkpoint", "last"]
    assert main([*words, "--data.vocab_size", "300", "--data.tokenizer", "bpe"]) == 2
    assert "--checkpoint run/checkpoints/last.ckpt:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "overrides", "rest"),
    [
        (["--model.a", "1", "--data.b=2"], ["--model.a", "1", "--data.b=2"], []),
        (["--trainer.callbacks+=x"], ["--trainer.callbacks+=x"], []),
        (["--seed_everything", "3"], ["--seed_everything", "3"], []),
        (["stray", "--model.a", "1"], ["--model.a", "1"], ["stray"]),
        (["--batch", "3", "--model.a", "1"], ["--model.a", "1"], ["--batch", "3"]),
        (["--batch", "3"], [], ["--batch", "3"]),
        (["--models.a", "3"], [], ["--models.a", "3"]),
    ],
)
def test_overrides_begin_like_a_section(words, overrides, rest) -> None:
    assert overrides_of(words) == (overrides, rest)
