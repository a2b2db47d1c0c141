"""Checks for your own parts: ``check_preset("mine")`` in a test, after loading a plug-in.

They are the guarantees of every preset; nothing here knows how a preset works. Each check builds
small models of a preset, in float64 with a fixed seed, and raises an `AssertionError` naming what
fails.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.masks import Mask, causal_mask
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.core.errors import UserError
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    MaskedLanguageModel,
    build_model,
)
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack
from lightning_app.plugins import load

__all__ = ["CHECKS", "KINDS", "Check", "check_preset"]


Model = TypeVar("Model", bound=nn.Module)

PAD, BOS, EOS = 0, 2, 3
VOCABULARY = 17
SOURCE_LENGTHS = (7, 4, 1)
TARGET_LENGTHS = (11, 6, 3)
NUM_HEADS, HEAD_DIM = 2, 5
SIZES: dict[str, Any] = {
    "encoder_depth": 3,
    "decoder_depth": 2,
    "model_dim": NUM_HEADS * HEAD_DIM,
    "ff_dim": 13,
    "num_heads": NUM_HEADS,
    "dropout": 0.0,
}


def small_architecture(**changes: Any) -> ArchitectureConfig:
    return ArchitectureConfig(**{**SIZES, **changes})


def _model(kind: str, block: BlockConfig | str, changes: dict[str, Any]) -> Any:
    block = BlockConfig(preset=block) if isinstance(block, str) else block
    return build_model(small_architecture(kind=kind, **changes), block, VOCABULARY, PAD)


def translator(block: BlockConfig | str, **changes: Any) -> EncoderDecoder:
    """Return an encoder-decoder with its initial values."""
    return _model("encoder_decoder", block, changes)


def masked_model(block: BlockConfig | str, **changes: Any) -> MaskedLanguageModel:
    """Return an encoder with the head for masked tokens, with its initial values."""
    return _model("encoder", block, changes)


def causal_model(block: BlockConfig | str, **changes: Any) -> CausalLanguageModel:
    """Return a causal stack without an encoder, with its initial values."""
    return _model("decoder", block, changes)


def specification(block: BlockConfig | StackSpec | str, stack: Stack) -> StackSpec:
    """Return the specification of `block` in `stack`."""
    if isinstance(block, StackSpec):
        return block
    return (BlockConfig(preset=block) if isinstance(block, str) else block).resolve(stack)


def encoder(
    block: BlockConfig | StackSpec | str, depth: int = 3, peer_depth: int = 2, **changes: Any
) -> BlockStack:
    """Return the encoder of two stacks, with its initial values, smooth between its matrices."""
    spec = specification(block, Stack(depth=depth, peer_depth=peer_depth))
    sizes = small_architecture(**{"activation": "gelu", **changes})
    module = BlockStack(spec, sizes.sizes(), sizes.order())
    initialize(module)
    return module


def decoder(block: BlockConfig | StackSpec | str, depth: int = 2, **changes: Any) -> BlockStack:
    """Return a decoder that reads an encoder of three layers."""
    spec = specification(block, Stack(depth=depth, peer_depth=3, causal=True, cross=True))
    sizes = small_architecture(**{"activation": "gelu", **changes})
    module = BlockStack(spec, sizes.sizes(), sizes.order(), cross=True)
    initialize(module)
    return module


def decode(module: BlockStack, x: Tensor, memory: Tensor, source_mask: Mask) -> Tensor:
    """Return the states of a whole target."""
    return module(x, causal_mask(x.shape[1], x.device), module.remember(memory, source_mask))


@torch.no_grad()
def randomise(model: Model) -> Model:
    """Add noise to every parameter: initial values of 0 or 1 hide errors of their factors."""
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, SpectralLinear):
            module.aim()  # as after many steps
    return model


def words(*shape: int) -> Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(5, VOCABULARY, shape)


def sentences() -> tuple[Tensor, Tensor]:
    """Return a padded batch: sources end with EOS, targets are BOS ... EOS."""
    source = words(len(SOURCE_LENGTHS), max(SOURCE_LENGTHS))
    target = words(len(TARGET_LENGTHS), max(TARGET_LENGTHS))
    target[:, 0] = BOS
    for row, (n, m) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        source[row, n - 1], source[row, n:] = EOS, PAD
        target[row, m - 1], target[row, m:] = EOS, PAD
    return source, target


KINDS = ("encoder", "encoder_decoder", "decoder")
"""The kinds of model, as in `model.architecture.kind`."""

_BUILD: dict[str, Callable[..., nn.Module]] = {
    "encoder": masked_model,
    "encoder_decoder": translator,
    "decoder": causal_model,
}


@dataclass(frozen=True)
class Check:
    """One guarantee about models of one kind; call it with the name of a preset."""

    name: str
    kind: str
    function: Callable[[str], None]

    def __call__(self, preset: str) -> None:
        """Raise `AssertionError` naming the preset, the kind of model and what fails."""
        with _float64():
            try:
                self.function(preset)
            except AssertionError as error:
                reason = " ".join(str(error).split())
                raise AssertionError(
                    f"preset '{preset}', {self.kind}: {self.name.replace('_', ' ')}: {reason}"
                ) from error


CHECKS: list[Check] = []
"""Every check, in the order in which `check_preset` makes them."""

Made = Callable[[str], None]


def of(kind: str) -> Callable[[Made], Made]:
    """Return the decorator that turns a function into a check of models of that kind."""

    def add(function: Made) -> Made:
        CHECKS.append(Check(function.__name__, kind, function))
        return function

    return add


def of_each_kind(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Turn a function of a preset and a kind into one check per kind."""
    for kind in KINDS:
        CHECKS.append(Check(function.__name__, kind, lambda name, kind=kind: function(name, kind)))
    return function


