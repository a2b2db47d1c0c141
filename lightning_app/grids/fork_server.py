"""The first module that the fork server imports: it ties its life to the supervisor's.

It ignores signals to the whole process group, which a terminal or a scheduler sends to the
supervisor. It does not collect garbage: its imports leave hardly any, and the search would take a
sixth of their time. Its children collect garbage again.
"""

import gc
import os
import signal

from lightning_app.runs.locks import die_with_parent

PID = os.getpid()

gc.disable()

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
die_with_parent()
