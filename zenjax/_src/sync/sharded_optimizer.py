"""`sharded_optimizer`: owners of rows update them, and hold the state alone."""

from collections.abc import Mapping, Sequence
import dataclasses
import sys
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import Capacities
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.arguments import Kernels
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import base
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.schemes.zen import PushOnly
from zenjax._src.sync import exchange
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import owner_rows
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options
from zenjax._src.tables import fetch
from zenjax._src.tables import sharded_table
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.tables.sharded_table import ShardedTable
from zenjax._src.tables.table_update import TableUpdate

# Where no device needs the sums of others.
_PUSH_ONLY = PushOnly()


class ShardedOptimizerState(NamedTuple):
  """State of `sharded_optimizer`.

  Attributes:
    sync: Statistics, as of `zen_sync`.
    inner: State of the optimizer within, with a `ShardedTable` for each array
      that has a row for each row of a table.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.sharded_optimizer(optax.adam(1e-3), "data")
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> params = {"table": jnp.zeros((600, 32))}
    >>> state = zenjax.init_state(tx, params, mesh, "data")
    >>> int(state.sync.step), state.inner[0].mu["table"].shape
    (0, (600, 32))
  """

  sync: sync_state.ZenSyncState
  inner: Any


class Leaves(NamedTuple):
  """A tree of parameters or gradients, taken apart.

  Attributes:
    structure: Of the tree, sharded tables and SparseRows as leaves.
    names: Of the leaves.
    leaves: Arrays and SparseRows; of sharded tables their values.
    tables: Sharded tables, by number.
  """

  structure: Any
  names: list[str]
  leaves: list[Any]
  tables: dict[int, ShardedTable]

  @classmethod
  def of(cls, tree: Any) -> "Leaves":
    is_leaf = lambda x: is_rows(x) or is_sharded(x)
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return cls(
      structure=structure,
      names=[name for name, _ in leaf_util.named_leaves(tree, is_leaf)],
      leaves=[x.value if is_sharded(x) else x for x in nodes],
      tables={i: x for i, x in enumerate(nodes) if is_sharded(x)},
    )

  def tree(self, values: Sequence[Any]) -> Any:
    """Returns the tree of values, with the sharded tables that it had."""
    return self.structure.unflatten(
      [
        self.tables[i].with_value(x) if i in self.tables else x
        for i, x in enumerate(values)
      ]
    )

  def view(self, values: Sequence[Any], tables: Mapping[int, Any]) -> Any:
    """Returns the tree of values as an optimizer sees it.

    Tables that have owners are `ShardedTable`s. One of nnx is outside of its
    variable, because an `nnx.Optimizer` keeps the types around its variables
    and forgets the types inside.
    """
    tree = self.structure.unflatten(
      [
        tables[i].with_value(x) if i in tables else x
        for i, x in enumerate(values)
      ]
    )
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not tables:
      return tree
    is_variable = lambda x: isinstance(x, nnx.Variable)

    def in_front(x: Any) -> Any:
      table = x.get_raw_value() if is_variable(x) else x
      if not is_variable(x) or not is_sharded(table):
        return x
      return table.with_value(x.replace(table.value))

    return jax.tree.map(in_front, tree, is_leaf=is_variable)


