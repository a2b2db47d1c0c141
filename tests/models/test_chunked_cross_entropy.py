"""The output layer in chunks against its definition over all logits, written out."""

from typing import Any, NamedTuple

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_app.blocks import linear
from lightning_app.blocks.config import BlockConfig
from lightning_app.models.loss import ObjectiveConfig, output_sums
from lightning_app.scores.task_facts import TASKS
from lightning_app.tasks.base import build_task
from lightning_app.tasks.causal_lm import CausalBatch
from lightning_app.tasks.masked_lm import MaskedBatch
from lightning_app.tasks.translation import TranslationBatch
from tests import tiny


class Case(NamedTuple):
    states: Tensor
    table: Tensor
    bias: Tensor | None
    labels: Tensor
    counted: Tensor
    smoothing: float
    cap: float | None = None
    z_loss: float = 0.0

    def to(self, dtype: torch.dtype) -> "Case":
        states, table, bias = [None if part is None else leaf(part.to(dtype)) for part in self[:3]]
        assert states is not None
        assert table is not None
        return self._replace(states=states, table=table, bias=bias)

    def leaves(self) -> list[Tensor]:
        return [part for part in self[:3] if part is not None]

    def sums(self, chunk: int | None = None) -> Any:
        given = (self.states, self.table, self.labels, self.counted, self.smoothing)
        how = {"bias": self.bias, "chunk": chunk, "cap": self.cap, "z_loss": self.z_loss}
        return output_sums(*given, **how)  # pyright: ignore[reportArgumentType]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def case(
    tokens: int, width: int, vocabulary: int, *, bias: bool = False, share: float = 0.8, **more: Any
) -> Case:
    """A case in float64; about `share` of its tokens count."""
    draw = torch.Generator().manual_seed(more.pop("seed", 0))
    like: dict[str, Any] = {"generator": draw, "dtype": torch.float64}
    return Case(
        leaf(torch.randn(tokens, width, **like)),
        leaf(torch.randn(vocabulary, width, **like)),
        leaf(torch.randn(vocabulary, **like)) if bias else None,
        torch.randint(0, vocabulary, (tokens,), generator=draw),
        torch.rand(tokens, **like) < share,
        **{"smoothing": 0.1, **more},
    )


def naive(case: Case) -> tuple[Tensor, Tensor]:
    """(loss, nll) by ``loss_t = w (log Z_t)^2 - sum_v q_tv log p_tv``.

    ``q = (1 - e) onehot + e / V``. With a cap c the logits are ``c (1 - 2 / (exp(2 z / c) + 1))``.
    """
    logits = case.states @ case.table.t()
    if case.bias is not None:
        logits = logits + case.bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if case.cap is not None:
        logits = case.cap * (1.0 - 2.0 / ((2.0 * logits / case.cap).exp() + 1.0))
    total = logits.exp().sum(dim=1) if case.z_loss else torch.ones(len(logits))
    log_p = logits - logits.logsumexp(dim=1, keepdim=True)
    own = nn.functional.one_hot(case.labels, len(case.table)).to(log_p.dtype)
    wanted = (1.0 - case.smoothing) * own + case.smoothing / len(case.table)
    each = case.z_loss * total.log() ** 2 - (wanted * log_p).sum(dim=1)
    loss = each.to(log_p.dtype) @ case.counted.to(log_p.dtype)
    return loss, -(own * log_p).sum(dim=1) @ case.counted.to(log_p.dtype)


def assert_equal_to_naive(case: Case, chunk: int | None, tolerance: float) -> None:
    expected, expected_nll = naive(case)
    sums = case.sums(chunk)
    scale = 1.0 + float(case.counted.sum())
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance * scale}
    torch.testing.assert_close(sums.loss, expected, **close)
    torch.testing.assert_close(sums.nll, expected_nll, **close)
    assert sums.tokens.item() == case.counted.sum().item()
    # Not 1: what comes in must scale what is found.
    gradients = torch.autograd.grad(3.0 * sums.loss, case.leaves())
    others = torch.autograd.grad(3.0 * expected, case.leaves())
    for ours, theirs in zip(gradients, others, strict=True):
        scale = 1e-3 + float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@settings(max_examples=150)