def check_preset(
    preset: str, *, plugin: str | Path | None = None, kinds: Sequence[str] = KINDS
) -> None:
    """Check the guarantees of every preset, for models of these kinds.

    A later token never changes an earlier output; padding, other rows and their order change
    nothing; cached decoding equals full decoding; gradients are finite and reach every parameter;
    every parameter has an initial value; parameters survive a checkpoint, and their number does not
    change between models.

    Args:
        preset: The name of the preset.
        plugin: The plug-in that registers it, if it is not loaded yet: a file, or a module.
        kinds: The kinds of model that the preset supports.

    Raises:
        AssertionError: naming the preset, the kind of model and what fails.
        UserError: if there is no preset or plug-in with that name, or another kind is named.
    """
    if plugin is not None:
        load(str(plugin))
    _ = PRESETS[preset]
    if isinstance(kinds, str) or not kinds or not {*kinds} <= {*KINDS}:
        raise UserError(f"kinds: expected some of {', '.join(KINDS)}, found {kinds!r}")
    token = _KEPT.set({})
    try:
        for check in CHECKS:
            if check.kind in kinds:
                check(preset)
    finally:
        _KEPT.reset(token)


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            yield
    finally:
        torch.set_default_dtype(before)


def assert_same(ours: Tensor, theirs: Tensor, where: str = "outputs differ") -> None:
    """Compare two results of the same sums in different order."""
    torch.testing.assert_close(
        ours, theirs, rtol=1e-11, atol=1e-11, msg=lambda text: f"{where}: {text}"
    )


def inputs_of(model: nn.Module) -> tuple[Tensor, ...]:
    """Return a batch for a model of any kind."""
    if isinstance(model, EncoderDecoder):
        return sentences()
    tokens = words(3, 7)
    return (tokens,) if isinstance(model, CausalLanguageModel) else (tokens, torch.arange(5))


_KEPT: ContextVar[dict[Any, nn.Module] | None] = ContextVar("kept", default=None)


def _kept(build: Callable[[str], nn.Module], preset: str) -> Any:
    """Return a model that the checks of one `check_preset` share; building takes longest."""
    kept = _KEPT.get()
    if kept is None or (build, preset) not in kept:
        with torch.random.fork_rng(devices=[]):
            made = randomise(build(preset))
        if kept is None:
            return made.eval()
        kept[build, preset] = made
    return kept[build, preset].eval()


def _translator(preset: str) -> EncoderDecoder:
    return _kept(translator, preset)


def _causal(preset: str) -> CausalLanguageModel:
    return _kept(causal_model, preset)


def _other_words(tokens: Tensor) -> Tensor:
    return 5 + (tokens - 4) % 12


