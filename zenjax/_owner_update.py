"""`owner_update`: owners of rows update them, and hold the state alone."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax import _auto
from zenjax import _group
from zenjax import _options
from zenjax import _owned
from zenjax import _parts
from zenjax import _plan
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax import _tables
from zenjax._options import Capacities
from zenjax._options import Options
from zenjax._options import SparseSpec
from zenjax._plan import Partition
from zenjax._rows import _on_rows
from zenjax._rows import _separable
from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE


class OwnerState(NamedTuple):
  """State of `owner_update`.

  Attributes:
    sync: Statistics, as of `zen_sync`.
    inner: Of the optimizer within, with `Owned` parts of tables.
  """

  sync: _state.ZenSyncState
  inner: Any


def owner_update(
  tx: optax.GradientTransformation,
  axis_name: str,
  *,
  sparse: SparseSpec = None,
  op: str = "mean",
  partition: Partition = "auto",
  wire_dtype: Any = None,
  capacities: Capacities = None,
  hash_seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes gradients and runs `tx` at the owner of each row.

  In the place of `chain(zen_sync(axis_name), lazy_rows(tx))`. There every
  device gets all sums and updates all of them, with a state of its own of every
  table. Here the owner of a row, who sums its gradients, also updates it, and
  sends the update back in the place of the sum: as many bytes, an n-th of the
  optimizer's work and of its memory on each of `n` devices, as in ZeRO. Losses
  are the same. Leaves that do not travel sparse take `pmean` and `tx` on every
  device.

  The state differs between devices: make it with `zenjax.init`, and place it by
  `zenjax.state_specs`. Rows that no device touched keep state and parameters,
  as in `lazy_rows`.

  Args:
    tx: What updates a row by that row's gradient, state and parameters.
    axis_name: One axis that devices are mapped over.
    sparse: As for `zen_sync`, like all that follow.
    op: See there.
    partition: See there. What is no business of single elements, as
      `row_adagrad`, needs whole rows: then `"auto"` is `"hash"`.
    wire_dtype: See there; updates are cast too.
    capacities: See there.
    hash_seed: See there.

  Returns:
    A transformation from local gradients, arrays or SparseRows, to updates that
    are equal on all devices, for `zenjax.apply_updates`.

  Raises:
    ValueError: An argument is out of range; `axis_name` is more than one axis;
      `tx` needs more than the row (a norm over all updates), or whole rows with
      a `partition` by columns; the state was not made by `zenjax.init`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> adagrad = optax.adagrad(1.0, initial_accumulator_value=0.0)
    >>> tx = zenjax.owner_update(adagrad, "data", sparse=True)
    >>> table = jnp.zeros((1000, 8))
    >>> state = zenjax.init(tx, table, mesh, "data")
    >>> squares = state.inner[0].sum_of_squares.part
    >>> squares.addressable_shards[0].data.size, table.size  # half, padded
    (4096, 8000)
    >>> def step(table, state, ids):
    ...   loss, grads = zenjax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, state = tx.update(grads, state, table)
    ...   return zenjax.apply_updates(table, updates), state, loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> table, state, _ = step(table, state, jnp.array([3, 3, 5, 9]))
    >>> table[jnp.array([3, 4, 5]), 0].round(3).tolist()
    [-1.0, 0.0, -1.0]

  References:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020, stage 1.
  """
  options = _options.check(
    axis_name,
    **_options.DEFAULTS
    | dict(
      sparse=sparse,
      op=op,
      partition=partition,
      wire_dtype=wire_dtype,
      capacities=capacities,
      hash_seed=hash_seed,
    ),
  )
  if len(options.axes) > 1:
    raise ValueError(
      f"`axis_name` must be one axis for owner_update, got {axis_name!r}; give"
      " the axis of the fastest links, and average over the others before, or"
      " use `zen_sync` and `lazy_rows`."
    )
  transform = _Transform(optax.with_extra_args_support(tx), options)
  return optax.GradientTransformationExtraArgs(transform.init, transform.update)


