"""Imported by the fork server alone, before all else: its life ends with the supervisor's."""

import os

from lightning_app.ablation.lifeline import die_with_parent

PID = os.getpid()

die_with_parent()
