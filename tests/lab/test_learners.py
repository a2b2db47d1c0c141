"""Batches and the work of our models."""

from dataclasses import replace

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.lab.bench.peers import Setting, batch_of, learner, masked, preset_work, work

TINY = Setting(depth=1, width=16, ff_dim=24, heads=2, vocabulary=50, length=28, tokens=84)


def test_a_translation_batch_is_as_the_data_module_makes_them() -> None:
    batch = batch_of(TINY)
    assert batch.source.shape == (3, 28)
    assert batch.target.shape == (3, 29)
    assert (batch.target[:, 0] == BOS).all()
    lengths = (28, 27, 26)
    for row, length in enumerate(lengths):
        for text, start in ((batch.source[row], 0), (batch.target[row], 1)):
            assert (text[start : start + length - 1] >= SPECIALS).all()
            assert text[start + length - 1] == EOS
            assert (text[start + length :] == PAD).all()
    assert batch.predicted_tokens == sum(lengths)


def test_a_masked_batch_predicts_what_it_hides() -> None:
    batch = batch_of(masked(TINY))
    places = batch.tokens.flatten()
    assert (places[batch.positions] == MASK).all()
    assert int((places == MASK).sum()) == len(batch.positions) == round(0.15 * 84)
    assert (batch.labels >= SPECIALS).all()
    assert batch.predicted_tokens == len(batch.labels)


@pytest.mark.parametrize("setting", [TINY, masked(TINY)])
def test_a_step_trains_and_passes_alone_do_not(setting: Setting) -> None:
    setting = replace(setting, label_smoothing=0.0)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="pre_ln"), batch)
    start = float(ours.loss().detach())
    assert start == pytest.approx(float(torch.tensor(50.0).log()), rel=0.5)
    passes = work(ours, replace(setting, step=False))
    passes.run()
    assert float(ours.loss().detach()) == start
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    step = work(ours, setting)
    for _ in range(30):
        step.run()
    assert float(ours.loss().detach()) < start


def test_a_form_is_forced_while_the_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_app.blocks.kernels import choose as kernels

    seen = []
    choose = kernels.choose

    def watched(*args, **kwargs):
        seen.append(choose(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(kernels, "choose", watched)
    setting = replace(masked(TINY), step=False)
    preset_work(setting, "realformer").run()
    assert {choice.reason for choice in seen} != {"asked for"}
    seen.clear()
    preset_work(setting, "realformer", "reversible").run()
    assert {choice.form for choice in seen} == {"reversible"}