def _check_causality(logits_of: Callable[[Tensor], Tensor], text: Tensor) -> None:
    """Change all tokens of a text from each place on, as one batch beside the text itself."""
    rows = text.repeat(len(text), 1)
    for i in range(1, len(text)):
        rows[i, i:] = _other_words(text[i:])
    same, *others = logits_of(rows)
    for i, changed in enumerate(others, start=1):
        assert_same(changed[:i], same[:i], f"token {i} changes an output before it")
        moved = float((changed[i] - same[i]).detach().abs().max()) > 1e-6
        assert moved, f"token {i} does not change its own output"


@of("encoder_decoder")
def a_later_target_token_never_changes_an_earlier_output(preset: str) -> None:
    model, source = _translator(preset), words(1, 7)
    _check_causality(lambda target: model(source.repeat(len(target), 1), target), words(11))


@of("encoder_decoder")
def every_source_token_counts(preset: str) -> None:
    """What makes the checks of padding meaningful: real tokens do change the output."""
    model, source, target = _translator(preset), words(7), words(1, 11)
    sources = source.repeat(8, 1)
    for j in range(7):
        sources[j + 1, j] = _other_words(source[j])
    same, *others = model(sources, target.repeat(8, 1))
    for j, changed in enumerate(others):
        moved = float((changed - same).detach().abs().max()) > 1e-6
        assert moved, f"source token {j} changes no output"


@of("encoder_decoder")
def more_padding_changes_nothing(preset: str) -> None:
    model = _translator(preset)
    source, target = sentences()
    real = target != PAD
    wider = model(pad(source, (0, 5)), pad(target, (0, 3)))
    assert_same(wider[:, : target.shape[1]][real], model(source, target)[real])


@of("encoder_decoder")
def a_row_does_not_depend_on_the_others(preset: str) -> None:
    """A single row, cut to its length, equals itself in a batch; also for a one-token source."""
    model = _translator(preset)
    source, target = sentences()
    for logits in _of_both_modes(model, lambda: model(source, target)):
        for row, (n, m) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
            alone = model(source[row : row + 1, :n], target[row : row + 1, :m])
            assert_same(alone[0], logits[row, :m], f"row {row}")


@of("encoder_decoder")
def the_order_of_rows_changes_nothing(preset: str) -> None:
    model = _translator(preset)
    source, target = sentences()
    order = torch.tensor([2, 0, 1])
    assert_same(model(source[order], target[order]), model(source, target)[order])


@of("encoder_decoder")
def a_blank_row_is_finite_and_harmless(preset: str) -> None:
    """A device without a sentence gets only EOS as source and padding as target."""
    model = _translator(preset)
    source, target = sentences()
    blank_source, blank_target = torch.zeros_like(source[:1]), torch.zeros_like(target[:1])
    blank_source[0, 0] = EOS
    logits = model(torch.cat([source, blank_source]), torch.cat([target, blank_target]))
    assert_same(logits[:3], model(source, target))
    logits.sum().backward()
    assert bool(logits.isfinite().all()), "an output is not finite"
    bad = [name for name, p in model.named_parameters() if not _is_finite(p.grad)]
    assert bad == [], f"gradients are not finite: {bad}"


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(grad.isfinite().all())


@of("decoder")
def texts_do_not_depend_on_each_other(preset: str) -> None:
    model, tokens = _causal(preset), words(3, 7)
    for logits in _of_both_modes(model, lambda: model(tokens)):
        for row in range(3):
            assert_same(model(tokens[row : row + 1])[0], logits[row], f"row {row}")


