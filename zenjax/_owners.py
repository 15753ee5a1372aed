"""The transformation of `owner_update`, and its state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax import _auto
from zenjax import _before
from zenjax import _group
from zenjax import _holding
from zenjax import _marks
from zenjax import _once
from zenjax import _owned
from zenjax import _parts
from zenjax import _plan
from zenjax import _same_program
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax import _tables
from zenjax import _totals
from zenjax._options import Options
from zenjax._rows import _by_rows
from zenjax._rows import _on_rows
from zenjax._rows import _row_program
from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows
from zenjax._schemes import SPARSE


class OwnerState(NamedTuple):
  """State of `owner_update`.

  Attributes:
    sync: Statistics, as of `zen_sync`.
    inner: Of the optimizer within, with `Owned` parts of tables.
    owners: What these parts were made for: devices, hash and columns. None
      where nothing is kept of tables.

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
  owners: Any  # a `Holding`, or None


@dataclasses.dataclass(frozen=True)
class Owners:
  """Devices that each update the rows that they sum."""

  inner: optax.GradientTransformationExtraArgs
  options: Options

  @functools.cached_property
  def _programs(self) -> _by_rows.Programs:
    return _by_rows.Programs(self.inner)

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
    make = lambda params: self.inner.init(params)
    _by_rows.require_no_accumulation(jax.eval_shape(make, params), "tx")
    context = _group.context_of(self.options)
    chosen = _select.select(params, self.options.sparse, self.options.unit)
    _select.warn_of_none(params, self.options.sparse, chosen, "sparse")
    plans, partition = self._plans(params, chosen, context)
    if plans:
      program = self._program_of(params, chosen)
      names = [name for name, _ in _select.named_leaves(params)]
      _by_rows.warn_of_decay(program, names, plans)
    leaves, structure = jax.tree.flatten(params)
    empty = list(leaves)
    for i, plan in plans.items():
      slots = jnp.arange(plan.layout.slots, dtype=jnp.int32)
      table = _parts.as_table(leaves[i], self.options.unit)
      table = _group.as_varying(table, context.axes)
      leaves[i] = _owned.own_rows(table, slots, plan, context.axes[0])
      # A column more tells which dimensions are columns.
      wider = plan.layout.slots, plan.block_width + 1
      empty[i] = jnp.zeros(wider, table.dtype)
    inner = self.inner.init(structure.unflatten(leaves))
    inner = self._wrapped(inner, structure, plans, context)
    empty = self.inner.init(structure.unflatten(empty))
    owners = self._holding(inner, empty, structure, plans, partition, context)
    names = [plan.table.name for plan in plans.values()]
    new = _state.empty_leaf(None, mean=context.mean, devices=context.devices)
    memory = dict.fromkeys(names, new)
    sync = _state.ZenSyncState(jnp.zeros((), jnp.int32), memory)
    return OwnerState(sync, inner, owners)

  def update(
    self, updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, OwnerState]:
    options, context = self.options, _group.context_of(self.options)
    op = "mean" if options.mean else "sum"
    _before.require_linear("owner_update", op)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    leaves = _group.local_leaves(updates, context)
    names = [name for name, _ in leaves]
    exchange = _marks.Exchange("owner_update", options, tuple(names))
    local = _marks.marked([leaf for _, leaf in leaves], exchange, "local")
    leaves = list(zip(names, local))
    chosen = _select.select(updates, options.sparse, options.unit)
    _group.check_state(leaves, chosen, state.sync)
    plans, _ = self._plans(updates, chosen, context)
    _holding.require(state.owners, plans.values(), context.devices)
    dense = dataclasses.replace(options, output="dense")
    whole = {i: leaf for i, (_, leaf) in enumerate(leaves) if i not in plans}
    summed = _totals.totals(whole, dense, context)
    grads = [summed.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
    program = self._program_of(updates, chosen, params, state, extra)
    owner = _owned.Owner(
      inner=self.inner,
      program=program,
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
      tables, inner, sync, owner = self._exchange(
        leaves, owner, inner, state.sync, context
      )
      for i, value in tables.items():
        out[i] = value
    rest, inner = owner.finish(inner)
    out = [rest[i] if i not in plans else x for i, x in enumerate(out)]
    sync = sync._replace(step=sync.step + 1)
    out = _marks.marked(out, exchange, "synced")
    facts = _same_program.described("owner_update", options, updates)
    exchange.facts.update(facts)
    inner = self._wrapped(inner, structure, plans, context)
    new = OwnerState(sync, inner, state.owners)
    return structure.unflatten(out), new

  def _tables(self, params, structure, plans):
    """Leaves, those that travel sparse as `[R, D]`."""
    if params is None:
      return None
    leaves = structure.flatten_up_to(params)
    return [
      _parts.as_table(x, self.options.unit) if i in plans else x
      for i, x in enumerate(leaves)
    ]

  def _exchange(self, leaves, owner, inner, sync, context):
    """Updates of tables by the leaf's number, the state, statistics."""
    plans = owner.plans
    group = [leaves[i] for i in plans]
    exchange = _sync.Exchange(
      list(plans.values()),
      SPARSE["zen"],
      dataclasses.replace(context, mean=False),
    )
    begun = exchange.begin(
      [_parts.as_table(leaf, self.options.unit) for _, leaf in group]
    )
    result = exchange.finish(begun, owner=owner, owned=inner)
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
    return tables, result.owned, sync._replace(leaves=memory), result.owner

  def _plans(self, tree, chosen, context):
    """Of the leaves that travel sparse, by number, and who is to own rows.

    Owners are those of arrays, whatever form gradients have: the state is laid
    out by them.
    """
    named = _select.named_leaves(tree, is_rows)
    at = [i for i, sparse in enumerate(chosen) if sparse]
    if not at:
      return {}, "hash"
    by_columns = self._program_of(tree, chosen).splits_columns
    if not by_columns:
      self._require_tables([named[i] for i in at])
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
    return dict(zip(at, plans)), wanted

  def _require_tables(self, named):
    """Refuses leaves that `tx` sees in another shape, if that matters to it."""
    for name, leaf in named:
      if leaf.ndim != 2 or self.options.unit != "row":
        raise ValueError(
          "`tx` of owner_update must update single elements, or leaves of two"
          f" dimensions by rows: it takes rows of leaf {name!r} together, which"
          f" has shape {leaf.shape}; leave that leaf out by `sparse=`."
        )

  def _program_of(self, tree, chosen, params=None, state=None, extra=None):
    """The update of whole tables; without a state, as for a first step.

    Raises:
      ValueError: It does not update tables by rows.
    """
    types = self._table_types(tree, chosen)
    params = None if params is None else self._table_types(params, chosen)
    make = lambda params: self.inner.init(params)
    whole = jax.eval_shape(make, types if params is None else params)
    if state is not None:
      own = jax.tree.leaves(_owned.unwrapped(state.inner))
      leaves, structure = jax.tree.flatten(whole)
      whole = structure.unflatten(
        [
          _row_program.type_of(x).update(shape=w.shape)
          for x, w in zip(own, leaves)
        ]
      )
    given = types if state is None else params
    try:
      program = self._programs.of(types, whole, given, extra or {}, chosen)
    except NameError as error:
      raise ValueError(
        f"`tx` must not synchronize devices, but it wants an axis of them"
        f" ({error}); owner_update is in the place of zen_sync."
      ) from error
    names = [name for name, _ in _select.named_leaves(tree, is_rows)]
    _by_rows.require(program, names, "tx", _by_rows.REMEDY)
    return program

  def _table_types(self, tree, chosen):
    """Types of leaves; of those that travel sparse as `[R, D]`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
    found = []
    for leaf, is_table in zip(leaves, chosen):
      kind = _row_program.type_of(leaf)
      if is_table:
        shape = _select.table_shape(kind, self.options.unit)
        kind = kind.update(shape=shape)
      found.append(kind)
    return structure.unflatten(found)

  def _wrapped(self, inner, structure, plans, context):
    """The state with what has rows of a table marked as a part."""
    at = [_on_rows.ALL] * structure.num_leaves
    for i, plan in plans.items():
      at[i] = _on_rows.At(jnp.zeros(0, jnp.int32), plan.layout.slots)
    tags = _trees.tagged(
      self.inner, inner, structure.unflatten(at), _on_rows.ALL
    )

    def wrap(leaf, at):
      if not at.has(leaf):
        return leaf
      return _owned.Owned(_group.as_varying(leaf, context.axes))

    return jax.tree.map(wrap, inner, tags)

  def _holding(self, inner, empty, structure, plans, partition, context):
    """Describes the owners of a new state's parts; None where it has none.

    `empty` is of tables of zeros that have a column more.
    """
    number = dict(zip(plans, range(len(plans))))
    at = [number.get(i, -1) for i in range(structure.num_leaves)]
    at = structure.unflatten(at)
    tables = _trees.tagged(self.inner, _owned.unwrapped(inner), at, -1)
    if jax.tree.structure(empty) != jax.tree.structure(tables):
      raise ValueError(
        "`tx` must keep the same of a table whatever its shape, as owners of"
        " more devices have less of it, but with a column more it keeps other"
        " arrays; choose leaves by their names, not by shapes, as in"
        " `optax.masked` and `optax.multi_transform`."
      )
    nodes, parted = jax.tree.flatten(inner, is_leaf=_owned.is_owned)
    each = zip(nodes, parted.flatten_up_to(tables), parted.flatten_up_to(empty))
    parts = [one for one in each if _owned.is_owned(one[0])]
    if not parts:
      return None
    lies = [
      _holding.Lies(table, int(node.part.shape[1:2] != fill.shape[1:2]))
      for node, table, fill in parts
    ]
    padding = [fill.reshape(-1)[0].astype(jnp.float32) for *_, fill in parts]
    devices = context.devices
    facts = [_holding.facts_of(p, devices, partition) for p in plans.values()]
    facts = jnp.asarray(np.array([facts], np.uint32))
    made_for = _holding.Holding(
      tables={_holding.key_of(plans.values(), devices): facts},
      leaves=jnp.asarray(np.array([lies], np.uint32)),
      padding=jnp.stack(padding)[None],
    )
    return _group.as_varying(made_for, context.axes)
