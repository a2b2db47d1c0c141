"""The number of parameters in one line, in place of Lightning's table of modules."""

from typing import Any

from lightning.pytorch.callbacks import ModelSummary


class ParameterCount(ModelSummary):
    """Print how many parameters a run has when it starts.

    Lightning's table has a row for each metric, and FLOPs, which are 0 without an example input.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        *others: Any,
        **named: Any,
    ) -> None:
        kept = total_parameters - trainable_parameters
        fixed = f", {kept:,} of them fixed" if kept else ""
        print(f"model: {total_parameters:,} parameters{fixed}")