def _of_both_modes(model: nn.Module, run: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield the outputs in evaluation mode and in training, where a norm could use statistics of
    the batch; the latter unless they are random, as with branches that are skipped by chance."""
    model.eval()
    yield run()
    model.train()
    logits = run()
    if torch.equal(logits, run()):
        yield logits


@of("encoder")
def rows_do_not_depend_on_each_other(preset: str) -> None:
    model, tokens = randomise(masked_model(preset)), words(3, 7)
    for each in _of_both_modes(model, lambda: model(tokens, torch.arange(21))):
        for row in range(3):
            alone = model(tokens[row : row + 1], torch.arange(7))
            assert_same(alone, each.unflatten(0, (3, 7))[row], f"row {row}")
    model.eval()
    logits = model(tokens, torch.arange(21)).unflatten(0, (3, 7))
    order = torch.tensor([2, 0, 1])
    assert_same(model(tokens[order], torch.arange(21)).unflatten(0, (3, 7)), logits[order])
    one = model(tokens[:, :1], torch.arange(3))
    assert one.shape == (3, VOCABULARY), "texts of one token have other shapes"
    assert bool(one.isfinite().all()), "texts of one token have outputs that are not finite"


@of("encoder_decoder")
def cached_decoding_equals_full_decoding(preset: str) -> None:
    model = _translator(preset)
    source, target = sentences()
    check_cached_translation(model, source, target, target.shape[1])


def check_cached_translation(
    model: EncoderDecoder, source: Tensor, target: Tensor, steps: int
) -> None:
    """Compare `steps` steps of cached decoding with a full pass."""
    full, state = model(source, target), model.start(source)
    for i in range(steps):
        logits, state = model.step(target[:, i : i + 1], state)
        real = target[:, i] != PAD
        assert_same(logits[real], full[real, i], f"step {i}")


def check_cached_text(model: CausalLanguageModel, tokens: Tensor) -> None:
    """Compare cached decoding of a text with a full pass."""
    full, state = model(tokens), model.start(len(tokens))
    for i in range(tokens.shape[1]):
        logits, state = model.step(tokens[:, i : i + 1], state)
        assert_same(logits, full[:, i], f"step {i}")


@of("encoder_decoder")
def hypotheses_may_be_reordered_and_repeated(preset: str) -> None:
    """A beam keeps rows 2, 0, 0 after the third token; each continues as in its own sentence."""
    model = _translator(preset)
    source, target = sentences()[0], words(3, 7)
    rows = torch.tensor([2, 0, 0])
    state = model.start(source)
    for i in range(3):
        _, state = model.step(target[:, i : i + 1], state)
    state = state.select(rows)
    mixed = torch.cat([target[rows, :3], target[:, 3:]], dim=1)
    full = model(source[rows], mixed)
    for i in range(3, 7):
        logits, state = model.step(mixed[:, i : i + 1], state)
        assert_same(logits, full[:, i], f"step {i}")


@of("decoder")
def a_later_token_never_changes_an_earlier_prediction(preset: str) -> None:
    _check_causality(_causal(preset), words(11))


@of("decoder")
def cached_decoding_of_one_stack_equals_full_decoding(preset: str) -> None:
    check_cached_text(_causal(preset), words(3, 7))


@of_each_kind
def gradients_are_finite_and_reach_every_parameter(preset: str, kind: str) -> None:
    """Distributed training stops at a parameter that no loss reaches."""
    model = randomise(_BUILD[kind](preset))
    inputs = inputs_of(model)
    (model(*inputs) * torch.randn(VOCABULARY)).sum().backward()
    absent = [name for name, p in model.named_parameters() if p.grad is None]
    assert absent == [], f"no gradient reaches {absent}"
    bad = [name for name, p in model.named_parameters() if not _is_finite(p.grad)]
    assert bad == [], f"gradients are not finite: {bad}"


@of_each_kind
def every_parameter_of_a_stack_has_an_initial_value(preset: str, kind: str) -> None:
    """Additional parameters belong in a `LearnedScalars`, which also sets their weight decay."""
    model = _BUILD[kind](preset)
    stacks = ("encoder.", "decoder.")
    inside = {name: p for name, p in model.named_parameters() if name.startswith(stacks)}
    with torch.no_grad():
        for parameter in inside.values():
            parameter.fill_(torch.nan)
    initialize(model)
    unset = [name for name, p in inside.items() if not bool(p.isfinite().all())]
    assert unset == [], f"`initialize` does not set {unset}; use a LearnedScalars"


@of_each_kind
def the_state_survives_a_checkpoint(preset: str, kind: str) -> None:
    build = _BUILD[kind]
    model, other = (randomise(build(preset)).eval() for _ in range(2))
    shapes, others = ({n: p.shape for n, p in m.named_parameters()} for m in (model, other))
    assert shapes == others, "two models have other parameters"
    inputs = inputs_of(model)
    expected = model(*inputs)
    assert not torch.equal(other(*inputs), expected), "the parameters change no output"
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*inputs), expected), "outputs differ after a checkpoint"


@of_each_kind
def evaluation_is_deterministic(preset: str, kind: str) -> None:
    model = _BUILD[kind](preset, dropout=0.3, attention_dropout=0.3)
    inputs = inputs_of(model)
    assert not torch.equal(model(*inputs), model(*inputs)), "dropout changes no output"
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs)), "two evaluations differ"