@dataclasses.dataclass(frozen=True)
class Owners:
  """Devices that each update the rows that they sum."""

  inner: optax.GradientTransformationExtraArgs
  options: Options
  op: str | None = None  # as it was given
  mesh: Any = None
  clip_norm: float | None = None
  # Leaves whose gradients XLA has summed.
  summed: frozenset[str] = frozenset()
  # Analyses of `inner`, made once for each kind of arguments.
  known: dict[Any, RowAnalysis] = dataclasses.field(
    default_factory=dict, compare=False, repr=False
  )

  def init(self, params: Any) -> ShardedOptimizerState:
    mesh = self._mesh_around(params)
    if mesh is not None:
      return self._init_on(mesh, params)
    collectives.size_in_init(self.options.axes, "sharded_optimizer")
    make = lambda params: self.inner.init(params)
    lazy.require_no_accumulation(jax.eval_shape(make, params), "tx")
    context = gradient_tree.context_of(self.options)
    given = Leaves.of(params)
    if given.tables:
      self._require_usual()
    tables = self._tables(params, given, context)
    chosen = [i in tables for i in range(len(given.leaves))]
    leaf_util.warn_of_none(params, self.options.sparse, chosen, "sparse")
    analysis = self._analysis_of(given, tables)[0] if tables else None
    leaves = list(given.leaves)
    for i, table in tables.items():
      if i not in given.tables:
        slots = jnp.arange(table.layout.slots, dtype=jnp.int32)
        whole = leaf_util.as_table(leaves[i], self.options.unit)
        whole = gradient_tree.as_varying(whole, table.axes)
        leaves[i] = owner_rows.own_rows(whole, slots, table)
    inner = self.inner.init(given.view(leaves, tables))
    if analysis is not None:
      lazy.warn_of_decay(analysis, given.names)
      _require_form(inner, analysis)
    new = sync_state.empty_leaf(
      mean=context.mean, devices=context.devices, sharded=bool(given.tables)
    )
    memory = dict.fromkeys([given.names[i] for i in tables], new)
    sync = sync_state.empty(memory, self.options, owners=True)
    return ShardedOptimizerState(sync, _bare(inner))

  def update(
    self, updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, ShardedOptimizerState]:
    if not isinstance(state, ShardedOptimizerState):
      raise ValueError(
        "`state` of sharded_optimizer must be made by `zenjax.init_state(tx,"
        f" params, mesh, axis_name)`, got {type(state).__name__}; a state of"
        " plain optax moves by `zenjax.tables.shard(params, mesh, axis_name,"
        " opt_state=state)`."
      )
    mesh = self._mesh_around(updates)
    if mesh is not None:
      return self._update_on(mesh, updates, state, params, extra)
    options, context = self.options, gradient_tree.context_of(self.options)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    leaves = gradient_tree.local_leaves(updates, context)
    names = [name for name, _ in leaves]
    local = [leaf for _, leaf in leaves]
    given = Leaves.of(structure.unflatten(local))
    tables = self._tables(updates, given, context)
    for i, table in tables.items():
      if names[i] in self.summed:
        # Each owner sends its own rows of the sum to itself.
        given.leaves[i] = _own_part(given.leaves[i], table)
    _require_state(state, tables.values(), context.sizes[-1])
    gradient_tree.check_state(
      leaves, [i in tables for i in range(len(leaves))], state.sync
    )
    _require_memory([names[i] for i in given.tables], state.sync)
    whole = {
      i: leaf
      for i, (name, leaf) in enumerate(leaves)
      if i not in tables and name not in self.summed
    }
    summed = gradient_tree.totals(whole, options, context)
    own_params = self._params_of(params, given, tables)
    analysis, inner = self._analysis_of(
      given, tables, own_params, state.inner, extra
    )
    owner = owner_rows.Owner(
      analysis=analysis,
      structure=jax.tree.structure(given.view(local, tables), is_leaf=is_rows),
      tables=self._types_of_parts(given, tables),
      grads=[summed.get(i, leaf) for i, (_, leaf) in enumerate(leaves)],
      params=own_params,
      extra=extra,
      axis=context.axes[-1],
      scaled=context.scaled,
      sharded=frozenset(given.tables),
      clip_norm=self.clip_norm,
    )
    out, sync = {}, state.sync
    if tables:
      out, inner, sync, owner = self._exchange(
        given, tables, owner, inner, sync, context
      )
    elif self.clip_norm is not None:
      owner = owner.agreed(owner.no_squares)
    rest, inner = owner.finish(inner)
    done = [out.get(i, x) for i, x in enumerate(rest)]
    by = "sharded_optimizer"
    step = processes.compared(sync.step + 1, by, options, updates, sync.tuned)
    new = ShardedOptimizerState(sync.replace(step=step), _bare(inner))
    return given.tree(done), new

  def _mesh_around(self, tree: Any) -> Any:
    """Returns the mesh over which XLA spreads the program, if it does.

    Raises:
      ValueError: A mesh is known, and has not the axes.
    """
    axes = self.options.axes
    mesh = collectives.mesh_around(axes, tree, self.mesh)
    if mesh is None and self.mesh is not None:
      missing = [x for x in axes if x not in self.mesh.axis_names]
      if missing:
        raise ValueError(
          "`axis_name` of sharded_optimizer must name axes of `mesh`, which has"
          f" {self.mesh.axis_names!r}, got {missing[0]!r}."
        )
    return mesh

  def _init_on(self, mesh, params):
    """The state where XLA spreads the program over `mesh`."""
    _require_replicated(params)
    axes, make = self.options.axes, self.init
    self._require_devices(mesh, params)
    for axis in reversed(axes):
      make = jax.vmap(
        make, in_axes=None, axis_name=axis, axis_size=mesh.shape[axis]
      )
    local = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[len(axes) :], x.dtype),
      jax.eval_shape(make, sharded_table.types_of_part(params)),
    )
    # Owners lie along the last axis; along others they have copies.
    split = PartitionSpec(axes[-1])
    made = whole_batch.mapped(
      self.init,
      mesh,
      axes,
      (sharded_table.specs(params, split),),
      sharded_table.specs(local, split),
    )
    return jax.jit(made)(params)

  def _update_on(self, mesh, updates, state, params, extra):
    """The update of a whole batch's gradients."""
    if self.op == "mean":
      raise ValueError(whole_batch.NO_MEAN)
    _require_replicated(params)
    self._require_devices(mesh, (updates, params))
    parts = whole_batch.parts_of(updates, mesh, self.options)
    of_arrays = frozenset(
      [name for (name, _), mine in zip(parts.named, parts.mine) if not mine]
    )
    given = Leaves.of(updates)
    axis, devices = self.options.axes[-1], mesh.shape[self.options.axes[-1]]
    options = dataclasses.replace(
      self.options, mean=False, sparse=lambda name, _: name in parts.sparse
    )
    owners = dataclasses.replace(self, options=options, summed=of_arrays)
    # Or shard_map says that nothing divides.
    for node in sharded_table.nodes(state.inner):
      sharded_table.require_devices("`state`", node.devices, devices)

    def step(own, summed, state, params):
      grads = parts.tree(own, summed)
      return owners.update(grads, state, params, **extra)

    split, everywhere = PartitionSpec(axis), PartitionSpec()
    specs = sharded_table.specs(state, split)
    # Rows of a leaf that is not sent sparse come out as an array.
    unreduced = [x for x, mine in zip(parts.named, parts.mine) if mine]
    synced = [
      jax.tree.leaves(lies.synced)[-1]
      if is_rows(x) and name not in parts.sparse
      else lies.synced
      for (name, x), lies in zip(unreduced, parts.lie)
    ]
    out = Leaves.of(parts.tree(synced, [everywhere] * len(of_arrays)))
    lies = list(out.leaves)
    for i, table in given.tables.items():
      aux = table.layout.slots, table.axes
      lies[i] = TableUpdate.tree_unflatten(aux, (split, split))
    return whole_batch.mapped(
      step,
      mesh,
      self.options.axes,
      (
        [x.given for x in parts.lie],
        everywhere,
        specs,
        sharded_table.specs(params, split),
      ),
      (given.tree(lies), specs),
    )(parts.given, parts.summed, state, params)

  def _require_devices(self, mesh, tree):
    """Raises ValueError where sharded tables are not of the mesh's devices."""
    for name, node in leaf_util.named_leaves(tree, is_sharded):
      if is_sharded(node):
        self._require_axes(node)
        devices = mesh.shape[self.options.axes[-1]]
        what = f"Table {name}"
        sharded_table.require_devices(what, node.devices, devices)

  def _require_axes(self, table):
    if table.devices and table.batch_axes != self.options.axes:
      raise ValueError(
        "`axis_name` of sharded_optimizer must name the axes over which a batch"
        " of sharded tables is split: `replicas` of `zenjax.tables.shard`, then"
        f" its `axis_name`, here {table.batch_axes!r}, got"
        f" {self.options.axes!r}."
      )

  def _tables(self, tree, given, context) -> dict[int, ShardedTable]:
    """Returns the tables that have owners, by the leaf's number.

    The form in which the optimizer sees them; values are None.
    """
    if given.tables:
      for table in given.tables.values():
        devices = context.sizes[-1]
        sharded_table.require_devices("`updates`", table.devices, devices)
        self._require_axes(table)
      self._require_small(given)
      return {
        i: dataclasses.replace(x, value=None, sizes=())
        for i, x in given.tables.items()
      }
    axes = self.options.axes
    if len(axes) > 1:
      raise ValueError(
        "`axis_name` must be one axis for sharded_optimizer where tables are"
        f" replicated, got {axes!r}; give the axis of the fastest links, and"
        " average over the others before, use `zen_sync` and `lazy_rows`, or"
        " shard tables by `zenjax.tables.shard(.., replicas=)`."
      )
    chosen = leaf_util.select(tree, self.options.sparse, self.options.unit)
    found, hash_offset = {}, 0
    for i, leaf in enumerate(given.leaves):
      if not chosen[i]:
        continue
      rows, _ = leaf_util.table_shape(leaf, self.options.unit)
      found[i] = ShardedTable(
        value=None,
        num_rows=rows,
        axes=axes,
        devices=context.sizes[-1],
        seed=self.options.hash_seed,
        hash_offset=hash_offset,
        stack=tuple(leaf.shape[:-2]),
      )
      hash_offset = (hash_offset + rows) % 2**32
    return found

  def _require_small(self, given):
    for i, (name, leaf) in enumerate(zip(given.names, given.leaves)):
      if is_rows(leaf) and i not in given.tables and leaf_util.is_table(leaf):
        raise ValueError(
          "`params` of sharded_optimizer must have all large tables sharded or"
          f" none, and leaf {name!r}, of which there are SparseRows, is"
          " replicated; choose it by `tables=` of `zenjax.tables.shard`, have"
          " its gradient as an array by `tables=` of `zenjax.value_and_grad`,"
          " or give it another transformation by `optax.partition`."
        )

  def _require_usual(self):
    """Raises ValueError for options that sharded tables know nothing of."""
    options = self.options
    given = dict(
      sparse=options.sparse is not None,
      capacities=bool(options.capacities),
      wire_dtype=options.wire_dtype is not None,
      hash_seed=bool(options.hash_seed),
      kernels=options.kernels == "pallas",
    )
    if wrong := [f"`{name}`" for name, is_given in given.items() if is_given]:
      raise ValueError(
        f"{', '.join(wrong)} of sharded_optimizer must be left out where tables"
        " are sharded: `zenjax.tables.shard` has decided who owns which row,"
        " rows are sent in their own dtype, and there are no kernels for them."
      )

  def _params_of(self, params, given, tables):
    """Returns leaves of parameters, of sharded tables `[S, D]`."""
    if params is None:
      if given.tables:
        raise ValueError(
          "`params` must be given to `update` of sharded_optimizer where tables"
          " are sharded."
        )
      return None
    return [
      x.value
      if is_sharded(x)
      else leaf_util.as_table(x, self.options.unit)
      if i in tables
      else x
      for i, x in enumerate(given.structure.flatten_up_to(params))
    ]

  def _types_of_parts(self, given, tables):
    """Returns tables with types `[S, D]` as their values."""
    found = {}
    for i, table in tables.items():
      _, width = self._table_shape(given, i)
      shape = table.layout.slots, width
      kind = jax.ShapeDtypeStruct(shape, given.leaves[i].dtype)
      found[i] = table.with_value(kind)
    return found

  def _table_shape(self, given, i):
    if i in given.tables:
      return given.tables[i].num_rows, given.leaves[i].shape[-1]
    return leaf_util.table_shape(given.leaves[i], self.options.unit)

  def _exchange(self, given, tables, owner, inner, sync, context):
    """Updates of tables by the leaf's number, the state, statistics."""
    plans = self._plans(given, tables, sync, context)
    entered = []
    for i, plan in zip(tables, plans):
      rows = leaf_util.as_table(given.leaves[i], self.options.unit)
      entered.append(exchange.Local(plan, [rows]))
    sums = dataclasses.replace(context, mean=False)
    if owner.clip_norm is not None:
      # Owners must have all sums before they can update the first of them.
      _, squares = exchange.exchange(
        entered,
        _PUSH_ONLY,
        sums,
        owner=owner.add_squares,
        owned=owner.no_squares,
      )
      owner = owner.agreed(squares)
    scheme, step, owned = SPARSE["zen"], owner, inner
    if given.tables:
      lists = [
        owner_rows.Listed.empty(plan.most_pull, table)
        for plan, table in zip(plans, owner.tables.values())
      ]
      scheme, step, owned = _PUSH_ONLY, owner.keeping, (inner, lists)
    found, owned = exchange.exchange(
      entered, scheme, sums, owner=step, owned=owned
    )
    out, memory = {}, dict(sync.leaves)
    if given.tables:
      inner, lists = owned
      for (i, table), (slots, rows) in zip(given.tables.items(), lists):
        out[i] = TableUpdate(slots, rows, table.layout.slots, table.axes)
    else:
      inner = owned
      for i, table in zip(tables, found):
        (rows,) = table.rows
        out[i] = gradient_tree.as_asked(rows, given.leaves[i], self.options)
    for table in found:
      name = table.plan.table.name
      beside = _bytes_beside(table, owner, given.tables, context)
      (memory[name],) = sync_state.after_step(
        [memory[name]],
        sync.step,
        table.counts,
        table.plan,
        scheme,
        context,
        beside,
      )
    return out, inner, sync.replace(leaves=memory), owner

  def _plans(self, given, tables, sync, context):
    """How the rows of each table get to their owners."""
    options, scheme = self.options, SPARSE["zen"]
    group = [(given.names[i], given.leaves[i]) for i in tables]
    known = [leaf_tables.table_of(*one, options) for one in group]
    if given.tables:
      choices = [
        leaf_tables.Choice("zen", 1, _buffers_of(table, kind))
        for table, kind in zip(given.tables.values(), known)
      ]
    else:
      tuned = leaf_tables.choose(known, options, dict(sync.tuned), context)
      choices = [x._replace(scheme="zen", column_groups=1) for x in tuned]
    plans = leaf_tables.plans(
      known, choices, scheme, options, context, owners=True
    )
    # Nobody is sent the sums of a sharded table.
    rooms = {"rooms": (0,)} if given.tables else {}
    return [
      dataclasses.replace(plan, layout=table.layout, **rooms)
      for plan, table in zip(plans, tables.values())
    ]

  def _analysis_of(self, given, tables, params=None, state=None, extra=None):
    """Says how `tx` updates whole tables; without a state, in a first step.

    And the state as `tx` made it.

    Raises:
      ValueError: It does not update tables by rows.
    """
    types = self._types(given, tables, given.leaves)
    if params is not None:
      params = self._types(given, tables, params)
    make = lambda params: self.inner.init(params)
    whole = jax.eval_shape(make, types if params is None else params)
    if state is not None:
      own, leaves = jax.tree.leaves(state), jax.tree.leaves(whole)
      found, wanted = map(jax.tree.structure, (state, _bare(whole)))
      if found != wanted:
        raise ValueError(
          "`state` of sharded_optimizer must be made by `tx` for these"
          f" parameters, with structure {wanted}, got {found}; make it by"
          " `zenjax.init_state(tx, params, mesh, axis_name)`."
        )
      structure = jax.tree.structure(whole)
      state = structure.unflatten(own)
      whole = structure.unflatten(
        [
          row_analysis.type_of(x).update(shape=w.shape)
          for x, w in zip(own, leaves)
        ]
      )
    by = types if state is None else params
    # Row gradients of small tables, too, are updated by rows.
    small = [i for i, x in enumerate(given.leaves) if is_rows(x)]
    chosen = dict.fromkeys([*tables, *small], touched_rows.FEWEST)
    analysis = row_analysis.analysis_of(
      self.inner, types, whole, by, extra or {}, chosen, self.known
    )
    lazy.require(analysis, given.names, "tx")
    if analysis.sums:
      raise ValueError(
        "`tx` of sharded_optimizer must update rows without sums over all of"
        f" them, such as a norm, and it has one ({analysis.sums}): each owner"
        " has some rows. To clip by the norm of all gradients give"
        " `clip_norm=`."
      )
    return analysis, state

  def _types(self, given, tables, leaves):
    """Types of leaves; of tables `ShardedTable`s of `[R, D]`."""
    found = []
    for i, leaf in enumerate(leaves):
      kind = row_analysis.type_of(leaf)
      if i in tables:
        kind = kind.update(shape=self._table_shape(given, i))
      found.append(kind)
    return given.view(found, tables)


