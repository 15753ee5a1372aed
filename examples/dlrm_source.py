"""Where rows come from: a file, or the planted log. Batches of either.

The first rows are held out. What follows is trained on in the order of the log,
as click models are; a file starts again when it ends.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from dlrm_criteo import ClickLog
from dlrm_planted import Planted
from dlrm_rows import Rows


class Source(Protocol):
  """Rows to train on, and rows held out."""

  def held_out(self, count: int) -> Rows:
    """The first `count` rows."""
    ...

  def batches(self, held: int, size: int, first_step: int) -> Iterator[Rows]:
    """Endless batches of `size` rows from `first_step` on, without the held."""
    ...


class PlantedSource:
  """The planted log, which never ends: no row is seen twice."""

  def __init__(self, seed: int):
    self._planted = Planted(seed)

  def held_out(self, count: int) -> Rows:
    return self._planted.rows(0, count)

  def batches(self, held: int, size: int, first_step: int) -> Iterator[Rows]:
    first = held + first_step * size
    while True:
      yield self._planted.rows(first, first + size)
      first += size


class FileSource:
  """A file of Criteo's format, epoch after epoch in its own order.

  Args:
    path: Of the file.

  Raises:
    OSError: The file cannot be read; by the methods too.
    ValueError: The file is too short or breaks the format; by the methods.
  """

  def __init__(self, path: str):
    self._path = path
    self._log = ClickLog(path)

  def held_out(self, count: int) -> Rows:
    lines = list(islice(self._log.lines(), count))
    if len(lines) < count:
      raise ValueError(
        f"{self._path} must hold {count:,} rows to hold out and more to train"
        f" on, got {len(lines):,}: give more rows or a smaller --eval-rows"
      )
    return self._log.parse(lines)

  def batches(self, held: int, size: int, first_step: int) -> Iterator[Rows]:
    to_skip = first_step
    while True:
      lines = islice(self._log.lines(), held, None)
      done = 0
      # What is left at the end of the file is less than a batch.
      while len(batch := list(islice(lines, size))) == size:
        done += 1
        if to_skip:
          to_skip -= 1  # Steps before a resumed run: read, and not parsed.
        else:
          yield self._log.parse(batch)
      if not done:
        raise ValueError(
          f"{self._path} must hold a batch of {size:,} rows beside {held:,}"
          f" held out, got {held + len(batch):,} rows: give more rows or a"
          " smaller --batch"
        )
