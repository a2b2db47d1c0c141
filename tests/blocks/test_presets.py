"""What each preset says, as a value."""

import json
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from lightning_app.blocks import attention, block, norm, presets, residual
from lightning_app.blocks.presets import ABSENT, PRESETS, Stack, StackSpec, around, carry_scores
from lightning_app.blocks.residual import Gain, ResidualSpec

STACKS = {
    "encoder of two": Stack(side="encoder", depth=3, peer_depth=2),
    "decoder of two": Stack(side="decoder", depth=2, peer_depth=3),
    "encoder alone": Stack(side="encoder", depth=3),
}
every_spec = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(preset(stack), id=f"{name}-{where}")
        for name, preset in PRESETS.items()
        for where, stack in STACKS.items()
    ],
)
UNIT = Gain()
ALONE = STACKS["encoder alone"]


def parts(value: Any) -> list[Any]:
    """Return `value` and every specification inside it."""
    if isinstance(value, tuple):
        return [part for entry in value for part in parts(entry)]
    if not is_dataclass(value):
        return []
    inside = [part for f in fields(value) for part in parts(getattr(value, f.name))]
    return [value, *inside]


def rebuild(kind: Any, tree: Any) -> Any:
    """Return the specification of type `kind` that `asdict` and JSON made `tree` from."""
    if get_origin(kind) is tuple:
        return tuple(rebuild(get_args(kind)[0], entry) for entry in tree)
    if isinstance(kind, UnionType):
        return None if tree is None else rebuild(get_args(kind)[0], tree)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return tree
    hints = get_type_hints(kind)
    return kind(**{name: rebuild(hints[name], entry) for name, entry in tree.items()})


@every_spec
def test_specification_is_frozen(spec: StackSpec) -> None:
    for part in parts(spec):
        for entry in fields(part):
            with pytest.raises(FrozenInstanceError):
                setattr(part, entry.name, None)


@every_spec
def test_specification_prints_as_what_builds_it(spec: StackSpec) -> None:
    names = {**vars(attention), **vars(block), **vars(norm), **vars(presets), **vars(residual)}
    assert eval(repr(spec), names) == spec


@every_spec
def test_specification_survives_asdict_and_json(spec: StackSpec) -> None:
    again = rebuild(StackSpec, json.loads(json.dumps(asdict(spec))))
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("stack", STACKS.values(), ids=list(STACKS))
def test_specifications_compare_by_value(stack: Stack) -> None:
    """Equal when made twice, and no two presets the same."""
    specs = [preset(stack) for preset in PRESETS.values()]
    assert specs == [preset(stack) for preset in PRESETS.values()]
    assert len(set(specs)) == len(PRESETS)
    assert all(len(spec.blocks) == stack.depth for spec in specs)


def test_presets_are_named_and_described() -> None:
    assert list(PRESETS) == [
        "post_ln",
        "pre_ln",
        "realformer",
        "parallel",
        "sas",
        "sas_p",
        "sas_p_no_norm",
    ]
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert all([preset.equation, preset.paper, preset.fixes])


def test_final_norm_is_in_every_stack_but_of_post_ln() -> None:
    for stack in STACKS.values():
        without = {name for name, preset in PRESETS.items() if preset(stack).final_norm == "none"}
        assert without == {"post_ln", "realformer"}


@pytest.mark.parametrize(
    ("where", "divisors"),
    [
        ("encoder of two", [1.0, 2.0, 3.0]),
        ("decoder of two", [1.0, 2.0]),
        ("encoder alone", [1.0, 1.0, 1.0]),
    ],
)
def test_realformer_is_a_mean_in_two_stacks_and_a_sum_in_one(
    where: str, divisors: list[float]
) -> None:
    blocks = PRESETS["realformer"](STACKS[where]).blocks
    assert [b.self_attention.score_divisor for b in blocks] == divisors
    assert [b.cross_attention.score_divisor for b in blocks] == divisors
    assert all(b.self_attention.carry_scores and b.cross_attention.carry_scores for b in blocks)


