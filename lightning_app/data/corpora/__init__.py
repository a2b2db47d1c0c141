"""The corpora of the package, one module each; importing this registers them in `CORPORA`."""

from lightning_app.data.corpora import (
    glue,
    iwslt14,
    squad,
    synthetic,
    text,
    tinyshakespeare,
    wikitext2,
)

__all__ = ["glue", "iwslt14", "squad", "synthetic", "text", "tinyshakespeare", "wikitext2"]
