from lightning_app.data import corpora

__all__ = ["corpora"]
