"""The corpora of the package; importing this registers them in `CORPORA`."""

from lightning_app.data.corpora import glue, iwslt14, squad, texts

__all__ = ["glue", "iwslt14", "squad", "texts"]