@dataclasses.dataclass(frozen=True)
class _Transform:
  inner: optax.GradientTransformationExtraArgs
  options: Options

  def init(self, params: Any) -> OwnerState:
    for axis in self.options.axes:
      try:
        lax.axis_size(axis)
      except NameError as error:
        raise ValueError(
          "`owner_update` keeps a part of the state on each device, so it must"
          f" be made where axis {axis!r} is bound; call `zenjax.init(tx,"
          f" params, mesh, {axis!r})` instead of `tx.init`."
        ) from error
    context = _group.context_of(self.options)
    chosen = _select.select(params, self.options.sparse, self.options.unit)
    plans = self._plans(params, chosen, context)
    leaves, structure = jax.tree.flatten(params)
    for i, plan in plans.items():
      slots = jnp.arange(plan.layout.slots, dtype=jnp.int32)
      table = _group.as_varying(leaves[i], context.axes)
      leaves[i] = _owned.own_rows(table, slots, plan, context.axes[0])
    inner = self.inner.init(structure.unflatten(leaves))
    inner = self._wrapped(inner, structure, plans, context)
    names = [plan.table.name for plan in plans.values()]
    memory = {name: _state.empty_leaf(None) for name in names}
    sync = _state.ZenSyncState(jnp.zeros((), jnp.int32), memory)
    return OwnerState(sync, inner)

  def update(
    self, updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, OwnerState]:
    options, context = self.options, _group.context_of(self.options)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    leaves = _group.local_leaves(updates, context)
    chosen = _select.select(updates, options.sparse, options.unit)
    _group.check_state(leaves, chosen, state.sync)
    plans = self._plans(updates, chosen, context)
    dense = dataclasses.replace(options, output="dense")
    grads = [
      leaf if i in plans else _parts.total(leaf, DENSE["dense"], dense, context)
      for i, (_, leaf) in enumerate(leaves)
    ]
    owner = _owned.Owner(
      inner=self.inner,
      structure=structure,
      plans=plans,
      grads=grads,
      params=None if params is None else structure.flatten_up_to(params),
      extra=extra,
      axis=context.axes[0],
      scaled=context.scaled,
    )
    inner = _owned.unwrapped(state.inner)
    out, sync = [None] * len(leaves), state.sync
    if plans:
      tables, inner, sync = self._exchange(
        leaves, owner, inner, state.sync, context
      )
      for i, value in tables.items():
        out[i] = value
    rest, inner = owner.finish(inner)
    out = [rest[i] if i not in plans else x for i, x in enumerate(out)]
    sync = sync._replace(step=sync.step + 1)
    inner = self._wrapped(inner, structure, plans, context)
    return structure.unflatten(out), OwnerState(sync, inner)

  def _exchange(self, leaves, owner, inner, sync, context):
    """Updates of tables by the leaf's number, the state, statistics."""
    plans = owner.plans
    group = [leaves[i] for i in plans]
    result = _sync.sync(
      [_parts.as_table(leaf, self.options) for _, leaf in group],
      list(plans.values()),
      SPARSE["zen"],
      dataclasses.replace(context, mean=False),
      owner=owner,
      owned=inner,
    )
    tables, memory = {}, dict(sync.leaves)
    for k, ((i, plan), named) in enumerate(zip(plans.items(), group)):
      tables[i] = _parts.leave(
        named, result.targets[k], result.first[k], plan, self.options
      )
      memory[plan.table.name] = _state.after_step(
        memory[plan.table.name],
        sync.step,
        result.outcomes[k],
        plan,
        context,
        _auto.Choice("zen", plan.column_groups),
      )
    return tables, result.owned, sync._replace(leaves=memory)

  def _plans(self, tree, chosen, context):
    """Of the leaves that travel sparse, by number.

    Owners are those of arrays, whatever form gradients have: the state is laid
    out by them.
    """
    named = _select.named_leaves(tree, is_rows)
    at = [i for i, sparse in enumerate(chosen) if sparse]
    if not at:
      return {}
    by_rows, by_columns = _separable.kinds(self.inner, tree, chosen)
    if not by_rows:
      raise ValueError(
        "`tx` must update a row by that row alone, but it gave rows other"
        " updates than with other rows beside them, or could not be tried"
        " without further arguments; transforms of all updates, as"
        " `clip_by_global_norm`, need `zen_sync` and `lazy_rows`."
      )
    if not by_columns and self.options.partition not in ("auto", "hash"):
      raise ValueError(
        "`partition` must be 'hash' or 'auto' where `tx` needs whole rows, as"
        f" row_adagrad does, got {self.options.partition!r}."
      )
    wanted = self.options.partition if by_columns else "hash"
    columns = []
    for i in at:
      name, leaf = named[i]
      shape: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      table = _tables.table_of(name, shape, self.options)
      columns.append(
        _plan.choose_column_groups(table, context.sizes[-1], wanted)
      )
    group = [named[i] for i in at]
    scheme = SPARSE["zen"]
    plans = _tables.plans(group, scheme, self.options, context, columns)
    return dict(zip(at, plans))

  def _wrapped(self, inner, structure, plans, context):
    """The state with what has rows of a table marked as a part."""
    at = [_on_rows.At()] * structure.num_leaves
    for i, plan in plans.items():
      at[i] = _on_rows.At(jnp.zeros(0, jnp.int32), plan.layout.slots)
    at = structure.unflatten(at)
    tags = _trees.tagged(self.inner, inner, at, _on_rows.At())

    def wrap(leaf, at):
      if not at.has(leaf):
        return leaf
      return _owned.Owned(_group.as_varying(leaf, context.axes))

    return jax.tree.map(wrap, inner, tags)
