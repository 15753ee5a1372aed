"""Records which rows of each table's gradient every device touched.

`Recorder.rows` runs inside a step, and packs one bit for each row of a
gradient. `Recorder.write` runs outside, and appends the bits of all devices to
a trace. Letters: `n` devices, `R` rows, `D` width.
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


@dataclasses.dataclass(eq=False, repr=False)
class Recorder:
  """Writes the first steps of a run as a trace.

  `zenjax.planner.record` makes it. Call `rows` inside a training step and
  `write` after it, as long as `wants_more` is true.

  Attributes:
    written: Number of steps that were written.

  Example:
    >>> import tempfile
    >>> import zenjax
    >>> params = {"embed": jnp.zeros((4096, 16)), "bias": jnp.zeros(16)}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   recorder = zenjax.planner.record(directory, params, steps=2)
    ...   [t.name for t in recorder.tables], recorder.wants_more
    (['embed'], True)
  """

  _directory: str | os.PathLike
  _leaves: Sequence[traces.LeafInfo]
  _steps: int
  _axes: Axes
  _mesh: Mesh | None
  _look_ups: dict[str, int] = dataclasses.field(default_factory=dict)
  _header: traces.Header | None = None
  written: int = 0

  @property
  def tables(self) -> list[traces.LeafInfo]:
    """The tables whose rows are recorded."""
    return [leaf for leaf in self._leaves if leaf.is_table]

  @property
  def wants_more(self) -> bool:
    """True until the requested number of steps has been written."""
    return self.written < self._steps

  def rows(self, grads: Any) -> RowSets:
    """Packs one bit for each row of the gradients of tables.

    Call it inside a step where gradients are local. The result leaves
    `shard_map` through `out_specs=P(axis_name)`, and a step of `data_parallel`
    in its `aux`. In plain `jit`, pass the SparseRows of zenjax's
    `value_and_grad`, because XLA has already summed arrays over devices.

    Args:
      grads: Gradients of the parameters that `record` was given, arrays or
        SparseRows. For SparseRows, no array of `R` rows is made.

    Returns:
      For each table `[n, ceil(R / 8)]` uint8, for `write`.

    Raises:
      ValueError: In plain `jit` over several devices, a gradient is an array,
        or the mesh is not known.
    """
    leaves = dict(leaf_util.named_leaves(grads, is_rows))
    leaves = {table.name: leaves[table.name] for table in self.tables}
    # In plain jit, gradients are those from all devices of this mesh. Inside
    # `shard_map` there is no such mesh, because gradients are local.
    mesh = collectives.mesh_around(self._axes, leaves, self._mesh)
    n = math.prod(mesh.shape[axis] for axis in self._axes) if mesh else 1
    if mesh is None and jax.device_count() > 1:
      try:
        collectives.size(self._axes)
      except NameError as error:
        raise ValueError(
          "`axis_name` of `record` must name axes of shard_map, or of a mesh,"
          f" got {self._axes}. In plain jit, give `record` the `mesh=`, too."
        ) from error
    for name, leaf in leaves.items():
      if isinstance(leaf, SparseRows):
        self._look_ups[name] = -(-leaf.capacity // n)
    if mesh is None or n == 1:
      return _nonzero_rows(leaves)
    if arrays := [name for name, leaf in leaves.items() if not is_rows(leaf)]:
      raise ValueError(
        "`grads` must hold SparseRows of tables in plain jit, but the gradients"
        f" of {arrays} are arrays, which XLA has already summed over devices."
        " Take gradients with `zenjax.value_and_grad`. If you do, the loss does"
        " more than look up their rows: leave them out with `sparse=` of"
        " `record`."
      )
    split = PartitionSpec(self._axes)
    given = {name: filled_up(leaf, n) for name, leaf in leaves.items()}
    if set(self._axes) & compat.explicit_of(mesh):
      over_devices = NamedSharding(mesh, split)
      given = jax.tree.map(
        lambda x: jax.sharding.reshard(x, over_devices), given
      )
    mapped = jax.shard_map(
      _nonzero_rows, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    return mapped(given)

  def write(self, packed: Mapping[str, jax.Array]) -> None:
    """Writes one step of the trace.

    In a program of several processes, call it in all of them. One writes.

    Args:
      packed: The result of `rows`, `[n, *]` for each table.

    Raises:
      ValueError: All steps have been written already.
    """
    if not self.wants_more:
      raise ValueError(
        f"`write` was called after all {self._steps} `steps` had been written."
        " Call it only if `wants_more` is true."
      )
    bits = [_on_host(packed[t.name]) for t in self.tables]
    if jax.process_index() == 0:
      leaves = [
        dataclasses.replace(leaf, look_ups=self._look_ups.get(leaf.name))
        for leaf in self._leaves
      ]
      if self._header is None:
        self._header = traces.Header(leaves=tuple(leaves), devices=len(bits[0]))
        traces.create(self._directory, self._header)
      sets = [
        [np.flatnonzero(np.unpackbits(x, count=table.rows)) for x in each]
        for table, each in zip(self.tables, bits)
      ]
      traces.write_step(self._directory, self._header, self.written, sets)
    self.written += 1


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

  Use it to plan for more devices or larger batches than you have now: the
  planner derives from the trace how many different rows any number of devices
  would touch together. If devices read their data in order, record steps that
  are far apart, because neighboring steps touch similar rows.

  Args:
    directory: Where to write the trace. It must be missing or empty, and is
      created with the first step.
    params: Parameters, or their shapes.
    steps: Number of steps to record.
    sparse: Selects the parameters that are tables: a pytree prefix of bools, or
      a callable `(name, leaf) -> bool`. By default large and tall ones.
    axis_name: Mesh axes over which the batch is split.
    mesh: The mesh of these axes, which plain `jit` needs; by default the mesh
      of `params`.

  Returns:
    A `Recorder`.

  Raises:
    ValueError: `directory` is not empty, or `params` has no table.

  Example:
    >>> import tempfile
    >>> import zenjax
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"embed": jnp.zeros((4096, 16)), "bias": jnp.zeros(16)}
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   recorder = zenjax.planner.record(directory, params, steps=1)
    ...   touched = jax.shard_map(
    ...     lambda ids: recorder.rows(
    ...       {"embed": params["embed"].at[ids].set(1.0), "bias": None}
    ...     ),
    ...     mesh=mesh, in_specs=P("data"), out_specs=P("data"),
    ...   )(jnp.array([3, 5, 3, 7]))
    ...   recorder.write(touched)
    ...   trace = zenjax.planner.traces.read(directory)
    ...   [s.tolist() for s in trace.sets["embed"][0]]
    [[3, 5], [3, 7]]
  """
  if not isinstance(steps, int) or steps < 1:
    raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
  traces.check_free(directory)
  axes = arguments.axes(axis_name)
  tx = zen_sync.zen_sync(axes, sparse=sparse)
  chosen = jax.eval_shape(tx.init, params).leaves
  if not chosen:
    raise ValueError(
      "`params` must hold a table that zen_sync sends sparsely, but none"
      " has two dimensions, enough rows and few columns. Choose tables with"
      " `sparse=`."
    )
  leaves = [
    traces.LeafInfo(
      name=name,
      shape=tuple(leaf.shape),
      dtype=leaf.dtype.name,
      is_table=name in chosen,
    )
    for name, leaf in leaf_util.named_leaves(params)
  ]
  mesh = mesh or collectives.mesh_around(axes, params, None)
  return Recorder(directory, leaves, steps, axes, mesh)


def _nonzero_rows(leaves: Mapping[str, jax.Array | SparseRows]) -> RowSets:
  """Packs one bit for each nonzero row of this device's gradients."""
  return RowSets(
    (name, jnp.packbits(_is_nonzero(leaf))[None])
    for name, leaf in leaves.items()
  )


def _is_nonzero(table: jax.Array | SparseRows) -> jax.Array:
  """Returns `[R]` bool: which rows of a gradient are not zero."""
  if not isinstance(table, SparseRows):
    return reference.row_mask(leaf_util.as_table(table, "row")).nonzero
  # Gradients of several lookups of a row may cancel each other, as in an array.
  rows = table.combine()
  nonzero = reference.row_mask(rows.values).nonzero
  none = jnp.zeros(rows.num_rows, bool)
  return none.at[rows.indices].set(nonzero, mode="drop")


def _on_host(packed: jax.Array) -> np.ndarray:
  """Fetches `[n, *]`, including the parts of other processes."""
  if packed.is_fully_addressable:
    return np.asarray(packed)
  return np.asarray(multihost_utils.process_allgather(packed, tiled=True))
