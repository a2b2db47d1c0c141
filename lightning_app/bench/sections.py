"""The comparisons of `ablate bench`: presets, attention maps, peers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lightning_app.bench.attention import Maps, chain_forms, single_forms
from lightning_app.bench.bert_peers import bert_peer
from lightning_app.bench.compare import Comparison, Contender, How, compare
from lightning_app.bench.learners import Setting, masked, preset_work
from lightning_app.bench.peers import (
    TorchTranslator,
    XTranslator,
    residual_encoder,
    translation_peer,
)
from lightning_app.bench.rates import Rates, rate_in_force
from lightning_app.bench.same_library import same_library
from lightning_app.blocks.block_config import BlockConfig

BASELINE = "pre_ln"
WORK = {True: "training step", False: "forward and backward"}


def said(setting: Setting) -> str:
    """Return the sizes of `setting` as text."""
    stacks = setting.architecture().stacks(BlockConfig())
    depth = "+".join([str(setting.depth)] * len(stacks))
    return (
        f"{depth} blocks of width {setting.width}, ff {setting.ff_dim}, {setting.heads} heads, "
        f"{setting.rows} x {setting.length} tokens"
    )


def presets(setting: Setting, names: Sequence[str], how: How) -> Iterator[Comparison]:
    """Compare presets with the baseline: a training step, then its passes alone."""
    others = [name for name in names if name != BASELINE]
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender(name, partial(preset_work, mine, name)) for name in (BASELINE, *others)
        ]
        yield compare(f"Presets, {WORK[step]}: {said(mine)}", contenders, how)


def attention(maps: Maps, how: How) -> Iterator[Comparison]:
    """Compare the forms of one map, causal and not, and of a chain of maps."""
    sizes = f"{maps.rows} x {maps.length} tokens, {maps.heads} heads of {maps.head_dim}"
    for causal in (True, False):
        mine = replace(maps, depth=1, causal=causal)
        seen = "causal" if causal else "all keys"
        yield compare(f"One attention map, {seen}: {sizes}", single_forms(mine), how)
    chain = chain_forms(replace(maps, causal=False))
    yield compare(f"A chain of {maps.depth} maps, all keys: {sizes}", chain, how)


def peers(setting: Setting, how: How, rates: Rates) -> Iterator[Comparison]:
    """Compare our models with the same models of other libraries, each with our weights.

    Where our products are computed by another matrix library than theirs, everything is compared
    again with the linear maps of both by each library: the first ratio is what a user gets, the
    others what the form of the model gives.
    """
    yield from _peers(setting, how)
    if setting.device != "cpu" or setting.precision != "32":
        return
    for library, context in same_library().items():
        with context():
            rate = rate_in_force(rates, setting.device, bf16=False)
            # The process that measures resident memory would use the libraries as they are.
            for comparison in _peers(setting, replace(how, rate=rate, resident=False)):
                title = f"{comparison.title}; linear maps of both by {library}"
                yield replace(comparison, title=title)


def _peers(setting: Setting, how: How) -> Iterator[Comparison]:
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("torch.nn.Transformer", partial(translation_peer, mine, TorchTranslator)),
            Contender("x-transformers", partial(translation_peer, mine, XTranslator)),
        ]
        yield compare(f"Translation, {WORK[step]}: {said(mine)}", contenders, how)
    for step in (True, False):
        mine = replace(masked(setting), step=step)
        body = partial(bert_peer, mine, predicted_only=True)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("Hugging Face BERT", partial(bert_peer, mine, predicted_only=False)),
            Contender("the same, predicted places alone", body),
        ]
        yield compare(f"Masked tokens, {WORK[step]}: {said(mine)}", contenders, how)
    mine = replace(masked(setting), step=False)
    contenders = [
        Contender("ours, realformer", partial(residual_encoder, mine, ours=True)),
        Contender("x-transformers, residual_attn", partial(residual_encoder, mine, ours=False)),
    ]
    yield compare(f"Residual attention, {WORK[False]}: encoder of {said(mine)}", contenders, how)
