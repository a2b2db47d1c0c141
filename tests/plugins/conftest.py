"""Plug-ins that tests write; each is forgotten again after its test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_app import plugins
from lightning_app.core.errors import UserError

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    assert not plugins.loaded()
    yield
    for name in list(plugins.loaded()):
        plugins.unload(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str, name: str = "some_parts", folder: str = "") -> Path:
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return written


def refused(source: object) -> str:
    with pytest.raises(UserError) as caught:
        plugins.load(str(source))
    assert not plugins.loaded()
    assert "\n" not in str(caught.value)
    return str(caught.value)


PARTS = '''
import math

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_app.blocks.feed_forward import activation
from lightning_app.blocks.norm import NORM_KINDS, LearnedScalars
from lightning_app.blocks.placed import Placed
from lightning_app.blocks.presets import preset
from lightning_app.blocks.residual import RESIDUAL_RULES, ResidualSpec
from lightning_app.blocks.stack import around, same_block
from lightning_app.data.config import CORPORA
from lightning_app.data.sources import GeneratedCorpus
from lightning_app.models.positions import POSITIONS, Positions
from lightning_app.models.optim import OPTIMIZERS, schedule
from lightning_app.plugins import CALLBACKS
from lightning_app.scores.task_facts import TASKS, Monitored, QualityMetric, TaskFacts
from lightning_app.tasks.base import task
from lightning_app.tasks.causal_lm import CausalLanguageModelling


@NORM_KINDS.register("max_norm")
class MaxNorm(nn.Module):
    """x / max |x|, without parameters."""

    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return x / x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-6)


@RESIDUAL_RULES.register("leaky")
class Leaky(LearnedScalars):
    """s + a b, a = 1/2 at the start"""

    def __init__(self, dim):
        super().__init__()
        self.a = nn.Parameter(torch.empty(()))

    def reset(self):
        self.a.fill_(0.5)

    def forward(self, skip, branch):
        return skip + self.a * branch


@preset(equation="x' = M(x + f(x))", paper="a test", fixes="nothing")
def max_post(stack):
    """Post-LN with another norm."""
    return same_block(stack, around(ResidualSpec(norm_sum="max_norm")), final_norm="none")


@preset(equation="x' = x + a f(N(x))", paper="a test", fixes="nothing")
def leaky_pre(stack):
    """Pre-LN with another residual rule."""
    each = ResidualSpec(norm_input="layer_norm", rule="leaky")
    return same_block(stack, around(each), final_norm="layer_norm")


@activation("squared_relu")
def squared_relu(x, slope):
    return torch.relu(x) ** 2


@schedule("halved", ends=True)
def halved(config, step, total):
    return 1.0 if 2 * step <= total else 0.5


@OPTIMIZERS.register("plain_sgd")
def plain_sgd(config, groups, *, fused):
    return torch.optim.SGD(groups, lr=config.lr)


class Falling(nn.Module):
    """b_ij = -|i - j| / 2^h in head h: a score rule of one's own."""

    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1), persistent=False)

    def forward(self, places):
        placed = Placed()
        distance = (places.newest[:, None] - places.keys[:, None]).abs()
        placed.bias = -self.slopes[:, None, None] * distance[:, None]
        return placed


@POSITIONS.register("falling")
class FallingScores(Positions):
    def placing(self, spec):
        return Falling(self.num_heads)


LINES = {"source": ["eins zwei", "drei", "vier"] * 40, "target": ["one two", "three", "four"] * 40}


@CORPORA.register("counting")
class Counting(GeneratedCorpus):
    def generate(self, config):
        columns = LINES if TASKS[config.task].pairs else {"text": LINES["target"]}
        return {split: columns for split in ("train", "valid", "test")}

    def protocol(self, source, lines, counts):
        return f"numbers: {counts['train']} pairs"


FACTS = TaskFacts(
    title="next words",
    architecture="decoder",
    running_text=True,
    label_smoothing=0.0,
    monitored=Monitored(metric="val/certainty", mode="max"),
    scores=(QualityMetric("val/certainty", "Certainty", "mean probability of a word"),),
)


@task("next_word", FACTS)
class NextWord(CausalLanguageModelling):
    """Causal language modelling with a score of its own."""

    def scores(self, stage, datamodule, found):
        more = super().scores(stage, datamodule, found)
        return {**more, f"{stage}/certainty": math.exp(-found.nll / found.tokens)}


@CALLBACKS.register("Loud")
class Loud(Callback):
    pass
'''
