"""Our optimizers against their equations in NumPy, and over a checkpoint."""

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.config.config import resolve
from lightning_app.core.errors import UserError
from lightning_app.models import optim, optimizers
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.models.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    training_of,
)


@pytest.mark.parametrize("beta2", [0.98, 0.999])
def test_an_automatic_warm_up_is_as_long_as_the_second_moment_remembers(beta2: float) -> None:
    model = {"optimizer": {"betas": [0.9, beta2]}, "schedule": {"kind": "constant"}}
    model["schedule"]["warmup_steps"] = "auto"
    found = resolve({"model": model, "trainer": {"max_steps": 5000}}, "a test")["model"]
    assert found["schedule"]["warmup_steps"] == round(2 / (1 - beta2))


# Each equation in float64, written from its paper: p, g, the state, the step, the constants.

Numbers = Any


def adams(state: dict[str, Numbers], g: Numbers, t: int, b1: float, b2: float, **how: Any) -> Any:
    if t == 1:
        state["m"], state["product"] = 0 * g, 1.0
        state["v"] = g * g if how.get("second_moment_start") == "gradient" else 0 * g
    state["m"] = b1 * state["m"] + (1 - b1) * g
    state["v"] = b2 * state["v"] + (1 - b2) * g**2
    state["product"] *= b1
    correction = how.get("bias_correction", True)
    m = state["m"] / (1 - state["product"]) if correction is True else state["m"]
    return m, state["v"] / (1 - b2**t) if correction else state["v"]


def adam(p, g, state, t, c) -> Any:
    m, v = adams(state, g + c["wd"] * p, t, c["b1"], c["b2"], **c["how"])
    return p - c["lr"] * m / (np.sqrt(v) + c["eps"])


def adamw(p, g, state, t, c) -> Any:
    m, v = adams(state, g, t, c["b1"], c["b2"], **c["how"])
    return p - c["lr"] * (m / (np.sqrt(v) + c["eps"]) + c["wd"] * p)


def radam(p, g, state, t, c) -> Any:
    m, v = adams(state, g + c["wd"] * p, t, c["b1"], c["b2"])
    most = 2 / (1 - c["b2"]) - 1
    rho = most - 2 * t * c["b2"] ** t / (1 - c["b2"] ** t)
    if rho <= 5:
        return p - c["lr"] * m
    r = math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    root = math.sqrt(1 - c["b2"] ** t)
    return p - c["lr"] * m * r / (np.sqrt(v) + c["eps"] / root)


def sgd(p, g, state, t, c) -> Any:
    state["b"] = c["mu"] * state.get("b", 0) + g + c["wd"] * p
    return p - c["lr"] * state["b"]


def lion(p, g, state, t, c) -> Any:
    m = state.get("m", 0 * g)
    u = np.sign(c["b1"] * m + (1 - c["b1"]) * g)
    state["m"] = c["b2"] * m + (1 - c["b2"]) * g
    return p - c["lr"] * (u + c["wd"] * p)


def signum(p, g, state, t, c) -> Any:
    state["m"] = c["b1"] * state.get("m", 0 * g) + (1 - c["b1"]) * g
    return p - c["lr"] * (np.sign(state["m"]) + c["wd"] * p)


def stable_adamw(p, g, state, t, c) -> Any:
    """With the beta of step t of the paper instead of corrections."""
    for key, value, beta in (("m", g, c["b1"]), ("v", g * g, c["b2"])):
        now = beta * (1 - beta ** (t - 1)) / (1 - beta**t)
        state[key] = now * state.get(key, 0) + (1 - now) * value
    rms = np.sqrt(np.mean(g * g / np.maximum(state["v"], c["eps"] ** 2)))
    rate = c["lr"] / max(1, rms)
    return p - rate * c["wd"] * p - rate * state["m"] / (np.sqrt(state["v"]) + c["eps"])


def lamb(p, g, state, t, c) -> Any:
    m, v = adams(state, g, t, c["b1"], c["b2"])
    u = m / (np.sqrt(v) + c["eps"]) + c["wd"] * p
    lengths = np.sqrt((p**2).sum()), np.sqrt((u**2).sum())
    is_gain = p.ndim < 2
    ratio = lengths[0] / lengths[1] if all(lengths) and not is_gain else 1.0
    return p - c["lr"] * ratio * u


