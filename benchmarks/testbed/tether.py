"""Becomes a command that the kernel kills when the process PARENT ends.

Run as a file: `python -I -S tether.py PARENT COMMAND...`. Not a `preexec_fn`,
as a process with threads, and JAX has many, must not run Python after a fork.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> None:
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before it was asked for.
      os.kill(os.getpid(), signal.SIGKILL)
  try:
    os.execvp(command[0], command)
  except OSError as error:
    sys.exit(f"Cannot run {command[0]!r}: {error.strerror}.")


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2:])
