"""The config of a cell: resolved as that of `ablate fit`, while nothing foreign is imported."""

from typing import Any

from lightning_app.ablation.imports import check_config
from lightning_app.config import config_parser, resolve
from lightning_app.importing import only_known_packages


def resolve_cell(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the complete config of a cell; a grid file names no code but what is listed.

    It is checked as written, since parsing imports, and as resolved, since a text may be the name
    of a file that the parser reads.

    Raises:
        UserError: for what `resolve` refuses, and for what is not listed.
    """
    check_config(source, tree)
    config_parser()
    with only_known_packages():
        complete = resolve(tree, source)
    check_config(source, complete)
    return complete
