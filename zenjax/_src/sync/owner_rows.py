"""Runs an optimizer at the owners, on the sums of a push.

An owner holds the optimizer's state of its rows and columns and of no others,
`[S, ceil(D / g)]` where a table is `[R, D]`: as in ZeRO, but by the owners that
sum the gradients anyway.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core.arguments import Partition
from zenjax._src.rows import sparse_rows
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_program import RowProgram
from zenjax._src.rows.row_program import Totals
from zenjax._src.rows.sharded_tables import Sums
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Sums as Held
from zenjax._src.schemes.buffer_sizes import TablePlan

# Reductions of some rows, and how many rows of each table these are.
Parts = tuple[dict[int, jax.Array], dict[int, jax.Array]]


class Owned(NamedTuple):
  """A leaf of a state that every device has its own part of."""

  part: Any  # [S, ...] on a device, or its spec


def is_owned(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, Owned)


def unwrapped(state: Any) -> Any:
  """The state as the optimizer knows it."""
  return jax.tree.map(
    lambda x: x.part if is_owned(x) else x, state, is_leaf=is_owned
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
  """One step of `inner` on the rows that pushes bring.

  Attributes:
    inner: The optimizer.
    program: Of its update of whole tables.
    structure: Of parameters and gradients.
    plans: Of the leaves that are tables, by the leaf's number.
    grads: Leaves; of tables anything, of all others the mean over devices.
    params: Leaves, whole; None if the caller gave none.
    extra: Further arguments of `inner.update`.
    axis: Along which owners lie.
    scaled: The mean of a sum, or the sum.
    sharded: Leaves of which a device has its own rows alone.
    totals: Reductions over the rows of all owners, those that are known.
  """

  inner: optax.GradientTransformationExtraArgs
  program: RowProgram
  structure: Any
  plans: dict[int, TablePlan]
  grads: Sequence[Any]
  params: Sequence[Any] | None
  extra: dict[str, Any]
  axis: str
  scaled: Callable[[jax.Array], jax.Array]
  sharded: frozenset[int] = frozenset()
  totals: Totals = dataclasses.field(default_factory=dict)

  @property
  def depth(self) -> int:
    """How often owners must agree on a value of all rows before they step."""
    return self.program.depth

  def nothing(self, level: int) -> Parts:
    """Returns what reductions of a level make of no rows."""
    like = lax.axis_index(self.axis)
    zero = compat.cast_like(jnp.zeros((), jnp.int32), like)
    return self.program.none(level, like), dict.fromkeys(self.plans, zero)

  def reduced(
    self, level: int, parts: Parts, held: Sequence[Held], state: Any
  ) -> Parts:
    """Joins reductions with those of the rows that a push brought."""
    unions, at, grads = self._pushed(held)
    grads, params, at = self._trees(grads, at)
    more = touched_rows.parts(
      self.program, level, at, grads, state, params, self.extra, self.totals
    )
    before, counts = parts
    real = touched_rows.counted(touched_rows.real_rows(at))
    counts = {i: counts[i] + real[i] for i in self.plans}
    return self.program.joined(before, more), counts

  def agreed(self, parts: Parts) -> "Owner":
    """Returns this with the reductions of a level over the rows of all owners.

    Owners add in one order, so that all have the same bits.
    """
    own, counts = parts
    groups = {i: plan.column_groups for i, plan in self.plans.items()}
    total = _gathered((own, counts), self.axis)
    whole = {i: self.program.reduction_of(i, x) for i, x in total[0].items()}
    counts = {i: jnp.sum(x) // groups[i] for i, x in total[1].items()}
    found = self.program.finished(whole, counts)
    return dataclasses.replace(self, totals={**self.totals, **found})

  def __call__(
    self, held: Sequence[Held], state: Any
  ) -> tuple[list[Held], Any]:
    """Sums become updates; the state has a step of these rows more."""
    unions, at, grads = self._pushed(held)
    out, new, tags = self._step(state, grads, at)
    state = touched_rows.with_rows(state, new, tags)
    found = []
    for (i, plan), own in zip(self.plans.items(), held):
      real = (unions[i].slots < plan.layout.slots)[:, None]
      rows = jnp.where(real, out[i].astype(unions[i].rows.dtype), 0)
      found.append(own._replace(union=unions[i]._replace(rows=rows)))
    return found, state

  def finish(self, state: Any) -> tuple[list[Any], Any]:
    """Updates of what is no table, and the state with all that has no rows."""
    at, grads = {}, {}
    for i, plan in self.plans.items():
      some, slots = self.program.fewest, plan.layout.slots
      at[i] = touched_rows.At(jnp.full(some, slots, jnp.int32), slots)
      grads[i] = jnp.zeros((some, plan.block_width), plan.table.dtype)
    out, rest, tags = self._step(state, grads, at)
    return out, touched_rows.with_rest(state, rest, tags)

  def _pushed(self, held):
    """Unions, which rows they are, and their gradients, by table."""
    unions = {i: h.union for i, h in zip(self.plans, held)}
    at, grads = {}, {}
    for i, plan in self.plans.items():
      slots = plan.layout.slots
      distinct = touched_rows.distinct(unions[i].slots, slots)
      at[i] = touched_rows.At(distinct, slots)
      rows = self.scaled(unions[i].rows)
      grads[i] = rows.astype(plan.table.dtype)
    return unions, at, grads

  def _trees(self, grads, at):
    """Gradients, parameters, and which rows, in the user's structure."""
    grads = [grads.get(i, x) for i, x in enumerate(self.grads)]
    params = None
    if self.params is not None:
      params = self.structure.unflatten(
        [
          self._rows_of(i, x, at[i]) if i in at else x
          for i, x in enumerate(self.params)
        ]
      )
    at = [at.get(i, touched_rows.ALL) for i in range(len(grads))]
    back = self.structure.unflatten
    return back(grads), params, back(at)

  def _rows_of(self, i, table, at):
    if i in self.sharded:
      return touched_rows.gather(table, at)
    return own_rows(table, at.ids, self.plans[i], self.axis)

  def on_own_tables(
    self, sums: Sums, state: Any, tables: dict[int, jax.Array]
  ) -> tuple[Any, dict[int, jax.Array]]:
    """A step of these rows on tables `[S, D]`, of which all are sharded."""
    params = [tables.get(i, x) for i, x in enumerate(self.params or ())]
    owner = dataclasses.replace(self, params=params)
    held, state = owner(pushed(sums), state)
    for i, own in zip(self.plans, held):
      slots, size = own.union.slots, self.plans[i].layout.slots
      rows = SparseRows(slots, own.union.rows, size).as_unique()
      tables = tables | {i: sparse_rows.added(tables[i], rows)}
    return state, tables

  def _step(self, state, grads, at):
    grads, params, at = self._trees(grads, at)
    out, new, tags = touched_rows.step(
      self.inner,
      self.program,
      at,
      grads,
      state,
      params,
      self.extra,
      self.totals,
    )
    return self.structure.flatten_up_to(out), new, tags


