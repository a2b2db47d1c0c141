"""Imported by the fork server alone, before all else: it ends with the supervisor, not before.

A signal to the whole process group, as from a terminal or a scheduler, is for the supervisor.
"""

import os
import signal

from lightning_app.ablation.supervision.parent_death import die_with_parent

PID = os.getpid()

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
die_with_parent()
