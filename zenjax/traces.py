"""Traces of a training run: which rows of which gradients were not zero.

A trace is a directory. `trace.json` holds the version of the format, the
number of devices and of steps, and name, rows, width and dtype of each table;
`leaves`, where it is there, name, shape and dtype of every parameter, and the
look-ups of a device where its gradient was SparseRows.
`step-000000.npz` and so on hold one step each: for table `k` of `trace.json`
`rows_k`, the row ids of device 0, then of device 1 and so on, `[*] uint32`,
ascending within a device, and `offsets_k`, `[devices + 1] int64`: those of
device `i` are `rows_k[offsets_k[i]:offsets_k[i + 1]]`. Sets, not counts: what
a row's gradient holds is left out, and so is how often it was looked up.

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
from typing import Any, BinaryIO, NamedTuple
import zipfile
import zlib

import numpy as np

# What a trace may hold: its header and a step's row sets, checked.
#
# The same checks guard what is written and what is read.


VERSION = 1
AGAIN = "record the trace again into a new directory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
  """One table whose gradients are traced, seen as `[rows, width]`."""

  name: str
  rows: int
  width: int
  dtype: str  # as NumPy or ml_dtypes names it, say "float32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
  """One parameter of the model, a table or not.

  Attributes:
    name: As `zenjax.report` has it.
    shape: Of it.
    dtype: Its name.
    look_ups: Rows that a device's gradient has room for where it is SparseRows;
      None of an array.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  look_ups: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
  """What `trace.json` says.

  Attributes:
    tables: In the order in which they are synchronized.
    devices: Devices of the run.
    steps: How many files of steps there are, or will be.
    leaves: All parameters, for a planner; none where they were not told.
  """

  tables: tuple[Table, ...]
  devices: int
  steps: int
  leaves: tuple[Leaf, ...] = ()


class Where(NamedTuple):
  """What is checked, and the remedy if it is broken."""

  name: str
  remedy: str = AGAIN

  def broken(self, what: str) -> ValueError:
    return ValueError(f"{self.name} {what}; {self.remedy}.")


def document(header: Header) -> dict[str, Any]:
  """Inverse of `parse`."""
  fields = dataclasses.asdict(header)
  lists = {name: list(fields[name]) for name in ("tables", "leaves")}
  return {"version": VERSION, **fields, **lists}


def parse(document: Any, where: Where) -> Header:
  """`document` as a header, every field checked."""
  if not isinstance(document, dict):
    raise where.broken(f"must hold an object, got {document!r}")
  version = document.get("version")
  if version != VERSION:
    raise where.broken(
      f"must be of version {VERSION}, got {version!r}: another zenjax wrote it"
    )
  tables = document.get("tables")
  if not isinstance(tables, list) or not tables:
    raise where.broken(f"must list tables, got tables={tables!r}")
  parsed = tuple(_parse_table(entry, where) for entry in tables)
  names = [table.name for table in parsed]
  if len(set(names)) != len(names):
    raise where.broken(f"must name each table once, got {names}")
  leaves = _parse_leaves(document.get("leaves", []), where)
  _require_tables(parsed, leaves, where)
  return Header(
    tables=parsed,
    devices=_count(document, "devices", where),
    steps=_count(document, "steps", where),
    leaves=leaves,
  )


def _parse_leaves(entries: Any, where: Where) -> tuple[Leaf, ...]:
  if not isinstance(entries, list):
    raise where.broken(f"must list leaves, got leaves={entries!r}")
  leaves = tuple(_parse_leaf(entry, where) for entry in entries)
  names = [leaf.name for leaf in leaves]
  if len(set(names)) != len(names):
    raise where.broken(f"must name each leaf once, got {names}")
  return leaves


