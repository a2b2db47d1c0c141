"""The class of presets, and the decorator that registers one, also from outside the package."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.registry import Registry

ABSENT = Gain(value=0.0)
POST = ResidualSpec(norm_sum="layer_norm")
PRE = ResidualSpec(norm_input="layer_norm")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named variant with its description for `ablate blocks`."""

    name: str
    equation: str
    paper: str
    fixes: str
    build: Callable[[Stack], StackSpec]
    differs: str = ""
    """Parameters that the authors' code trains and ours does not."""
    matched_by: str = ""
    """The axes of the block, in the form of a config, that train these parameters here too."""

    def __call__(self, stack: Stack) -> StackSpec:
        return self.build(stack)

    @property
    def difference(self) -> str:
        """The difference from the authors' code, and the axes that remove it; empty without one."""
        if not self.differs:
            return ""
        axes = f"model.block: {{{self.matched_by}}}"
        return f"the authors' code also trains {self.differs}; here with {axes}"


PRESETS: Registry[Preset] = Registry("model.block.preset", resolved=True)
"""The presets by name; `preset` is the decorator that adds one."""


def preset(
    *, equation: str, paper: str, fixes: str, differs: str = "", matched_by: str = ""
) -> Callable[[Callable[[Stack], StackSpec]], Preset]:
    """Register a function as a preset under its own name."""

    def register(build: Callable[[Stack], StackSpec]) -> Preset:
        name = getattr(build, "__name__")  # noqa: B009 - a Callable need not have a name
        made = Preset(
            name=name,
            equation=equation,
            paper=paper,
            fixes=fixes,
            build=build,
            differs=differs,
            matched_by=matched_by,
        )
        PRESETS.add(name, made)
        return made

    return register