def rotational_adamw(p, g, state, t, c) -> Any:
    if p.ndim < 2:
        return adamw(p, g, state, t, c | {"wd": 0})
    m, v = adams(state, g, t, c["b1"], c["b2"])
    if t == 1:
        p = p - p.mean(1, keepdims=True)
        state["n"] = np.sqrt((p * p).sum(1, keepdims=True))
        state["s"] = 0.0
    n = np.where(state["n"] > 0, state["n"], 1)
    u = m / (np.sqrt(v) + c["eps"])
    u = u - p * (u * p).sum(1, keepdims=True) / n**2
    u = u - u.mean(1, keepdims=True)
    state["s"] = 0.9 * state["s"] + 0.1 * (u * u).sum(1, keepdims=True)
    angle = math.sqrt(2 * c["lr"] * c["wd"] * (1 - c["b1"]) / (1 + c["b1"]))
    new = p - angle * state["n"] * u / (np.sqrt(state["s"] / (1 - 0.9**t)) + 1e-8)
    length = np.sqrt((new * new).sum(1, keepdims=True))
    return new * state["n"] / np.where(length > 0, length, 1)


def orthogonal(matrix: Any) -> Any:
    """By torch's own steps, which no public function has."""
    from torch.optim._muon import _zeropower_via_newtonschulz as steps

    return steps(torch.tensor(matrix), (3.4445, -4.7750, 2.0315), 5, 1e-7).double().numpy()


def by_matrix(step: Callable[..., Any]) -> Callable[..., Any]:
    """AdamW for all but the matrices."""

    def equation(p, g, state, t, c) -> Any:
        if p.ndim < 2:
            return adamw(p, g, state, t, c | {"wd": 0, "b1": c["beta1"]})
        return step(p, g, state, t, c)

    return equation


def nesterov(g, state, c) -> Any:
    state["m"] = c["mu"] * state.get("m", 0 * g) + (1 - c["mu"]) * g
    return orthogonal(c["mu"] * state["m"] + (1 - c["mu"]) * g)


@by_matrix
def muon_spectral(p, g, state, t, c) -> Any:
    scale = math.sqrt(max(1, p.shape[0] / p.shape[1]))
    return p * (1 - c["lr"] * c["wd"]) - c["lr"] * scale * nesterov(g, state, c)


@by_matrix
def normuon(p, g, state, t, c) -> Any:
    """The size of a step is algorithm 1's, 0.2 lr sqrt(rows columns), for orthogonal u."""
    u = nesterov(g, state, c)
    state["v"] = c["b2"] * state.get("v", 0) + (1 - c["b2"]) * (u * u).mean(1, keepdims=True)
    new = u / (np.sqrt(state["v"]) + 1e-10)
    size = 0.2 * np.sqrt(max(p.shape)) * np.linalg.norm(u)
    return p * (1 - c["lr"] * c["wd"]) - c["lr"] * size * new / max(np.linalg.norm(new), 1e-10)


def on_sphere(p, u, state, lr) -> Any:
    radius = state.setdefault("r", np.linalg.norm(p))
    new = p - lr * radius * u / max(np.linalg.norm(u), 1e-10)
    return radius * new / np.linalg.norm(new)


@by_matrix
def muonh(p, g, state, t, c) -> Any:
    return on_sphere(p, nesterov(g, state, c), state, c["lr"])


def adamh(p, g, state, t, c) -> Any:
    m, v = adams(state, g, t, c["b1"], c["b2"])
    u = m / (np.sqrt(v) + c["eps"])
    return p - c["lr"] * u if p.ndim < 2 else on_sphere(p, u, state, c["lr"])


def adafactor(p, g, state, t, c) -> Any:
    """As `torch.optim.Adafactor`: no momentum, a factored v of matrices, steps of relative size."""
    decay = 1 - t**-0.8
    eps = np.finfo(p.dtype).eps
    if p.ndim < 2:
        state["v"] = v = decay * state.get("v", 0) + (1 - decay) * g * g
    else:
        for axis, name in ((1, "rows"), (0, "columns")):
            mean = (g * g).mean(axis, keepdims=True)
            state[name] = decay * state.get(name, 0) + (1 - decay) * mean
        v = state["rows"] @ state["columns"] / max(state["rows"].mean(), eps)
    u = g / np.sqrt(np.maximum(v, eps**2))
    size = max(1e-3, np.sqrt((p * p).mean())) * min(c["lr"], t**-0.5)
    return p * (1 - c["lr"] * c["wd"]) - size * u / max(1, np.sqrt((u * u).mean()))


