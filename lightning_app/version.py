"""The version of the package."""

__version__ = "0.1.0"
BEFORE_STRIKING = "8b5dd6a"
"""The last commit with `model.rounding` and support for records of schema 1."""