def _own_part(leaf: jax.Array, table: ShardedTable) -> jax.Array:
  """Returns an array with zeros for the rows that other devices own."""
  rows = jnp.arange(table.num_rows, dtype=jnp.int32)
  owner, _ = table.layout.place(rows)
  own = owner == lax.axis_index(table.axes)
  shape = *leaf.shape[: max(leaf.ndim - 1, 1)], *(1,) * (leaf.ndim > 1)
  return jnp.where(own.reshape(shape), leaf, 0)


def _bare(state: Any) -> Any:
  """Returns a state without sharded tables in which nothing is.

  Masks and labels of an optimizer that are made of the parameters leave them
  out within their types; others leave them out with these.
  """
  return jax.tree.map(
    lambda x: x.value if is_sharded(x) and not jax.tree.leaves(x) else x,
    state,
    is_leaf=is_sharded,
  )


def _require_form(state: Any, analysis: RowAnalysis) -> None:
  """Raises ValueError where a state has rows in another form than tables."""
  inside = []
  for node in jax.tree.leaves(state, is_leaf=is_sharded):
    inside += [is_sharded(node)] * len(jax.tree.leaves(node))
  if any(
    of is not None and not is_in
    for of, is_in in zip(analysis.state_rows, inside, strict=True)
  ):
    raise ValueError(
      "`tx` of sharded_optimizer must keep what it has for each row in the"
      " structure of the parameters, as optimizers of optax do by"
      " `jax.tree.map`."
    )


