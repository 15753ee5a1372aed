"""Reads and writes traces: which gradient rows of a run were not zero.

`zenjax.planner.record` writes a trace, and `zenjax.planner.plan(trace=...)`
reads it. Use this module to write a trace from your own data. It needs NumPy
only.

A trace is a directory. `trace.json` holds the version of the format, the number
of devices, and the parameters of the model, including its tables. Each of
`step-000000.npz`, `step-000001.npz` and so on holds one step. Its array
`rows_k_i`, `[*] uint32`, has the row ids of table `k` of `trace.json` on device
`i`, ascending. A step is written under a temporary name and then renamed, so
that a file that exists is complete.
"""

from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
from typing import Annotated, ClassVar
import zipfile
import zlib

import numpy as np

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source

__all__ = (
  "check_free",
  "create",
  "Header",
  "LeafInfo",
  "read",
  "Trace",
  "write_step",
)

_HEADER = "trace.json"
_REMEDY = "record the trace again into a new directory"

# The row ids of one table in one step: an array for each device.
DeviceRows = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
  """A parameter of the model in a trace.

  Attributes:
    name: Name of the parameter, as `zenjax.report` shows it.
    shape: Shape of the parameter.
    dtype: Name of its dtype.
    look_ups: Lookups of a device in a step, if the gradient is SparseRows; None
      if it is an array.
    is_table: Whether the trace has the rows of this parameter.
  """

  name: str
  shape: tuple[Annotated[int, NOT_NEGATIVE], ...]
  dtype: str = "float32"
  look_ups: Annotated[int, POSITIVE] | None = None
  is_table: bool = True

  @property
  def rows(self) -> int:
    """Product of all dimensions except for the last, or a vector's length."""
    return math.prod(self.shape[:-1] if len(self.shape) > 1 else self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header(checked_json.Document):
  """The contents of `trace.json`.

  Attributes:
    leaves: Parameters of the model, at least its tables.
    devices: Number of devices of the run.
  """

  leaves: tuple[LeafInfo, ...]
  devices: Annotated[int, POSITIVE]

  _VERSION: ClassVar[tuple[str, int]] = "version", 3
  _SOURCE: ClassVar[Source] = Source(_HEADER, _REMEDY)

  def __post_init__(self):
    names = [leaf.name for leaf in self.leaves]
    if len(set(names)) != len(names) or not self.tables:
      raise ValueError(
        "`leaves` must have different names and include a table, got names"
        f" {names}."
      )

  @property
  def tables(self) -> list[LeafInfo]:
    """The parameters whose rows are in the trace."""
    return [leaf for leaf in self.leaves if leaf.is_table]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
  """A trace that `read` has checked.

  Attributes:
    header: Parameters and devices of the run.
    sets: `sets[table][step][device]` holds the ids of nonzero rows, ascending,
      uint32.
  """

  header: Header
  sets: dict[str, list[list[np.ndarray]]]

  @property
  def steps(self) -> int:
    """Number of steps."""
    return len(self.sets[self.header.tables[0].name])


def check_free(directory: str | os.PathLike) -> None:
  """Raises `ValueError` unless `directory` is missing or empty."""
  path = pathlib.Path(directory)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f"`directory` must be new or empty, but {path} is not. Give another"
      " directory, or remove this one."
    )


def create(directory: str | os.PathLike, header: Header) -> None:
  """Starts a trace in a directory.

  Args:
    directory: Where to write the trace. It is created if it is missing.
    header: Parameters and devices of the run.

  Raises:
    ValueError: `directory` is not empty.
  """
  check_free(directory)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  (path / _HEADER).write_text(header.to_json(), encoding="utf-8")


def write_step(
  directory: str | os.PathLike,
  header: Header,
  step: int,
  sets: Sequence[DeviceRows],
) -> None:
  """Writes one step of a trace.

  Args:
    directory: The directory that was given to `create`.
    header: The header that was given to `create`.
    step: Number of the step in the trace, from 0.
    sets: For each table of the header, the row ids of each device. Order and
      duplicates do not matter.

  Raises:
    ValueError: `sets` does not match the tables and devices of the header, or
      an id is not a row of its table.
  """
  if len(sets) != len(header.tables):
    raise ValueError(
      f"`sets` must hold ids for each of {len(header.tables)} tables of the"
      f" header, got {len(sets)}. Write `LeafInfo(.., is_table=False)` for"
      " parameters that are not tables."
    )
  arrays = {}
  for k, (table, each) in enumerate(zip(header.tables, sets)):
    rows = [np.unique(ids) for ids in each]
    if any(x.dtype == bool for x in rows):
      raise ValueError(
        f"`sets` must hold row ids for table {table.name!r}, got masks. Give"
        " `np.flatnonzero(mask)`."
      )
    ids = np.concatenate([[], *rows])
    if len(rows) != header.devices or np.any(
      (ids < 0) | (ids >= table.rows) | (ids % 1 != 0)
    ):
      raise ValueError(
        f"`sets` must hold {header.devices} arrays of row ids for table"
        f" {table.name!r}, one per device, with integers in [0, {table.rows}),"
        f" got {len(rows)} arrays with ids up to {ids.max(initial=0):g}."
      )
    for i, ids in enumerate(rows):
      arrays[f"rows_{k}_{i}"] = ids.astype(np.uint32)
  path = _step_path(directory, step)
  partial = path.with_suffix(".partial")
  with open(partial, "wb") as file:
    np.savez_compressed(file, **arrays)
  os.replace(partial, path)


def _step_path(directory: str | os.PathLike, step: int) -> pathlib.Path:
  return pathlib.Path(directory, f"step-{step:06d}.npz")


def read(directory: str | os.PathLike) -> Trace:
  """Reads all steps of a trace, and checks them.

  Args:
    directory: A directory that `zenjax.planner.record` or `create` wrote.

  Raises:
    OSError: `directory` does not hold a trace.
    ValueError: A file is truncated, of another version, or holds impossible
      values. The message names the file.

  Example:
    >>> import tempfile
    >>> table = LeafInfo(name="embed", shape=(10, 4))
    >>> header = Header(leaves=(table,), devices=2)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   create(directory, header)
    ...   write_step(directory, header, 0, [[np.array([5, 1]), np.array([7])]])
    ...   read(directory).sets["embed"][0][0]
    array([1, 5], dtype=uint32)
  """
  text = pathlib.Path(directory, _HEADER).read_text(encoding="utf-8")
  header = Header.from_json(text)
  steps = []
  while (path := _step_path(directory, len(steps))).exists():
    steps.append(_read_step(path, header))
  if not steps:
    raise ValueError(f"The trace {directory} has no steps. Record some.")
  sets = {t.name: list(x) for t, x in zip(header.tables, zip(*steps))}
  return Trace(header=header, sets=sets)


def _read_step(path: pathlib.Path, header: Header) -> list[list[np.ndarray]]:
  """Returns the row ids of each table and device in one step."""
  source = Source(str(path), _REMEDY)
  try:
    # `np.load` alone would try other formats if the file is not an archive.
    with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
      sets = [
        [file[f"rows_{k}_{i}"] for i in range(header.devices)]
        for k in range(len(header.tables))
      ]
  except (
    *(OSError, EOFError, KeyError, ValueError, NotImplementedError),
    *(zlib.error, zipfile.BadZipFile),
  ) as error:
    raise source.broken(f"is truncated or corrupt ({error})") from error
  for table, each in zip(header.tables, sets):
    if any(x.dtype != np.uint32 or np.any(x >= table.rows) for x in each):
      raise source.broken(
        f"must hold row ids of table {table.name!r} below {table.rows}"
      )
  return sets