@pytest.mark.parametrize("name", ["sas", "sas_p", "sas_p_no_norm"])
@pytest.mark.parametrize(("depth", "gain"), [(18, 0.1), (72, 0.05), (2, 0.3)])
def test_simplified_gains_are_the_authors_at_depth_18(name: str, depth: int, gain: float) -> None:
    for b in PRESETS[name](replace(ALONE, depth=depth)).blocks:
        assert b.around_ff.branch.value == pytest.approx(gain, rel=1e-14)
        assert b.around_ff.branch.learned
        assert b.around_self.branch == Gain(value=1.0, learned=True)
        assert b.around_self.skip.absent
        assert b.around_ff.skip.absent == (name != "sas")


@pytest.mark.parametrize("name", ["sas", "sas_p", "sas_p_no_norm"])
def test_simplified_attention_has_values_in_the_first_layer_alone(name: str) -> None:
    first, *rest = (b.self_attention for b in PRESETS[name](ALONE).blocks)
    assert (first.value, first.output) == ("identity_plus", "identity")
    assert {(a.value, a.output) for a in rest} == {("identity", "identity")}
    assert {a.query_init for a in (first, *rest)} == {"zeros"}
    assert {a.shaping for a in (first, *rest)} == {attention.ShapingSpec()}


@pytest.mark.parametrize("name", ["sas", "sas_p", "sas_p_no_norm"])
def test_simplified_presets_keep_ordinary_cross_attention(name: str) -> None:
    for b in PRESETS[name](STACKS["decoder of two"]).blocks:
        assert b.cross_attention == attention.AttentionSpec()
        assert b.around_cross == ResidualSpec(norm_input="layer_norm")


def test_no_norm_keeps_the_norm_of_the_first_layer() -> None:
    first, *rest = PRESETS["sas_p_no_norm"](ALONE).blocks
    assert not first.around_self.unnormalized
    assert all(b.around_self.unnormalized and b.around_ff.unnormalized for b in rest)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_stack_without_blocks_is_refused(side: Any) -> None:
    with pytest.raises(ValueError, match=f"{side}_depth 0"):
        Stack(side=side, depth=0)


def bare(depth: int, skip: Gain = UNIT, branch: Gain = UNIT) -> StackSpec:
    return StackSpec(blocks=(around(ResidualSpec(skip=skip, branch=branch)),) * depth)


@pytest.mark.parametrize(
    "residual",
    [
        {},
        {"branch": Gain(value=0.51)},
        {"skip": Gain(value=0.9), "branch": Gain(value=0.5)},
        {"branch": Gain(value=-1.0)},
    ],
)
def test_stream_that_explodes_without_norm_is_refused(residual: dict[str, Gain]) -> None:
    with pytest.raises(ValueError, match="norm_placement none"):
        bare(4, **residual)


@pytest.mark.parametrize(
    "residual",
    [
        {"branch": Gain(value=0.5)},  # SkipInit's 1 / sqrt(depth)
        {"branch": Gain(value=0.0, learned=True)},  # ReZero
        {"skip": Gain(value=2.0)},
    ],
)
def test_stream_that_stays_bounded_without_norm_is_allowed(residual: dict[str, Gain]) -> None:
    assert len(bare(4, **residual).blocks) == 4


def test_parallel_stream_counts_both_branches() -> None:
    """Both join one skip: a small feed-forward does not make up for a full attention."""
    quiet = ResidualSpec(branch=Gain(value=0.2))
    loud = ResidualSpec(skip=ABSENT)
    b = replace(around(quiet), around_self=loud, layout="parallel")
    with pytest.raises(ValueError, match="norm_placement none"):
        StackSpec(blocks=(b,) * 4)
    b = replace(b, around_self=replace(quiet, skip=ABSENT))
    assert len(StackSpec(blocks=(b,) * 4).blocks) == 4


def test_carrying_can_be_taken_away_again() -> None:
    plain = PRESETS["post_ln"](ALONE)
    assert carry_scores(carry_scores(plain, "mean"), "none") == plain