def _require_state(state: Any, tables: Any, devices: int) -> None:
  """Raises ValueError if a state was made for other tables or owners."""
  known = {dataclasses.replace(x, value=None) for x in tables}
  for node in sharded_table.nodes(state.inner):
    if not jax.tree.leaves(node):
      continue
    sharded_table.require_devices("`state`", node.devices, devices)
    for x in jax.tree.leaves(node.value):
      if node.has_rows(x) and len(x) != node.layout.slots:
        raise ValueError(
          "`state` of sharded_optimizer must be split over devices, got the"
          f" parts of {len(x) // node.layout.slots} devices on each of"
          f" {devices}; give `zenjax.state_specs(state, axis_name)` to"
          " shard_map."
        )
    if _owner_of(node) not in {_owner_of(x) for x in known}:
      raise ValueError(
        "`state` of sharded_optimizer must be made for the tables of this step,"
        f" of (rows, hash_seed, rows before) {sorted(map(_owner_of, known))},"
        f" got {_owner_of(node)}: its rows have other owners; make it by"
        " `zenjax.init_state` with the same `sparse` and `hash_seed`."
      )


def _owner_of(table: ShardedTable) -> tuple[int, int, int]:
  return table.num_rows, table.seed, table.hash_offset


def _require_memory(names: Sequence[str], sync: Any) -> None:
  """Raises ValueError where a state is of replicated tables."""
  tables = sync_state.tables(sync)
  if sorted(tables) != sorted(names):
    raise ValueError(
      "`state` of sharded_optimizer must be made for the tables that are"
      f" sharded, {sorted(names)}, got one where these are {sorted(tables)};"
      " shard tables before `zenjax.init_state`, or move both by"
      " `zenjax.tables.shard(params, mesh, axis_name, opt_state=..)`."
    )


