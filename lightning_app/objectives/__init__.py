"""The tasks a model is trained for."""

from lightning_app.objectives.base import Objective, ObjectiveConfig
from lightning_app.objectives.masked_lm import MaskedLanguageModelling
from lightning_app.objectives.translation import Translation


def build_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective that `config` names."""
    return Translation(config) if config.kind == "translation" else MaskedLanguageModelling(config)
