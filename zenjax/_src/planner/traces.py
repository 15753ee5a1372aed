"""Reads and writes traces: which gradient rows of a run were not zero.

`zenjax.planner.record` writes a trace, and `zenjax.planner.plan(trace=...)`
reads it. Use this module to write a trace from your own data. It needs NumPy
only.

A trace is a directory. `trace.json` holds the version of the format, the number
of devices, and the parameters of the model, including its tables. Each of
`step-000000.npz`, `step-000001.npz` and so on holds one step, with two arrays
for table `k` of `trace.json`:

- `rows_k`, `[*] uint32`: row ids of device 0, then of device 1 and so on,
  ascending for each device.
- `offsets_k`, `[devices + 1] int64`: the ids of device `i` are
  `rows_k[offsets_k[i]:offsets_k[i + 1]]`.

Every file is written under a temporary name and then renamed, so that a file
that exists is complete.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import math
import os
import pathlib
from typing import Annotated, BinaryIO
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
_VERSION = "version", 2
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
class Header:
  """The contents of `trace.json`.

  Attributes:
    leaves: Parameters of the model, at least its tables.
    devices: Number of devices of the run.
  """

  leaves: tuple[LeafInfo, ...]
  devices: Annotated[int, POSITIVE]

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
  pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
  document = dict([_VERSION]) | dataclasses.asdict(header)
  with _whole(pathlib.Path(directory, _HEADER)) as file:
    file.write((json.dumps(document, indent=1) + "\n").encode())


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
  arrays = {}
  for k, (table, each) in enumerate(zip(header.tables, sets, strict=True)):
    rows = [np.unique(ids) for ids in each]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    joined = np.concatenate(rows) if rows else np.zeros(0)
    if len(rows) != header.devices or np.any(
      (joined < 0) | (joined >= table.rows) | (joined % 1 != 0)
    ):
      raise ValueError(
        f"`sets` must hold {header.devices} arrays of row ids for table"
        f" {table.name!r}, one per device, with integers in [0, {table.rows}),"
        f" got {len(rows)} arrays with ids up to {joined.max(initial=0)}."
      )
    arrays |= {f"rows_{k}": joined.astype(np.uint32), f"offsets_{k}": offsets}
  with _whole(_step_path(directory, step)) as file:
    np.savez_compressed(file, **arrays)


def _step_path(directory: str | os.PathLike, step: int) -> pathlib.Path:
  return pathlib.Path(directory, f"step-{step:06d}.npz")


@contextlib.contextmanager
def _whole(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a temporary file, and renames it to `path` once it is complete."""
  partial = path.with_name(f".{path.name}.partial")
  try:
    with open(partial, "wb") as file:
      yield file
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def read(directory: str | os.PathLike) -> Trace:
  """Reads all steps of a trace, and checks them.

  Args:
    directory: A directory that `zenjax.planner.record` or `create` wrote.

  Raises:
    ValueError: A file is missing, truncated, of another version, or holds
      impossible values. The message names the file.

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
  path = pathlib.Path(directory, _HEADER)
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, ValueError) as error:
    raise ValueError(
      f"`directory` must hold a trace, but {path} cannot be read ({error})."
      " Give a directory that `zenjax.planner.record` wrote."
    ) from error
  source = Source(str(path), _REMEDY)
  fields = checked_json.fields(text, _VERSION, source)
  header = checked_json.parse(Header, fields, source)
  sets: dict[str, list[list[np.ndarray]]] = {t.name: [] for t in header.tables}
  step = 0
  while (path := _step_path(directory, step)).exists():
    for table, each in zip(header.tables, _read_step(path, header)):
      sets[table.name].append(each)
    step += 1
  if not step:
    raise source.broken("belongs to a trace without steps")
  return Trace(header=header, sets=sets)


def _read_step(path: pathlib.Path, header: Header) -> list[list[np.ndarray]]:
  source = Source(str(path), _REMEDY)
  sets = []
  try:
    # `np.load` alone would try other formats if the file is not an archive.
    with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
      arrays = {key: file[key] for key in file.files}
  except (
    *(OSError, EOFError, ValueError, NotImplementedError, zlib.error),
    zipfile.BadZipFile,
  ) as error:
    raise source.broken(f"is truncated or corrupt ({error})") from error
  for k, table in enumerate(header.tables):
    rows = arrays.get(f"rows_{k}", np.zeros(0, np.uint32))
    offsets = arrays.get(f"offsets_{k}", np.zeros(0, np.int64))
    right = rows.dtype == np.uint32 and np.all(rows < table.rows)
    right &= offsets.shape == (header.devices + 1,)
    right = right and offsets[0] == 0 and offsets[-1] == len(rows)
    if not right or np.any(np.diff(offsets) < 0):
      raise source.broken(
        f"must hold row ids of table {table.name!r}, below {table.rows}, for"
        f" {header.devices} devices"
      )
    sets.append([rows[a:b] for a, b in zip(offsets[:-1], offsets[1:])])
  return sets
