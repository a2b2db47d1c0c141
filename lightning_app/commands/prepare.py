"""`ablate prepare`: fetch or read, check, tokenise and cache a corpus."""

from dataclasses import replace
from pathlib import Path

from lightning_app.commands.options import Parser
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.project import shipped_folder
from lightning_app.data.config import CORPORA, DataConfig


def add_prepare(parser: Parser) -> None:
    names = "iwslt14, wikitext2, tinyshakespeare, books, text or synthetic"
    parser.add("--data NAME", names)
    parser.add("--root DIR", "the folder that holds the corpus", type=str)
    parser.add("--config FILE", "use `data` from this config")
    parser.set_defaults(call=prepare_corpus)


def prepare_corpus(data: str | None, root: str | None, config: Path | None) -> int:
    """Prepare a corpus; print a summary and its folder."""
    if (data is None) == (config is None):
        raise UserError("prepare: expected one of --data NAME and --config FILE")
    if config is not None:
        settings = read_data(config)
    elif data is None or data not in CORPORA:
        hint = nearest(str(data), CORPORA)
        raise UserError(f"prepare: --data '{data}' is not one of {', '.join(CORPORA)}{hint}")
    elif CORPORA[data].base:
        settings = shipped_data(data)
    elif root is None and CORPORA[data].needs_root:
        raise UserError(f"prepare: --data {data} needs --root, the folder of its files")
    else:
        settings = DataConfig(name=data, root=root)
    if root is not None:
        settings = replace(settings, root=root)
    from lightning_app.data.prepare import corpus_summary, prepare

    print(corpus_summary(prepare(settings), settings.tokens_per_batch))
    return 0


def shipped_data(name: str) -> DataConfig:
    """Return the `data` section with which the shipped ablations use a corpus.

    A shipped file needs no parser of whole runs, so a cached corpus takes only a second.
    """
    tree, _ = strict_yaml.read_yaml_file(shipped_folder() / "base" / CORPORA[name].base)
    # Several corpora share a file that names only one of them.
    return DataConfig(**{**tree["data"], "name": name}, task=tree["model"]["objective"]["kind"])


def read_data(config: Path) -> DataConfig:
    """Return the completed `data` section of a user's config file."""
    tree, _ = strict_yaml.read_yaml_file(config)
    from lightning_app.config.config import resolve
    from lightning_app.data.sources import resolved_data

    return resolved_data(resolve(tree, str(config))["data"])
