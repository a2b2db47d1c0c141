"""Checks for your own parts: ``check_preset("mine")`` in a test, after loading a plug-in."""

from lightning_app.testing.conformance import CHECKS, KINDS, Check, check_preset

__all__ = ["CHECKS", "KINDS", "Check", "check_preset"]
