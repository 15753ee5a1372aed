"""Records which rows of each table's gradient every device touched.

Inside a step `Recorder.rows` packs one bit for each row of a local gradient;
outside `Recorder.write` adds what all devices gave to a trace
(`zenjax.traces`). Letters: `n` devices, `R` rows, `D` width.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any

import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from zenjax import traces
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import zen_sync
from zenjax._src.training.returned import RowSets


class Recorder:
  """Writes the first steps of a run as a trace; see `record`.

  Attributes:
    tables: Tables whose rows are recorded.

  Example:
    >>> import tempfile
    >>> import zenjax
    >>> params = {"embed": jnp.zeros((4096, 16)), "bias": jnp.zeros(16)}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   recorder = zenjax.planner.record(directory, params, steps=2)
    ...   seen = recorder.rows({"embed": params["embed"].at[3].set(1.0)})
    ...   recorder.write(seen)
    ...   [t.name for t in recorder.tables], recorder.wants_more
    ...   recorder.close()
    (['embed'], True)
    1
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    tables: Sequence[traces.TableInfo],
    steps: int,
    leaves: Sequence[traces.LeafInfo] = (),
  ):
    traces.check_free(directory)
    self.tables = tuple(tables)
    self._leaves = tuple(leaves)
    self._look_ups: dict[str, int] = {}
    self._directory = directory
    self._steps = steps
    self._header: traces.Header | None = None
    self._done = 0

  @property
  def wants_more(self) -> bool:
    """True while fewer steps were written than were asked for."""
    return self._done < self._steps

  def rows(self, grads: Any) -> RowSets:
    """Packs one bit for each nonzero row: name -> `[1, ceil(R / 8)]` uint8.

    Call it where gradients are local; its result leaves `shard_map` through
    `out_specs=P(axis_name)`, and a step of `data_parallel` in its `aux`.

    Args:
      grads: Gradients of the parameters that `record` was given, arrays or
        SparseRows. SparseRows take an array of R bits, and none of R rows.
    """
    for name, leaf in _named(grads).items():
      if isinstance(leaf, SparseRows):
        self._look_ups[name] = leaf.capacity
    return nonzero_rows(grads, self.tables)

  def write(self, packed: Mapping[str, jax.Array]) -> None:
    """Writes one step: the results of `rows` on all devices, `[n, *]` each.

    In a program of several processes all of them call it, and one writes.
    """
    if not self.wants_more:
      raise ValueError(
        f"`write` must be called for {self._steps} steps at most, and these are"
        " written; ask `wants_more` first."
      )
    bits = {t.name: _on_host(packed[t.name]) for t in self.tables}
    if jax.process_index() == 0:
      self._write(bits)
    self._done += 1

  def _write(self, bits: Mapping[str, np.ndarray]) -> None:
    if self._header is None:
      (devices,) = {len(of_table) for of_table in bits.values()}
      leaves = [
        dataclasses.replace(leaf, look_ups=self._look_ups.get(leaf.name))
        for leaf in self._leaves
      ]
      self._header = traces.Header(
        tables=self.tables,
        devices=devices,
        steps=self._steps,
        leaves=tuple(leaves),
      )
      traces.create(self._directory, self._header)
    sets = [
      [np.flatnonzero(d) for d in np.unpackbits(bits[t.name], axis=1)]
      for t in self.tables
    ]
    traces.write_step(self._directory, self._header, self._done, sets)

  def close(self) -> int:
    """Ends the trace, also after fewer steps; returns their number."""
    if self._header is not None:
      traces.finish(self._directory, self._header, self._done)
    return self._done

  def __enter__(self) -> "Recorder":
    return self

  def __exit__(self, *_) -> None:
    self.close()


