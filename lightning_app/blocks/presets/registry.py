"""The class of presets, and the decorator that registers one, also from outside the package."""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from lightning_app.blocks.checked import check_spec
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.core.registry import Registry

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
    """Parameters that the authors' code trains, but ours does not."""
    matched_by: str = ""
    """The axes of the block, in the form of a config, that make these parameters trainable here
    too."""

    def __call__(self, stack: Stack) -> StackSpec:
        """Return the specification of a stack, checked like a section of a config.

        Raises:
            ValueError: for a meaningless combination, and for a mistake in the preset of a
                plug-in, with its file and line.
        """
        try:
            spec = self.build(stack)
            check_spec(spec, StackSpec, "its value")
            if spec.depth != stack.depth:
                raise ValueError(f"it has {spec.depth} blocks in a stack of {stack.depth}")
        except (Exception, SystemExit) as error:
            if self.build.__module__.startswith(__name__.partition(".")[0] + "."):
                raise
            is_said = isinstance(error, ValueError) or "UserError" in type(error).__name__
            said = str(error) if is_said else f"{type(error).__name__}: {error}"
            raise ValueError(f"preset '{self.name}' ({self._place(error)}): {said}") from error
        return spec

    def _place(self, error: BaseException) -> str:
        """Return the file of the preset, and the line in it that raised an error."""
        code = getattr(inspect.unwrap(self.build), "__code__", None)
        if code is None:
            return self.build.__module__
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == code.co_filename
        ]
        return f"{code.co_filename}, line {lines[-1] if lines else code.co_firstlineno}"

    @property
    def difference(self) -> str:
        """The difference from the authors' code, and the axes that remove it; empty if none."""
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