class _Pushed(NamedTuple):
  """As `Held`, of sums that nobody pulls."""

  union: Any


class _Union(NamedTuple):
  slots: jax.Array
  rows: jax.Array


def pushed(sums: Sums) -> Sequence[Any]:
  """Sums at the owner of a sharded table, as an `Owner` takes them."""
  return [_Pushed(_Union(*x)) for x in zip(sums.slots, sums.rows)]


def _gathered(tree: Any, axis: str) -> Any:
  """Leaves of all owners behind each other, by one collective a dtype."""
  leaves, structure = jax.tree.flatten(tree)
  out: list[Any] = [None] * len(leaves)
  for dtype in sorted({str(x.dtype) for x in leaves}):
    at = [i for i, x in enumerate(leaves) if str(x.dtype) == dtype]
    flat = jnp.concatenate([jnp.ravel(leaves[i]) for i in at])
    whole = collectives.all_gather(flat, (axis,))
    begin = 0
    for i in at:
      x = leaves[i]
      part = whole[:, begin : begin + x.size]
      out[i] = part.reshape(-1, *x.shape)
      begin += x.size
  return structure.unflatten(out)


def own_rows(
  table: jax.Array, slots: jax.Array, plan: TablePlan, axis: str
) -> jax.Array:
  """This owner's columns of its rows at `slots: [k]`, zeros where none is."""
  me, g = lax.axis_index(axis), plan.column_groups
  row = plan.layout.row(me // g, slots)
  rows = indexing.take_or(table, row, 0)
  if g == 1:
    return rows
  missing = plan.block_width * g - table.shape[1]
  rows = jnp.pad(rows, ((0, 0), (0, missing)))
  begin = me % g * plan.block_width
  return lax.dynamic_slice_in_dim(rows, begin, plan.block_width, axis=1)


# Which owner holds which rows of a state, told by the state itself.
#
# A part of a state is of use to the owner that it was made for, and to no
# other. So beside its parts a state keeps what decides who holds them: under a
# key of the owners, which is there when a step is traced and when a checkpoint
# is restored into a state, and with a first dimension of as many as there are
# devices. What is saved may also be in the order of rows, which knows no
# owners.


# The key of a state that lies as its tables do.
IN_ROWS = "in_order_of_rows"
# Of the owners of sharded tables, which the tables say themselves.
SHARDED = "sharded"
# Values of `partition` that are no number of column groups.
_BY_NAME: dict[Any, int] = {
  "hash": 1,
  "columns": 2**32 - 1,
  SHARDED: 2**32 - 2,
}


class Facts(NamedTuple):
  """Numbers that decide who owns a table's rows and columns."""

  devices: Any  # 0 in the order of rows
  rows: Any  # R
  width: Any  # D
  itemsize: Any
  wire_itemsize: Any
  partition: Any  # column groups, or as `_BY_NAME`
  seed: Any
  first_word: Any  # of a sharded table; 0 where the step decides it


class Holding(NamedTuple):
  """Describes the owners that the parts of a state were made for.

  Each device has a copy, `[1, ..]`, so that globally there are as many as
  devices. A state in the order of rows has one copy, on the host.
  """

  tables: dict[str, Any]  # [1, T, len(Facts)] uint32, under `key_of`
  leaves: Any  # [1, L, 2] uint32, see `Lies`
  padding: Any  # [1, L] float32, of an `Owned` where no row is


class Lies(NamedTuple):
  """Numbers that say what an `Owned` is a part of."""

  table: Any  # its place among the tables
  columns: Any  # 1 if its second dimension is the table's, else 0


def key_of(plans: Iterable[TablePlan], devices: int) -> str:
  """Returns a fingerprint of all tables' owners, the devices in front."""
  lies = [
    (
      plan.table.num_rows,
      plan.table.width,
      plan.column_groups,
      plan.layout.groups,
      plan.layout.seed,
      plan.layout.first_word,
    )
    for plan in plans
  ]
  digest = hashlib.blake2s(repr(lies).encode(), digest_size=6).hexdigest()
  return f"{devices}_devices_{digest}"


def facts_of(plan: TablePlan, devices: int, partition: Partition) -> Facts:
  """Returns the facts of a table that is planned already."""
  return Facts(
    devices=devices,
    rows=plan.table.num_rows,
    width=plan.table.width,
    itemsize=plan.table.dtype.itemsize,
    wire_itemsize=plan.table.wire_dtype.itemsize,
    partition=_BY_NAME.get(partition, partition),
    seed=plan.layout.seed,
    first_word=plan.layout.first_word if partition == SHARDED else 0,
  )


def plans_of(tables: Sequence[Facts], devices: int) -> tuple[TablePlan, ...]:
  """Returns the plans by which a step on so many devices finds owners.

  Raises:
    ValueError: A number of column groups does not divide the devices.
  """
  names = {code: name for name, code in _BY_NAME.items()}
  known, columns = [], []
  for i, facts in enumerate(tables):
    table = buffer_sizes.Table(
      name=str(i),
      num_rows=facts.rows,
      width=facts.width,
      # Sizes alone decide.
      dtype=jnp.dtype(f"u{facts.itemsize}"),
      wire_dtype=jnp.dtype(f"u{facts.wire_itemsize}"),
    )
    known.append(table)
  if names.get(tables[0].partition) == SHARDED:
    return tuple(
      [
        plan_of_sharded(table, devices, facts.seed, facts.first_word)
        for table, facts in zip(known, tables)
      ]
    )
  for facts in tables:
    partition = names.get(facts.partition, facts.partition)
    groups = buffer_sizes.column_groups_of(partition, devices)
    if devices % groups:
      raise ValueError(
        f"`mesh` must have devices that the {groups} column groups of"
        f" `partition={groups}` divide, got {devices}; give `like=` a state of"
        " `zenjax.init_state` that was made with another `partition`."
      )
    columns.append(groups)
  return buffer_sizes.plan_group(
    known,
    row_groups=[devices // g for g in columns],
    column_groups=columns,
    devices=devices,
    pinned=[None] * len(known),
    seed=tables[0].seed,
  )


def plan_of_sharded(
  table: buffer_sizes.Table, devices: int, seed: int, first_word: int
) -> TablePlan:
  """Returns the plan of a table of which each device has its own rows."""
  return buffer_sizes.plan_table(
    table,
    groups=devices,
    column_groups=1,
    devices=devices,
    pinned=None,
    seed=seed,
    first_word=first_word,
  )


def require(
  holding: Holding | None, plans: Iterable[TablePlan], devices: int
) -> None:
  """Raises ValueError where parts are not those of the owners of a step."""
  if holding is None:
    return
  ((key, tables),) = holding.tables.items()
  want = key_of(plans, devices)
  if key == want and tables.shape[0] == 1:
    return
  if key == IN_ROWS:
    raise ValueError(in_rows_message("state"))
  made_for = int(key.split("_")[0])
  if key == want:
    raise ValueError(
      "`state` of sharded_optimizer must be split over devices, got the parts"
      " of"
      f" {tables.shape[0]} devices on each of {devices}; give"
      " `zenjax.state_specs(state, axis_name)` to shard_map, and call"
      " `zenjax.from_checkpoint(state, mesh, axis_name)` where it was saved on"
      f" {tables.shape[0] * devices}."
    )
  if made_for != devices:
    raise ValueError(
      others_message("state", "sharded_optimizer", made_for, devices)
    )
  raise ValueError(
    "`state` of sharded_optimizer must be made for the tables and owners of"
    " this"
    f" step on {devices} devices, {want}, got {key}: its rows have other"
    " owners; give sharded_optimizer the `hash_seed`, `partition` and"
    " `wire_dtype`"
    " that the state was made with, or move it by"
    " `zenjax.from_checkpoint(state, mesh,"
    " axis_name, like=zenjax.init_state(tx, params, mesh, axis_name))`."
  )


def in_rows_message(argument: str) -> str:
  """Says that a state on devices is needed in the place of a saved one."""
  return (
    f"`{argument}` of sharded_optimizer must lie on the devices that own its"
    " rows,"
    " got one in the order of rows, as it is saved; call"
    " `zenjax.from_checkpoint(state, mesh, axis_name)` first."
  )


def others_message(argument: str, by: str, had: int, devices: int) -> str:
  """Says that a state was made for other devices than it is used on."""
  return (
    f"`{argument}` of {by} must be made for the {devices} devices that it is"
    f" used on, got one made for {had}; call `zenjax.from_checkpoint(state,"
    " mesh,"
    " axis_name)`, which moves it, or use it with the mesh that it lies on,"
    " of `mesh=` too."
  )


def in_rows(inner: Any, holding: Holding) -> tuple[Any, Holding]:
  """Joins parts `[n * S, ..]` to host arrays `[R, ..]` in the order of rows."""
  tables = _facts(holding)
  if not tables[0].devices:
    return inner, _relabelled(holding, tables, 0)
  plans = plans_of(tables, tables[0].devices)

  def joined(part, lies, fill):
    del fill
    plan = plans[lies.table]
    shape = _shape(plan)
    _require_shape(part, shape[0] * shape[1] * shape[2], tables[0].devices)
    part = part.reshape(*shape, *part.shape[1:])
    group, slot = _places(plan)
    if not lies.columns:
      return part[group, 0, slot]
    rows = part[group, :, slot]  # [R, g, w, ..]
    rows = rows.reshape(len(rows), -1, *rows.shape[3:])
    return rows[:, : plan.table.width]

  inner = _each(joined, inner, holding)
  tables = [facts._replace(devices=0) for facts in tables]
  return inner, _relabelled(holding, tables, 0)


def on_owners(
  inner: Any, holding: Holding, devices: int, like: Holding | None = None
) -> tuple[Any, Holding]:
  """Divides rows among so many owners, with the padding that `init` makes.

  Args:
    inner: The optimizer's state, on owners or in the order of rows.
    holding: Says which.
    devices: The number of owners.
    like: Its partition and seed are taken; None for those of `holding`.
  """
  old = _facts(holding)
  new = old if like is None else _facts(like)
  new = [facts._replace(devices=devices) for facts in new]
  shapes = lambda tables: [(facts.rows, facts.width) for facts in tables]
  if shapes(old) != shapes(new):
    raise ValueError(
      f"`like` must hold the tables of `state`, of shapes {shapes(old)}, got"
      f" {shapes(new)}."
    )
  if new != old:
    inner, holding = in_rows(inner, holding)
    plans = plans_of(new, devices)
    parted = lambda rows, lies, fill: _parted(rows, lies, fill, plans)
    inner = _each(parted, inner, holding)
  return inner, _relabelled(holding, new, devices)


def _parted(
  rows: np.ndarray, lies: Lies, fill: np.ndarray, plans: Sequence[TablePlan]
) -> np.ndarray:
  """Divides `[R, ..]` into `[n * S, ..]`."""
  plan = plans[lies.table]
  _require_shape(rows, plan.table.num_rows, 0)
  m, g, slots = _shape(plan)
  group, slot = _places(plan)
  rest = rows.shape[1:]
  if lies.columns:
    missing = g * plan.block_width - plan.table.width
    pads = [(0, 0), (0, missing), *[(0, 0)] * (rows.ndim - 2)]
    rows = np.pad(rows, pads, constant_values=fill)
    rest = plan.block_width, *rest[1:]
    rows = rows.reshape(len(rows), g, *rest)
  else:
    rows = np.repeat(rows[:, None], g, axis=1)
  part = np.full((m, g, slots, *rest), fill, rows.dtype)
  part[group, :, slot] = rows
  return part.reshape(-1, *rest)


def _require_shape(part: np.ndarray, rows: int, devices: int) -> None:
  if part.shape[0] != rows:
    form = f"on {devices} devices" if devices else "in the order of rows"
    raise ValueError(
      f"`state` of sharded_optimizer must have {rows} rows {form}, as it says"
      " of"
      f" itself, got {part.shape[0]}; give it as it was saved, whole."
    )


def _shape(plan: TablePlan) -> tuple[int, int, int]:
  """Returns `(m, g, S)`; owner `p` has rows of `p // g`, columns of `p % g`."""
  return plan.layout.groups, plan.column_groups, plan.layout.slots


def _places(plan: TablePlan) -> tuple[np.ndarray, np.ndarray]:
  """Returns the row group and the slot of each row, in order."""
  place = plan.layout.place(jnp.arange(plan.table.num_rows, dtype=jnp.int32))
  group, slot = map(np.asarray, place)
  return group, slot


def _facts(holding: Holding) -> list[Facts]:
  """Returns the facts of each table; refuses a state that is not whole."""
  (copies,) = map(np.asarray, holding.tables.values())
  tables = [Facts(*map(int, facts)) for facts in copies[0]]
  devices = tables[0].devices
  if len(copies) != max(devices, 1) or (copies != copies[:1]).any():
    raise ValueError(
      "`state` of sharded_optimizer must have the parts of all devices, each"
      " once,"
      f" got {len(copies)} parts of a state for {devices} devices; give it as"
      " it was saved, split over the axis of sharded_optimizer and no other."
    )
  return tables


def relabelled(holding: Holding, devices: int | None) -> Holding:
  """Describes as many owners of sharded tables, whose rows go by themselves."""
  tables = [facts._replace(devices=devices or 0) for facts in _facts(holding)]
  return _relabelled(holding, tables, devices or 0)


def _relabelled(
  holding: Holding, tables: Sequence[Facts], devices: int
) -> Holding:
  """Describes other owners; the order of rows where `devices` is 0."""
  copies = max(devices, 1)
  key = key_of(plans_of(tables, devices), devices) if devices else IN_ROWS
  again = lambda x: np.repeat(np.asarray(x)[:1], copies, axis=0)
  return Holding(
    tables={key: again(np.array([tables], np.uint32))},
    leaves=again(holding.leaves),
    padding=again(holding.padding),
  )


def _each(
  f: Callable[[np.ndarray, Lies, np.ndarray], np.ndarray],
  inner: Any,
  holding: Holding,
) -> Any:
  """Puts `f(part, Lies, padding)` in the place of each part."""
  known = zip(np.asarray(holding.leaves)[0], np.asarray(holding.padding)[0])

  def one(node):
    if not is_owned(node):
      return node
    lies, fill = next(known)
    part = np.asarray(node.part)
    fill = np.asarray(fill).astype(part.dtype)
    part = f(part, Lies(*map(int, lies)), fill)
    return node._replace(part=part)

  return jax.tree.map(one, inner, is_leaf=is_owned)
