"""What would make a run here and now, to compare with what has made those that are done."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_app.data.corpus import data_config
from lightning_app.data.prepare import find
from lightning_app.errors import UserError
from lightning_app.hardware import default_device, hardware
from lightning_app.provenance import software


def here(sections: Iterable[Mapping[str, Any]], accelerator: str = "auto") -> dict[str, Any]:
    """The `provenance` of a run here and now, and the `corpora` of some `data` sections.

    The corpora are None where one is not prepared on this machine: nothing is fetched for that.
    """
    corpora = [_corpus(section) for section in sections]
    made = {**software(), **hardware(default_device(accelerator))}
    return {"provenance": made, "corpora": None if None in corpora else corpora}


def _corpus(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = find(data_config(section))
    except UserError:  # its files have gone: what they came to is not known here
        return None
    return None if found is None else {"digest": found.digest, "checksum": found.meta["checksum"]}
