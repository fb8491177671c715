"""Ends an engine's processes when their parent ends, even if it was killed. Linux only.

In vLLM 0.32 EngineCore never ends if its front end is killed. Called only in the processes of a kvtune run: production
engines are left as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process when its parent dies; signal it now if the parent is already dead."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), number)
