"""The drawing of a stack as data: the parts on its stream, in order.

`draw_stack` makes it from a specification; `text` and `svg` render it.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_app.blocks.attention import CarryKind
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.residual import SUM, Rule
from lightning_app.catalogue.folding import Side, layer_names

SubLayer = Literal["SA", "CA", "FF"]

NAMES: dict[SubLayer, str] = {
    "SA": "self-attention",
    "CA": "cross-attention",
    "FF": "feed-forward",
}
_NORMS: dict[str, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


@dataclass(frozen=True, kw_only=True)
class NormPart:
    """A norm on the stream or on a branch."""

    kind: Norm

    @property
    def name(self) -> str:
        return norm_name(self.kind)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A gain on the stream or on a branch: its initial value, and how it is trained."""

    value: str
    notes: tuple[str, ...] = ()


Part = NormPart | Factor


@dataclass(frozen=True, kw_only=True)
class Inside:
    """One difference of a sub-layer from the plain one, in the order of the computation."""

    label: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A sub-layer, with the norms and gains before and after it."""

    kind: SubLayer
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    inside: tuple[Inside, ...] = ()
    carry: CarryKind = "none"


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One residual formula: branches with one input and one skip.

    `skip` holds the gains on the skip; it is None without a skip. `bottom` adds the layer's
    input through the same gains. `shared` comes before the branches fork. `rule` joins the skip and
    the branch: the sum, or a rule of a plug-in, whose name then replaces the plus.
    """

    branches: tuple[Branch, ...]
    shared: tuple[Part, ...] = ()
    skip: tuple[Part, ...] | None = ()
    bottom: bool = False
    norm: tuple[Part, ...] = ()
    rule: Rule = SUM

    @property
    def joins(self) -> bool:
        """Whether there is anything to add: a skip or a second branch."""
        return self.skip is not None or len(self.branches) > 1


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive layers that differ in numbers only."""

    first: int
    last: int
    sums: tuple[Sum, ...]
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return layer_names(self.first, self.last)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A whole stack: norms before its first layer, its layers, norms after its last layer.

    With `dual`, a second stream sums all branches, and only that stream passes `exit`.
    """

    side: Side
    entry: tuple[Part, ...] = ()
    runs: tuple[LayerRun, ...]
    exit: tuple[Part, ...] = ()
    dual: bool = False
    notes: tuple[str, ...] = ()

    def sums(self) -> list[Sum]:
        return [one for run in self.runs for one in run.sums]

    def parts(self) -> list[Part]:
        """Return every norm and gain of the drawing, in any place."""
        found = [*self.entry, *self.exit]
        for one in self.sums():
            found += [*one.shared, *(one.skip or ()), *one.norm]
            found += [part for branch in one.branches for part in (*branch.before, *branch.after)]
        return found


def norm_name(kind: str) -> str:
    """Return the name of a norm in a drawing, by default that of its kind."""
    return _NORMS.get(kind, kind)
