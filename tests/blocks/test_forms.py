"""Every form of residual and of shaped attention against the equations, written out in float64."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_app.blocks.kernels import choose as kernels
from lightning_app.blocks.kernels import tiled
from lightning_app.blocks.kernels.choose import (
    MOST_SHAPED,
    SHORT,
    Form,
    PlainScores,
    attend,
    attend_with_carry,
    attention_form,
    choose,
    shape_map,
    stores_map,
)
from lightning_app.blocks.kernels.stored import MapGains
from lightning_app.blocks.kernels.tiled import ReversibleScores
from lightning_app.blocks.masks import Mask, causal_mask, full_mask, mask_of, padding_mask

CPU = torch.device("cpu")
MAPLESS: tuple[Form, ...] = ("reversible", "blocked")
FORMS: tuple[Form, ...] = ("plain", *MAPLESS)
KINDS = ("full", "padding", "causal", "causal and padding", "any")

EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Layers = list[tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True, params=[(40, 1), (200, 3)], ids=["heads", "sentences"])
def _small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per map and several heads per tile, or, as on a GPU, several sentences."""
    monkeypatch.setattr(tiled, "tile_limits", lambda query: request.param)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(KINDS))
    queries = draw(st.integers(1, 9))
    keys = queries if "causal" in kind else draw(st.integers(1, 9))
    most = {"batch": 3, "heads": 3, "dim": 5, "value_dim": 5, "depth": 4}
    drawn = {name: draw(st.integers(1, largest)) for name, largest in most.items()}
    drawn |= {"mean": draw(st.booleans()), "seed": draw(st.integers(0, 2**31))}
    return {"kind": kind, "queries": queries, "keys": keys, **drawn}


def mask_for(case: dict[str, Any]) -> Mask:
    """Return a mask of the kind asked for; padding may leave a sentence without any key."""
    batch, queries, keys = case["batch"], case["queries"], case["keys"]
    present = torch.arange(keys) < torch.randint(0, keys + 1, (batch, 1))
    match case["kind"]:
        case "full":
            return full_mask(keys, CPU)
        case "padding":
            return padding_mask(present)
        case "causal":
            return causal_mask(keys, CPU)
        case "causal and padding":
            return Mask(keys, CPU, seen=present[:, None, None, :], causal=True)
        case _:
            return mask_of(torch.rand(batch, 1, queries, keys) < 0.6)


