"""Ablations of Transformer blocks, and how sensitive each one is to learning-rate warm-up.

From Python:

    from lightning_app import Block, Encoder, Decoder, fit, run_grid, results, compare, load_run

A name is imported on first use, so that `import lightning_app` takes no time. `Block`,
`Encoder` and `Decoder` are plain torch; `fit` and `load_run` import Lightning. A mistake in a call
raises `UserError`, whose message is one line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_app.version import __version__

if TYPE_CHECKING:
    from lightning_app.api.blocks import Block, BlockState, Decoder, Encoder
    from lightning_app.api.runs import RunResult, compare, fit, results, run_grid
    from lightning_app.api.trained import TextScore, TrainedRun, load_run
    from lightning_app.core.errors import UserError

__all__ = [
    "Block",
    "BlockState",
    "Decoder",
    "Encoder",
    "RunResult",
    "TextScore",
    "TrainedRun",
    "UserError",
    "__version__",
    "compare",
    "fit",
    "load_run",
    "results",
    "run_grid",
]

_MODULES = {
    "Block": "api.blocks",
    "BlockState": "api.blocks",
    "Decoder": "api.blocks",
    "Encoder": "api.blocks",
    "RunResult": "api.runs",
    "TextScore": "api.trained",
    "TrainedRun": "api.trained",
    "UserError": "core.errors",
    "compare": "api.runs",
    "fit": "api.runs",
    "load_run": "api.trained",
    "results": "api.runs",
    "run_grid": "api.runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