def ademamix(p, g, state, t, c) -> Any:
    """2409.03137: a slow moment beside Adam's, with warm-ups of its weight and its decay."""
    m, v = adams(state, g, t, c["b1"], c["b2"])
    share = min(1, t / 10)
    first, last = math.log(c["b1"]), math.log(0.99)
    slow = math.exp(first * last / ((1 - share) * last + share * first))
    state["slow"] = slow * state.get("slow", 0) + (1 - slow) * g
    u = (m + 4.0 * share * state["slow"]) / (np.sqrt(v) + c["eps"])
    return p * (1 - c["lr"] * c["wd"]) - c["lr"] * u


def soap(p, g, state, t, c) -> Any:
    """2409.11321: Adam in the eigenbasis of g g^T and g^T g; the first step only finds it."""
    basis = state.setdefault("basis", {})
    grams = state.setdefault("grams", {})
    sides = (0, 1) if p.ndim == 2 else ()
    for side in sides:
        gram = g @ g.T if side == 0 else g.T @ g
        grams[side] = c["b2"] * grams.get(side, 0) + (1 - c["b2"]) * gram
        if t == 1:
            basis[side] = np.linalg.eigh(grams[side])[1][:, ::-1]
    if t == 1:
        return p
    old = {side: state["before"][side] for side in sides} if t > 2 else basis

    def turned(x) -> Any:
        return old[0].T @ x @ old[1] if sides else x

    m, v, t = state.get("m", 0), state.get("v", 0), t - 1
    state["m"] = m = c["b1"] * m + (1 - c["b1"]) * g
    state["v"] = v = c["b2"] * v + (1 - c["b2"]) * turned(g) ** 2
    u = turned(m) / (np.sqrt(v) + c["eps"])
    u = old[0] @ u @ old[1].T if sides else u
    rate = c["lr"] * math.sqrt(1 - c["b2"] ** t) / (1 - c["b1"] ** t)
    state["before"] = dict(old)
    if t % 5 == 0:
        for side in sides:
            product = grams[side] @ old[side]
            order = np.argsort(-(old[side] * product).sum(0))
            state["v"] = np.take(state["v"], order, side)
            state["before"][side] = np.linalg.qr(product[:, order])[0]
    return (p - rate * u) * (1 - c["lr"] * c["wd"])


def kl_soap(p, g, state, t, c) -> Any:
    """2509.03378, with the authors' start, floor of eigenvalues and order of steps."""
    if p.ndim < 2:
        return adamw(p, g, state, t, c)
    b1, b2, (a, b) = c["b1"], c["b2"], p.shape
    if t == 1:
        state["s"] = [(1 - b2) * gram for gram in [g @ g.T / b, g.T @ g / a]]
        state["q"] = [np.linalg.eigh(s)[1][:, ::-1] for s in state["s"]]
        state["d"] = [np.full(a, 0.2), np.full(b, 0.2)]
        state["m"], state["v"] = 0 * g, 0 * g
        return p
    (q1, q2), (d1, d2) = state["q"], state["d"]
    # The first moment in the space of the parameter.
    state["m"] = b1 * state["m"] + (1 - b1) * g
    state["v"] = b2 * state["v"] + (1 - b2) * (q1.T @ g @ q2) ** 2
    u = q1 @ ((q1.T @ state["m"] @ q2) / (np.sqrt(state["v"]) + c["eps"])) @ q2.T
    inverse1, inverse2 = q1 @ np.diag(1 / d1) @ q1.T, q2 @ np.diag(1 / d2) @ q2.T
    new = [g @ inverse2 @ g.T / b, g.T @ inverse1 @ g / a]
    state["s"] = [b2 * s + (1 - b2) * x for s, x in zip(state["s"], new, strict=True)]
    for i, q in enumerate(state["q"]):
        d = b2 * state["d"][i] + (1 - b2) * np.diag(q.T @ new[i] @ q)
        state["d"][i] = np.maximum(d, 1 / max(10, len(d)) ** 2)
    if (t - 1) % 5 == 0:
        state["q"] = [np.linalg.qr(s @ q)[0] for s, q in zip(state["s"], state["q"], strict=True)]
    return (p - c["lr"] * u) * (1 - c["lr"] * c["wd"])