def _parse_leaf(entry: Any, where: Where) -> Leaf:
  _check_named(entry, "leaf", where)
  shape = entry.get("shape")
  whole = isinstance(shape, list | tuple) and all(
    type(size) is int and size >= 0 for size in shape
  )
  if not whole:
    raise where.broken(f"must give a leaf's shape, got {entry!r}")
  known = entry.get("look_ups") is not None
  return Leaf(
    name=entry["name"],
    shape=tuple(shape),
    dtype=entry["dtype"],
    look_ups=_count(entry, "look_ups", where) if known else None,
  )


def _require_tables(
  tables: tuple[Table, ...], leaves: tuple[Leaf, ...], where: Where
) -> None:
  """Where leaves are told, the tables are among them."""
  known = {leaf.name: leaf for leaf in leaves}
  for table in tables if leaves else ():
    leaf = known.get(table.name)
    size = table.rows * table.width
    if leaf is None or math.prod(leaf.shape) != size:
      raise where.broken(
        f"must hold table {table.name!r}, {table.rows} x {table.width}, among"
        f" its leaves, got {leaf}"
      )


def _check_named(entry: Any, kind: str, where: Where) -> None:
  if not isinstance(entry, dict):
    raise where.broken(f"must hold an object for each {kind}, got {entry!r}")
  for field in ("name", "dtype"):
    if not isinstance(entry.get(field), str):
      raise where.broken(f"must give a {kind}'s {field}, got {entry!r}")
  try:
    np.dtype(entry["dtype"])
  except TypeError as error:
    raise where.broken(f"must name a dtype, got {entry['dtype']!r}") from error


def _parse_table(entry: Any, where: Where) -> Table:
  _check_named(entry, "table", where)
  return Table(
    name=entry["name"],
    rows=_count(entry, "rows", where),
    width=_count(entry, "width", where),
    dtype=entry["dtype"],
  )


def _count(fields: dict[str, Any], name: str, where: Where) -> int:
  value = fields.get(name)
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise where.broken(f"must give {name} as a positive integer: {value!r}")
  return value


def split(
  rows: np.ndarray,
  offsets: np.ndarray,
  table: Table,
  devices: int,
  where: Where,
) -> list[np.ndarray]:
  """`rows` of each device; raises where they cannot be sets of its rows."""
  of = f"table {table.name!r}"
  if rows.dtype != np.uint32 or rows.ndim != 1:
    raise where.broken(
      f"must hold rows of {of} as [*] uint32, got {_kind(rows)}"
    )
  if offsets.dtype != np.int64 or offsets.shape != (devices + 1,):
    raise where.broken(
      f"must hold offsets of {of} as [{devices + 1}] int64 for {devices}"
      f" devices, got {_kind(offsets)}",
    )
  ends = offsets[0] == 0 and offsets[-1] == len(rows)
  if not ends or np.any(np.diff(offsets) < 0):
    raise where.broken(
      f"must hold offsets of {of} that rise from 0 to its {len(rows)} rows, got"
      f" {offsets.tolist()}",
    )
  if len(rows) and int(rows.max()) >= table.rows:
    raise where.broken(
      f"holds row {rows.max()} of {of}, which has {table.rows} rows"
    )
  sets = [rows[a:b] for a, b in zip(offsets[:-1], offsets[1:])]
  if any(np.any(s[1:] <= s[:-1]) for s in sets):
    raise where.broken(f"must hold each device's rows of {of} ascending")
  return sets


def _kind(array: np.ndarray) -> str:
  return f"{list(array.shape)} {array.dtype}"


__all__ = (
  "check_free",
  "create",
  "finish",
  "Header",
  "Leaf",
  "read",
  "read_header",
  "Table",
  "Trace",
  "write_step",
)

_HEADER = "trace.json"
_CORRECT = Where("", "give what `Header` and `write_step` ask for")

