"""`sharded_optimizer`: the owner of a row updates it, and holds its state."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import re
import sys
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import base
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.schemes.zen import PushOnly
from zenjax._src.sync import exchange
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import owner_rows
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.exchange import Counts
from zenjax._src.sync.sync_options import Options
from zenjax._src.tables import fetch
from zenjax._src.tables import sharded_table
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.tables.sharded_table import ShardedTable
from zenjax._src.tables.table_update import TableUpdate

# For sharded tables, whose sums no other device needs.
_PUSH_ONLY = PushOnly()


class ShardedOptimizerState(NamedTuple):
  """State of `sharded_optimizer`.

  You need it only to read its parts. `zenjax.stats` and `zenjax.report` show
  the statistics, and `zenjax.to_checkpoint` saves it.

  Attributes:
    sync: What recent steps counted, as in the state of `zen_sync`.
    inner: The state of `tx`, with a `ShardedTable` for each array that has a
      row for each row of a table.

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
    structure: The tree, with sharded tables and SparseRows as leaves.
    names: The names of the leaves.
    leaves: Arrays and SparseRows; in place of sharded tables their values.
    tables: Sharded tables, by the leaf's number.
  """

  structure: Any
  names: list[str]
  leaves: list[Any]
  tables: dict[int, ShardedTable]

  @classmethod
  def of(cls, tree: Any) -> "Leaves":
    # A mask of the user may leave a table out, within its type.
    is_table = lambda x: is_sharded(x) and bool(jax.tree.leaves(x))
    is_leaf = lambda x: is_rows(x) or is_table(x)
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return cls(
      structure=structure,
      names=[name for name, _ in leaf_util.named_leaves(tree, is_leaf)],
      leaves=[x.value if is_sharded(x) else x for x in nodes],
      tables={i: x for i, x in enumerate(nodes) if is_sharded(x)},
    )

  def tree(self, values: Sequence[Any], tables: Mapping[int, Any]) -> Any:
    """Returns the tree of values, with these of them inside of tables."""
    numbered = enumerate(values)
    return self.structure.unflatten(
      [tables[i].with_value(x) if i in tables else x for i, x in numbered]
    )

  def view(self, values: Sequence[Any], tables: Mapping[int, Any]) -> Any:
    """Returns the tree of values as an optimizer sees it.

    Tables that have owners are `ShardedTable`s. One of nnx is outside of its
    variable, because an `nnx.Optimizer` keeps the types around its variables
    and forgets the types inside.
    """
    tree = self.tree(values, tables)
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
  clip_norm: float | None = None
  # Names of leaves whose gradients XLA has summed.
  summed: frozenset[str] = frozenset()
  # Analyses of `inner`, made once for each kind of arguments.
  analyses: dict[Any, RowAnalysis] = dataclasses.field(
    default_factory=dict, compare=False, repr=False
  )

  def init(self, params: Any) -> Any:
    options = self.options
    mesh = collectives.mesh_around(options.axes, params, options.mesh)
    if mesh is not None:
      return self._init_on(mesh, params)
    collectives.size_in_init(options.axes, "sharded_optimizer")
    make = lambda params: self.inner.init(params)
    lazy.require_no_accumulation(jax.eval_shape(make, params), "tx")
    context = gradient_tree.context_of(options)
    self._require_devices(context.sizes[-1], params)
    given = Leaves.of(params)
    if given.tables:
      self._require_usual()
    tables = self._tables(params, given)
    chosen = [True for _ in tables]
    leaf_util.warn_of_none(params, options.sparse, chosen, "sparse")
    leaves = list(given.leaves)
    if not given.tables:
      for i, table in tables.items():
        slots = jnp.arange(table.layout.slots, dtype=jnp.int32)
        whole = leaf_util.as_table(leaves[i], options.unit)
        whole = gradient_tree.as_varying(whole, table.axes)
        leaves[i] = owner_rows.own_rows(whole, slots, table)
    inner = self.inner.init(given.view(leaves, tables))
    if tables:
      types = self._types(given, tables, given.leaves)
      whole = jax.eval_shape(make, types)
      analysis = self._analysis_of(given, tables, whole, types, {})
      _require_same_program(self.inner, given, types)
      lazy.warn_of_decay(analysis, given.names)
      _require_form(inner, analysis)
    sync = sync_state.empty(
      [given.names[i] for i in tables],
      options,
      owners=True,
      devices=context.devices,
      sharded=bool(given.tables),
    )
    return ShardedOptimizerState(sync, _bare(inner))

  def update(
    self, updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, Any]:
    if not isinstance(state, ShardedOptimizerState):
      raise ValueError(
        "`state` of sharded_optimizer must be made by `zenjax.init_state(tx,"
        f" params, mesh, axis_name)`, got {type(state).__name__}. To go on with"
        " a state of plain optax, write `params, state ="
        " zenjax.tables.shard(params, mesh, axis_name, opt_state=state)`."
      )
    options = self.options
    mesh = collectives.mesh_around(options.axes, updates, options.mesh)
    if mesh is not None:
      return self._update_on(mesh, updates, state, params, extra)
    context = gradient_tree.context_of(options)
    gradient_tree.local_leaves(updates, context)
    self._require_devices(context.sizes[-1], updates, state)
    given = Leaves.of(updates)
    tables = self._tables(updates, given)
    names = given.names
    gradient_tree.require_sparse(
      [names[i] for i in tables], state.sync, options
    )
    _require_same_tables(state, given, tables.values())
    local = {}
    for i, name in enumerate(names):
      if i in tables and name in self.summed:
        # Each owner sends its own rows of the sum to itself.
        given.leaves[i] = _own_part(given.leaves[i], tables[i])
      elif i not in tables and name not in self.summed:
        local[i] = given.leaves[i]
    totals = gradient_tree.totals(local, options, context)
    grads = [totals.get(i, leaf) for i, leaf in enumerate(given.leaves)]
    own_params, types = self._params_of(params, given, tables)
    inner, whole = self._whole_state(given, tables, state.inner, types)
    owner = owner_rows.Owner(
      analysis=self._analysis_of(given, tables, whole, types, extra),
      structure=jax.tree.structure(given.view(grads, tables), is_leaf=is_rows),
      tables=tables,
      grads=grads,
      params=own_params,
      extra=extra,
      axis=context.axes[-1],
      scaled=context.scaled,
      sharded=frozenset(given.tables),
      clip_norm=self.clip_norm,
    )
    out, leaves = {}, state.sync.leaves
    if tables:
      out, inner, leaves, owner = self._exchange(
        given, owner, inner, state.sync, context
      )
    elif self.clip_norm is not None:
      owner = owner.agreed(owner.no_squares)
    updated, inner = owner.finish(inner)
    updated = [out.get(i, x) for i, x in enumerate(updated)]
    sync = sync_state.next_state(
      state.sync, leaves, "sharded_optimizer", options, updates
    )
    new = ShardedOptimizerState(sync, _bare(inner))
    return given.tree(updated, given.tables), new

  def _init_on(self, mesh, params):
    """Makes the state in plain jit over a mesh."""
    _require_replicated(params)
    axes, part = self.options.axes, sharded_table.types_of_part(params)
    self._require_devices(mesh.shape[axes[-1]], params)
    local = collectives.shapes_on_device(self.init, part, mesh, axes)
    # Owners are along the last axis. Along the others they have copies.
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
    """Updates by gradients of the whole batch, in plain jit over a mesh."""
    _require_replicated(params)
    axes = self.options.axes
    self._require_devices(mesh.shape[axes[-1]], updates, params, state)
    parts = whole_batch.parts_of(updates, mesh, self.options)
    owners = dataclasses.replace(
      self, options=parts.options, summed=frozenset(parts.summed)
    )

    def step(own, summed, state, params):
      grads = parts.tree(own, summed)
      return owners.update(grads, state, params, **extra)

    split, everywhere = PartitionSpec(axes[-1]), PartitionSpec()
    # Rows of a leaf that is not sent sparse come out as an array.
    synced = [
      spec if name in parts.sparse else jax.tree.leaves(spec)[-1]
      for name, spec in zip(parts.names, parts.synced_specs)
    ]
    out = Leaves.of(parts.tree(synced, [everywhere] * len(parts.summed)))
    given = Leaves.of(updates)
    for i, table in given.tables.items():
      aux = table.layout.slots, table.axes
      out.leaves[i] = TableUpdate.tree_unflatten(aux, (split, split))
    specs = sharded_table.specs(state, split)
    return whole_batch.mapped(
      step,
      mesh,
      axes,
      (
        parts.given_specs,
        everywhere,
        specs,
        sharded_table.specs(params, split),
      ),
      (given.tree(out.leaves, given.tables), specs),
    )(parts.given, [*parts.summed.values()], state, params)

  def _require_devices(self, devices: int, *trees: Any) -> None:
    """Raises ValueError if sharded tables are for other devices or axes."""
    for name, table in leaf_util.named_leaves(trees, is_sharded):
      if not is_sharded(table):
        continue
      what = f"Table {name.partition('.')[2] or leaf_util.ONLY!r}"
      # A saved table has no axes.
      if table.batch_axes in ((), self.options.axes):
        sharded_table.require_devices(what, table.devices, devices)
      else:
        raise ValueError(
          "`axis_name` of sharded_optimizer must name the axes over which a"
          f" batch of sharded tables is split, got {self.options.axes!r}. Give"
          f" {table.batch_axes!r}: `replicas` and `axis_name` of"
          " `zenjax.tables.shard`."
        )

  def _tables(self, tree: Any, given: Leaves) -> dict[int, ShardedTable]:
    """Returns the tables that have owners, by the leaf's number.

    Their values are the types `[S, D]` of an owner's part.
    """
    options, tables, hash_offset = self.options, {}, 0
    if not given.tables and len(options.axes) > 1:
      raise ValueError(
        "`axis_name` must be one axis for replicated tables, got"
        f" {options.axes!r}. Give the axis of the fastest links and average"
        " over the others before, or use `zenjax.tables.shard(.., replicas=)`."
      )
    chosen = [False] * len(given.leaves)
    if not given.tables:
      chosen = leaf_util.select(tree, options.sparse, options.unit)
    for i, leaf in enumerate(given.leaves):
      if i in given.tables:
        table, width = given.tables[i], leaf.shape[-1]
        # A state is the same however rows are sent.
        table = dataclasses.replace(table, sizes=(), wire_dtype=None)
      elif chosen[i]:
        rows, width = leaf_util.table_shape(leaf, options.unit)
        table = ShardedTable(
          value=None,
          num_rows=rows,
          axes=options.axes,
          devices=collectives.size(options.axes),
          seed=options.hash_seed,
          hash_offset=hash_offset,
          stack=tuple(leaf.shape[:-2]),
        )
        hash_offset = (hash_offset + rows) % 2**32
      elif given.tables and is_rows(leaf) and leaf_util.is_table(leaf):
        raise ValueError(
          "`params` of sharded_optimizer must have all large tables sharded or"
          f" none, but leaf {given.names[i]!r} is replicated. Choose it with"
          " `tables=` of `zenjax.tables.shard`, or give it another"
          " transformation with `optax.partition`."
        )
      else:
        continue
      shape = table.layout.slots, width
      tables[i] = table.with_value(jax.ShapeDtypeStruct(shape, leaf.dtype))
    return tables

  def _require_usual(self):
    """Raises ValueError for options that sharded tables do not have."""
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
        f"{', '.join(wrong)} of sharded_optimizer must be left out, because"
        " tables are sharded and `zenjax.tables.shard` has decided how rows are"
        " sent."
      )

  def _params_of(self, params, given, tables):
    """Returns leaves of parameters, `[S, D]` for sharded tables, and types."""
    if params is None:
      if given.tables:
        raise ValueError(
          "`params` must be given to `update` of sharded_optimizer, because"
          " tables are sharded. Call `tx.update(grads, state, params)`."
        )
      return None, None
    leaves = [
      x.value
      if is_sharded(x)
      else leaf_util.as_table(x, self.options.unit)
      if i in tables
      else x
      for i, x in enumerate(given.structure.flatten_up_to(params))
    ]
    return leaves, self._types(given, tables, leaves)

  def _exchange(self, given, owner, inner, sync, context):
    """Returns updates of tables, the state of `tx`, counts, and the owner."""
    plans = self._plans(given, owner.tables, sync, context)
    gradients = [
      [leaf_util.as_table(given.leaves[i], self.options.unit)]
      for i in owner.tables
    ]
    sums = dataclasses.replace(context, mean=False)
    if owner.clip_norm is not None:
      # Owners must have all sums before they can update the first of them.
      _, _, squares = exchange.exchange(
        plans,
        gradients,
        _PUSH_ONLY,
        sums,
        owner=owner.add_squares,
        owned=owner.no_squares,
      )
      owner = owner.agreed(squares)
    out = {}
    if given.tables:
      scheme, step = _PUSH_ONLY, owner.keeping
      lists = [
        owner_rows.Listed.empty(plan.most_pull, table)
        for plan, table in zip(plans, owner.tables.values())
      ]
      _, counts, (inner, lists) = exchange.exchange(
        plans, gradients, scheme, sums, owner=step, owned=(inner, lists)
      )
      for (i, table), (slots, rows) in zip(given.tables.items(), lists):
        out[i] = TableUpdate(slots, rows, table.layout.slots, table.axes)
    else:
      scheme = SPARSE["zen"]
      updates, counts, inner = exchange.exchange(
        plans, gradients, scheme, sums, owner=owner, owned=inner
      )
      for i, (rows,) in zip(owner.tables, updates):
        out[i] = gradient_tree.as_output(rows, given.leaves[i], self.options)
    leaves = dict(sync.leaves)
    for plan, count in zip(plans, counts):
      other_bytes = _other_bytes(plan, count, owner, given.tables, context)
      leaves |= sync_state.after_step(
        leaves, sync.step, count, plan, scheme, context, other_bytes
      )
    return out, inner, leaves, owner

  def _plans(self, given, tables, sync, context):
    """Plans how the rows of each table get to their owners."""
    options, scheme, choices = self.options, SPARSE["zen"], []
    if given.tables:
      wires = {given.names[i]: x.wire_dtype for i, x in given.tables.items()}
      options = dataclasses.replace(options, wire_dtype=wires)
    facts = [
      leaf_tables.table_of(given.names[i], given.leaves[i], options)
      for i in tables
    ]
    for i, fact in zip(tables, facts):
      if table := given.tables.get(i):
        # Buffers have the size that a fetch has. The union has no limit but,
        # if copies of a table exchange their unions, what `tune` has chosen.
        size = fetch.buffer_size(fact.look_ups or 1, table.layout, table.sizes)
        union = size * context.devices
        if context.devices > table.devices:
          union = [*table.sizes[1:], union][0]
        sizes = arguments.Capacity(size, min(table.num_rows, union))
        choice = leaf_tables.Choice("zen", 1, sizes)
      else:
        choice = leaf_tables.choose(fact, options, dict(sync.tuned), context)
      choices.append(choice)
    plans = leaf_tables.plans(
      facts, choices, scheme, options, context, owners=True
    )
    # No device receives the sums of a sharded table.
    rooms = {"rooms": (0,)} if given.tables else {}
    return [
      dataclasses.replace(plan, layout=table.layout, **rooms)
      for plan, table in zip(plans, tables.values())
    ]

  def _whole_state(self, given, tables, state, params):
    """Returns `state` as `tx` made it, and its types for whole tables."""
    if params is None:
      params = self._types(given, tables, given.leaves)
    wanted = jax.eval_shape(lambda params: self.inner.init(params), params)
    got_structure = jax.tree.structure(state)
    if got_structure != jax.tree.structure(_bare(wanted)):
      raise ValueError(
        "`state` of sharded_optimizer must be made by `zenjax.init_state(tx,"
        " params, mesh, axis_name)` for these parameters, with structure"
        f" {jax.tree.structure(_bare(wanted))}, got {got_structure}."
      )
    leaves, structure = jax.tree.leaves(state), jax.tree.structure(wanted)
    types = [
      row_analysis.type_of(x).update(shape=whole.shape)
      for x, whole in zip(leaves, jax.tree.leaves(wanted))
    ]
    return structure.unflatten(leaves), structure.unflatten(types)

  def _analysis_of(self, given, tables, state, params, extra):
    """Returns how `tx` updates whole tables, from types of their state.

    Raises:
      ValueError: It does not update tables by rows.
    """
    grads = self._types(given, tables, given.leaves)
    # Row gradients of small tables, too, are updated by rows.
    small = [i for i, x in enumerate(given.leaves) if is_rows(x)]
    chosen = dict.fromkeys([*tables, *small], touched_rows.FEWEST)
    analysis = row_analysis.analysis_of(
      self.inner, grads, state, params, extra, chosen, self.analyses
    )
    lazy.require(analysis, given.names, "tx")
    if analysis.sums:
      raise ValueError(
        "`tx` of sharded_optimizer must update rows without sums over all of"
        f" them, but it has one ({analysis.sums}), and each device has only"
        " some rows. To clip by the norm of all gradients, give `clip_norm=`."
      )
    return analysis

  def _types(self, given, tables, leaves):
    """Returns types of leaves; for tables `ShardedTable`s of `[R, D]`."""
    types = [row_analysis.type_of(leaf) for leaf in leaves]
    for i, table in tables.items():
      shape = table.num_rows, table.value.shape[-1]
      types[i] = types[i].update(shape=shape)
    return given.view(types, tables)


def _own_part(leaf: jax.Array, table: ShardedTable) -> jax.Array:
  """Returns an array with zeros for the rows that other devices own."""
  rows = jnp.arange(table.num_rows, dtype=jnp.int32)
  owner, _ = table.layout.place(rows)
  is_own = owner == lax.axis_index(table.axes)
  shape = *leaf.shape[: max(leaf.ndim - 1, 1)], *(1,) * (leaf.ndim > 1)
  return jnp.where(is_own.reshape(shape), leaf, 0)


def _bare(state: Any) -> Any:
  """Returns a state without the sharded tables that are empty.

  Masks and labels of an optimizer that are made of the parameters leave tables
  out within their types; others leave them out with these.
  """
  return jax.tree.map(
    lambda x: x.value if is_sharded(x) and not jax.tree.leaves(x) else x,
    state,
    is_leaf=is_sharded,
  )


def _require_same_program(
  tx: optax.GradientTransformation, given: Leaves, types: Any
) -> None:
  """Raises ValueError if `tx` treats tables otherwise than plain arrays.

  It may choose leaves by their paths, to which a `ShardedTable` adds a key.

  Args:
    tx: The transformation.
    given: The parameters.
    types: Their types, with tables as `tx` sees them.
  """

  def program(types: Any) -> str:
    run = lambda x: tx.update(x, tx.init(x), x)
    # Optax promotes dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"):
      with jax.numpy_rank_promotion("allow"):
        text = str(jax.make_jaxpr(run)(types))
    return re.sub("0x[0-9a-f]+", "", text)

  if program(types) != program(
    given.structure.unflatten(jax.tree.leaves(types))
  ):
    raise ValueError(
      "`tx` of sharded_optimizer must not choose leaves by the end of their"
      " paths, because the path of a table ends with one more key here. Give"
      " labels of `optax.partition` and masks as trees, such as {'table':"
      " 'adagrad', 'w': 'adam'}, or look at earlier keys of the path only."
    )


def _require_form(state: Any, analysis: RowAnalysis) -> None:
  """Raises ValueError if a state has rows outside of `ShardedTable`s."""
  inside = []
  for node in jax.tree.leaves(state, is_leaf=is_sharded):
    inside += [is_sharded(node)] * len(jax.tree.leaves(node))
  if any(
    table is not None and not is_inside
    for table, is_inside in zip(analysis.state_rows, inside, strict=True)
  ):
    raise ValueError(
      "`tx` of sharded_optimizer must keep the state of each row in the"
      " structure of the parameters. Make it with `jax.tree.map(.., params)`,"
      " as optimizers of optax do."
    )


def _require_same_tables(
  state: ShardedOptimizerState, given: Leaves, tables: Iterable[ShardedTable]
) -> None:
  """Raises ValueError if a state is for other tables, or for other owners."""
  names = sorted([given.names[i] for i in given.tables])
  had = sorted(sync_state.tables(state.sync))
  if had != names:
    raise ValueError(
      "`state` of sharded_optimizer must be made for the tables that are"
      f" sharded, {names}, got {had}. Shard tables before `init_state`, or move"
      " both: `zenjax.tables.shard(params, mesh, axis_name, opt_state=..)`."
    )
  owners = {(x.num_rows, x.seed, x.hash_offset) for x in tables}
  for node in sharded_table.nodes(state.inner):
    for x in jax.tree.leaves(node.value):
      if node.has_rows(x) and len(x) != node.layout.slots:
        raise ValueError(
          "`state` of sharded_optimizer must be split over devices, but each"
          f" device has the parts of {len(x) // node.layout.slots} devices."
          " Give `zenjax.state_specs(state, axis_name)` to shard_map. For"
          " `data_parallel`, don't put it into an `nnx.state`, which hides it."
        )
    owner = node.num_rows, node.seed, node.hash_offset
    if jax.tree.leaves(node) and owner not in owners:
      raise ValueError(
        "`state` of sharded_optimizer must be made for the tables of this step,"
        f" but it is for a table of {node.num_rows} rows whose rows are not"
        " where they are now. Make it with `zenjax.init_state(tx, params, mesh,"
        " axis_name)` for these parameters, with the same `hash_seed`."
      )


def _other_bytes(
  plan: ExchangePlan,
  counts: Counts,
  owner: owner_rows.Owner,
  sharded: Any,
  context: Context,
) -> jax.Array | float:
  """Returns the bytes of fetches and of a norm that a device receives."""
  nbytes = 0.0
  if owner.clip_norm is not None:
    messages = _PUSH_ONLY.messages([plan], context)
    rounds = counts.rounds.astype(jnp.float32)
    nbytes += rounds * base.received_bytes(messages, context)
  if sharded:
    n = plan.layout.groups
    ids, rows, _ = fetch.words_of_round(plan.push, n, plan.row_wire)
    fetches = jnp.maximum(jnp.ceil(counts.fullest / plan.push), 1)
    nbytes += fetches * 4 * (ids + rows) * (n - 1) / n
  return nbytes


def _require_replicated(params: Any) -> None:
  """Raises ValueError if a type says that a parameter is sharded."""
  for name, leaf in leaf_util.named_leaves(params, is_sharded):
    if not is_sharded(leaf) and any(compat.explicit_spec(leaf)):
      raise ValueError(
        "`params` must be replicated for sharded_optimizer, but leaf"
        f" {name!r} is sharded by {jax.typeof(leaf).sharding.spec}. Replicate"
        " it with `jax.device_put(x, jax.P())`. To shard a table, use"
        " `zenjax.tables.shard`. A leaf that must stay sharded needs another"
        " transformation, by `optax.partition`."
      )


def sharded_optimizer(
  tx: optax.GradientTransformation,
  axis_name: arguments.AxisName,
  *,
  sparse: arguments.SparseSpec = None,
  op: str | None = None,
  clip_norm: float | None = None,
  wire_dtype: Any = None,
  capacities: arguments.Capacities = None,
  mesh: Any = None,
  kernels: arguments.Kernels = "xla",
  hash_seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes gradients, and shards the optimizer state of tables.

  Use it instead of `optax.chain(zen_sync(axis_name), lazy_rows(tx))` to divide
  the optimizer's state of tables by the number of devices, as ZeRO does, and
  always for tables that `zenjax.tables.shard` has sharded. The device that sums
  a row's gradient, its *owner*, also updates the row. Each of `n` devices sends
  as many bytes as with the chain (with `clip_norm` more), does 1/n of the
  optimizer's work and holds 1/n of its state. Results equal the chain's. Leaves
  that are not tables are all-reduced and updated by `tx` on every device.

  Rows that no device touched keep state and parameters, as in `lazy_rows`.
  Apply updates with `optax.apply_updates`. The update of a sharded table holds
  rows, so put transformations that scale updates inside `tx`.

  The state differs between devices. `zenjax.init_state` makes it everywhere. In
  plain `jit` over a mesh `tx.init` does too, if `jax.set_mesh`, the parameters
  or `mesh=` tell the mesh. Save it with `zenjax.to_checkpoint`, and move it to
  another number of devices with `zenjax.from_checkpoint`.

  Args:
    tx: Any optimizer that updates a row by that row's gradient, state and
      parameters.
    axis_name: The axis that devices are mapped over. For sharded tables with
      `replicas`, all axes of the batch, slowest first; owners are along the
      last.
    sparse: Which replicated tables have owners: a pytree prefix of bools or a
      callable `(name, leaf) -> bool`. By default large and tall leaves.
    op: `"mean"` or `"sum"` of the devices' gradients. In plain `jit`, where
      the loss is taken over the whole batch, it is always the sum.
    clip_norm: Scales all gradients so that their norm, over all rows of all
      owners and all other leaves, is at most this. None does not clip.
    wire_dtype: Rounds rows of replicated tables to this dtype before they are
      sent, as in `zen_sync`: gradients to owners, and updates from them. For
      sharded tables, `zenjax.tables.shard` has this argument.
    capacities: Buffer sizes `(push, pull)` in rows of replicated tables, for
      all or by leaf name. `zenjax.tune` finds them for you.
    mesh: The mesh of a step in plain `jit`, if neither `jax.set_mesh` nor the
      types of gradients and parameters tell.
    kernels: `"xla"` or `"pallas"`, as for `zen_sync`, for replicated tables.
    hash_seed: Draws another hash for replicated tables.

  Returns:
    A transformation from gradients, arrays or SparseRows, to updates. Its state
    is a `ShardedOptimizerState`.

  Raises:
    ValueError: An argument is out of range; `axis_name` is more than one axis,
      or sharded tables have other axes; `tx` updates rows by others (see
      `lazy_rows`) or by sums over rows, or accumulates gradients
      (`optax.MultiSteps`); or the state was made for other owners.
    NotImplementedError: `kernels="pallas"` has no kernel for this device or
      table.

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
    ...   return (optax.apply_updates(table, updates), opt_state), loss
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
    wire_dtype=wire_dtype,
    capacities=capacities,
    mesh=mesh,
    kernels=kernels,
    hash_seed=hash_seed,
  )
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(
      f"`clip_norm` must be positive, got {clip_norm!r}. Leave it out for no"
      " limit."
    )
  inner = optax.with_extra_args_support(arguments.optimizer("tx", tx))
  owners = Owners(inner, options, clip_norm)
  return optax.GradientTransformationExtraArgs(owners.init, owners.update)
