"""The provenance of a run on this machine now, to compare with that of finished runs."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_app.data.corpus import resolved_data
from lightning_app.data.prepare import find
from lightning_app.errors import UserError
from lightning_app.hardware import default_device, hardware
from lightning_app.provenance import software


def here(sections: Iterable[Mapping[str, Any]], accelerator: str = "auto") -> dict[str, Any]:
    """The `provenance` of a run on this machine now, and the `corpora` of some `data` sections.

    The corpora are None if one is not prepared on this machine: nothing is downloaded.
    """
    corpora = [_corpus(section) for section in sections]
    made = {**software(), **hardware(default_device(accelerator))}
    return {"provenance": made, "corpora": None if None in corpora else corpora}


def _corpus(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = find(resolved_data(section))
    except UserError:  # its files are missing, so its digest is unknown here
        return None
    return None if found is None else {"digest": found.digest}
