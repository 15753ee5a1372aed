"""One compilation for all hosts: host 0 compiles, the others load the result.

On a machine whose cores all hosts share, the same program compiled on each of
them takes as many times longer.
"""

import os
import pathlib
import time

import jax
from jax.experimental import serialize_executable

_POLL_S = 0.02
_LONGEST_S = 900.0


class SharedCompiler:
  """Compiles in turns; all hosts ask for the same programs in one order.

  Args:
    directory: One that all hosts see, of this run alone.
    host: Index of this one.
  """

  def __init__(self, directory: pathlib.Path, host: int):
    self._directory, self._host = directory, host
    self._turn = 0

  def compile(
    self, lowered: jax.stages.Lowered
  ) -> tuple[jax.stages.Compiled, float]:
    """The executable, and the seconds that host 0 took to compile it."""
    path = self._directory / f"program-{self._turn}"
    self._turn += 1
    if self._host:
      return _load(_wait_for(path), lowered)
    start = time.perf_counter()
    serialized = b""
    try:
      compiled = lowered.compile()
      seconds = time.perf_counter() - start
      serialized, _, _ = serialize_executable.serialize(compiled)
      return compiled, seconds
    finally:
      # After an error too: the others must not wait. Whole or not there.
      half = path.with_suffix(".half")
      half.write_bytes(serialized)
      os.rename(half, path)


def _wait_for(path):
  deadline = time.monotonic() + _LONGEST_S
  while not path.exists():
    if time.monotonic() > deadline:
      raise TimeoutError(f"Host 0 has not compiled within {_LONGEST_S:.0f} s.")
    time.sleep(_POLL_S)
  return path.read_bytes()


def _load(serialized, lowered):
  if not serialized:
    raise RuntimeError("Host 0 has failed to compile; its log says why.")
  loaded = serialize_executable.deserialize_and_load(
    serialized, lowered.in_tree, lowered.out_tree
  )
  return loaded, 0.0
