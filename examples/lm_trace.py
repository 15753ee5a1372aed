"""Records which rows of each sparse table's gradient every device touched.

`zenjax.traces` says what the files hold. Letters: n devices, R rows, D width.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import zenjax
from zenjax import traces


def sparse_tables(params, axis_name: str) -> tuple[traces.Table, ...]:
  """The leaves that zen_sync sends sparse, whichever way they travel here."""
  tx = zenjax.zen_sync(axis_name)
  chosen = jax.eval_shape(tx.init, params).leaves
  return tuple(
    traces.Table(
      name=name,
      rows=leaf.shape[0],
      width=leaf.shape[1],
      dtype=leaf.dtype.name,
    )
    for name, leaf in _named(params).items()
    if name in chosen
  )


def nonzero_rows(grads, tables: tuple[traces.Table, ...]) -> dict:
  """Name -> [1, ceil(R / 8)] uint8, one bit for each row of a local gradient.

  Args:
    grads: Arrays, or SparseRows: of these an array of R bits is made, and none
      of R rows.
    tables: Which of them.
  """
  leaves = _named(grads)
  return {
    table.name: jnp.packbits(_is_nonzero(leaves[table.name]))[None]
    for table in tables
  }


def _is_nonzero(table: jax.Array | zenjax.SparseRows) -> jax.Array:
  """[R] bool."""
  if not isinstance(table, zenjax.SparseRows):
    return _has_bits(table)
  # Look-ups of one row may cancel each other, as they would in the array.
  rows = table.combine()
  none = jnp.zeros(rows.num_rows, bool)
  return none.at[rows.indices].set(_has_bits(rows.values), mode="drop")


def _has_bits(rows: jax.Array) -> jax.Array:
  """Which rows are not zero: [K, D] -> [K] bool.

  A row is zero where all of its bits are, signs apart: comparing floats would
  take subnormals for zero on CPU.
  """
  bits = jnp.dtype(f"uint{8 * rows.dtype.itemsize}")
  raw = lax.bitcast_convert_type(rows, bits)
  unsigned = raw << np.array(1, bits)
  return jnp.any(unsigned != 0, axis=1)


def _is_rows(node: Any) -> bool:
  return isinstance(node, zenjax.SparseRows)


def _named(tree) -> dict[str, Any]:
  """Leaves by the names that zenjax reports."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_rows)
  name = jax.tree_util.keystr
  return {name(path, simple=True, separator="."): x for path, x in flat}


class Recorder:
  """Writes the first steps of a run as a trace.

  Args:
    directory: Must be missing or empty; made with the first step.
    steps: How many to record.

  Raises:
    ValueError: `directory` holds files.
  """

  def __init__(self, directory: str, steps: int):
    traces.check_free(directory)
    self._directory = directory
    self._header = traces.Header(tables=(), devices=0, steps=steps)
    self._done = 0

  @property
  def tables(self) -> tuple[traces.Table, ...]:
    return self._header.tables

  @property
  def wants_more(self) -> bool:
    return self._done < self._header.steps

  def start(self, tables: tuple[traces.Table, ...], devices: int) -> None:
    """Says what is to come; before the first `write`."""
    if not tables:
      raise SystemExit(
        "--trace needs a table that zen_sync sends sparse, but these are too"
        " small or too wide: raise --vocab or lower --width"
      )
    self._header = dataclasses.replace(
      self._header, tables=tables, devices=devices
    )

  def write(self, packed: Mapping[str, jax.Array]) -> None:
    """Writes one step: what `nonzero_rows` gave on all devices, [n, *]."""
    if not self._done:
      traces.create(self._directory, self._header)
    bits = {name: np.unpackbits(x, axis=1) for name, x in _host(packed)}
    sets = [
      [np.flatnonzero(device) for device in bits[table.name]]
      for table in self.tables
    ]
    traces.write_step(self._directory, self._header, self._done, sets)
    self._done += 1

  def close(self) -> None:
    """Ends the trace, also where fewer steps were taken than announced."""
    if self._done:
      traces.finish(self._directory, self._header, self._done)
      print(f"trace of {self._done} steps: {self._directory}")


def _host(packed: Mapping[str, jax.Array]):
  return ((name, np.asarray(x)) for name, x in packed.items())
