"""Every initial value, the pass that initialises Admin's skips, and parameter counts."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_app.blocks.attention import AnchoredProjection, Attention
from lightning_app.blocks.block import Block, InitSpec
from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.norm import LearnedScalars
from lightning_app.blocks.residual import LearnedGain, Residual
from lightning_app.blocks.steps import Halting
from lightning_app.core.registry import Registry
from lightning_app.models.positions import Embedding, LearnedTable, OutputTable, SegmentTable
from lightning_app.models.stack import BlockStack, stacks

_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_)


class _NoValues(TorchFunctionMode):
    """Skip initial values: on the meta device torch would import its compiler for some of them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `build` returns, without allocating its parameters."""
    with torch.device("meta"), _NoValues():
        return build()


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Return the number of trained parameters of the module that `build` returns."""
    return sum(parameter.numel() for parameter in without_values(build).parameters())


Initial = Callable[[Tensor, float, int], Any]
"""Draws a matrix or a table with a standard deviation; the number is that of the branches which the
stack of an output matrix sums, and 1 for all others."""
INITIALS: Registry[Initial] = Registry("model.architecture.initial")
"""The rules by name; `INITIALS.register` is the decorator that adds one."""


@INITIALS.register("xavier")
def xavier(weight: Tensor, std: float, branches: int) -> None:
    """The table of `initialize`: fairseq's rule of attention, with the gains of the preset."""
    nn.init.xavier_uniform_(weight)


@INITIALS.register("fairseq")
def fairseq(weight: Tensor, std: float, branches: int) -> None:
    """As `xavier`, but ``U(+-1/sqrt(fan_in))`` of torch in feed-forwards and biases.

    The bias of an attention's output is zero (facebookresearch/fairseq 3d262bb2).
    """
    nn.init.xavier_uniform_(weight)


@INITIALS.register("normal")
def normal(weight: Tensor, std: float, branches: int) -> None:
    """``N(0, std^2)``, as in GPT and in BERT by Hugging Face."""
    nn.init.normal_(weight, std=std)


@INITIALS.register("gpt2")
def gpt2(weight: Tensor, std: float, branches: int) -> None:
    """``N(0, std^2)``, output matrices with ``std / sqrt(branches)`` (Radford et al. 2019)."""
    nn.init.normal_(weight, std=std / math.sqrt(branches))


_BY_SHAPE = (xavier, fairseq)
"""The rules whose sizes follow from shapes and gains, without a standard deviation."""
_Rule = tuple[Initial, float, float, bool]  # with the std, that of blocks, and `by_name`
_rule: ContextVar[_Rule] = ContextVar("_rule", default=(xavier, 0.0, 0.0, False))


@contextmanager
def initial_values(
    kind: str, std: float = 0.0, *, by_name: bool = False, width_factor: float = 1.0
) -> Iterator[None]:
    """Let `initialize` draw by a rule of `INITIALS`, and perhaps each module by its name.

    With `by_name` the values of a module depend on the seed of torch and its name, so that parts
    that two variants share start equal, whatever else the variants have. Numbers drawn
    afterwards are those without any draw in this context. Matrices of blocks have ``std /
    sqrt(width_factor)``.
    """
    before = _rule.set((INITIALS[kind], std, std / math.sqrt(width_factor), by_name))
    try:
        with torch.random.fork_rng(devices=[]) if by_name else nullcontext():
            yield
    finally:
        _rule.reset(before)


Seeded = Callable[[nn.Module], None]
"""Called before the values of a module are drawn."""