def record(
  directory: str | os.PathLike,
  params: Any,
  *,
  steps: int = 32,
  sparse: Any = None,
) -> Recorder:
  """Starts a trace of the rows that training steps touch.

  The planner learns from it how unions grow with the devices. Record steps that
  lie far apart if devices read their data in order: neighbouring steps are
  alike.

  Args:
    directory: Must be missing or empty; made with the first step.
    params: Arrays, or their shapes.
    steps: Number of steps to record.
    sparse: Selects the leaves that are tables, as for `zen_sync`.

  Raises:
    ValueError: `directory` holds files, or there is no table.

  Example:
    >>> import tempfile
    >>> import zenjax
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"embed": jnp.zeros((4096, 16)), "bias": jnp.zeros(16)}
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   with zenjax.planner.record(directory, params, steps=1) as recorder:
    ...     seen = jax.shard_map(
    ...       lambda ids: recorder.rows(
    ...         {"embed": params["embed"].at[ids].set(1.0), "bias": None}
    ...       ),
    ...       mesh=mesh, in_specs=P("data"), out_specs=P("data"),
    ...     )(jnp.array([3, 5, 3, 7]))
    ...     recorder.write(seen)
    ...   [s.tolist() for s in zenjax.traces.read(directory).sets["embed"][0]]
    [[3, 5], [3, 7]]
  """
  if not isinstance(steps, int) or steps < 1:
    raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
  tables = _tables(params, sparse)
  if not tables:
    raise ValueError(
      "`params` must hold a leaf that zen_sync sends sparse, but these are too"
      " small or too wide; name one by `sparse`."
    )
  leaves = [
    traces.LeafInfo(
      name=name, shape=tuple(x.shape), dtype=jnp.dtype(x.dtype).name
    )
    for name, x in _named(params).items()
  ]
  return Recorder(directory, tables, steps, leaves)


def _tables(params: Any, sparse: Any) -> tuple[traces.TableInfo, ...]:
  """Returns the leaves that zen_sync sends sparse."""
  tx = zen_sync.zen_sync("data", sparse=sparse)
  chosen = jax.eval_shape(tx.init, params).leaves
  tables = []
  for name, leaf in _named(params).items():
    if name in chosen:
      rows, width = leaf_util.table_shape(leaf, "row")
      dtype = leaf.dtype.name
      tables.append(
        traces.TableInfo(name=name, rows=rows, width=width, dtype=dtype)
      )
  return tuple(tables)


def nonzero_rows(grads: Any, tables: Sequence[traces.TableInfo]) -> RowSets:
  """Packs one bit for each nonzero row of these tables."""
  leaves = _named(grads)
  return RowSets(
    (table.name, jnp.packbits(_is_nonzero(leaves[table.name]))[None])
    for table in tables
  )


def _is_nonzero(table: jax.Array | SparseRows) -> jax.Array:
  """Returns `[R]` bool."""
  if not isinstance(table, SparseRows):
    return _has_bits(leaf_util.as_table(table, "row"))
  # Look-ups of one row may cancel each other, as they would in the array.
  rows = table.combine()
  none = jnp.zeros(rows.num_rows, bool)
  return none.at[rows.indices].set(_has_bits(rows.values), mode="drop")


def _has_bits(rows: jax.Array) -> jax.Array:
  """Returns which rows are not zero: `[K, D]` -> `[K]` bool.

  A row is zero where all of its bits are, signs apart: comparing floats would
  take subnormals for zero on CPU.
  """
  bits = jnp.dtype(f"uint{8 * rows.dtype.itemsize}")
  raw = lax.bitcast_convert_type(rows, bits)
  unsigned = raw << np.array(1, bits)
  return jnp.any(unsigned != 0, axis=1)


def _named(tree: Any) -> dict[str, Any]:
  """Returns leaves by the names that zenjax reports."""
  return dict(leaf_util.named_leaves(tree, is_rows))


def _on_host(packed: jax.Array) -> np.ndarray:
  """Fetches `[n, *]`, with the parts of other processes."""
  if packed.is_fully_addressable:
    return np.asarray(packed)
  return np.asarray(multihost_utils.process_allgather(packed, tiled=True))