@given(
    tokens=st.integers(1, 23),
    width=st.integers(1, 7),
    vocabulary=st.integers(2, 13),
    chunk=st.one_of(st.none(), st.integers(1, 29)),
    smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    bias=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
    cap=st.sampled_from([None, 0.5, 3.0]),
    z_loss=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_float64_is_the_definition(tokens, width, vocabulary, chunk, seed, **rest: Any) -> None:
    assert_equal_to_naive(case(tokens, width, vocabulary, seed=seed, **rest), chunk, 1e-10)


capped_or_not = pytest.mark.parametrize("more", [{}, {"cap": 4.0}, {"z_loss": 0.01}])


@capped_or_not
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "chunk"), [(1000, None), (257, None), (300, 70)])
def test_float32_is_it(tokens: int, chunk: int | None, bias: bool, more: dict[str, Any]) -> None:
    assert_equal_to_naive(case(tokens, 31, 211, bias=bias, **more).to(torch.float32), chunk, 1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("tokens", [20, 300])
@pytest.mark.parametrize("bias", [False, True])
@capped_or_not
def test_by_onednn_it_is_the_definition(monkeypatch, tokens, bias, more: dict[str, Any]) -> None:
    """With more tokens than dimensions, the table's gradient is summed transposed."""
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    for limit in ("SMALL", "SMALL_TURNED", "SMALL_TURNED_ZEN_4"):
        monkeypatch.setattr(linear, limit, 0)
    some = case(tokens, 31, 211, bias=bias, **more).to(torch.float32)
    assert_equal_to_naive(some, 70, 1e-5)
    assert all(x.is_contiguous() for x in torch.autograd.grad(some.sums(70).loss, some.leaves()))


def test_a_rank_without_tokens_gives_zeros() -> None:
    empty = case(0, 5, 7, bias=True)
    sums = empty.sums()
    sums.loss.backward()
    assert (sums.loss.item(), sums.nll.item(), sums.tokens.item()) == (0.0, 0.0, 0.0)
    slopes = [leaf.grad for leaf in empty.leaves() if leaf.grad is not None]
    assert [slope.abs().sum().item() for slope in slopes] == [0.0] * 3
    with torch.no_grad():
        *sums, by_token = empty.sums()
    assert [float(value) for value in sums] == [0.0] * 4
    assert by_token.shape == (2, 0)


def large(kind: str, smoothing: float, bias: bool) -> Case:
    """Logits of 1e3 that float32 holds exactly: far apart, or all but alike."""
    draw = torch.Generator().manual_seed(3)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(-16, 17, shape, generator=draw).double() / 8

    states, table, shift = eighths(40, 6), eighths(13, 6), torch.zeros(13)
    if kind == "far apart":
        states = 128.0 * states
    elif bias:
        shift = 1000.0 + shift
    else:
        states = torch.cat([states, torch.full_like(states[:, :1], 1.0)], 1)
        table = torch.cat([table, torch.full_like(table[:, :1], 1000.0)], 1)
    return Case(
        leaf(states),
        leaf(table),
        leaf(shift.double() + eighths(13)) if bias else None,
        torch.randint(0, 13, (40,), generator=draw),
        torch.ones(40, dtype=torch.bool),
        smoothing,
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["far apart", "alike"])
def test_large_logits_lose_no_digits(kind: str, smoothing: float, bias: bool, grad: bool) -> None:
    """Token by token: rounding differs from one to the next, so that a sum would hide it."""
    exact = large(kind, smoothing, bias)
    logits = exact.states @ exact.table.t() + (0.0 if exact.bias is None else exact.bias)
    assert 1e3 < float(logits.detach().abs().max()) < 1e4
    assert torch.equal(logits.float().double(), logits)
    for t in range(40):
        states, labels, counted = exact.states[[t]], exact.labels[[t]], exact.counted[[t]]
        one = exact._replace(states=leaf(states), labels=labels, counted=counted)
        wanted, wanted_nll = naive(one)
        some = one.to(torch.float32)
        with torch.set_grad_enabled(grad):
            sums = some.sums()
        for ours, theirs in ((sums.loss, wanted), (sums.nll, wanted_nll)):
            # The mean of a bias of 1e3 is rounded, by 3e-5 at most.
            close: dict[str, Any] = {"rtol": 3e-7, "atol": 1e-6 + 3e-5 * smoothing}
            torch.testing.assert_close(ours.double(), theirs, **close)
        if grad:
            found = torch.autograd.grad(sums.loss, some.leaves())
            for ours, theirs in zip(found, torch.autograd.grad(wanted, one.leaves()), strict=True):
                # Rows of the table as large as 1e3 cancel in the gradient of the states.
                scale = 1.0 + float(theirs.abs().max()) + (1e3 if kind == "alike" else 0.0)
                torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=1e-6 * scale)


