"""Criteo's click logs as files: `label \\t 13 integers \\t 26 hashes`, a line.

A hash has 8 hexadecimal digits; integers and hashes may be missing. Files whose
names end in `.gz` are compressed.
"""

from collections.abc import Iterable, Iterator, Sequence
import gzip
from itertools import islice
from pathlib import Path
import re
import sys
from typing import Literal, NamedTuple, NoReturn, TextIO
import zlib

import numpy as np
from tqdm import tqdm

from examples.studies.common import files
from examples.studies.dlrm.rows import CATEGORIES
from examples.studies.dlrm.rows import MISSING_CATEGORY
from examples.studies.dlrm.rows import MISSING_NUMBER
from examples.studies.dlrm.rows import NUMBERS
from examples.studies.dlrm.rows import Rows

_COLUMNS = 1 + NUMBERS + CATEGORIES
_NUMBER = "(?:-?[0-9]{1,18})?"  # 18 digits always fit int64.
_HASH = "(?:[0-9a-fA-F]{8})?"
_LINE = re.compile(f"[01](?:\t{_NUMBER}){{13}}(?:\t{_HASH}){{26}}\n?")
_MISSING_HASH = f"{MISSING_CATEGORY:08x}"


class Line(NamedTuple):
  """Holds a line of a file, and its number from 1."""

  number: int
  text: str  # With its line feed, but for the last line of some files.


class ClickLog:
  """A file of Criteo's format, epoch after epoch in its own order.

  It is read in passes and never held as a whole. The first rows are held out.
  What follows is trained on in the order of the log, as click models are; it
  starts again when it ends.

  Args:
    path: Names the file.

  Raises:
    OSError: The file cannot be read; raised by the methods.
    ValueError: It is too short or breaks the format; raised by the methods.
  """

  def __init__(self, path: str | Path):
    self._path = Path(path)
    self._told = False

  def held_out(self, count: int) -> Rows:
    """Returns the first `count` rows."""
    lines = list(islice(self.lines(), count))
    if len(lines) < count:
      raise ValueError(
        f"{self._path} must hold {count:,} rows to hold out and more to train"
        f" on, got {len(lines):,}: give more rows or a smaller --eval-rows"
      )
    return self.parse(lines)

  def batches(self, held: int, size: int, first_step: int) -> Iterator[Rows]:
    """Yields batches of `size` rows from `first_step` on, without the held."""
    to_skip = first_step
    while True:
      lines = islice(self.lines(), held, None)
      done = 0
      # What is left at the end of the file is less than a batch.
      while len(batch := list(islice(lines, size))) == size:
        done += 1
        if to_skip:
          to_skip -= 1  # Steps before a resumed run: read, and not parsed.
        else:
          yield self.parse(batch)
      if not done:
        raise ValueError(
          f"{self._path} must hold a batch of {size:,} rows beside {held:,}"
          f" held out, got {held + len(batch):,} rows: give more rows or a"
          " smaller --batch"
        )

  def lines(self) -> Iterator[Line]:
    """Passes over the file once.

    A last line that was cut short is left out, with a message the first time.
    """
    with _open(self._path, "rt") as file:
      try:
        for number, text in enumerate(file, 1):
          if text.endswith("\n") or _LINE.fullmatch(text):
            yield Line(number, text)
          else:
            self._tell(
              f"{self._path}:{number}: cut short, this line is left out"
            )
      except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
          f"{self._path} must be a whole gzip file, but: {error}"
        ) from error

  def parse(self, lines: Sequence[Line]) -> Rows:
    """Returns the rows that lines of this file say."""
    labels, numbers, hashes = [], [], []
    for line in lines:
      if not _LINE.fullmatch(line.text):
        self._explain(line)
      label, *fields = line.text.rstrip("\n").split("\t")
      labels.append(label == "1")
      numbers += [int(x) if x else MISSING_NUMBER for x in fields[:NUMBERS]]
      hashes += [x or _MISSING_HASH for x in fields[NUMBERS:]]
    categories = np.frombuffer(bytes.fromhex("".join(hashes)), ">u4")
    return Rows(
      np.array(labels, np.int8),
      np.array(numbers, np.int64).reshape(-1, NUMBERS),
      categories.astype(np.uint32).reshape(-1, CATEGORIES),
    )

  def _tell(self, message: str) -> None:
    if not self._told:
      tqdm.write(message, file=sys.stderr)  # Does not tear a progress bar.
      self._told = True

  def _explain(self, line: Line) -> NoReturn:
    where = f"{self._path}:{line.number}"
    label, *fields = line.text.rstrip("\n").split("\t")
    if len(fields) + 1 != _COLUMNS:
      raise ValueError(
        f"{where}: a line must have {_COLUMNS} columns with tabs between, got"
        f" {len(fields) + 1}"
      )
    if label not in ("0", "1"):
      raise ValueError(f"{where}: the label must be 0 or 1, got {label!r}")
    rules = [(_NUMBER, "an integer of at most 18 digits")] * NUMBERS
    rules += [(_HASH, "8 hexadecimal digits")] * CATEGORIES
    for column, (field, (pattern, rule)) in enumerate(zip(fields, rules), 2):
      if not re.fullmatch(pattern, field):
        raise ValueError(
          f"{where}: column {column} must be empty or {rule}, got {field!r}"
        )
    raise AssertionError("the line matches after all")


def write(path: str | Path, parts: Iterable[Rows]) -> None:
  """Writes rows to a new file. It is there when all of it is, or not at all."""
  with files.written_whole(Path(path)) as partial:
    with _open(partial, "wt") as file:
      for rows in parts:
        file.writelines(_format(rows))


def _format(rows: Rows) -> Iterator[str]:
  for label, numbers, categories in zip(
    rows.labels.tolist(), rows.numbers.tolist(), rows.categories.tolist()
  ):
    fields = [str(label)]
    fields += ["" if x == MISSING_NUMBER else str(x) for x in numbers]
    fields += ["" if x == MISSING_CATEGORY else f"{x:08x}" for x in categories]
    yield "\t".join(fields) + "\n"


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
  # What is not ASCII breaks the format, and is shown in the message.
  how = "ascii", "backslashreplace"
  if path.suffix == ".gz":
    return gzip.open(path, mode, 9, *how)
  return open(path, mode, -1, *how)