def _buffers_of(table: ShardedTable, kind: Table) -> Capacity:
  """Returns the buffer sizes of a push: as large as a fetch's, and no limit."""
  size = fetch.buffer_size(kind.look_ups or 1, table.layout, table.sizes)
  return Capacity(size, min(table.num_rows, size * table.devices))


def _bytes_beside(
  found: exchange.Exchanged, owner: Any, sharded: Any, context: Context
) -> jax.Array | float:
  """Bytes of fetches and of a norm, which a device receives in a step."""
  plan, counts, total = found.plan, found.counts, 0.0
  if owner.clip_norm is not None:
    messages = exchange.messages([plan], _PUSH_ONLY, context)
    rounds = counts.rounds.astype(jnp.float32)
    total += rounds * base.received_bytes(messages, context)
  if sharded:
    table, n = plan.table, plan.layout.groups
    ids, rows, _ = fetch.words_of_round(plan.push, n, table.width, table.dtype)
    fetches = jnp.maximum(jnp.ceil(counts.fullest / plan.push), 1)
    total += fetches * 4 * (ids + rows) * (n - 1) / n
  return total


def _require_replicated(params: Any) -> None:
  """Raises where a type says that a parameter is spread over devices."""
  for name, leaf in leaf_util.named_leaves(params, is_sharded):
    if not is_sharded(leaf) and any(compat.explicit_spec(leaf)):
      raise ValueError(
        "`params` must be replicated for sharded_optimizer, and leaf"
        f" {name!r} is spread by {jax.typeof(leaf).sharding.spec}; give that"
        " leaf another transformation by `optax.partition`."
      )