def layers_for(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> Layers:
    def heads(tokens: int, dim: int) -> Tensor:
        # As a projection leaves them: the heads of a token are beside each other.
        x = torch.randn(case["batch"], tokens, case["heads"], dim, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    queries, keys, dim = case["queries"], case["keys"], case["dim"]
    sizes = ((queries, dim), (keys, dim), (keys, case["value_dim"]))
    return [tuple(heads(*size) for size in sizes) for _ in range(case["depth"])]  # pyright: ignore[reportReturnType]


def divisors(case: dict[str, Any]) -> list[float]:
    return [float(n) if case["mean"] else 1.0 for n in range(1, case["depth"] + 1)]


def run(form: Form, layers: Layers, mask: Mask, divisors: list[float], dropout: float = 0.0):
    carry, found = None, []
    with attention_form(form):
        for (query, key, value), divisor in zip(layers, divisors, strict=True):
            heads, carry = attend_with_carry(query, key, value, mask, dropout, carry, divisor)
            found.append(heads)
    return found


def literal(layers: Layers, allowed: Tensor, divisors: Any, kept: Any = None, sums=torch.float64):
    """``dropout(softmax(Z_n / c_n + mask)) V_n`` with ``Z_n = Z_{n-1} + Q_n K_n^T / sqrt(d)``.

    `kept`: what each entry of a map is multiplied with; `sums`: the type of Z. A row that sees
    nothing has the map zero.
    """
    z, found = torch.zeros((), dtype=sums), []
    for n, (query, key, value) in enumerate(layers):
        z = z + (query.to(sums) @ key.to(sums).mT) / query.shape[-1] ** 0.5
        grown = torch.where(allowed, (z / divisors[n]).exp(), torch.zeros((), dtype=sums))
        total = grown.sum(-1, keepdim=True)
        weights = grown / torch.where(total > 0, total, torch.ones((), dtype=sums))
        if kept is not None:
            weights = weights * kept[n]
        found.append(weights.to(value.dtype) @ value)
    return found


def gradients(found: list[Tensor], layers: Layers, weights: list[Tensor]) -> list[Tensor]:
    loss = sum(((x * w).sum() for x, w in zip(found, weights, strict=True)), torch.zeros(()))
    return list(torch.autograd.grad(loss, [x for layer in layers for x in layer]))


def worst(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest error over the largest entry of its tensor."""
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(ours, exact, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS)
@settings(EXAMPLES, max_examples=60)
@given(case=cases())
@pytest.mark.in_turn(2)
def test_residual_attention_is_the_equation(form: Form, case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    mask, layers = mask_for(case), layers_for(case)
    expected = literal(layers, mask.allowed, divisors(case))
    weights = [torch.randn_like(x) for x in expected]
    ours = run(form, layers, mask, divisors(case))
    exact = [*expected, *gradients(expected, layers, weights)]
    assert worst([*ours, *gradients(ours, layers, weights)], exact) < 1e-10
    # In float32, of the same inputs.
    single = [tuple(x.detach().float().requires_grad_() for x in layer) for layer in layers]
    found = run(form, single, mask, divisors(case))  # pyright: ignore[reportArgumentType]
    narrow = [weight.float() for weight in weights]
    assert worst([*found, *gradients(found, single, narrow)], exact) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [None, 0.8])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_chain_of_shaped_maps_is_the_equation(form, batch, gamma, dropout: float) -> None:
    """Residual and shaped attention together; dropout acts on A alone."""
    torch.manual_seed(2)
    sizes = {"batch": batch, "heads": 2, "queries": 6, "keys": 6, "dim": 3, "value_dim": 4}
    layers, mask = layers_for({**sizes, "depth": 2}), causal_mask(6, CPU)
    weights = [0.9, 1.3] if gamma is None else [0.9, 1.3, gamma]
    gains = [torch.full((2, 1, 1), w, dtype=torch.float64).requires_grad_() for w in weights]
    alpha, beta, *rest = gains
    eye = torch.eye(6, dtype=torch.float64)

    def ours(chain: Layers, factors: MapGains | None) -> list[Tensor]:
        torch.manual_seed(5)
        carry, found = None, []
        with attention_form(form):
            for query, key, value in chain:
                given = (query, key, value, mask, dropout, carry, 1.0, factors)
                heads, carry = attend_with_carry(*given)
                found.append(heads)
        return found

    seen_through = [(q, k, eye.expand(batch, 2, 6, 6)) for q, k, _ in layers]
    kept = [(one != 0.0).double() / (1.0 - dropout) for one in ours(seen_through, None)]
    softmaxes = literal(seen_through, mask.allowed, [1.0, 1.0], kept)
    centre = mask.allowed.double() / mask.allowed.double().sum(-1, keepdim=True)
    expected = [
        (alpha * eye + beta * a - (rest[0] * centre if rest else 0.0)) @ value
        for a, (_, _, value) in zip(softmaxes, layers, strict=True)
    ]
    upstream = [torch.randn_like(x) for x in expected]
    found = ours(layers, MapGains(alpha, beta, rest[0] if rest else None))
    leaves = [*(x for layer in layers for x in layer), *gains]

    def slopes(outputs: list[Tensor]) -> list[Tensor]:
        loss = sum(((x * w).sum() for x, w in zip(outputs, upstream, strict=True)), torch.zeros(()))
        return list(torch.autograd.grad(loss, leaves))

    assert worst([*found, *slopes(found)], [*expected, *slopes(expected)]) < 1e-10


def test_only_short_maps_in_training_are_stored() -> None:
    x = torch.randn(2, 2, MOST_SHAPED + 1, 4, requires_grad=True)
    short = x[:, :, 1:]
    mask, longer = full_mask(MOST_SHAPED, CPU), full_mask(MOST_SHAPED + 1, CPU)
    assert stores_map(short, short, mask)
    assert not stores_map(x, x, longer)
    assert not stores_map(short.bfloat16(), short.bfloat16(), mask)
    with torch.no_grad():
        assert not stores_map(short, short, mask)
    with attention_form("plain"):
        assert not stores_map(short, short, mask)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("divisor", [1e-3, 0.2, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_a_key_give_zeros(form: Form, divisor: float, dtype: torch.dtype) -> None:
    """In a chain, with rows that see keys beside them; masked scores over 1/4 would overflow."""
    torch.manual_seed(1)
    sizes = {"batch": 2, "heads": 2, "queries": 6, "keys": 5, "dim": 3, "value_dim": 3, "depth": 2}
    layers = layers_for(sizes, dtype)
    allowed = torch.rand(2, 1, 6, 5) < 0.6
    allowed[0] = allowed[1, :, 2] = False
    divided = [divisor, divisor]
    ours = run(form, layers, mask_of(allowed), divided)
    for heads in ours:
        assert heads[0].abs().sum() == heads[1, :, 2].abs().sum() == 0.0
    found = gradients(ours, layers, [torch.ones_like(x) for x in ours])
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    for gradient in found:  # of the first sentence, whose rows see nothing
        assert gradient[0].abs().sum() == 0.0
    if divisor >= 0.2:  # beyond, the equation written out overflows
        wide = [tuple(x.detach().double().requires_grad_() for x in layer) for layer in layers]
        expected = literal(wide, allowed, divided)  # pyright: ignore[reportArgumentType]
        exact = gradients(expected, wide, [torch.ones_like(x) for x in expected])  # pyright: ignore[reportArgumentType]
        assert worst([*ours, *found], [*expected, *exact]) < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 0), (0, 0), (0, 4)])
def test_no_keys_or_no_queries_give_zeros(form, dropout, masked, queries: int, keys: int) -> None:
    sizes = {"batch": 2, "heads": 3, "queries": queries, "keys": keys, "dim": 2, "value_dim": 5}
    layers = layers_for({**sizes, "depth": 2})
    seen = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    ours = run(form, layers, mask_of(seen) if masked else full_mask(keys, CPU), [1.0, 2.0], dropout)
    for heads in ours:
        assert heads.shape == (2, 3, queries, 5)
        assert heads.abs().sum() == 0.0
    for gradient in gradients(ours, layers, [torch.ones_like(x) for x in ours]):
        assert gradient.abs().sum() == 0.0


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("form", MAPLESS)
@settings(EXAMPLES, max_examples=40)
@given(case=cases(), dropout=st.sampled_from([0.1, 0.5]))
def test_dropout_is_alike_in_both_passes(form: Form, case: dict[str, Any], dropout: float) -> None:
    """What was dropped is read off by V = I, with the same seed; the equation is then given it."""
    torch.manual_seed(case["seed"])
    mask, layers = mask_for(case), layers_for(case)
    shape = (case["batch"], case["heads"], case["keys"], case["keys"])
    eye = torch.eye(case["keys"], dtype=torch.float64).expand(shape)
    seen_through = [(query, key, eye) for query, key, _ in layers]
    torch.manual_seed(case["seed"])
    maps = run(form, seen_through, mask, divisors(case), dropout)
    kept = [(one != 0.0).double() / (1.0 - dropout) for one in maps]
    torch.manual_seed(case["seed"])
    ours = run(form, layers, mask, divisors(case), dropout)
    expected = literal(layers, mask.allowed, divisors(case), kept)
    weights = [torch.randn_like(x) for x in expected]
    exact = [*expected, *gradients(expected, layers, weights)]
    assert worst([*ours, *gradients(ours, layers, weights)], exact) < 1e-10


@pytest.mark.parametrize("form", MAPLESS)
def test_dropout_drops_its_share_and_differs_by_layer(form: Form) -> None:
    torch.manual_seed(1)
    case = {"batch": 2, "heads": 2, "queries": 30, "keys": 30, "dim": 3, "value_dim": 30}
    layers = layers_for({**case, "depth": 2})
    eye = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    seen = [(q, k, eye) for q, k, _ in layers]
    first, second = run(form, seen, full_mask(30, CPU), [1.0, 1.0], 0.3)
    for one in (first, second):
        assert 0.25 < (one == 0.0).double().mean() < 0.35
    assert 0.3 < ((first == 0.0) != (second == 0.0)).double().mean() < 0.54


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_nearer_than_a_running_sum_in_bfloat16(form: Form) -> None:
    """12 layers. Scores in float32 lose nothing that their queries and keys have not lost."""
    torch.manual_seed(3)
    case = {"batch": 2, "heads": 2, "queries": 24, "keys": 24, "dim": 16, "value_dim": 16}
    layers = layers_for({**case, "depth": 12}, torch.bfloat16)
    mask, ones = causal_mask(24, CPU), [1.0] * 12
    wide = [tuple(x.detach().double().requires_grad_() for x in layer) for layer in layers]
    expected = literal(wide, mask.allowed, ones)  # pyright: ignore[reportArgumentType]
    weights = [torch.randn_like(x) for x in expected]
    exact = gradients(expected, wide, weights)  # pyright: ignore[reportArgumentType]
    narrow = [weight.bfloat16() for weight in weights]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run(form, layers, mask, ones)
    naive = literal(layers, mask.allowed, ones, sums=torch.bfloat16)
    assert {x.dtype for x in ours} == {torch.bfloat16}
    error = worst(gradients(ours, layers, narrow), exact)
    assert error < 0.5 * worst(gradients(naive, layers, narrow), exact)


def test_policy_goes_by_shape_and_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    short = choose((8, 4, SHORT - 1, 512), CPU, 4)
    long = choose((8, 4, SHORT, 512), CPU, 4)
    assert [short, long, choose((8, 4, 2**20, 2**20), CPU, 4)] == ["plain", "reversible", "blocked"]
    with attention_form("plain"):
        assert choose((8, 4, SHORT, 512), CPU, 4) == "plain"
    assert choose((8, 4, SHORT, 512), CPU, 4) == "reversible"
    monkeypatch.setattr(kernels, "memory_of", lambda device: 2**36)  # a GPU stores small maps
    forms = [choose((8, 4, n, n), torch.device("cuda"), 4) for n in (16, 512, 1024, 2**16)]
    assert forms == ["plain", "plain", "reversible", "blocked"]


def test_a_long_chain_takes_the_reversible_form_and_a_compiled_one_the_plain(monkeypatch) -> None:
    query = torch.randn(1, 1, SHORT, 2)
    mask = full_mask(SHORT, CPU)
    _, carry = attend_with_carry(query, query, query, mask, 0.0, None, 1.0)
    assert isinstance(carry, ReversibleScores)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    _, carry = attend_with_carry(query, query, query, mask, 0.0, None, 1.0)
    assert isinstance(carry, PlainScores)


@pytest.mark.parametrize("form", MAPLESS)
def test_no_map_is_kept_for_the_backward_pass(form: Form) -> None:
    """Whatever the depth: what autograd saves is queries, keys and values alone."""
    case = {"batch": 1, "heads": 2, "queries": 50, "keys": 50, "dim": 3, "value_dim": 3}
    layers = layers_for({**case, "depth": 3})
    saved: list[int] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(form, layers, causal_mask(50, CPU), [1.0] * 3)
    assert saved
    assert max(saved) == 2 * 50 * 3


def test_a_second_backward_pass_is_refused_not_wrong() -> None:
    case = {"batch": 1, "heads": 1, "queries": 5, "keys": 5, "dim": 2, "value_dim": 2}
    layers = layers_for({**case, "depth": 3})
    leaves = [x for layer in layers for x in layer]
    mask = full_mask(5, CPU)
    loss = torch.stack(run("reversible", layers, mask, [1.0] * 3)).sum()
    torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        torch.autograd.grad(loss, leaves)
    # A part of one, up to the second layer: the next finds the scores elsewhere.
    loss = torch.stack(run("reversible", layers, mask, [1.0] * 3)).sum()
    torch.autograd.grad(loss, layers[2], retain_graph=True)
    with pytest.raises(RuntimeError, match="no part of"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("form", MAPLESS)
def test_a_second_derivative_is_refused_not_wrong(form: Form) -> None:
    """Also where the incoming gradient is a constant, and only what was saved would need one."""
    case = {"batch": 1, "heads": 1, "queries": 5, "keys": 5, "dim": 2, "value_dim": 2}
    layers = layers_for({**case, "depth": 2})
    loss = torch.stack(run(form, layers, full_mask(5, CPU), [1.0] * 2)).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, [x for layer in layers for x in layer], create_graph=True)


def test_a_second_derivative_of_shaped_attention_is_refused_or_right() -> None:
    case = {"batch": 2, "heads": 2, "queries": 5, "keys": 5, "dim": 2, "value_dim": 2}
    ((query, key, value),) = layers_for({**case, "depth": 1})
    mask, gain = causal_mask(5, CPU), torch.full((2, 1, 1), 0.7, dtype=torch.float64)
    gain.requires_grad_()

    def slope(create_graph: bool) -> Tensor:
        heads = literal([(query, key, value)], mask.allowed, [1.0])[0]
        shaped = shape_map(heads, value, mask, gain, gain, gain)
        return torch.autograd.grad(shaped.pow(3).sum(), gain, create_graph=create_graph)[0].sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        slope(create_graph=True)
    with attention_form("plain"):
        second = torch.autograd.grad(slope(create_graph=True), gain)[0].sum()
        gain.data += 1e-5
        above = slope(create_graph=False)
        gain.data -= 2e-5
        below = slope(create_graph=False)
    torch.testing.assert_close(second, (above - below) / 2e-5, rtol=1e-6, atol=1e-6)


@settings(EXAMPLES, max_examples=80)
@given(case=cases(), shared=st.booleans())
def test_shaped_attention_is_the_equation(case: dict[str, Any], shared: bool) -> None:
    """``(alpha I + beta A - gamma C) V`` and all six gradients, in float64 and float32."""
    torch.manual_seed(case["seed"])
    queries, keys = sorted((case["queries"], case["keys"]))  # the queries are the newest keys
    case |= {"queries": queries, "keys": keys, "depth": 1}
    mask, layers = mask_for(case), layers_for(case)
    gain_shape = (1 if shared else case["heads"], 1, 1)
    gains = [torch.randn(gain_shape, dtype=torch.float64).requires_grad_() for _ in range(3)]
    query, key, value = layers[0]
    allowed = mask.allowed.double()
    centre = allowed / allowed.sum(-1, keepdim=True).clamp(min=1.0)
    own = torch.eye(keys, dtype=torch.float64)[keys - queries :]
    identity = [(query, key, torch.eye(keys, dtype=torch.float64).expand(*key.shape[:2], -1, -1))]
    (attention,) = literal(identity, mask.allowed, [1.0])
    alpha, beta, gamma = gains
    expected = (alpha * own + beta * attention - gamma * centre) @ value
    weight = torch.randn_like(expected)
    exact = [expected, *torch.autograd.grad((expected * weight).sum(), [*layers[0], *gains])]
    # The last one is SDPA and the mean of values beside it, which longer maps take.
    for form in (None, "plain", "stored", "reversible"):
        for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (*layers[0], *gains)]
            with attention_form(form) if form else nullcontext():
                q, k, v, *factors = leaves
                found = attend(q, k, v, mask, 0.0, MapGains(*factors))
            ours = torch.autograd.grad((found * weight.to(dtype)).sum(), leaves)
            assert worst([found, *ours], exact) < limit


def test_stored_maps_drop_entries_of_the_softmax_alone() -> None:
    """What was dropped is read off by V = I; the equation and its six gradients are given it."""
    torch.manual_seed(3)
    sizes = {"batch": 2, "heads": 2, "queries": 5, "keys": 5, "dim": 3, "value_dim": 4}
    ((query, key, value),), mask = layers_for({**sizes, "depth": 1}), causal_mask(5, CPU)
    eye, allowed = torch.eye(5, dtype=torch.float64).expand(2, 2, 5, 5), mask.allowed.double()

    def ours(value: Tensor, *gains: Tensor) -> Tensor:
        torch.manual_seed(5)
        with attention_form("stored"):
            return attend(query, key, value, mask, 0.4, MapGains(*gains))

    gains = [torch.randn(2, 1, 1, dtype=torch.float64).requires_grad_() for _ in range(3)]
    zero, one = (torch.full((2, 1, 1), of, dtype=torch.float64) for of in (0.0, 1.0))
    kept = [(ours(eye, zero, one, zero) != 0.0).double() / 0.6]
    (dropped,) = literal([(query, key, eye)], mask.allowed, [1.0], kept)
    alpha, beta, gamma = gains
    centre = allowed / allowed.sum(-1, keepdim=True)
    expected = (alpha * eye + beta * dropped - gamma * centre) @ value
    weight, leaves = torch.randn_like(expected), [query, key, value, *gains]
    both = [
        (of, *torch.autograd.grad((of * weight).sum(), leaves))
        for of in (ours(value, *gains), expected)
    ]
    assert worst(*map(list, both)) < 1e-10


def test_running_mean_in_bfloat16_is_summed_in_float32() -> None:
    value = torch.ones(1, 1, 3000, 1, dtype=torch.bfloat16)
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    mask = causal_mask(3000, CPU)
    mean = -shape_map(torch.zeros_like(value), value, mask, zero, zero, one)
    # A sum in bfloat16 would end at 256.
    torch.testing.assert_close(mean.float(), torch.ones(1, 1, 3000, 1))
