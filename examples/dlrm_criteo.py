"""Criteo's click logs as files: `label \\t 13 integers \\t 26 hashes`, a line.

A hash has 8 hexadecimal digits; integers and hashes may be missing. Files whose
names end in `.gz` are compressed.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import gzip
from pathlib import Path
import re
import sys
from typing import Literal, NoReturn, TextIO
import zlib

from dlrm_rows import CATEGORIES
from dlrm_rows import MISSING_CATEGORY
from dlrm_rows import MISSING_NUMBER
from dlrm_rows import NUMBERS
from dlrm_rows import Rows
import numpy as np
from tqdm import tqdm

_COLUMNS = 1 + NUMBERS + CATEGORIES
_NUMBER = "(?:-?[0-9]{1,18})?"  # 18 digits always fit int64.
_HASH = "(?:[0-9a-fA-F]{8})?"
_LINE = re.compile(f"[01](?:\t{_NUMBER}){{13}}(?:\t{_HASH}){{26}}\n?")
_MISSING_HASH = f"{MISSING_CATEGORY:08x}"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
  """A line of a file.

  Attributes:
    number: from 1.
    text: with its line feed, but for the last line of some files.
  """

  number: int
  text: str


class ClickLog:
  """A file of Criteo's format. It is read in passes and never held as a whole.

  Args:
    path: Of the file.
  """

  def __init__(self, path: str | Path):
    self._path = Path(path)
    self._told = False

  def lines(self) -> Iterator[Line]:
    """One pass over the file.

    A last line that was cut short is left out, with a message the first time.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is compressed, and broken or cut short.
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
    """The rows that lines of this file say.

    Raises:
      ValueError: A line that breaks the format.
    """
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
  path = Path(path)
  partial = path.with_name(f".partial-{path.name}")  # Keeps the ending.
  try:
    with _open(partial, "wt") as file:
      for rows in parts:
        file.writelines(_format(rows))
    partial.rename(path)
  finally:
    partial.unlink(missing_ok=True)


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