def schedule_free(p, g, state, t, c) -> Any:
    """2405.15682, AdamW, at one rate: p is y, at which gradient and decay are taken."""
    z, x = state.get("z", p), state.get("x", p)
    state["v"] = v = c["b2"] * state.get("v", 0) + (1 - c["b2"]) * g * g
    u = g / (np.sqrt(v / (1 - c["b2"] ** t)) + c["eps"]) + c["wd"] * p
    state["z"] = z = z - c["lr"] * u
    state["x"] = x = x + (z - x) / t
    return (1 - c["b1"]) * z + c["b1"] * x


SECOND = {"bias_correction": "second"}
GRADIENT = {"second_moment_start": "gradient"}
RISING = {"momentum_warmup_steps": 6, "momentum_start": 0.3}
KL = {"arguments": {"precondition_frequency": 5, "init_factor": 0.2}}
RULES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "adam second": ("adam", adam, SECOND),
    "adam gradient": ("adam", adam, GRADIENT),
    "adamw gradient, rising": ("adamw", adamw, GRADIENT | RISING),
    "adamw uncorrected": ("adamw", adamw, GRADIENT | {"bias_correction": False}),
    "radam rising": ("radam", radam, RISING),
    "sgd rising": ("sgd", sgd, RISING),
    "lion": ("lion", lion, {}),
    "lion rising": ("lion", lion, RISING),
    "signum": ("signum", signum, {}),
    "stable_adamw": ("stable_adamw", stable_adamw, {}),
    "lamb": ("lamb", lamb, {}),
    "lamb rising": ("lamb", lamb, RISING),
    "rotational_adamw": ("rotational_adamw", rotational_adamw, {}),
    "muon": ("muon", muon_spectral, {"matrix_rate": "spectral"}),
    "muon rising": ("muon", muon_spectral, {"matrix_rate": "spectral"} | RISING),
    "normuon": ("normuon", normuon, {}),
    "muonh": ("muonh", muonh, {}),
    "adamh": ("adamh", adamh, {}),
    "kl_soap": ("kl_soap", kl_soap, KL),
    "kl_soap rising": ("kl_soap", kl_soap, KL | RISING),
}


SLOW = {"betas": [0.8, 0.95, 0.99], "alpha": 4.0, "t_alpha_beta3": 10}
LIBRARIES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "adafactor": ("adafactor", adafactor, {}),
    "ademamix": ("ademamix", ademamix, {"arguments": SLOW}),
    "soap": ("soap", soap, {"arguments": {"precondition_frequency": 5}}),
    "schedule_free": ("schedule_free", schedule_free, {}),
}
"""Their states have the type of the parameter; pytorch-optimizer's SOAP takes a QR in float32."""
TORCHS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "adam without correction": ("adam", adam, {"bias_correction": False}),
    "adamw without correction": ("adamw", adamw, {"bias_correction": False}),
}
"""As BERT has it: torch's own steps, here fused, with another rate."""
EVERY = RULES | LIBRARIES | TORCHS


