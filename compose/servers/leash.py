"""Run a command that dies with its parent: `python -I -S leash.py PARENT_PID COMMAND ...`.

A process that is killed with -9 cannot stop its children, so the kernel has to (prctl, PR_SET_PDEATHSIG). It is set
here, in a small program between fork and exec, because running Python between fork and exec of a threaded parent may
deadlock. The signal survives exec but not fork: what the command forks must watch for itself.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
