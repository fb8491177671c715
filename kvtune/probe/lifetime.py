"""No process of a profiled engine outlives the one that started it, even when that one was killed. Linux only.

vLLM 0.32's EngineCore goes on for ever when its front end is killed; production engines are left as they are, so this
is called only in processes of a run of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send `number` to this process when its parent dies; at once if it is dead already."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), number)