def sharded_optimizer(
  tx: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  sparse: SparseSpec = None,
  op: str | None = None,
  clip_norm: float | None = None,
  wire_dtype: Any = None,
  capacities: Capacities = None,
  mesh: Any = None,
  kernels: Kernels = "auto",
  hash_seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes gradients and runs `tx` at the owner of each row.

  Use it instead of `chain(zen_sync(axis_name), lazy_rows(tx))` to divide the
  optimizer's state of tables by the number of devices, as ZeRO does, and
  wherever tables are sharded by `zenjax.tables.shard`. The device that sums a
  row's gradient, its owner, also updates the row: the same number of bytes, and
  1/n of the optimizer's work and memory on each of `n` devices. Results equal
  the chain's. Leaves that are not tables are averaged by `pmean` and updated by
  `tx` on every device.

  Updates are to be added, as any of optax: `optax.apply_updates` takes them.
  The update of a sharded table holds rows, so transformations that scale
  updates belong into `tx`. Rows that no device touched keep state and
  parameters, as in `lazy_rows`.

  The state differs between devices. In plain `jit` over a mesh `tx.init` makes
  it, given a mesh by `jax.set_mesh`, by parameters that lie on it, or by
  `mesh=`; `zenjax.init_state` makes it everywhere. `zenjax.to_checkpoint` and
  `zenjax.from_checkpoint` save it and move it to another number of devices.

  Args:
    tx: Any optimizer that updates a row by that row's gradient, state and
      parameters.
    axis_name: One axis that devices are mapped over. For sharded tables with
      `replicas` all axes of the batch, slowest first, owners along the last.
    sparse: Which leaves have owners: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. By default large and tall ones.
    op: `"mean"` or `"sum"` of the devices' gradients. In plain `jit`, where
      the loss is taken over the whole batch, it is always the sum.
    clip_norm: Scales all gradients so that their norm, over all rows of all
      owners and all other leaves, is at most this. None does not.
    wire_dtype: Dtype in which rows of replicated tables are sent.
    capacities: Buffer sizes of replicated tables, as for `zen_sync`.
    mesh: The mesh that plain `jit` spreads the program over, if nothing else
      tells.
    kernels: What works on rows of replicated tables, as for `zen_sync`.
    hash_seed: Draws another hash for replicated tables.

  Returns:
    A transformation from gradients, arrays or SparseRows, to updates.

  Raises:
    ValueError: An argument is out of range; `axis_name` is more than one axis,
      or sharded tables have other axes; `tx` updates rows by others (see
      `lazy_rows`) or by sums over rows, or accumulates gradients
      (`optax.MultiSteps`); or the state was made for other owners.
    NotImplementedError: `kernels="pallas"` cannot serve what it was
      given, see `zen_sync`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> adagrad = optax.adagrad(1.0, initial_accumulator_value=0.0)
    >>> tx = zenjax.sharded_optimizer(adagrad, "data", sparse=True)
    >>> table = jnp.zeros((1000, 8))
    >>> opt_state = zenjax.init_state(tx, table, mesh, "data")
    >>> squares = opt_state.inner[0].sum_of_squares.value
    >>> squares.addressable_shards[0].data.size, table.size  # half, padded
    (4096, 8000)
    >>> def step(state, ids):
    ...   table, opt_state = state
    ...   loss, grads = zenjax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, opt_state = tx.update(grads, opt_state, table)
    ...   return (zenjax.apply_updates(table, updates), opt_state), loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> ids = jnp.array([3, 3, 5, 9])
    >>> (table, opt_state), _ = step((table, opt_state), ids)
    >>> table[jnp.array([3, 4, 5]), 0].round(3).tolist()
    [-1.0, 0.0, -1.0]

  References:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020, stage 1.
  """
  options = sync_options.check(
    axis_name,
    sparse=sparse,
    op=op,
    partition="hash",
    wire_dtype=wire_dtype,
    capacities=capacities,
    mesh=mesh,
    kernels=kernels,
    hash_seed=hash_seed,
  )
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(
      f"`clip_norm` must be positive, or None for no limit, got {clip_norm!r}."
    )
  tx = optax.with_extra_args_support(tx)
  owners = Owners(tx, options, op, mesh, clip_norm)
  init: Any = owners.init
  update: Any = owners.update
  return optax.GradientTransformationExtraArgs(init, update)
