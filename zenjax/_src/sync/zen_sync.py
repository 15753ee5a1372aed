"""`zen_sync`: gradient synchronization as an optax transformation."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import Capacities
from zenjax._src.core.arguments import Partition
from zenjax._src.core.arguments import SchemeName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.arguments import Unit
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sharded_tables
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes.registry import DENSE
from zenjax._src.sync import chains
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_options import Tuning


def zen_sync(
  axis_name: AxisName,
  *,
  sparse: SparseSpec = None,
  scheme: SchemeName = "zen",
  op: str | None = None,
  on_overflow: str = "exact",
  output: str = "same",
  unit: Unit = "auto",
  partition: Partition = "auto",
  wire_dtype: Any = None,
  capacities: Capacities = None,
  plan: Plan | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tuning: Tuning | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over devices, sending only rows that are not zero.

  Unlike other optax transformations this one takes *local* gradients, those
  of this device's part of the batch, and returns *global* ones, equal on all
  devices: what `jax.lax.pmean` returns, to rounding, for every input. It is
  used inside `shard_map`, `pmap` or `vmap` with an axis name, or with row
  gradients in plain `jit` (below). In a chain nothing stands before it but a
  sparsifier, or what is linear in gradients. Leaves that do not travel
  sparse take `pmean`, with its dtypes (means of integers are floating), small
  ones together in one sum where CPUs of several processes would send them one
  after the other, so the one line replaces the user's own.

  A gradient may be an array, of which rows of zeros stay where they are, or
  `SparseRows`, as `zenjax.value_and_grad` gives them of tables that are only
  looked up. What comes out for these are the rows of all devices, each once,
  for `zenjax.lazy_rows`, with room for the look-ups of all devices, or the
  whole table if that is less. Nothing on the way has the size of the table,
  except what `scheme="split_dense_gather"` pulls, and where this room is the
  whole table: processes on CPUs then exchange it as an array. Rows of a leaf
  that does not travel sparse (a small table, `sparse=False`), or that travels
  by `"dense"` or `"ring"`, are made an array, which is summed: those that come
  out have room for the whole table.

  In plain `jit` over a mesh the loss is that of the whole batch, and parts of
  its gradient are summed, never averaged, in a `shard_map` of zen_sync's own:

  - `SparseRows`, on automatic axes and explicit ones. A table may be split by
    columns over another axis, an explicit one if rows are not to be gathered
    over it.
  - On explicit axes, arrays that nobody has summed yet: gradients by
    `zenjax.unreduced(params, axis_name)`. Accumulated in a scan they stay so
    until zen_sync, and a sparsifier before it selects from each device's part.

  All else XLA has summed, and it passes as it is, however it lies on the mesh.
  No norm, mean or random number means anything else there than without
  zen_sync.

  Under `shard_map(check_vma=True)` autodiff sums gradients of replicated
  parameters by itself; take them by `zenjax.unreduced(params, axis_name)`, too.

  Around it `optax.MultiSteps` accumulates what differs between devices: make
  that state with `zenjax.init_state`, as for `on_overflow="carry"`. It needs
  arrays, of `jax.grad`: SparseRows of several batches are added with `+` and
  given to one `update`.

  A leaf is synchronized once along an axis: `zenjax.init_state` refuses a
  chain with another zen_sync, or `sharded_optimizer`, for it. `tx.init`
  cannot: it sees one transformation at a time.

  Derivatives through it, of an update by what it was made of, are those of
  `jax.lax.pmean`, rounding for the wire left aside, in either direction and of
  any order. SparseRows come out with a derivative where their ids decide which
  rows they are. Else, and of what `on_overflow="carry"` keeps, a
  NotImplementedError says so.

  Transforms that branch on local gradients (`optax.apply_if_finite`) go after
  zen_sync: `chain(zen_sync(..), apply_if_finite(adam(..), ..))`. Around it
  they would send devices down different branches, and the devices hang.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.scale(2))
    >>> params = jnp.zeros((6, 2))
    >>> grads = jnp.zeros((2, 6, 2)).at[0, 1].set(2.0).at[1, 4].set(4.0)
    >>> update = jax.vmap(
    ...   lambda g: tx.update(g, tx.init(params))[0], axis_name="data"
    ... )
    >>> jax.jit(update)(grads)[0, :, 0].tolist()  # the same on both devices
    [0.0, 2.0, 0.0, 0.0, 4.0, 0.0]

  Args:
    axis_name: The axis that devices are mapped over; a tuple from the slowest
      link to the fastest (`("host", "device")`) for the hierarchical form.
    sparse: Which leaves travel sparse: a pytree prefix of bools, or a
      callable `(name, leaf) -> bool`, named as in `zenjax.report`. By default
      those of two dimensions, at least 512 rows and 16,384 elements, and more
      than 4 times as many rows as columns; with another `unit` than rows, any
      of 16,384. A leaf judged wrongly costs time, never a wrong result. A
      `UserWarning` tells of a callable that chooses no leaf.
    scheme: How sparse leaves are summed: `"zen"` (push, merge, pull; between
      two devices that have arrays alone `"all_gather"`, which is fewer bytes
      then, unless `partition` says who sums, `capacities` are given or rows
      may wait), or one
      of the systems before it: `"all_gather"` (everyone gets all rows),
      `"recursive_doubling"`, `"split_all_gather"`, `"split_dense_gather"`
      (SparCML), `"block_sparse"` (OmniReduce), `"dense"` (`psum`) and
      `"ring"` (the same bytes, step by step). `"auto"` predicts the time of
      `zen`, `all_gather`, `recursive_doubling` and `dense` for every leaf. Of
      those within 5 % of the fastest it takes the one with the fewest
      collectives, or `dense` if that one needs more than 0.8 of dense's time.
      What comes as SparseRows, comes out as rows or may wait never travels
      dense. `zenjax.report` shows the times.
    op: `"mean"` or `"sum"`. By default the mean, and in plain `jit` the sum,
      the only one there.
    on_overflow: `"exact"` exchanges rows that do not fit the first round's
      buffers in further rounds, or sums the whole array where that is cheaper;
      SparseRows that travel as rows take further rounds. `"carry"` is of
      arrays alone: it keeps these rows for the next step in a per-device
      residual; make that state with `zenjax.init_state`.
    output: What comes out for leaves that travel sparse: `"same"` as came in,
      `"dense"` for arrays, `"rows"` for `SparseRows`. Of an array these hold
      as many rows as the table, the only exact bound, and with
      `on_overflow="carry"` as many as one round brings.
    unit: What is sent or not as a whole: `"row"` (the last dimension),
      `"element"`, or a number of consecutive elements. SparseRows are rows.
      `"auto"` are rows, or what the scheme has in their place. Give
      `"element"` behind a sparsifier (`top_k`, `threshold`, `random_k`, with
      `error_feedback` or without), or all of such a leaf is sent.
    partition: Who sums a row in `scheme="zen"`: `"hash"` spreads rows over
      devices, `"columns"` splits every row, a number `g` that divides the
      devices makes `g` column groups of hashed rows; `"auto"` takes the fewest
      bytes by formula. Other schemes divide rows in ways of their own.
      `scheme="auto"` chooses column groups by predicted time, and refuses
      another value than `"auto"` here.
    wire_dtype: Cast rows to this floating dtype for the wire. The only lossy
      switch; sums stay in float32. It must have the range of the leaf's dtype,
      as bfloat16 has float32's; float16 has it of float16. With
      `unit="element"` and means, float16 is taken for any leaf, for
      `error_feedback(wire_dtype=jnp.float16)` before it has rounded to that.
    capacities: Rows that the first round's buffers hold, `(push, pull)` for
      all leaves, cut to the rows that each has, or a mapping from leaf name;
      `zenjax.report` advises them. The rest follows in parts of these, so small
      ones cost turns, never rows; with `on_overflow="carry"` it waits for the
      next step. Of large ones that pay in no step a `UserWarning` says so.
    plan: What `zenjax.planner.plan` chose for every leaf, in the place of
      `sparse`, `scheme`, `partition`, `wire_dtype`, `capacities` and
      `tuning.overlap`.
    mesh: Over which plain `jit` runs, where neither `jax.set_mesh` nor the
      gradients' types tell. Of no use where the axis is mapped.
    tuning: How the exchange runs, for experts: see `zenjax.Tuning`.

  Returns:
    A transformation whose state is a `ZenSyncState`.

  Raises:
    ValueError: An argument is out of range, a gradient was already summed by
      autodiff, a leaf does not fit what was asked for, or a plan was made for
      other leaves, devices or another JAX.
    TypeError: A leaf chosen explicitly is not floating; a gradient is float0,
      as `jax.grad(.., allow_int=True)` gives of integers.
    NotImplementedError: `Tuning(exchange="remote_copies")` or
      `Tuning(kernels="pallas")` cannot serve what it was given; for a platform
      without such kernels it says so when a step is compiled.
    NameError: In `update`, when no axis of that name is bound and no mesh has
      one.

  References:
    Wang et al., [ZEN: Empowering Distributed Training with Sparsity-driven
    Data Synchronization](https://www.usenix.org/conference/osdi25/presentation/wang-zhuang),
    OSDI 2025.
  """
  given = locals()
  options = sync_options.check(**given)

  def init_fn(params: optax.Params) -> Any:
    return _init(params, options)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, sync_state.ZenSyncState]:
    del params, extra_args
    around = collectives.mesh_around(options.axes, updates, mesh)
    if around is not None:
      if op == "mean":
        raise ValueError(whole_batch.NO_MEAN)
      of_parts = lambda **changed: zen_sync(**(given | changed))
      return whole_batch.sync(of_parts, updates, state, around, options)
    synced, memory = gradient_tree.sync_tree(updates, state, options)
    step = processes.compared(state.step + 1, "zen_sync", options, updates)
    return synced, state._replace(step=step, leaves=memory)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(params: optax.Params, options: Options) -> sync_state.ZenSyncState:
  sharded_tables.refuse(params, "params", "zen_sync")
  chains.will_sync("zen_sync", params, options)
  leaves: dict[str, sync_state.LeafState] = {}
  named = leaf_util.named_leaves(params, is_rows)
  if options.plan:
    require_tree(options.plan, leaf_util.shapes(leaf_util.named_leaves(params)))
  if options.scheme not in DENSE:
    chosen = leaf_util.select(params, options.sparse, options.unit)
    if not options.plan:  # A plan may well say that nothing pays.
      leaf_util.warn_of_none(params, options.sparse, chosen, "sparse")
    for (name, leaf), sparse in zip(named, chosen):
      if sparse:
        residual = None if options.exact else _residual(leaf, options)
        # Where a residual is kept its axes are bound.
        devices = 0 if options.exact else collectives.size(options.axes)
        leaves[name] = sync_state.empty_leaf(
          residual, mean=options.mean, devices=devices
        )
  return sync_state.ZenSyncState(jnp.zeros((), jnp.int32), leaves)


