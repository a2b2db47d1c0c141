"""The command `ablate prepare`."""

from dataclasses import replace
from pathlib import Path

from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.project import shipped_folder
from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.corpus import resolved_data
from lightning_app.data.prepare import corpus_summary, prepare


def prepare_corpus(name: str | None, root: str | None, config: Path | None) -> int:
    """Fetch or read, check, tokenise and cache a corpus; print a summary and its folder."""
    if (name is None) == (config is None):
        raise UserError("prepare: expected one of --data NAME and --config FILE")
    if name is not None:
        if name not in CORPORA:
            choices = ", ".join(CORPORA)
            raise UserError(
                f"prepare: --data '{name}' is not one of {choices}{nearest(name, CORPORA)}"
            )
        reader = CORPORA[name]
        if reader.base:
            data = shipped_data(name)
        elif root is None and reader.needs_root:
            raise UserError(f"prepare: --data {name} needs --root, the folder of its files")
        else:
            data = DataConfig(name=name, root=root)
    else:
        assert config is not None
        data = read_data(config)
    if root is not None:
        data = replace(data, root=root)
    print(corpus_summary(prepare(data), data.tokens_per_batch))
    return 0


def shipped_data(name: str) -> DataConfig:
    """Return the `data` section with which the shipped ablations use a corpus.

    A shipped file needs no parser of whole runs, so a cached corpus is found within a second.
    """
    tree, _ = strict_yaml.read_yaml_file(shipped_folder() / "base" / CORPORA[name].base)
    # Several corpora share a file, which names one of them.
    return DataConfig(**{**tree["data"], "name": name}, task=tree["model"]["objective"]["kind"])


def read_data(config: Path) -> DataConfig:
    """Return the completed `data` section of a user's config file."""
    tree, _ = strict_yaml.read_yaml_file(config)
    from lightning_app.config.config import resolve

    return resolved_data(resolve(tree, str(config))["data"])
