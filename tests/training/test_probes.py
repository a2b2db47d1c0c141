"""What is watched while a run trains: gains by name, and probes that training never notices."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_app.blocks.attention import ProjectionGains
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.spans import AdaptiveSpan, SpanMask
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.probes.hooks import MODEL, ActivationHooks, Place, from_csv
from lightning_app.probes.probe import Snapshot, snapshot
from lightning_app.training.callbacks.loggers import Events
from lightning_app.training.callbacks.probes import (
    GainLogger,
    SignalProbe,
    gains,
    histograms,
    shown,
    tag,
)
from lightning_app.training.module import TransformerModule, loss_of
from tests import warm
from tests.runs import data, module, trainer


def model_with(
    preset: str, depth: int, decoder_depth: int = 2, kind: str = "encoder_decoder", **block: Any
) -> nn.Module:
    architecture = ArchitectureConfig(
        kind=kind,  # pyright: ignore[reportArgumentType]
        encoder_depth=depth,
        decoder_depth=decoder_depth,
        model_dim=8,
        ff_dim=12,
        num_heads=2,
    )
    return build_model(architecture, BlockConfig(preset=preset, **block), 17, 0)


def logged(preset: str, depth: int, **block: Any) -> dict[str, Tensor]:
    return {tag(place): gain for place, gain in gains(model_with(preset, depth, **block)).items()}


def named(*quantities: str) -> set[str]:
    """The tags of quantities in an encoder of three layers and a decoder of two."""
    layers = [("encoder", layer) for layer in (1, 2, 3)] + [("decoder", layer) for layer in (1, 2)]
    return {f"probe/{q}/{stack}/{layer}" for q in quantities for stack, layer in layers}


DECODER = ("decoder/1", "decoder/2")
GAINS: dict[str, set[str]] = {
    "sas": named("alpha", "beta", "gamma", "attention_branch", "ff_branch"),
    "rezero": named("attention_branch"),  # one of all sub-layers
    "skipinit": named("attention_branch", "ff_branch")
    | {f"probe/cross_branch/{at}" for at in DECODER},
    "normformer": named("head_gain") | {f"probe/cross_head_gain/{at}" for at in DECODER},
    **{name: set() for name in ("post_ln", "pre_ln", "realformer", "parallel")},
}


@pytest.mark.parametrize("name", GAINS)
def test_every_gain_is_logged(name: str) -> None:
    found = logged(name, 3)
    assert set(found) == GAINS[name]
    if name == "sas":
        branch = float(found["probe/ff_branch/encoder/1"].detach())
        assert branch == pytest.approx(0.1 * (18 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (model_with("sas", 6, 6), {("encoder", 6), ("decoder", 6)}),
        (model_with("sas", 6, kind="encoder"), {("encoder", 6), ("encoder", 1)}),
        (model_with("skipinit", 6, 6), {(s, n) for s in ("encoder", "decoder") for n in (1, 6)}),
        (model_with("rezero", 2, 1), {("encoder", 2), ("encoder", 1), ("decoder", 1)}),
        (model_with("rezero", 12, kind="encoder"), {("encoder", n) for n in (*range(1, 10), 12)}),
    ],
    ids=["sas", "sas-encoder", "skipinit", "rezero", "rezero-deep"],
)  # fmt: skip
def test_event_files_get_as_many_layers_as_there_is_room_for(model, layers) -> None:
    told = shown(model, list(gains(model)))
    assert {(place.stack, place.layer) for place in told} == layers
    assert len(told) == len(set(told)) <= 10


LEARNED = ProjectionGains(kept=Gain(learned=True), change=Gain(value=0.2, learned=True))


def test_of_many_gains_event_files_get_each_of_the_encoder_and_their_ratios() -> None:
    block: dict[str, Any] = {"value_projection": "orthogonal_plus", "value_gains": LEARNED}
    block |= {"output_projection": "orthogonal_plus", "output_gains": LEARNED}
    model = model_with("sas", 3, **block)
    found = gains(model)
    told = shown(model, list(found))
    assert len(told) == 10
    assert {place.quantity for place in told} == {place.quantity for place in found}
    found = logged("sas", 3, value_projection="orthogonal_plus", value_gains=LEARNED)
    ratios = {name: float(value.detach()) for name, value in found.items() if "_change" in name}
    assert ratios
    assert list(ratios.values()) == [pytest.approx(0.2)] * len(ratios)
    assert ratios.keys() <= named("value_change")


def test_histograms_hold_every_head_of_every_layer() -> None:
    found = gains(model_with("sas", 3))
    with torch.no_grad():
        for place, gain in found.items():
            if place.quantity == "beta":
                gain.copy_(torch.tensor([place.layer, torch.inf])[:, None, None])
    drawn = histograms(found)
    assert set(drawn) == {"gains/alpha", "gains/beta", "gains/gamma"}
    assert len(drawn["gains/alpha"]) == (3 + 2) * 2
    assert drawn["gains/beta"].tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("dynamic_bias", [None, -1.0])
def test_spans_of_heads_are_logged(tmp_path: Path, cache: str, dynamic_bias: float | None) -> None:
    """In tokens; event files have the means of layers alone."""
    span = AdaptiveSpan(longest=9, ramp=3.0, dynamic_bias=dynamic_bias, penalty=0.5)
    trained = module("causal_lm", decoder_depth=2, preset="pre_ln", adaptive_span=span)
    loggers = [CSVLogger(tmp_path, name="", version=""), Events(tmp_path)]
    fitter = trainer(tmp_path, callbacks=[GainLogger()], logger=loggers, max_steps=4)
    fitter.log_every_n_steps = 2  # pyright: ignore[reportAttributeAccessIssue]
    fitter.fit(trained, datamodule=data(cache, "causal_lm"))
    by_step: dict[str, dict[str, str]] = {}
    for row in csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()):
        by_step.setdefault(row["step"], {}).update({k: v for k, v in row.items() if v})
    rows = [row for row in by_step.values() if "probe/span/decoder/1" in row]
    assert [row["step"] for row in rows] == ["1", "2", "4"]
    heads, depth = trained.architecture.num_heads, trained.architecture.decoder_depth
    for row in rows:
        for layer in range(1, depth + 1):
            tag = f"probe/span/decoder/{layer}"
            spans = [float(row[f"{tag}/{head}"]) for head in range(heads)]
            assert float(row[tag]) == pytest.approx(sum(spans) / heads)
            assert 0.0 <= min(spans) <= max(spans) <= 9.0
        total = sum(float(row[f"probe/span/decoder/{n}"]) for n in range(1, depth + 1))
        if dynamic_bias is not None:  # the penalty of the same batch
            assert float(row["train/aux/span"]) == pytest.approx(0.5 * total, rel=1e-5)
    if dynamic_bias is None:
        first = next(part for part in trained.modules() if isinstance(part, SpanMask))
        last = first.tokens.flatten().tolist()
        found = [float(rows[-1][f"probe/span/decoder/1/{head}"]) for head in range(heads)]
        assert found == pytest.approx(last)
    events = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    told = [tag for tag in events if tag.startswith("probe/span/")]
    assert sorted(told) == [f"probe/span/decoder/{layer}" for layer in range(1, depth + 1)]


class Watch(pl.Callback):
    """Losses, and how many hooks there are while a batch is trained on."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.hooks: list[int] = []
        self.consumed: list[Any] = []

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        modules = list(pl_module.modules())
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        self.hooks.append(sum(len(getattr(m, kind)) for m in modules for kind in kinds))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(loss_of(outputs).clone())
        loader: Any = trainer.train_dataloader
        self.consumed.append(loader.state_dict())


