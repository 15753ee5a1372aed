"""Traces of a training run: which rows of which gradients were not zero.

A trace is a directory. `trace.json` holds the version of the format, the
number of devices and of steps, and name, rows, width and dtype of each table;
optionally, as `leaves`, name, shape and dtype of every parameter, and the
look-ups of a device if its gradient was SparseRows.
`step-000000.npz` and so on hold one step each: for table `k` of `trace.json`
`rows_k`, the row ids of device 0, then of device 1 and so on, `[*] uint32`,
ascending within a device, and `offsets_k`, `[devices + 1] int64`: those of
device `i` are `rows_k[offsets_k[i]:offsets_k[i + 1]]`. They are sets: neither
the values of a row nor the number of its look-ups are recorded.

Every file is written beside its place and then moved there, so that a file
that exists is whole. Needs NumPy only.
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
from zenjax._src.core.checked_json import NOT_EMPTY
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Rule
from zenjax._src.core.checked_json import Source

__all__ = (
  "check_free",
  "create",
  "finish",
  "Header",
  "LeafInfo",
  "read",
  "read_header",
  "TableInfo",
  "Trace",
  "write_step",
)

_HEADER = "trace.json"
_VERSION = "version", 1
_RECORD = "record the trace again into a new directory"
_CORRECT = "give what `Header` and `write_step` ask for"

# Row ids of one table in one step, one ascending array a device.
DeviceRows = Sequence[np.ndarray]


def _is_dtype(name: str) -> bool:
  try:
    np.dtype(name)
  except TypeError:
    return False
  return True


_Count = Annotated[int, POSITIVE]
# As NumPy or ml_dtypes names it, say "float32".
_Dtype = Annotated[str, Rule("a dtype", _is_dtype)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableInfo:
  """A table whose gradients are traced, seen as `[rows, width]`."""

  name: str
  rows: _Count
  width: _Count
  dtype: _Dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
  """A parameter of the model, a table or not.

  Attributes:
    name: Name of the leaf, as `zenjax.report` shows it.
    shape: Its shape.
    dtype: Name of its dtype.
    look_ups: Rows that a device's gradient has room for if it is SparseRows;
      None for an array.
  """

  name: str
  shape: tuple[Annotated[int, NOT_NEGATIVE], ...]
  dtype: _Dtype
  look_ups: _Count | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
  """The contents of `trace.json`.

  Attributes:
    tables: Tables, in the order in which they are synchronized.
    devices: Devices of the run.
    steps: Number of files of steps that there are, or will be.
    leaves: All parameters, for a planner; empty if they were not recorded.
  """

  tables: Annotated[tuple[TableInfo, ...], NOT_EMPTY]
  devices: _Count
  steps: _Count
  leaves: tuple[LeafInfo, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
  """A trace that was read and checked.

  Attributes:
    header: Tables, devices and steps.
    sets: By table name, then step, then device: the rows that were not zero,
      ascending, uint32.
  """

  header: Header
  sets: dict[str, list[list[np.ndarray]]]


# --- writing ------------------------------------------------------------------


def check_free(directory: str | os.PathLike) -> None:
  """Raises `ValueError` unless `directory` is missing or empty."""
  path = pathlib.Path(directory)
  if path.exists() and not path.is_dir():
    raise ValueError(
      f"`directory` must name a directory, but {path} is a file; give another."
    )
  if path.is_dir() and any(path.iterdir()):
    raise ValueError(
      f"`directory` must be new or empty, but {path} holds files; give another"
      " or remove it."
    )


def create(directory: str | os.PathLike, header: Header) -> None:
  """Starts a trace.

  Args:
    directory: Made if missing.
    header: Announces the steps to come; `finish` corrects it if they are less.

  Raises:
    ValueError: `directory` is not empty, or `header` is invalid.
  """
  check_free(directory)
  _checked(dataclasses.asdict(header), Source("`header`", _CORRECT))
  pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
  _write_header(directory, header)


def write_step(
  directory: str | os.PathLike,
  header: Header,
  step: int,
  sets: Sequence[DeviceRows],
) -> None:
  """Writes one step of a trace.

  Args:
    directory: As given to `create` before.
    header: The same as there.
    step: Counted from 0 within the trace.
    sets: For each table of the header the rows of each device.

  Raises:
    ValueError: `sets` are not ascending rows of the header's tables.
  """
  source = Source("`sets`", _CORRECT)
  if len(sets) != len(header.tables):
    raise source.broken(
      f"must hold one entry for each of {len(header.tables)} tables, got"
      f" {len(sets)}"
    )
  arrays = {}
  for k, (table, per_device) in enumerate(zip(header.tables, sets)):
    offsets = np.cumsum([0, *map(len, per_device)], dtype=np.int64)
    given = np.concatenate([np.zeros(0, np.uint32), *per_device])
    rows = given.astype(np.uint32)
    if np.any(rows != given):
      raise source.broken(f"must hold row ids, got {given.min()}")
    _split(rows, offsets, table, header.devices, source)
    arrays |= {f"rows_{k}": rows, f"offsets_{k}": offsets}
  with _whole(_step_path(directory, step)) as file:
    np.savez_compressed(file, **arrays)


def finish(directory: str | os.PathLike, header: Header, steps: int) -> None:
  """Corrects `trace.json` if fewer steps were written than announced."""
  if steps != header.steps:
    _write_header(directory, dataclasses.replace(header, steps=steps))


def _step_path(directory: str | os.PathLike, step: int) -> pathlib.Path:
  return pathlib.Path(directory, f"step-{step:06d}.npz")


def _write_header(directory: str | os.PathLike, header: Header) -> None:
  document = {**dict([_VERSION]), **dataclasses.asdict(header)}
  text = json.dumps(document, indent=1) + "\n"
  with _whole(pathlib.Path(directory, _HEADER)) as file:
    file.write(text.encode())


@contextlib.contextmanager
def _whole(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a file that takes its place once it is whole, or never."""
  partial = path.with_name(f".{path.name}.partial")
  try:
    with open(partial, "wb") as file:
      yield file
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