@pytest.mark.parametrize("chunk", [None, 1, 5, 40])
@capped_or_not
def test_without_gradients_guesses_are_counted(chunk: int | None, more: dict[str, Any]) -> None:
    some = case(37, 5, 7, bias=True, **more)
    loss, nll = naive(some)
    assert some.bias is not None
    guesses = (some.states @ some.table.t() + some.bias).argmax(dim=1)
    right = int(((guesses == some.labels) & some.counted).sum())
    assert some.sums(chunk).correct is None
    with torch.no_grad():
        sums = some.sums(chunk)
    assert 0 < right == sums.correct.item()
    torch.testing.assert_close(sums.loss, loss.detach())
    torch.testing.assert_close(sums.nll, nll.detach())
    assert sums.tokens.item() == some.counted.sum().item()


def errors(found: Any, exact: list[Tensor]) -> list[float]:
    """Return the distance of each gradient from the exact one, relative to its norm."""
    pairs = zip(found, exact, strict=True)
    return [float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


@capped_or_not
@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_it_errs_no_more_than_plain(bias: bool, more: dict[str, Any]) -> None:
    exact = case(600, 64, 503, bias=bias, **more)
    loss, nll = naive(exact)
    wanted = list(torch.autograd.grad(loss, exact.leaves()))
    some = exact.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, (plain, _) = some.sums(chunk=90), naive(some)
    assert sums.loss.dtype == sums.nll.dtype == torch.float32
    for ours, theirs in ((sums.loss, loss), (sums.nll, nll)):
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-9, atol=0.0)
    found = torch.autograd.grad(sums.loss, some.leaves())
    assert {gradient.dtype for gradient in found} == {torch.float32}
    others = torch.autograd.grad(plain, some.leaves())
    for ours, theirs in zip(errors(found, wanted), errors(others, wanted), strict=True):
        assert ours <= 1.05 * theirs


@capped_or_not
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.in_turn(3)
def test_chunks_add_up_in_float32_of_bfloat16_weights(bias: bool, more: dict[str, Any]) -> None:
    """Each chunk of one token: sums in bfloat16 would stop growing."""
    some = case(3000, 4, 11, bias=bias, share=1.0, **more).to(torch.bfloat16)
    exact = some.to(torch.float64)
    wanted = list(torch.autograd.grad(naive(exact)[0], exact.leaves()))
    found = torch.autograd.grad(some.sums(chunk=1).loss, some.leaves())
    assert {gradient.dtype for gradient in found} == {torch.bfloat16}
    assert max(errors(found, wanted)) < 2**-7


