"""`zen_sync`: gradient synchronization as an optax transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes.registry import DENSE
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import ZenSyncState


def zen_sync(
  axis_name: arguments.AxisName,
  *,
  sparse: arguments.SparseSpec = None,
  scheme: arguments.SchemeName = "zen",
  op: str | None = None,
  output: str = "same",
  unit: arguments.Unit = "auto",
  partition: arguments.Partition = "hash",
  wire_dtype: Any = None,
  capacities: arguments.Capacities = None,
  plan: Plan | None = None,
  mesh: jax.sharding.Mesh | None = None,
  kernels: arguments.Kernels = "xla",
  hash_seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over devices, and sends only nonzero rows.

  Put it first in your optax chain, in place of `jax.lax.pmean`. It takes the
  gradients of each device's part of the batch and returns what `lax.pmean`
  returns, up to rounding and bit-identical on all devices. Leaves that are not
  sparse are all-reduced as usual. You can differentiate through it.

  Use it inside `shard_map`, `pmap` or `vmap` with an axis name. In plain `jit`
  over a mesh it sums the row gradients of `zenjax.value_and_grad` and, on
  explicit axes, arrays whose gradients were taken with `zenjax.unreduced`. XLA
  has summed all other gradients already, so they pass unchanged; if there are
  only such gradients, it raises an error.

  Only what is linear in the gradient may come before it. Everything else goes
  after it: clipping, Adam, `apply_if_finite`, and `zenjax.lazy_rows(..)` around
  optimizers of row gradients. `zenjax.check_step` finds mistakes.

  After some 20 steps call `zenjax.tune(opt_state)` once: buffers then have the
  sizes that your batches need.

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
    axis_name: The axis that devices are mapped over. With a tuple, from the
      slowest link to the fastest (`("host", "device")`), rows are summed within
      the fastest axis first.
    sparse: Which leaves are sent sparse: a pytree prefix of bools, or a
      callable `(name, leaf) -> bool` with the names that `zenjax.report` shows.
      The default is every leaf of two dimensions with at least 512 rows, 16,384
      elements, and more than four times as many rows as columns; with another
      `unit` than rows every leaf of 16,384 elements. A wrong choice costs time,
      never a wrong result.
    scheme: How sparse leaves are summed. `"zen"` sends each row to an owner,
      which sums it and sends it to everyone. Over several axes, owners are
      along the fastest one, where rows are summed first. `"dense_inside"` sums
      whole tables there, which is faster if the devices of a host together
      touch most rows, and `"flat"` takes all axes as one. For comparison there
      are `"all_gather"`, `"recursive_doubling"`, `"split_all_gather"` and
      `"split_dense_gather"` (SparCML), `"block_sparse"` (OmniReduce), and
      `"dense"` (`psum`).
    op: `"mean"` or `"sum"`. The default is the mean. In plain `jit` it is the
      sum, since the loss there is taken over the whole batch.
    output: The type of synchronized sparse leaves: `"same"` as the gradients,
      `"dense"` for arrays, `"rows"` for `SparseRows` with room for every row of
      the table.
    unit: The part of a leaf that is sent if any of it is nonzero: `"row"` (the
      last dimension), `"element"`, or a number of consecutive elements.
      `"auto"` means rows. Give `"element"` for gradients of which only a few
      elements are not zero, anywhere in the leaf. Otherwise most rows are sent.
    partition: Who sums a row: `"hash"` distributes rows over devices,
      `"columns"` splits every row, and a number `g` that divides the devices
      makes `g` column groups of hashed rows.
    wire_dtype: Rounds rows to this dtype before they are sent: a floating dtype
      of 8 bits or more, `jnp.int8` or `jnp.int4`. This is the only lossy
      option; sums are taken in float32. A dtype with the range of the leaf's
      dtype, such as bfloat16 for float32, is a cast. In any other, a row is
      sent with a scale in float32 (of float32 or narrower leaves). Each push
      and each pull then rounds an element by up to 1/254 (int8) or 1/14 (int4)
      of the largest magnitude in its row, or 1/16 of the element
      (float8_e4m3fn). Errors are not kept for later steps. With a scale, a row
      with NaN or Inf arrives as NaN.
    capacities: Buffer sizes `(push, pull)` in rows for all leaves, or a mapping
      from leaf name: rows that one device sends to one owner in a round, and
      rows that one owner returns, at least as many. Rows that overflow follow
      in further rounds.
      `zenjax.tune` finds the sizes for you.
    plan: What `zenjax.planner.plan` chose for every leaf, instead of `sparse`,
      `scheme`, `unit`, `partition`, `wire_dtype` and `capacities`.
    mesh: The mesh of a step in plain `jit`, if neither `jax.set_mesh` nor the
      gradients' types tell.
    kernels: `"xla"` for plain JAX, `"pallas"` for kernels written for TPUs and
      NVIDIA GPUs, which give the same bits, and an error where there is none.
    hash_seed: Draws another hash.

  Returns:
    A transformation whose state is a `ZenSyncState`.

  Raises:
    ValueError: An argument is out of range, a gradient was already summed by
      autodiff, a leaf does not fit an argument, or a plan was made for other
      leaves, devices or another JAX.
    TypeError: A leaf chosen explicitly is not floating; a gradient is float0,
      as `jax.grad(.., allow_int=True)` gives for integers.
    NotImplementedError: `kernels="pallas"` has no kernel for this device or
      table.
    NameError: In `update`, when no axis of that name is bound and no mesh has
      one.

  References:
    Wang et al., [ZEN: Empowering Distributed Training with Sparsity-driven
    Data Synchronization](https://www.usenix.org/conference/osdi25/presentation/wang-zhuang),
    OSDI 2025.
  """
  options = sync_options.check(
    axis_name,
    sparse=sparse,
    scheme=scheme,
    op=op,
    output=output,
    unit=unit,
    partition=partition,
    wire_dtype=wire_dtype,
    capacities=capacities,
    plan=plan,
    mesh=mesh,
    kernels=kernels,
    hash_seed=hash_seed,
  )

  def init_fn(params: optax.Params) -> Any:
    return _init(params, options)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    del params, extra_args
    if not isinstance(state, ZenSyncState):
      raise TypeError(
        "`state` of zen_sync must be a ZenSyncState, got"
        f" {type(state).__name__}. Make it with `tx.init(params)`, and call"
        " `tx.update(grads, opt_state, params)`."
      )
    if options.plan:
      leaves = leaf_util.named_leaves(updates, is_rows)
      require_tree(options.plan, leaf_util.shapes(leaves))
    around = collectives.mesh_around(options.axes, updates, mesh)
    if around is not None:
      return whole_batch.sync(updates, state, around, options)
    return gradient_tree.sync_tree(updates, state, options)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(params: optax.Params, options: Options) -> ZenSyncState:
  leaf_util.refuse_sharded(params, "params", "zen_sync")
  if options.plan:
    require_tree(options.plan, leaf_util.shapes(leaf_util.named_leaves(params)))
  if options.scheme == DENSE:
    return sync_state.empty([], options)
  chosen = leaf_util.select(params, options.sparse, options.unit)
  if not options.plan:  # A plan may well say that nothing pays.
    leaf_util.warn_of_none(params, options.sparse, chosen, "sparse")
  named = leaf_util.named_leaves(params, is_rows)
  names = [name for (name, _), sparse in zip(named, chosen) if sparse]
  return sync_state.empty(names, options)