class Small(nn.Module):
    """Two matrices, one of which starts at zero or has a row of zeros, and a bias."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=dtype)
        self.second = nn.Linear(3, 5, bias=False, dtype=dtype)
        with torch.no_grad():
            self.second.weight[: 1 if kind in KEEPING else None] = 0.0


KEEPING = [
    name for name, part in optimizers.OPTIMIZERS.items() if not getattr(part, "from_zero", True)
]


@pytest.mark.parametrize("name", EVERY)
def test_a_rule_equals_its_equation(name: str) -> None:
    kind, equation, how = EVERY[name]
    eps = 1e-3 if kind == "stable_adamw" else 1e-8  # some v are below its square
    config = OptimizerConfig(
        kind=kind, lr=0.03, betas=(0.8, 0.95), eps=eps, weight_decay=0.1, momentum=0.8, **how
    )
    model = Small(kind, torch.float64)
    optimizer = build_optimizer(config, model, fused=name in TORCHS)
    values = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    states: dict[str, Any] = {n: {} for n in values}
    for t in range(1, 21):
        share = min(1.0, (t - 1) / 6) if how.keys() & RISING.keys() else 1.0
        warmed = [0.3 + (full - 0.3) * share for full in (0.8, 0.95)]
        b1, b2 = (0.8, warmed[1]) if kind == "lion" else (warmed[0], 0.95)
        for n, p in model.named_parameters():
            p.grad = torch.randn_like(p) * 10.0 ** (t % 7 - 5) * (n != "second.weight" or t > 1)
            c = {"lr": 0.03, "b1": b1, "beta1": 0.8, "b2": b2, "mu": b1, "eps": eps, "how": how}
            c["wd"] = 0.1 if p.dim() > 1 else 0.0
            values[n] = equation(values[n], p.grad.numpy().copy(), states[n], t, c)
        optimizer.step()
        for n, p in model.named_parameters():
            near = pytest.approx(values[n], rel=1e-9, abs=1e-6 if kind == "soap" else 1e-12)
            assert p.detach().numpy() == near, (n, t)


@pytest.mark.parametrize("matrix_rate", ["rms", "spectral"])
def test_muon_equals_that_of_torch(matrix_rate: Any) -> None:
    config = OptimizerConfig(
        kind="muon", lr=0.03, weight_decay=0.1, momentum=0.9, matrix_rate=matrix_rate
    )
    ours, theirs = Small("muon", torch.float32), Small("muon", torch.float32)
    theirs.load_state_dict(ours.state_dict())
    first = build_optimizer(config, ours, fused=False)
    name = {"rms": "match_rms_adamw", "spectral": "original"}[matrix_rate]
    weights = [theirs.first.weight, theirs.second.weight]
    second = torch.optim.Muon(weights, lr=0.03, weight_decay=0.1, momentum=0.9, adjust_lr_fn=name)
    for t in range(20):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a) * 10.0 ** (t % 5 - 3) * (t != 3)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if a.dim() == 2:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    rows = {row["role"]: row for row in training_of(first, ScheduleConfig(), ours)}
    factors = (1.0, (5 / 3) ** 0.5) if matrix_rate == "spectral" else (0.4, 0.2 * 5**0.5)
    assert rows["matrices"]["rate"] == pytest.approx([0.03 * each for each in factors])
    assert (rows["gains"]["by"], rows["gains"]["rate"]) == ("adamw", [0.03, 0.03])


def tiny(**fields: Any) -> nn.Module:
    sizes: dict[str, Any] = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 8, "ff_dim": 12}
    architecture = ArchitectureConfig(**{**sizes, "num_heads": 2, "dropout": 0.0, **fields})
    return build_model(architecture, BlockConfig(preset="pre_ln"), vocab_size=11, pad=0)


def trained(
    config: OptimizerConfig, schedule: ScheduleConfig, dtype: torch.dtype, *, stop: int
) -> list[torch.Tensor]:
    """The parameters after six steps, with a checkpoint saved and loaded after step `stop`."""
    torch.manual_seed(3)
    model = tiny(kind="decoder").to(dtype)
    tokens = torch.arange(1, 9).reshape(2, 4)

    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        by_role = schedule.warmup_of != "all"
        optimizer = build_optimizer(config, model, fused=False, by_role=by_role)
        return optimizer, build_schedule(schedule, optimizer, 20)

    optimizer, scheduler = build()
    for step in range(6):
        if step == stop:
            file = io.BytesIO()
            torch.save([part.state_dict() for part in (model, optimizer, scheduler)], file)
            file.seek(0)
            model = tiny(kind="decoder").to(dtype)
            optimizer, scheduler = build()
            saved = torch.load(file, weights_only=True)
            for part, state in zip((model, optimizer, scheduler), saved, strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        model(tokens).float().logsumexp(-1).square().mean().backward()
        optimizer.step()
        scheduler.step()
    states = [value for each in optimizer.state.values() for value in each.values()]
    kept = {value.dtype for value in states if isinstance(value, torch.Tensor)}
    assert kept <= {torch.float32}, "moments of bfloat16 would lose steps"
    return list(model.parameters())


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", EVERY)
def test_a_run_continues_from_its_checkpoint(name: str) -> None:
    """Ours in bfloat16, whose moments are of another type; the others follow from it."""
    kind, _, how = EVERY[name]
    dtype = torch.bfloat16 if name in RULES else torch.float32
    settings: dict[str, Any] = {"betas": (0.8, 0.95), **how}
    config = OptimizerConfig(kind=kind, lr=0.01, weight_decay=0.1, momentum=0.8, **settings)
    schedule = ScheduleConfig(warmup_steps=4, warmup_of="embeddings", reference_steps=4)
    whole = trained(config, schedule, dtype, stop=0)
    for a, b in zip(whole, trained(config, schedule, dtype, stop=3), strict=True):
        assert torch.equal(a, b)


def test_one_group_of_parameters_is_warmed_up() -> None:
    model = tiny(tie_embeddings=False, positions="learned", max_positions=6)
    optimizer = build_optimizer(OptimizerConfig(kind="lamb", lr=0.5), model, fused=False)
    schedule = ScheduleConfig(warmup_steps=4, warmup_of="output", reference_steps=6)
    build_schedule(schedule, optimizer, 20)
    names = {parameter: name for name, parameter in model.named_parameters()}
    roles: dict[str, set[str]] = {}
    for group in optimizer.param_groups:
        assert group["lr"] == (0.125 if group["role"] == "output" else 0.5)
        roles.setdefault(group["role"], set()).update(names[p] for p in group["params"])
    assert roles["embeddings"] == {"embedding.tokens.weight", "embedding.position_table.weight"}
    assert roles["output"] == {"embedding.output.weight"}
    assert roles["matrices"] == {
        name for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2
    }
    rows = training_of(optimizer, schedule, model)
    assert [(row["role"], row["by"], row["warmup_steps"]) for row in rows] == [
        *(("embeddings", "lamb", 0), ("matrices", "lamb", 0), ("gains", "adamw", 0)),
        ("output", "lamb", 4),
    ]
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    assert all(row["rate"] == [0.5, 0.5] for row in rows)


def test_others_have_the_full_rate_of_every_schedule() -> None:
    model = tiny()
    for kind in ("inverse_sqrt", "linear", "cosine", "sqrt", "bert"):
        schedule = ScheduleConfig(kind=kind, warmup_steps=5, warmup_of="gains", reference_steps=8)
        optimizer = build_optimizer(OptimizerConfig(), model, fused=False, by_role=True)
        scheduler = build_schedule(schedule, optimizer, 20)
        whole = ScheduleConfig(kind=kind, warmup_steps=5, reference_steps=8)
        full = ScheduleConfig(kind=kind, warmup_steps=0, reference_steps=8)
        for step in range(1, 20):
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                shape = whole if group["role"] == "gains" else full
                assert rate == pytest.approx(5e-4 * shape.factor(step, 20))
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    ("optimizer", "schedule", "message"),
    [
        ({"kind": "lion", "bias_correction": "second"}, {}, "bias_correction second: only"),
        ({"kind": "sgd", "second_moment_start": "gradient"}, {}, "second_moment_start gradient"),
        ({"kind": "sgd", "momentum_warmup_steps": 5}, {}, "momentum_start 0.0: .* full 0.0"),
        ({"momentum_warmup_steps": -1}, {}, "momentum_warmup_steps -1: must"),
        ({"momentum_warmup_steps": 5, "momentum_start": 0.9}, {}, "momentum_start 0.9: must"),
        ({"kind": "muon"}, {}, "momentum 0.0: kind muon .* 0.95"),
        ({"kind": "muonh", "matrix_rate": "spectral"}, {}, "matrix_rate spectral: .* muonh takes"),
        ({"kind": "rotational_adamw"}, {}, "weight_decay 0.0: .* above 0"),
        ({"kind": "lion", "arguments": {}}, {}, "arguments {}: only .* kind lion takes null"),
        ({"kind": "kl_soap", "arguments": {"factor": 1}}, {}, "has no 'factor'.*'init_factor'"),
        ({"kind": "kl_soap", "arguments": {"init_factor": 0}}, {}, "init_factor 0 .* above 0"),
        (
            {"kind": "kl_soap", "arguments": {"precondition_frequency": 2.5}},
            {},
            "precondition_frequency 2.5 .* a whole number",
        ),
        ({"kind": "kl_soap", "arguments": {"init_factor": True}}, {}, "True .* a number"),
        ({"kind": "soap", "arguments": {"beta": 1}}, {}, "has no 'beta'.*'betas'"),
        ({"kind": "soap", "arguments": {"lr": 1}}, {}, "lr belongs to model.optimizer.lr"),
        ({"kind": "soap", "arguments": {"shampoo_beta": -1.0}}, {}, "SOAP: .*shampoo_beta"),
        ({"kind": "adafactor", "arguments": {"eps": 1e-9}}, {}, "Adafactor: "),
        ({"kind": "adafactor", "arguments": {"d": "1"}}, {}, "Adafactor: TypeError: "),
        ({"kind": "ademamix", "arguments": {"betas": [0.9, 0.98]}}, {}, "AdEMAMix: ValueError: "),
        ({"kind": "schedule_free", "arguments": {"r": "0"}}, {}, "Free: TypeError: "),
        (
            {"kind": "ademamix", "arguments": {"betas": [0.8, 0.98, 0.9]}},
            {},
            r"betas \[0.8, 0.98, 0.9\] contradicts model.optimizer.betas \(0.9, 0.98\)",
        ),
        (
            {"kind": "soap", "arguments": {"eps": 1e-8}},
            {},
            "eps 1e-08 contradicts model.optimizer.eps 1e-09",
        ),
        ({"kind": "adafactor", "momentum_warmup_steps": 5}, {}, "adafactor has no decay"),
        ({"kind": "schedule_free"}, {}, "schedule.kind: inverse_sqrt with .* use constant"),
        (
            {"kind": "schedule_free", "arguments": {"warmup_steps": 5}},
            {"kind": "constant"},
            "warmup_steps belongs to model.schedule.warmup_steps",
        ),
        ({}, {"batch_warmup_steps": 50}, "batch_warmup_steps: 50, .* fewer than the 50"),
        ({}, {"batch_warmup_steps": -1}, "batch_warmup_steps -1: must"),
        ({}, {"batch_warmup_steps": 5, "batch_start": 1.0}, "batch_start 1.0: must"),
        ({}, {"batch_start": 0.5}, "batch_start 0.5 with batch_warmup_steps 0"),
        ({}, {"power": 1.2}, "power 1.2: .* inverse_sqrt takes 1"),
        ({}, {"power": 0.0}, "power 0.0: must be above 0"),
        ({}, {"warmup_of": "all", "warmup_steps": "many"}, "warmup_steps: expected a whole number"),
        ({}, {"warmup_of": "output"}, "output, which .* has embeddings, matrices, gains"),
        ({}, {"warmup_of": "gains", "coupling": "paper"}, "warmup_of gains with coupling paper"),
        ({"kind": "lion"}, {"warmup_steps": "auto"}, "warmup_steps: auto .* lion takes a number"),
        ({"betas": [0.9, 1.0]}, {"warmup_steps": "auto"}, "model.optimizer.betas: expected two"),
        ({"betas": [0.9, 0.98]}, {"warmup_steps": "auto"}, "warmup_steps: 100, .* 50 steps"),
    ],
)
def test_nonsense_is_refused(optimizer: Any, schedule: Any, message: str) -> None:
    rest = {"warmup_steps": 5, "reference_steps": 40}
    model = {"optimizer": optimizer, "schedule": {**rest, **schedule}}
    with pytest.raises(UserError, match=message) as caught:
        resolve({"trainer": {"max_steps": 50}, "model": model}, "a test")
    assert "\n" not in str(caught.value)


FREE: dict[str, Any] = {
    "optimizer": {"kind": "schedule_free"},
    "schedule": {"kind": "constant", "warmup_steps": 5},
}
QK_CLIP = "lightning_app.training.callbacks.safety.QKClip"
EMA = "lightning.pytorch.callbacks.EMAWeightAveraging"


@pytest.mark.parametrize(
    ("block", "callbacks", "message"),
    [
        ({"preset": "ngpt"}, [], "model.block: unit_matrices with .* schedule_free"),
        ({"preset": "prores"}, [], "model.block: branch_ramp with"),
        ({"preset": "sigma_reparam"}, [], "model.block: sigma_reparam with"),
        ({"adaptive_span": {"longest": 8, "ramp": 2.0}}, [], "model.block: adaptive_span with"),
        ({}, [{"class_path": EMA}], "EMAWeightAveraging with model.optimizer.kind"),
        ({}, [{"class_path": QK_CLIP, "init_args": {"tau": 1.0}}], "QKClip with"),
    ],
)
def test_an_average_of_weights_refuses_what_it_does_not_keep(block, callbacks, message) -> None:
    tree = {"trainer": {"max_steps": 50, "callbacks": callbacks}}
    with pytest.raises(UserError, match=message):
        resolve({**tree, "model": {**FREE, "block": block}}, "a test")
    _ = resolve({"trainer": {"max_steps": 50}, "model": FREE}, "a test")


@pytest.mark.parametrize(
    "model",
    [
        {"optimizer": {"kind": "lamb"}},
        {"optimizer": {"second_moment_start": "gradient"}},
        {"schedule": {"warmup_of": "gains"}},
    ],
)
def test_split_parameters_are_refused(model: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model\.\w+\.\w+: \w+ reads whole .* fsdp splits"):
        resolve({"trainer": {"strategy": "fsdp"}, "model": model}, "a test")
    resolve({"trainer": {"strategy": "ddp"}, "model": model}, "a test")


@pytest.mark.parametrize("kind", KEEPING)
def test_a_matrix_of_zeros_is_refused_where_its_norm_stays(kind: str) -> None:
    model = Small("adam", torch.float32)
    nn.init.zeros_(model.second.weight)
    config = OptimizerConfig(kind=kind, weight_decay=0.1, momentum=0.9)
    with pytest.raises(UserError, match=rf"kind: {kind} .* second\.weight starts at zero"):
        build_optimizer(config, model, fused=False)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"on": ("matrix",)}, "on .*matrix"),
        *(
            ({"reads": ("betas",), "options": {name: 0.1}}, f"options .*{name}")
            for name in ("weight_decay", "betas")
        ),
        ({"on": ("matrices",), "options": {"eps": 0.5}}, "options .*eps"),  # AdamW's in its group
        ({"reads": ("betas",), "momentum": "beta"}, "momentum 'beta'"),
        ({"momentum": "momentum"}, "add momentum to reads"),
        ({"reads": ("momentum",), "momentum": "beta2"}, "add betas to reads"),
    ],
)
def test_a_rule_that_would_not_do_what_it_says_is_refused(needs: Any, message: str) -> None:
    """Each trained something else, or warmed up nothing, without a word."""
    with pytest.raises(ValueError, match=message):
        optimizers.rule(**needs)(optimizers.signum.update)
    with pytest.raises(ValueError, match="another name"):
        optimizers.rule(on=("matrices",))(optimizers.adamw.update)
    assert optimizers.rule(reads=("betas",))(optimizers.adamw.update).on == ()


def test_a_rule_reads_fields_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    typo = optimizers.rule(reads=("beta",))(optimizers.signum.update)
    monkeypatch.setattr(optim, "OPTIMIZERS", {"typo": typo})
    with pytest.raises(ValueError, match="'beta', which is no field"):
        OptimizerConfig(kind="typo")


@pytest.mark.parametrize("found", [torch.zeros(()), torch.zeros(1, 1), None])
def test_a_rule_returns_the_shape_of_its_parameter(found: Any) -> None:
    """A scalar would be repeated over the parameter."""
    rule = optimizers.rule()(lambda parameter, gradient, state, group: found)
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    groups: Any = [{"params": [parameter], "rule": "r"}]
    optimizer = optimizers.RuleOptimizer(groups, {"r": rule}, lr=0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"shape \[2, 3\]"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 3))


def test_the_check_of_a_library_draws_no_random_number_and_reads_an_empty_mapping_as_none() -> None:
    state = torch.get_rng_state()
    config = OptimizerConfig(kind="soap", arguments={})
    assert torch.equal(torch.get_rng_state(), state)
    assert config == OptimizerConfig(kind="soap")
    wider = OptimizerConfig(kind="ademamix", arguments={"betas": [0.9, 0.98, 0.99]})
    assert wider.arguments == {"betas": [0.9, 0.98, 0.99]}