def _residual(leaf: jax.Array, options: Options) -> jax.Array:
  for axis in options.axes:
    try:
      lax.axis_size(axis)
    except NameError as error:
      raise ValueError(
        "`on_overflow='carry'` keeps a residual on each device, so its state"
        f" must be made where axis {axis!r} is bound; call"
        " `zenjax.init_state(tx,"
        " params, mesh, axis_name)` with the `axis_name` that zen_sync has,"
        " instead of `tx.init`."
      ) from error
  zeros = jnp.zeros((1, *leaf.shape), leaf.dtype)
  return gradient_tree.as_varying(zeros, options.axes)


def sparse_pmean(x: Any, axis_name: AxisName, **kwargs: Any) -> Any:
  """`lax.pmean` of one array of which most rows are zero, or of SparseRows.

  Args:
    x: Local array; rows are its last dimension unless `unit` says otherwise.
    axis_name: As for `zen_sync`.
    **kwargs: As for `zen_sync`, but for `sparse` and `op`.

  Returns:
    The mean over devices, equal on all: of `x`'s shape and dtype, an array or
    SparseRows as `output` says. Its derivatives are those of `lax.pmean`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> x = jnp.zeros((2, 4, 1)).at[0, 3].set(1.0)
    >>> mean = jax.vmap(
    ...   lambda x: zenjax.sparse_pmean(x, "data"), axis_name="data"
    ... )
    >>> jax.jit(mean)(x)[1, :, 0].tolist()
    [0.0, 0.0, 0.0, 0.5]
  """
  return _one(x, axis_name, "mean", kwargs)