def _seeds(model: nn.Module) -> Seeded:
    *_, by_name = _rule.get()
    if not by_name:
        return lambda module: None
    start, names = torch.initial_seed(), {each: name for name, each in model.named_modules()}

    def seed(module: nn.Module) -> None:
        name = "" if module is model else names[module]
        digest = hashlib.blake2b(f"{start} {name}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest) if name else start)

    return seed


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Set every parameter of `model`. Run once, after the whole model is built.

    ====================================  =====================================================
    parameter                             initial value
    ====================================  =====================================================
    matrices of linear layers             Xavier uniform, U(+-sqrt(6 / (fan_in + fan_out)))
    matrices of a block                   Xavier uniform or normal with the gains of its
                                          `InitSpec`: 1/sqrt(2) for query, key and value unless
                                          the preset says otherwise
    output and second feed-forward matrix zero with ``zero_output``
    query of shaped attention with C      zero, so that A = C at the start (He & Hofmann 2023)
    ``orthogonal`` value and output       a random orthogonal matrix
    W_0 of ``orthogonal_plus``            the same, a buffer; tied: the output's is the
                                          transpose of the value's
    dW of ``identity_plus`` and
    ``orthogonal_plus``                   zero
    biases                                zero; `HaltingSpec.bias` in the halting unit
    norm gain, norm bias                  one, zero; gain of a branch's norm: that of its `InitSpec`
    embedding                             N(0, 1/d) times the embedding gain of the stack, the
                                          row of the padding zero
    tables of auxiliary heads             N(0, 1/d)
    learned positions, steps, segments    N(0, 0.02^2)
    learned scalars                       their own values (`LearnedScalars.reset`)
    ====================================  =====================================================

    ``fairseq`` changes feed-forwards and biases. By another rule all matrices and tables are drawn
    by `Initial`, those of a block times the ratio of the preset's gain to that of `pre_ln`, the
    embedding times that of the stack.
    With ``unit_matrices`` rows of matrices of blocks and of the embedding then get length 1.
    Parts with ``drawn_last = True`` are drawn after all others, so that what a variant shares with
    others starts equal.
    """
    modules = [*model.modules()]
    parts = [part for part in modules if getattr(part, "drawn_last", False)]
    last = {module: None for part in parts for module in part.modules()}
    seed = _seeds(model)
    blocks = [module for module in modules if isinstance(module, Block)]
    inner = {module for block in blocks for module in block.modules()}
    for module in modules:
        if module not in last:
            _set(module, seed, module in inner)
    # After the loop: these override the general rule.
    branches = {
        block: stack.spec.depth * (2 if block.cross_attention is None else 3)
        for stack in modules
        if isinstance(stack, BlockStack)
        for _, block in stack.layers
    }
    for module in modules:
        if isinstance(module, Block):
            initialize_block(module, module.spec.init, seed, branches.get(module, 1))
        elif isinstance(module, Halting):
            nn.init.constant_(module.unit.bias, module.spec.bias)
    for module in last:
        _set(module, seed, module in inner)
    seed(model)  # what follows, such as heads of a task, starts equal as well
    for module in modules:
        if isinstance(module, SpectralLinear):
            module.start()
        elif isinstance(module, Block | Embedding):
            module.after_step()


def _set(module: nn.Module, seed: Seeded, in_block: bool) -> None:
    """Set the parameters that `module` holds itself by the general rule."""
    seed(module)
    rule, std, of_blocks, _ = _rule.get()
    match module:
        case nn.Linear():
            rule(module.weight, of_blocks if in_block else std, 1)
            bound = module.in_features**-0.5
            if module.bias is not None and rule is fairseq:
                nn.init.uniform_(module.bias, -bound, bound)
            elif module.bias is not None:
                nn.init.zeros_(module.bias)
        case Embedding():
            _draw_table(module.tokens.weight, module.model_dim**-0.5, module.spec.gain)
            module.tokens.weight[module.tokens.padding_idx] = 0.0
        case OutputTable():
            _draw_table(module.weight, module.weight.shape[1] ** -0.5)
        case LearnedTable() | SegmentTable() | nn.Embedding(padding_idx=None):  # or of a plug-in
            _draw_table(module.weight, 0.02)
        case nn.LayerNorm():
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        case nn.RMSNorm():
            nn.init.ones_(module.weight)
        case LearnedScalars():
            module.reset()


def _draw_table(weight: Tensor, usual: float, gain: float = 1.0) -> None:
    """Draw a table with the standard deviation `usual`, or by another rule, times `gain`."""
    rule, std, *_ = _rule.get()
    if rule in _BY_SHAPE:
        nn.init.normal_(weight, std=gain * usual)
    else:
        rule(weight, std, 1)
        weight.mul_(gain)


def initialize_block(
    block: Block, init: InitSpec, seed: Seeded = lambda module: None, branches: int = 1
) -> None:
    """Set the matrices of `block`, of a stack that sums `branches`, by the gains of `init`."""
    usual = InitSpec()
    draw = partial(_draw, init.distribution, seed)
    for attention in block.modules():
        if not isinstance(attention, Attention):
            continue
        draw(attention.query, init.query_key, usual.query_key)
        draw(attention.key, init.query_key, usual.query_key)
        sizes = init if init.cross or attention is not block.cross_attention else usual
        if attention.spec.value == "full":
            draw(attention.value, sizes.value, usual.value)
        if attention.spec.output == "full":
            draw(attention.output, sizes.output if init.output else 0.0, branches=branches)
        if attention.spec.query_init == "zeros":
            nn.init.zeros_(attention.query.weight)
        orthogonalize(attention, seed)
    if init.branch_norm != 1.0:
        for residual in (block.around_self, block.around_cross, block.around_ff):
            if residual is not None and not isinstance(residual.norm_branch, nn.Identity):
                nn.init.constant_(residual.norm_branch.get_parameter("weight"), init.branch_norm)
    for part in (block.feed_forward.inner, block.feed_forward.gate):
        draw(part, init.ff)
    draw(block.feed_forward.outer, init.outer, branches=branches)
    if _rule.get()[0] is fairseq:
        _as_torch(block)


def _as_torch(block: Block) -> None:
    """Give a feed-forward the range of torch's linear layers, and attention a zero output bias."""
    for part in (block.feed_forward.inner, block.feed_forward.gate, block.feed_forward.outer):
        if isinstance(part, nn.Linear):
            sizes = part.in_features, part.out_features
            part.weight.mul_(math.sqrt(sum(sizes) / (6 * part.in_features)))
    for attention in block.modules():
        output = attention.output if isinstance(attention, Attention) else None
        if isinstance(output, nn.Linear) and output.bias is not None:
            nn.init.zeros_(output.bias)


def _draw(
    distribution: str, seed: Seeded, part: Any, gain: float, usual: float = 1.0, branches: int = 1
) -> None:
    if not isinstance(part, nn.Linear):
        return
    seed(part)
    rule, _, std, _ = _rule.get()
    if gain == 0.0:  # without a draw, so that the other matrices start as without zeros
        nn.init.zeros_(part.weight)
    elif rule not in _BY_SHAPE:
        rule(part.weight, std, branches)
        part.weight.mul_(gain / usual)
    elif distribution == "normal":
        nn.init.xavier_normal_(part.weight, gain=gain)
    elif gain != 1.0:  # at gain 1 the general rule has already drawn it
        nn.init.xavier_uniform_(part.weight, gain=gain)


def orthogonalize(attention: Attention, seed: Seeded = lambda module: None) -> None:
    """Set the orthogonal matrices of value and output, and set dW to zero."""
    matrices: list[Tensor] = []
    kinds = (attention.spec.value, attention.spec.output)
    for kind, part in zip(kinds, (attention.value, attention.output), strict=True):
        if isinstance(part, AnchoredProjection):
            nn.init.zeros_(part.change.weight)
        seed(part)
        if kind == "orthogonal_plus":
            assert isinstance(part, AnchoredProjection)
            assert part.initial is not None
            matrices.append(nn.init.orthogonal_(part.initial))
        elif kind == "orthogonal":
            assert isinstance(part, nn.Linear)
            matrices.append(nn.init.orthogonal_(part.weight))
    if attention.spec.tied:
        value, output = matrices
        output.copy_(value.T)


def needs_profiling(model: nn.Module) -> bool:
    """Whether a skip of `model` is initialised by a pass over a batch."""
    return any(isinstance(m, LearnedGain) and m.profiled for m in model.modules())


@torch.no_grad()
def profile(
    model: nn.Module,
    run: Callable[[], Any],
    total: Callable[[Tensor], Tensor] = lambda moments: moments,
    real: Mapping[str, Bool[Tensor, "batch token"]] | None = None,
) -> None:
    """Set the profiled skips of `model` while `run` calls it once (Liu et al. 2020, Admin).

    In each stack ``omega_1 = 1`` and ``omega_(k+1) = sqrt(Var(omega_k x_k) + Var(f_k))``, k the
    sub-layer, x its input and f its branch as it enters the sum: with dropout if the model is in
    training mode, as in the authors' profiling. The variance is over all entries of real tokens.
    `total` sums moments over the ranks of a distributed run, so that each sets the same skips;
    `real` has the real tokens of each stack's rows, of which a rank without data has none.

    Call it once, before the first step: a later pass would overwrite trained values.
    """
    pass_ = _Pass(total, real or {})
    handles = [model.register_forward_pre_hook(pass_.see_inputs)]
    for name, stack in stacks(model).items():
        for residual in stack.modules():
            if not isinstance(residual, Residual):
                continue
            if isinstance(residual.skip, LearnedGain) and residual.skip.profiled:
                handles += pass_.watch(name, residual.branch, residual.skip)
    try:
        # Hooks must not become part of a compiled graph.
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()


class _Pass:
    """The state of the profiling pass while the batch runs through the stacks."""

    def __init__(
        self, total: Callable[[Tensor], Tensor], real: Mapping[str, Bool[Tensor, "batch token"]]
    ) -> None:
        self.total, self.real = total, real
        self.present: dict[str, Bool[Tensor, "batch token"]] = {}
        self.omega: dict[str, Tensor] = {}
        self.added: Tensor | None = None

    def see_inputs(self, model: Any, inputs: tuple[Tensor, ...]) -> None:
        self.present = dict(model.present(*inputs))
        for name, tokens in self.real.items():
            self.present[name] = self.present[name] & tokens.any(dim=1, keepdim=True)

    def watch(self, stack: str, branch: nn.Module, skip: LearnedGain) -> list[Any]:
        def see_branch(module: nn.Module, inputs: Any, added: Tensor) -> None:
            self.added = added

        def set_skip(module: nn.Module, inputs: tuple[Tensor]) -> None:
            assert self.added is not None
            omega = self.omega.get(stack, torch.ones((), device=skip.gain.device))
            skip.gain.fill_(omega)
            (x,) = inputs
            variance = omega**2 * self.variance(x, stack) + self.variance(self.added, stack)
            self.omega[stack] = variance.sqrt()

        return [branch.register_forward_hook(see_branch), skip.register_forward_pre_hook(set_skip)]

    def variance(self, x: Float[Tensor, "batch token model"], stack: str) -> Float[Tensor, ""]:
        """Return the variance of all entries at real tokens, over all ranks."""
        entries = x[self.present[stack]].double()
        count = torch.tensor(float(entries.numel()), device=x.device, dtype=torch.float64)
        count, total, squares = self.total(
            torch.stack([count, entries.sum(), entries.square().sum()])
        )
        return (squares / count - (total / count) ** 2).to(torch.get_default_dtype())