# Row ids of one table in one step, one ascending array a device.
Sets = Sequence[np.ndarray]


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
    header: What is to come; `finish` tells if it was less.

  Raises:
    ValueError: `directory` is not empty, or `header` is none.
  """
  check_free(directory)
  parse(document(header), _CORRECT._replace(name="`header`"))
  pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
  _write_header(directory, header)


def write_step(
  directory: str | os.PathLike, header: Header, step: int, sets: Sequence[Sets]
) -> None:
  """Writes one step of a trace.

  Args:
    directory: Given to `create` before.
    header: The same as there.
    step: Counted from 0 within the trace.
    sets: For each table of the header the rows of each device.

  Raises:
    ValueError: `sets` are not ascending rows of the header's tables.
  """
  where = _CORRECT._replace(name="`sets`")
  if len(sets) != len(header.tables):
    raise where.broken(
      f"must hold one entry for each of {len(header.tables)} tables, got"
      f" {len(sets)}"
    )
  arrays = {}
  for k, (table, per_device) in enumerate(zip(header.tables, sets)):
    offsets = np.cumsum([0, *map(len, per_device)], dtype=np.int64)
    given = np.concatenate([np.zeros(0, np.uint32), *per_device])
    rows = given.astype(np.uint32)
    if np.any(rows != given):
      raise where.broken(f"must hold row ids, got {given.min()}")
    split(rows, offsets, table, header.devices, where)
    arrays |= {f"rows_{k}": rows, f"offsets_{k}": offsets}
  with _whole(_step_path(directory, step)) as file:
    np.savez_compressed(file, **arrays)


def finish(directory: str | os.PathLike, header: Header, steps: int) -> None:
  """Corrects `trace.json` where fewer steps were written than announced."""
  if steps != header.steps:
    _write_header(directory, dataclasses.replace(header, steps=steps))


def read(directory: str | os.PathLike) -> Trace:
  """Reads a whole trace and checks it.

  Raises:
    ValueError: A file is missing, cut short, of another version, or holds
      what cannot be; the message names it.

  Example:
    >>> import tempfile
    >>> table = Table(name="embed", rows=10, width=4, dtype="float32")
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
  where = Where(str(path))
  try:
    document = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(
      f"`directory` must hold a trace, but {path} cannot be read"
      f" ({error.strerror}); give a directory that `zenjax.planner.record`"
      " wrote."
    ) from error
  except ValueError as error:
    raise where.broken(f"is no JSON: {error}") from error
  return parse(document, where)


def _read_step(path: pathlib.Path, header: Header) -> list[list[np.ndarray]]:
  where = Where(str(path))
  if not path.is_file():
    raise where.broken(
      f"is missing, and {_HEADER} announces {header.steps} steps: lower `steps`"
      " there to what is whole"
    )
  arrays = _load(path, where)
  found = []
  for k, table in enumerate(header.tables):
    missing = {f"rows_{k}", f"offsets_{k}"} - set(arrays)
    if missing:
      raise where.broken(f"lacks {sorted(missing)} of table {table.name!r}")
    rows, offsets = arrays[f"rows_{k}"], arrays[f"offsets_{k}"]
    found.append(split(rows, offsets, table, header.devices, where))
  return found


def _load(path: pathlib.Path, where: Where) -> dict[str, np.ndarray]:
  # What is no archive NumPy would take for another of its formats.
  if not zipfile.is_zipfile(path):
    raise where.broken("is cut short, or no npz")
  try:
    with np.load(path, allow_pickle=False) as file:
      return {key: file[key] for key in file.files}
  except (OSError, EOFError, ValueError, KeyError) as error:
    raise where.broken(f"cannot be read: {error}") from error
  except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
    raise where.broken(f"is corrupt: {error}") from error


def _step_path(directory: str | os.PathLike, step: int) -> pathlib.Path:
  return pathlib.Path(directory, f"step-{step:06d}.npz")


def _write_header(directory: str | os.PathLike, header: Header) -> None:
  text = json.dumps(document(header), indent=1) + "\n"
  with _whole(pathlib.Path(directory, _HEADER)) as file:
    file.write(text.encode())


@contextlib.contextmanager
def _whole(path: pathlib.Path) -> Iterator[BinaryIO]:
  """A file to write that takes its place when it is whole, or never."""
  partial = path.with_name(f".{path.name}.partial")
  try:
    with open(partial, "wb") as file:
      yield file
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
