"""What a trace may hold: its header and a step's row sets, checked.

The same checks guard what is written and what is read.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

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