# --- reading ------------------------------------------------------------------


def read(directory: str | os.PathLike) -> Trace:
  """Reads a whole trace and checks it.

  Raises:
    ValueError: A file is missing, cut short, of another version, or holds
      impossible values; the message names it.

  Example:
    >>> import tempfile
    >>> table = TableInfo(name="embed", rows=10, width=4, dtype="float32")
    >>> header = Header(tables=(table,), devices=2, steps=1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   create(directory, header)
    ...   write_step(directory, header, 0, [[np.array([1, 5]), np.array([7])]])
    ...   read(directory).sets["embed"][0][0]
    array([1, 5], dtype=uint32)
  """
  header = read_header(directory)
  sets: dict[str, list[list[np.ndarray]]] = {t.name: [] for t in header.tables}
  for step in range(header.steps):
    found = _read_step(_step_path(directory, step), header)
    for table, per_device in zip(header.tables, found):
      sets[table.name].append(per_device)
  return Trace(header=header, sets=sets)


def read_header(directory: str | os.PathLike) -> Header:
  """Reads `trace.json` only; raises as `read` does."""
  path = pathlib.Path(directory, _HEADER)
  source = Source(str(path), _RECORD)
  try:
    text = path.read_text(encoding="utf-8")
  except OSError as error:
    raise ValueError(
      f"`directory` must hold a trace, but {path} cannot be read"
      f" ({error.strerror}); give a directory that `zenjax.planner.record`"
      " wrote."
    ) from error
  except ValueError as error:
    raise source.broken(f"is no text: {error}") from error
  return _checked(checked_json.fields(text, _VERSION, source), source)


def _checked(fields: dict, source: Source) -> Header:
  """Returns the header of these fields, which must agree with each other."""
  header = checked_json.parse(Header, fields, source)
  for at, entries in (("tables", header.tables), ("leaves", header.leaves)):
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
      raise source.broken(f"must have different names, got {names}", at)
  known = {leaf.name: leaf for leaf in header.leaves}
  for table in header.tables if known else ():
    leaf = known.get(table.name)
    if leaf is None or math.prod(leaf.shape) != table.rows * table.width:
      raise source.broken(
        f"must hold table {table.name!r}, {table.rows} x {table.width}, among"
        f" its leaves, got {leaf}"
      )
  return header


def _read_step(path: pathlib.Path, header: Header) -> list[list[np.ndarray]]:
  source = Source(str(path), _RECORD)
  if not path.is_file():
    raise source.broken(
      f"is missing, and {_HEADER} announces {header.steps} steps: lower `steps`"
      " there to what is whole"
    )
  arrays = _load(path, source)
  found = []
  for k, table in enumerate(header.tables):
    missing = {f"rows_{k}", f"offsets_{k}"} - set(arrays)
    if missing:
      raise source.broken(f"lacks {sorted(missing)} of table {table.name!r}")
    rows, offsets = arrays[f"rows_{k}"], arrays[f"offsets_{k}"]
    found.append(_split(rows, offsets, table, header.devices, source))
  return found


def _load(path: pathlib.Path, source: Source) -> dict[str, np.ndarray]:
  # NumPy would take a file that is no archive for another of its formats.
  if not zipfile.is_zipfile(path):
    raise source.broken("is cut short, or no npz")
  try:
    with np.load(path, allow_pickle=False) as file:
      return {key: file[key] for key in file.files}
  except (OSError, EOFError, ValueError, KeyError) as error:
    raise source.broken(f"cannot be read: {error}") from error
  except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
    raise source.broken(f"is corrupt: {error}") from error


def _split(
  rows: np.ndarray,
  offsets: np.ndarray,
  table: TableInfo,
  devices: int,
  source: Source,
) -> list[np.ndarray]:
  """Splits `rows` by device; raises if they are not sets of its rows."""
  of = f"table {table.name!r}"
  kind = lambda array: f"{list(array.shape)} {array.dtype}"
  if rows.dtype != np.uint32 or rows.ndim != 1:
    raise source.broken(
      f"must hold rows of {of} as [*] uint32, got {kind(rows)}"
    )
  if offsets.dtype != np.int64 or offsets.shape != (devices + 1,):
    raise source.broken(
      f"must hold offsets of {of} as [{devices + 1}] int64 for {devices}"
      f" devices, got {kind(offsets)}",
    )
  ends = offsets[0] == 0 and offsets[-1] == len(rows)
  if not ends or np.any(np.diff(offsets) < 0):
    raise source.broken(
      f"must hold offsets of {of} that rise from 0 to its {len(rows)} rows, got"
      f" {offsets.tolist()}",
    )
  if len(rows) and int(rows.max()) >= table.rows:
    raise source.broken(
      f"holds row {rows.max()} of {of}, which has {table.rows} rows"
    )
  sets = [rows[a:b] for a, b in zip(offsets[:-1], offsets[1:])]
  if any(np.any(s[1:] <= s[:-1]) for s in sets):
    raise source.broken(f"must hold each device's rows of {of} ascending")
  return sets
