"""A process that ends with the one that started it, also when that one is killed in the middle of a step.

Linux sends the signal when the *thread* that started the process ends, so that thread has to live as long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT = "LINGBOT_ENGINE_PARENT"  # whose death the processes started from here shall share


def die_with_parent(parent: int) -> None:
    """Be killed when the parent dies. Exits at once when it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)


def let_children_die_with_us() -> None:
    """What vLLM starts from here on calls `as_vllm_process`, which looks for this."""
    os.environ[_PARENT] = str(os.getpid())


def as_vllm_process() -> None:
    """An entry point (pyproject.toml) that vLLM calls first in each process of its own.

    Its core process has no eye on its parent, and goes on for ever when that one is killed with -9 (vLLM 0.32).
    """
    parent = int(os.environ.get(_PARENT, "0"))
    if parent in {0, os.getpid()}:  # somebody else's vLLM, or the process that starts the others
        return
    die_with_parent(parent)
    let_children_die_with_us()