def sparse_psum(x: Any, axis_name: AxisName, **kwargs: Any) -> Any:
  """`lax.psum` of one array of which most rows are zero, or of SparseRows.

  As `sparse_pmean`, without the division.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> x = jnp.zeros((2, 4, 1)).at[:, 3].set(1.0)
    >>> total = jax.vmap(
    ...   lambda x: zenjax.sparse_psum(x, "data"), axis_name="data"
    ... )
    >>> jax.jit(total)(x)[0, :, 0].tolist()
    [0.0, 0.0, 0.0, 2.0]
  """
  return _one(x, axis_name, "sum", kwargs)


def _one(x: Any, axis_name: AxisName, op: str, kwargs: dict[str, Any]) -> Any:
  if kwargs.get("on_overflow", "exact") != "exact":
    raise ValueError(
      "`on_overflow` must be 'exact' here, got"
      f" {kwargs['on_overflow']!r}: there is no state to carry rows in; use"
      " `zenjax.zen_sync`."
    )
  if decided := sorted({"op", "sparse", "mesh"} & set(kwargs)):
    raise TypeError(f"{decided} are decided by the function itself.")
  options = sync_options.check(axis_name, sparse=True, op=op, **kwargs)
  synced, _ = gradient_tree.sync_tree(x, None, options)
  return synced
