"""Logits of attention that a step bounds, against those that the same model has without."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.config import BlockConfig
from lightning_app.config import config
from lightning_app.config.config import resolve
from lightning_app.core.errors import UserError
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.probes.hooks import scores
from lightning_app.training.callbacks import safety
from lightning_app.training.callbacks.safety import QKClip
from tests.runs import data, module, trainer

TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 3, 0, 0]])  # 0 is padding
REAL = {"encoder": TOKENS != 0, "decoder": TOKENS != 0}
PATH = "lightning_app.training.callbacks.safety.QKClip"


@contextmanager
def logits_of(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The logits of every attention, -inf in cells that do not count."""
    found: list[torch.Tensor] = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, logits, _ = scores(module, args, kwargs, None)
        cells = mask.allowed & REAL["encoder"][:, None, :, None]
        found.append(logits.detach().masked_fill(~cells, -torch.inf))

    parts = [part for part in model.modules() if isinstance(part, Attention)]
    handles = [part.register_forward_hook(hook, with_kwargs=True) for part in parts]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_logits_shrink_by_their_factor(positions: str, kv_heads: int | None) -> None:
    """With biases; heads below the bound keep every bit."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"model_dim": 16, "ff_dim": 16, "num_heads": 4, "dropout": 0.0}
    depths: dict[str, Any] = {"encoder_depth": 2, "decoder_depth": 2}
    architecture = ArchitectureConfig(**sizes, **depths, positions=positions, kv_heads=kv_heads)
    model = build_model(architecture, BlockConfig(), vocab_size=11, pad=0).double()
    for part in model.modules():
        if isinstance(part, Attention):
            nn.init.normal_(part.query.bias)
            nn.init.normal_(part.key.bias)
    bounds = []
    for tau in (1e9, 1.0):
        callback = QKClip(tau)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the step changes nothing else
        reduce = lambda value, reduce_op: value  # noqa: E731
        strategy = SimpleNamespace(reduce=reduce)
        given = {"optimizers": [optimizer], "strategy": strategy, "loggers": [], "global_step": 0}
        trainer: Any = SimpleNamespace(**given, log_every_n_steps=1)
        trainer.lightning_module = SimpleNamespace(tags=(set(), set()))
        task = SimpleNamespace(real_tokens=lambda batch: REAL)
        module: Any = SimpleNamespace(model=model, objective=task, device="cpu", profiled=True)
        callback.on_train_start(trainer, module)
        callback.on_train_batch_start(trainer, module, None, 0)
        with logits_of(model) as found:
            model(TOKENS, TOKENS).sum().backward()
        optimizer.step()
        callback.on_train_end(trainer, module)
        bounds.append(found)
    before, again = bounds
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    with logits_of(model) as after:
        model(TOKENS, TOKENS)
    largest = [each.amax(dim=(0, 2, 3)) for each in before]
    assert len(largest) == 6
    assert any((each > 1.0).any() for each in largest)
    assert any((each < 1.0).any() for each in largest)
    first = largest[0]  # later layers read other states, too
    factor = torch.where(first > 1.0, 1.0 / first, 1.0)[:, None, None]
    cells = before[0] > -torch.inf
    torch.testing.assert_close(after[0][cells], (factor * before[0])[cells])
    kept = (first <= 1.0).tolist()
    attention = next(part for part in model.modules() if isinstance(part, Attention))
    if kv_heads is None:
        for head in (index for index, each in enumerate(kept) if each):
            assert torch.equal(after[0][:, head], before[0][:, head])
    assert attention.query.weight.isfinite().all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"block": {"qk_norm": "layer_norm"}}, "QKClip .* model.block: qk_norm layer_norm"),
        ({"block": {"preset": "swin_v2"}}, "QKClip .* model.block: scores cosine"),
        ({"block": {"preset": "realformer"}}, "QKClip .* model.block: carry"),
        ({"block": {"score_cap": 50.0}}, "QKClip .* model.block: score_cap 50.0"),
        ({"block": {"preset": "sigma_reparam"}}, "QKClip .* model.block: sigma_reparam true"),
        ({"architecture": {"positions": "relative"}}, "QKClip .*positions: relative"),
        ({"compile": "blocks"}, "QKClip .* model.compile: blocks"),
        ({"optimizer": {"kind": "adamh"}}, "QKClip .* model.optimizer.kind: adamh"),
        ({}, r"tau -1\.0: must be a number above 0"),
    ],
)
def test_what_it_cannot_bound_is_refused(model: dict[str, Any], message: str) -> None:
    callback = {"class_path": PATH, "init_args": {"tau": 5.0 if model else -1.0}}
    with pytest.raises(UserError, match=message):
        resolve({"trainer": {"callbacks": [callback]}, "model": model}, "a test")


def test_a_plugin_may_have_a_bias_that_does_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"trainer": {"callbacks": [{"class_path": PATH, "init_args": {"tau": 5.0}}]}}
    rope = {"model": {"architecture": {"positions": "rope"}}}
    resolve({**tree, **rope}, "a test")
    monkeypatch.setattr(config, "_UNBIASED", ("sinusoidal",))  # as if rope were a plug-in's
    resolve(tree, "a test")
    with pytest.raises(UserError, match=r"model\.architecture\.positions: rope"):
        resolve({**tree, **rope}, "a test")


def test_logits_of_a_pass_that_sets_initial_values_do_not_count(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admin passes over the first batch with skips of 1 before it trains on it."""
    measured: list[Attention] = []

    def noted(module: Attention, *call: Any) -> Any:
        measured.append(module)
        return scores(module, *call)

    monkeypatch.setattr(safety, "scores", noted)
    trained = module("translation", preset="admin")
    trainer(tmp_path, max_steps=1, limit_val_batches=0, callbacks=[QKClip()]).fit(
        trained, datamodule=data(cache)
    )
    parts = [part for part in trained.modules() if isinstance(part, Attention)]
    assert measured == parts  # once each


def test_a_model_without_attention_is_refused() -> None:
    system = SimpleNamespace(model=nn.Linear(1, 1), device=torch.device("cpu"))
    with pytest.raises(UserError, match="QKClip with a model that has no attention"):
        QKClip().on_train_start(SimpleNamespace(), system)  # pyright: ignore[reportArgumentType]
