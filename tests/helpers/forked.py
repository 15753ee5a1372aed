"""Processes that are forked from one that has imported JAX.

Imports take seconds, and a process that has used JAX must not fork. So one that
only imports it makes all the others.
"""

from collections.abc import Callable
import multiprocessing
from multiprocessing.process import BaseProcess
import os
import pathlib
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["orbax.checkpoint", "zenjax"])


def start(
  log: pathlib.Path, run: Callable[..., Any], *arguments: Any
) -> BaseProcess:
  """Runs a function of a module on CPU devices; what it prints goes to `log`.

  The process ends with the code of `SystemExit`, or with 1 after another
  exception.
  """
  given = str(log), run, arguments
  process = _FORKS.Process(target=_logged, args=given, daemon=True)
  process.start()
  return process


def _logged(log: str, run: Callable[..., Any], arguments: Any) -> None:
  file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  for descriptor in (1, 2):
    os.dup2(file, descriptor)
  # Only here: the one that forks must not start JAX.
  import jax

  jax.config.update("jax_platforms", "cpu")
  run(*arguments)
