"""The rows of `speed_goals.py` against peers: as they are, and with the same matrix library.

Each ratio comes once as a user gets it and once with the linear maps of both by each library that
our models may use here. `share` is the part of our time that all products would take at the
measured rate of the library.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from benchmarks.measure import (
    Comparison,
    Contender,
    How,
    Missing,
    Work,
    compare,
    matmul_rates,
    rate_in_force,
    same_library,
)
from benchmarks.peers import (
    Setting,
    TorchTranslator,
    XTranslator,
    bert_peer,
    causal,
    causal_peer,
    masked,
    preset_work,
    residual_encoder,
    translation_peer,
)
from benchmarks.speed_rows import Figure, Row, at_least, at_most, exactly

Build = Callable[[], Work]
ROUNDS = 5


def ways(ours: Build, peers: Sequence[tuple[str, Build]]) -> Iterator[tuple[str, Comparison]]:
    """Return what was measured with the libraries as they are, and with each one for both."""
    rates = matmul_rates(torch.device("cpu"))
    contenders = [Contender("ours", ours), *(Contender(name, build) for name, build in peers)]
    for library, context in {"as it is": nullcontext, **same_library()}.items():
        with context():
            how = How(rounds=ROUNDS, rate=rate_in_force(rates, "cpu", bf16=False))
            measured = compare("", contenders, how)
        for result in measured.results:
            if result.missing is not None:
                raise Missing(result.missing)
        yield library, measured


def ratios(
    said: str,
    ours: Build,
    peers: Sequence[tuple[str, Build, float]],
    *,
    share: float | None = None,
    memory: float | None = None,
) -> Iterator[Figure]:
    """Yield each ratio of time with its goal, the share of the rate, and the ratio of memory."""
    goals = [goal for _, _, goal in peers]
    for library, measured in ways(ours, [(name, build) for name, build, _ in peers]):
        first, *others = measured.results
        for result, goal in zip(others, goals, strict=True):
            assert result.time is not None
            yield at_least(f"{said}, {result.name}, {library}", goal, result.time)
        if share is not None:
            assert first.share is not None
            yield at_least(f"{said}, share, {library}", share, exactly(first.share))
        if memory is not None and library == "as it is":
            assert others[0].memory is not None
            yield at_most(f"{said}, live memory", memory, exactly(1 / others[0].memory))


def translation(setting: Setting, goals: tuple[float, float], share: float) -> Iterator[Figure]:
    peers = [
        ("torch", partial(translation_peer, setting, TorchTranslator), goals[0]),
        ("x-transformers", partial(translation_peer, setting, XTranslator), goals[1]),
    ]
    said = f"{setting.width}, T={setting.length}"
    yield from ratios(said, partial(preset_work, setting, "post_ln"), peers, share=share)


def step_512() -> Iterator[Figure]:
    """The training step of 6+6 blocks, width 512, ff 1024, 1024 tokens in rows of 32."""
    yield from translation(Setting(length=32, tokens=1024), (1.15, 1.2), 0.7)


def step_256() -> Iterator[Figure]:
    """The training step of 6+6 blocks, width 256, ff 512, 8 x 128 tokens."""
    setting = Setting(width=256, ff_dim=512, length=128, tokens=1024)
    yield from translation(setting, (1.12, 1.12), 0.62)


def step_demo() -> Iterator[Figure]:
    """The share of the rate of the demo's step: 3+3 blocks, width 64, 56 rows of 17 tokens."""
    setting = Setting(depth=3, width=64, ff_dim=128, vocabulary=2716, length=17, tokens=952)
    for library, measured in ways(partial(preset_work, setting, "post_ln"), []):
        share = measured.results[0].share
        assert share is not None
        yield at_least(f"share, {library}", 0.45, exactly(share))


def masked_step() -> Iterator[Figure]:
    """The masked-word step, 12 blocks of width 256, against BERT's body with the same head."""
    setting = masked(Setting(depth=12, width=256, tokens=1024))
    for length in (128, 512):
        mine = replace(setting, length=length)
        peer = ("BERT's body", partial(bert_peer, mine, predicted_only=True), 1.15)
        yield from ratios(f"T={length}", partial(preset_work, mine, "post_ln"), [peer])


def causal_step() -> Iterator[Figure]:
    """The step of a causal language model, 12 blocks of width 256, against two decoders."""
    setting = causal(Setting(depth=12, width=256, tokens=1024))
    for length in (256, 1024):
        mine = replace(setting, length=length)
        peers = [
            ("GPT-2", partial(causal_peer, mine, hugging_face=True), 1.15),
            ("x-transformers", partial(causal_peer, mine, hugging_face=False), 1.15),
        ]
        yield from ratios(f"T={length}", partial(preset_work, mine, "pre_ln"), peers)


def residual_encoder_passes() -> Iterator[Figure]:
    """The passes of an encoder with residual attention, 12 blocks of width 256, 2048 tokens."""
    setting = Setting(task="masked_lm", depth=12, width=256, tokens=2048, step=False)
    for length, speed, memory in ((128, 1.25, 0.7), (512, 1.2, 0.47), (1024, 1.45, 0.33)):
        mine = replace(setting, length=length)
        peer = ("x-transformers", partial(residual_encoder, mine, ours=False), speed)
        ours = partial(residual_encoder, mine, ours=True)
        yield from ratios(f"T={length}", ours, [peer], memory=memory)


PEER_ROWS: dict[str, Row] = {
    "step_512": step_512,
    "step_256": step_256,
    "step_demo": step_demo,
    "masked_step": masked_step,
    "causal_step": causal_step,
    "residual_encoder": residual_encoder_passes,
}
