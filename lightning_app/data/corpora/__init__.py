"""The corpora of the package, one module each; importing this registers them in `CORPORA`."""

from lightning_app.data.corpora import (
    books,
    glue,
    iwslt14,
    squad,
    synthetic,
    text,
    tinyshakespeare,
    wikitext2,
)

__all__ = ["books", "glue", "iwslt14", "squad", "synthetic", "text", "tinyshakespeare", "wikitext2"]