def fit(
    folder: Path, cache: str, probe: SignalProbe | None, kind: str = "translation", **settings: Any
) -> tuple[Watch, TransformerModule]:
    pl.seed_everything(5, verbose=False)
    trained = module(kind, preset="realformer", query_key_noise=0.1)
    architecture = trained.architecture
    trained.architecture = type(architecture)(**{**vars(architecture), "dropout": 0.3})
    watch = Watch()
    callbacks = [watch] if probe is None else [probe, watch]
    fitter = trainer(folder, callbacks=callbacks, **{"max_steps": 12, **settings})
    fitter.fit(trained, datamodule=data(cache, kind))
    return watch, trained


def assert_unnoticed(plain: Any, watched: Any, steps: int) -> None:
    """Two runs with the same bits: a watch and a trained module of each."""
    (one, left), (two, right) = plain, watched
    assert len(one.losses) == len(two.losses) == steps
    assert all(map(torch.equal, one.losses, two.losses))
    for (name, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert one.consumed == two.consumed
    assert one.hooks == two.hooks == [0] * steps


@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
def test_probing_changes_no_bit_of_a_loss(tmp_path: Path, cache: str, kind: str) -> None:
    plain, left = fit(tmp_path / "plain", cache, None, kind)
    state = torch.get_rng_state()
    watched, right = fit(tmp_path / "probed", cache, SignalProbe(), kind)
    assert torch.equal(state, torch.get_rng_state())
    assert_unnoticed((plain, left), (watched, right), 12)
    assert {row.step for row in from_csv(tmp_path / "probed" / "probes.csv")} == {1, 2, 5, 10}
    assert not (tmp_path / "plain" / "probes.csv").exists()


def test_nothing_is_done_between_the_steps_that_fire(tmp_path, cache: str, monkeypatch) -> None:
    entered: list[int] = []
    copied: list[int] = []
    enter = ActivationHooks.__enter__

    def counted(taps: ActivationHooks) -> ActivationHooks:
        entered.append(1)
        return enter(taps)

    def copy(model: nn.Module) -> Snapshot:
        copied.append(1)
        return snapshot(model)

    monkeypatch.setattr(ActivationHooks, "__enter__", counted)
    monkeypatch.setattr("lightning_app.training.callbacks.probes.snapshot", copy)
    fit(tmp_path, cache, SignalProbe(steps=[4, 9]))
    assert len(entered) == len(copied) == 2
    probe = SignalProbe()
    fired = [step for step in range(0, 2001) if probe.fires(step)]
    assert fired == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_the_size_of_an_update_is_that_of_its_step(tmp_path: Path, cache: str) -> None:
    """The weights before and after step 2, seen from outside."""
    seen: dict[int, dict[str, Tensor]] = {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen[trainer.global_step] = {k: v.clone() for k, v in pl_module.state_dict().items()}

    pl.seed_everything(5, verbose=False)
    fitter = trainer(tmp_path, callbacks=[SignalProbe(), Keep()], max_steps=2)
    fitter.fit(module(preset="pre_ln"), datamodule=data(cache))
    prefix = "model.encoder.blocks.1."
    matrices = [k for k, v in seen[1].items() if k.startswith(prefix) and v.ndim == 2]
    moved = sum(float((seen[2][k] - seen[1][k]).square().sum()) for k in matrices)
    whole = sum(float(seen[1][k].square().sum()) for k in matrices)
    rows = {(r.step, r.place): r.value for r in from_csv(tmp_path / "probes.csv")}
    found = rows[2, Place("update_ratio", "encoder", 2)]
    assert found == pytest.approx((moved / whole) ** 0.5, rel=1e-4)
    assert {step for step, _ in rows} == {1, 2}
    assert (1, Place("output_information", MODEL)) in rows
    assert (1, Place("attention_entropy_p50", "decoder", 1, 2)) in rows


def test_loggers_get_a_few(tmp_path: Path, cache: str) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(tmp_path, cache, SignalProbe(), logger=logger, max_steps=3)
    header = (tmp_path / "metrics.csv").read_text().partition("\n")[0].split(",")
    layers = [("encoder", 1), ("encoder", 2), ("decoder", 1)]
    expected = {f"probe/{q}/{s}/{n}" for q in ("token_cosine", "w2_gradient") for s, n in layers}
    expected.add("probe/output_information/model")
    assert {name for name in header if name.startswith("probe/")} == expected


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_that_goes_on_keeps_its_rows(tmp_path: Path, cache: str) -> None:
    def steps() -> list[int]:
        return sorted({row.step for row in from_csv(tmp_path / "probes.csv")})

    saver = ModelCheckpoint(
        dirpath=tmp_path, filename="part", every_n_train_steps=3, enable_version_counter=False
    )
    common: dict[str, Any] = {"callbacks": [SignalProbe(), saver], "enable_checkpointing": True}
    trainer(tmp_path, max_steps=6, **common).fit(module(), datamodule=data(cache))
    assert steps() == [1, 2, 5]
    early = tmp_path / "early.ckpt"
    trainer(tmp_path, max_steps=3, **common).fit(module(), datamodule=data(cache))
    assert steps() == [1, 2]
    (tmp_path / "part.ckpt").rename(early)
    fitter = trainer(tmp_path, max_steps=12, **common)
    fitter.fit(module(), datamodule=data(cache), ckpt_path=early, weights_only=True)
    assert steps() == [1, 2, 5, 10]
    trainer(tmp_path, max_steps=1, **common).fit(module(), datamodule=data(cache))
    assert steps() == [1]


def test_one_rank_alone_probes(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda self: False))
    watch, _ = fit(tmp_path, cache, SignalProbe(), max_steps=2)
    assert len(watch.losses) == 2
    assert not (tmp_path / "probes.csv").exists()


CONFIG = """
seed_everything: 1
trainer:
  max_steps: 2
  limit_val_batches: 1
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_app.training.callbacks.probes.SignalProbe
      init_args: {steps: [2]}
model:
  architecture:
    {encoder_depth: 1, decoder_depth: 1, model_dim: 8, ff_dim: 8, num_heads: 2, dropout: 0.1}
  objective: {evaluate_test: false}
  schedule: {warmup_steps: 0}
data: {name: synthetic, tokenizer: word, vocab_size: null, tokens_per_batch: 512}
"""


# Over 5 s: a training with a corpus of its own and figures.
def test_a_config_names_it(tmp_path: Path, cache: str) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    settings = {"trainer.default_root_dir": run, "data.cache": cache}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = ["-m", "lightning_app", "fit", "--config", "mine.yaml", *words]
    done = warm.run(command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row.step for row in from_csv(run / "probes.csv")} == {2}
    assert "probe/token_cosine/encoder/1" in (run / "metrics.csv").read_text()