class Watch(TorchDispatchMode):
    """The sizes of all tensors made while it is entered, and the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.__name__)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@capped_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logits_of_whole_batches_are_kept(dtype: torch.dtype, more: dict[str, Any]) -> None:
    tokens, width, vocabulary, chunk = 400, 3, 101, 20
    some = case(tokens, width, vocabulary, bias=True, **more).to(torch.float32)
    saved: list[int] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with (
        Watch() as watch,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        sums = some.sums(chunk)
    with watch:
        sums.loss.backward()
    assert watch.largest == chunk * vocabulary
    assert max(saved) == tokens * width
    assert sum(saved) == (tokens + vocabulary) * width + vocabulary


@capped_or_not
def test_no_value_goes_to_the_host(more: dict[str, Any]) -> None:
    some = case(50, 3, 11, bias=True, **more)
    with Watch() as watch:
        some.sums(chunk=20).loss.backward()
    assert {"mm.default", "addmm_.default"} <= watch.names
    assert not {name for name in watch.names if "local_scalar" in name or "nonzero" in name}


def test_a_second_derivative_is_refused_and_the_likelihood_has_no_gradient() -> None:
    """Also where the states have a second derivative of their own, which would be but a part."""
    some = case(5, 3, 7)
    for states in (some.states, some.states.sin()):
        loss = some._replace(states=states).sums().loss
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, some.states, create_graph=True)
    assert not case(5, 3, 7).sums().nll.requires_grad


def test_gradients_add_up_over_backward_passes() -> None:
    some = case(30, 3, 7, bias=True)
    wanted = torch.autograd.grad(naive(some)[0], some.leaves())
    loss = some.sums(chunk=7).loss
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    some.sums().loss.backward()
    for part, one in zip(some.leaves(), wanted, strict=True):
        torch.testing.assert_close(part.grad, 2.5 * one)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_frozen_has_no_gradient(which: int) -> None:
    some = case(30, 3, 7, bias=True)
    some.leaves()[which].requires_grad_(False)
    trained = [part for part in some.leaves() if part.requires_grad]
    wanted = torch.autograd.grad(naive(some)[0], trained)
    some.sums(chunk=7).loss.backward()
    assert some.leaves()[which].grad is None
    for part, one in zip(trained, wanted, strict=True):
        torch.testing.assert_close(part.grad, one)


@pytest.mark.in_turn(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize("more", [{}, {"cap": 4.0, "z_loss": 0.01}])
def test_compiled_as_part_of_a_whole(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    """In one graph, from which no code is generated."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are not compiled
    some = case(50, 3, 11, bias=True, **more)

    def loss() -> Tensor:
        sums = some._replace(states=2.0 * some.states).sums(chunk=20)
        return sums.loss / sums.tokens + sums.nll

    wanted = torch.autograd.grad(loss(), some.leaves())
    torch.compiler.reset()
    found = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(), some.leaves()
    )
    torch.compiler.reset()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def batch_of(task: str) -> TranslationBatch | MaskedBatch | CausalBatch:
    index, predicted = torch.arange(3), torch.tensor(5)
    if task == "translation":
        return TranslationBatch(*tiny.sentences(), index, predicted)
    if task == "causal_lm":
        return CausalBatch(tiny.words(3, 7), tiny.words(3, 4), index, predicted)
    positions = torch.tensor([1, 4, 9, 20])
    return MaskedBatch(tiny.words(3, 7), positions, tiny.words(4), index, predicted)


@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (1.5, 0.0), (None, 0.3), (1.5, 0.3)])
@pytest.mark.parametrize("task", ["translation", "masked_lm", "causal_lm"])
def test_a_task_sums_its_tokens(float64: None, task: Any, cap: float | None, z_loss: float) -> None:
    """The gradients of every parameter, those of the tied table from both its ends."""
    objective = build_task(ObjectiveConfig(kind=task, label_smoothing=0.2, z_loss=z_loss))
    architecture = tiny.architecture(kind=TASKS[task].architecture, logit_cap=cap)
    model = objective.build_model(architecture, BlockConfig(), tiny.VOCABULARY)
    tiny.randomise(model)
    batch = batch_of(task)
    labels = batch.target[:, 1:] if isinstance(batch, TranslationBatch) else batch.labels
    labels = labels.flatten()
    logits = objective.logits(model, batch).flatten(0, -2)
    assert cap is None or 0.9 * cap < float(logits.detach().abs().max()) < cap
    likely: dict[str, Any] = {"ignore_index": tiny.PAD, "reduction": "sum"}
    nll = nn.functional.cross_entropy(logits, labels, **likely)
    wanted = nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, **likely)
    wanted = wanted + z_loss * (logits.exp().sum(dim=-1).log() ** 2 * (labels != tiny.PAD)).sum()
    sums = objective.sums(model, batch)
    with torch.no_grad():
        evaluated = objective.sums(model, batch)
    for found in (sums, evaluated):
        torch.testing.assert_close(found.nll, nll, rtol=1e-11, atol=0.0)
    found = objective.predictions(model, batch)
    mean = objective.mean_loss(found) * len(found.labels)
    torch.testing.assert_close(mean, wanted, rtol=1e-11, atol=0.0)
    torch.testing.assert_close(sums.loss, wanted, rtol=1e-11, atol=0.0)
    assert sums.tokens.item() == (labels != tiny.PAD).sum().item()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(sums.loss, parameters)
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