def sparse_pmean(x: Any, axis_name: arguments.AxisName, **kwargs: Any) -> Any:
  """Averages one array over devices like `lax.pmean`, sending nonzero rows.

  Use it for a single array with many rows of zeros, or for SparseRows, outside
  of an optimizer. You can differentiate through it.

  Args:
    x: This device's array or SparseRows. Rows are the last dimension unless
      `unit` says otherwise.
    axis_name: The axis that devices are mapped over, or a tuple of axes from
      the slowest link to the fastest.
    **kwargs: Options of `zen_sync`, such as `scheme`, `output`, `unit` and
      `wire_dtype`; not `sparse`, `op` and `mesh`.

  Returns:
    The mean over devices, equal on all, in the shape and dtype of `x`: an array
    or SparseRows, as `output` says.

  Raises:
    TypeError: `x` is not floating, or an option has a wrong type.
    ValueError: An option is out of range, or does not fit `x`.
    NameError: The axis is not bound by `shard_map`, `pmap` or `vmap`.

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
  return _reduced(x, axis_name, "mean", kwargs)


def sparse_psum(x: Any, axis_name: arguments.AxisName, **kwargs: Any) -> Any:
  """Sums one array over devices like `lax.psum`, sending nonzero rows.

  Use it for a single array with many rows of zeros, or for SparseRows, outside
  of an optimizer. You can differentiate through it.

  Args:
    x: This device's array or SparseRows. Rows are the last dimension unless
      `unit` says otherwise.
    axis_name: The axis that devices are mapped over, or a tuple of axes from
      the slowest link to the fastest.
    **kwargs: Options of `zen_sync`, such as `scheme`, `output`, `unit` and
      `wire_dtype`; not `sparse`, `op` and `mesh`.

  Returns:
    The sum over devices, equal on all, in the shape and dtype of `x`: an array
    or SparseRows, as `output` says.

  Raises:
    TypeError: `x` is not floating, or an option has a wrong type.
    ValueError: An option is out of range, or does not fit `x`.
    NameError: The axis is not bound by `shard_map`, `pmap` or `vmap`.

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
  return _reduced(x, axis_name, "sum", kwargs)


def _reduced(
  x: Any, axis_name: arguments.AxisName, op: str, given: dict[str, Any]
) -> Any:
  dtype = getattr(x, "dtype", type(x).__name__)
  if not hasattr(x, "dtype") or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"`x` must be an array of floats or SparseRows, got {dtype}. Use"
      " `jax.lax.psum` or `pmean`."
    )
  if refused := sorted({"sparse", "mesh", "op"} & set(given)):
    raise TypeError(
      f"`{refused[0]}` is not an option of sparse_pmean and sparse_psum. Leave"
      " it out."
    )
  options = sync_options.check(
    axis_name, op=op, sparse=True, mesh=None, **given
  )
  synced, _ = gradient_tree.sync_tree(x, None, options)
  return synced
