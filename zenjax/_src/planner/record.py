"""Records which rows of each table's gradient every device touched.

Inside a step `Recorder.rows` packs one bit for each row of a gradient; outside
`Recorder.write` adds what all devices gave to a trace. Letters: `n` devices,
`R` rows, `D` width.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.planner import traces
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import filled_up
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import zen_sync
from zenjax._src.training.returned import RowSets
from zenjax.kernels import reference


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
    ...   [t.name for t in recorder.tables], recorder.wants_more
    ...   recorder.close()
    (['embed'], True)
    0
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    params: Any,
    leaves: Sequence[traces.LeafInfo],
    steps: int,
    axes: Axes,
    mesh: Mesh | None,
  ):
    traces.check_free(directory)
    self.tables = [leaf for leaf in leaves if leaf.is_table]
    self._directory, self._leaves = directory, leaves
    self._look_ups: dict[str, int] = {}
    self._steps, self._done = steps, 0
    self._axes = axes
    self._mesh = mesh or collectives.mesh_around(axes, params, None)
    self._header: traces.Header | None = None

  @property
  def wants_more(self) -> bool:
    """True while fewer steps were written than were asked for."""
    return self._done < self._steps

  def rows(self, grads: Any) -> RowSets:
    """Packs one bit for each nonzero row: name -> `[n, ceil(R / 8)]` uint8.

    Call it where gradients are local: its result leaves `shard_map` through
    `out_specs=P(axis_name)`, and a step of `data_parallel` in its `aux`. In
    plain `jit` give it the SparseRows of zenjax's `value_and_grad`, which tell
    devices apart.

    Args:
      grads: Gradients of the parameters that `record` was given, arrays or
        SparseRows. SparseRows take an array of R bits, and none of R rows.

    Raises:
      ValueError: In plain `jit` over several devices, an array is of all of
        them, or the mesh is not known.
    """
    leaves = dict(leaf_util.named_leaves(grads, is_rows))
    leaves = {table.name: leaves[table.name] for table in self.tables}
    mesh, n = self._around(leaves)
    for name, leaf in leaves.items():
      if isinstance(leaf, SparseRows):
        self._look_ups[name] = -(-leaf.capacity // n)
    if n == 1:
      return _nonzero_rows(leaves)
    arrays = [name for name, leaf in leaves.items() if not is_rows(leaf)]
    if arrays:
      raise ValueError(
        f"`grads` in plain jit must hold SparseRows of tables, and {arrays} are"
        " arrays, summed over all devices already. Take gradients by"
        " `zenjax.value_and_grad`, or record inside `shard_map`."
      )
    split = PartitionSpec(self._axes)
    given = {name: filled_up(leaf, n) for name, leaf in leaves.items()}
    if set(self._axes) & compat.explicit_of(mesh):
      place = lambda x: jax.sharding.reshard(x, NamedSharding(mesh, split))
      given = jax.tree.map(place, given)
    mapped = jax.shard_map(
      _nonzero_rows, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    return mapped(given)

  def _around(self, leaves: Any) -> tuple[Any, int]:
    """Returns the mesh that gradients are summed over, and its devices.

    None and 1 where gradients are those of one device.
    """
    mesh = collectives.mesh_around(self._axes, leaves, self._mesh)
    if mesh is not None:
      return mesh, math.prod(mesh.shape[axis] for axis in self._axes)
    try:
      collectives.size(self._axes)
    except NameError as error:
      if jax.device_count() > 1:
        raise ValueError(
          f"`axis_name` must be bound by shard_map, or an axis of a mesh, and"
          f" {self._axes!r} is neither. Give `zenjax.planner.record` the axes"
          " of the batch as `axis_name=`, and in plain jit `mesh=`."
        ) from error
    return None, 1

  def write(self, packed: Mapping[str, jax.Array]) -> None:
    """Writes one step: the results of `rows` on all devices, `[n, *]` each.

    In a program of several processes all of them call it, and one writes.
    """
    if not self.wants_more:
      raise ValueError(
        f"`write` must be called for {self._steps} steps at most, and these are"
        " written; ask `wants_more` first."
      )
    bits = [_on_host(packed[t.name]) for t in self.tables]
    if jax.process_index() == 0:
      if self._header is None:
        leaves = [
          dataclasses.replace(x, look_ups=self._look_ups.get(x.name))
          for x in self._leaves
        ]
        self._header = traces.Header(leaves=tuple(leaves), devices=len(bits[0]))
        traces.create(self._directory, self._header)
      sets = [
        [np.flatnonzero(np.unpackbits(x, count=table.rows)) for x in each]
        for table, each in zip(self.tables, bits)
      ]
      traces.write_step(self._directory, self._header, self._done, sets)
    self._done += 1

  def close(self) -> int:
    """Returns the number of steps that were written."""
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
  axis_name: AxisName = "data",
  mesh: Mesh | None = None,
) -> Recorder:
  """Starts a trace of the rows that training steps touch.

  The planner learns from it how unions grow with the devices. Record steps that
  are far apart if devices read their data in order: neighboring steps are
  alike.

  Args:
    directory: Must be missing or empty; made with the first step.
    params: Arrays, or their shapes.
    steps: Number of steps to record.
    sparse: Selects the leaves that are tables, as for `zen_sync`.
    axis_name: Axes over which the batch is split.
    mesh: In plain `jit`, the mesh of these axes, by default that of `params`.

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
    ...   trace = zenjax.planner.traces.read(directory)
    ...   [s.tolist() for s in trace.sets["embed"][0]]
    [[3, 5], [3, 7]]
  """
  if not isinstance(steps, int) or steps < 1:
    raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
  axes = arguments.axes(axis_name)
  chosen = jax.eval_shape(
    zen_sync.zen_sync(axes, sparse=sparse).init, params
  ).leaves
  leaves = [
    traces.LeafInfo(
      name=name,
      shape=tuple(leaf.shape),
      dtype=leaf.dtype.name,
      is_table=name in chosen,
    )
    for name, leaf in leaf_util.named_leaves(params)
  ]
  if not chosen:
    raise ValueError(
      "`params` must hold a leaf that zen_sync sends sparse, but these are too"
      " small or too wide; name one by `sparse`."
    )
  return Recorder(directory, params, leaves, steps, axes, mesh)


def _nonzero_rows(leaves: Mapping[str, jax.Array | SparseRows]) -> RowSets:
  """Packs one bit for each nonzero row of a device."""
  return RowSets(
    (name, jnp.packbits(_is_nonzero(leaf))[None])
    for name, leaf in leaves.items()
  )


def _is_nonzero(table: jax.Array | SparseRows) -> jax.Array:
  """Returns `[R]` bool."""
  if not isinstance(table, SparseRows):
    return reference.row_mask(leaf_util.as_table(table, "row")).nonzero
  # Look-ups of one row may cancel each other, as they would in the array.
  rows = table.combine()
  nonzero = reference.row_mask(rows.values).nonzero
  none = jnp.zeros(rows.num_rows, bool)
  return none.at[rows.indices].set(nonzero, mode="drop")


def _on_host(packed: jax.Array) -> np.ndarray:
  """Fetches `[n, *]`, with the parts of other processes."""
  if packed.is_fully_addressable:
    return np.asarray(packed)
  return np.asarray(multihost_utils.process_allgather(packed, tiled=True))
