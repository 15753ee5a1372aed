"""The transformation of `owner_update`, and its state."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax import _auto
from zenjax import _group
from zenjax import _once
from zenjax import _owned
from zenjax import _parts
from zenjax import _plan
from zenjax import _ran
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax import _tables
from zenjax import _totals
from zenjax._options import Options
from zenjax._rows import _on_rows
from zenjax._rows import _separable
from zenjax._rows._sparse_rows import is_rows
from zenjax._schemes import SPARSE
from zenjax.kernels import _dispatch


class OwnerState(NamedTuple):
  """State of `owner_update`.

  Attributes:
    sync: Statistics, as of `zen_sync`.
    inner: Of the optimizer within, with `Owned` parts of tables.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.owner_update(optax.adam(1e-3), "data")
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> params = {"table": jnp.zeros((600, 32))}
    >>> state = zenjax.init(tx, params, mesh, "data")
    >>> int(state.sync.step), sorted(state.sync.leaves)
    (0, ['table'])
  """

  sync: _state.ZenSyncState
  inner: Any


@dataclasses.dataclass(frozen=True)
class Owners:
  """Devices that each update the rows that they sum."""

  inner: optax.GradientTransformationExtraArgs
  options: Options

  def init(self, params: Any) -> OwnerState:
    for axis in self.options.axes:
      try:
        lax.axis_size(axis)
      except NameError as error:
        raise ValueError(
          "`owner_update` keeps a part of the state on each device, so it must"
          f" be made where its axis {axis!r} is bound; call `zenjax.init(tx,"
          " params, mesh, axis_name)` instead of `tx.init`, with one axis_name"
          " for both."
        ) from error
    _once.will_sync("owner_update", params, self.options.axes)
    context = _group.context_of(self.options)
    chosen = _select.select(params, self.options.sparse, self.options.unit)
    plans = self._plans(params, chosen, context)
    leaves, structure = jax.tree.flatten(params)
    for i, plan in plans.items():
      slots = jnp.arange(plan.layout.slots, dtype=jnp.int32)
      table = _parts.as_table(leaves[i], self.options)
      table = _group.as_varying(table, context.axes)
      leaves[i] = _owned.own_rows(table, slots, plan, context.axes[0])
    inner = self.inner.init(structure.unflatten(leaves))
    _separable.require_no_accumulation(inner, "tx")
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
    whole = {i: leaf for i, (_, leaf) in enumerate(leaves) if i not in plans}
    summed = _totals.totals(whole, dense, context)
    grads = [summed.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
    owner = _owned.Owner(
      inner=self.inner,
      structure=structure,
      plans=plans,
      grads=grads,
      params=self._tables(params, structure, plans),
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

  def _tables(self, params, structure, plans):
    """Leaves, those that travel sparse as `[R, D]`."""
    if params is None:
      return None
    leaves = structure.flatten_up_to(params)
    return [
      _parts.as_table(x, self.options) if i in plans else x
      for i, x in enumerate(leaves)
    ]

  def _exchange(self, leaves, owner, inner, sync, context):
    """Updates of tables by the leaf's number, the state, statistics."""
    plans = owner.plans
    group = [leaves[i] for i in plans]
    with _dispatch.recording() as calls:
      exchange = _sync.Exchange(
        list(plans.values()),
        SPARSE["zen"],
        dataclasses.replace(context, mean=False),
      )
      begun = exchange.begin(
        [_parts.as_table(leaf, self.options) for _, leaf in group]
      )
      result = exchange.finish(begun, owner=owner, owned=inner)
    ran = _ran.number(calls)
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
        ran,
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
    at = [_on_rows.ALL] * structure.num_leaves
    for i, plan in plans.items():
      at[i] = _on_rows.At(jnp.zeros(0, jnp.int32), plan.layout.slots)
    tags = _on_rows.of_state(self.inner, inner, structure.unflatten(at))

    def wrap(leaf, at):
      if not at.has(leaf):
        return leaf
      return _owned.Owned(_group.as_varying(leaf, context.axes))

    return jax.tree.map(wrap, inner, tags)
