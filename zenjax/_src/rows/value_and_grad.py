"""`value_and_grad`: gradients of embedding tables as rows."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import batch_layout
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sharded_tables
from zenjax._src.rows import sparse_rows
from zenjax._src.rows import table_uses
from zenjax._src.rows import tapping
from zenjax._src.rows.loss import partial_loss
from zenjax._src.rows.sharded_tables import is_sharded
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.rows.tapping import Path


def value_and_grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  *,
  tables: SparseSpec = None,
  prefetched: sharded_tables.Ahead | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """`jax.value_and_grad`, with gradients of embedding tables as `SparseRows`.

  Use it in place of `jax.value_and_grad`; models need no change. It traces the
  loss and finds tables that are only looked up: through `jnp.take`,
  `table[ids]`, the embedding layers of Flax, Haiku and Equinox, inside `jit`,
  `vmap`, `scan` and `jax.checkpoint`, after casts, factors and a row that is
  set to a constant for padding. The gradient of such a table holds one row for
  each lookup, so no array of the table's size is made. Rows of ids that repeat
  are summed in float32, also those of bfloat16 tables. All other gradients are
  as `jax.value_and_grad` gives them, for example of a table that is also the
  weights of a softmax; `explain_tables` says why a gradient is an array.

  Under `shard_map(check_vma=True)` all gradients are those of the device's own
  part, as if `fun` had been given `zenjax.unreduced(params)`.

  Arguments may be modules of Flax's nnx, as `nnx.value_and_grad` takes them.
  Gradients by their `nnx.Param` come in an `nnx.State`, and what the loss
  writes to a module, for example counts of dropout, is written back to it. For
  modules of Equinox there is `zenjax.rows.filter_value_and_grad`.

  Args:
    fun: The loss. Sharded tables may be in any argument; those of arguments
      that are not differentiated stay as they are.
    argnums: Positions of the arguments to differentiate by, or `nnx.DiffState`
      for a part of a module.
    has_aux: Whether `fun` returns a pair `(loss, aux)`.
    holomorphic: As for `jax.value_and_grad`.
    allow_int: As for `jax.value_and_grad`.
    tables: Which leaves give rows: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. None finds all that can.
    prefetched: What `zenjax.tables.prefetch(fun)` returned for the arguments
      that the function will be given, if tables are sharded.

  Returns:
    A function with the arguments of `fun`. It returns the value and the
    gradients, in the structure of the arguments with SparseRows in the place
    of tables.

  Raises:
    ValueError: `tables` demands rows of a leaf that is used otherwise; the
      message says where. Or the loss adds variables to an nnx module, or two
      arguments share one.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.sum(params["table"][ids] @ params["scale"])
    >>> params = {"table": jnp.ones((5, 2)), "scale": jnp.array([1.0, 3.0])}
    >>> value, grads = zenjax.value_and_grad(loss)(params, jnp.array([4, 0]))
    >>> grads["table"]
    SparseRows(rows [4 0] of 5, values float32[2,2])
    >>> grads["table"].values.tolist(), grads["scale"].tolist()
    ([[1.0, 3.0], [1.0, 3.0]], [2.0, 2.0])
  """
  options = dict(holomorphic=holomorphic, allow_int=allow_int)

  @functools.wraps(fun)
  def value_and_grad_of(*args, **kwargs):
    loss = partial_loss(fun, argnums, args, kwargs)
    found = table_uses.find(loss, tables).require()
    outs, grads = _differentiate(found, options, prefetched)
    value = loss.result(found.traced.rebuild(outs))
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
      raise TypeError(
        "`fun` must return a pair (loss, aux) with `has_aux=True`, got"
        f" {jax.tree.structure(value)}; return a pair or leave `has_aux` out."
      )
    return value, loss.structure.unflatten(grads)

  # Of a table whose gradient is an array all the same, all rows are used.
  value_and_grad_of.__dict__["gives_rows"] = True
  return value_and_grad_of


def grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  *,
  tables: SparseSpec = None,
) -> Callable[..., Any]:
  """`jax.grad`, with gradients of embedding tables as `SparseRows`.

  Args:
    fun: As for `value_and_grad`, like all others.
    argnums: See there.
    has_aux: See there.
    holomorphic: See there.
    allow_int: See there.
    tables: See there.

  Returns:
    A function that returns the gradients, or with `has_aux` the pair
    `(gradients, aux)`.

  Raises:
    ValueError: See there.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> loss = lambda table: table[jnp.array([1])].sum()
    >>> zenjax.rows.grad(loss)(jnp.ones((3, 1)))
    SparseRows(rows [1] of 3, values float32[1,1])
  """
  both = value_and_grad(
    fun, argnums, has_aux, holomorphic, allow_int, tables=tables
  )

  @functools.wraps(fun)
  def grad_of(*args, **kwargs):
    value, grads = both(*args, **kwargs)
    return (grads, value[1]) if has_aux else grads

  return grad_of


def filter_value_and_grad(
  fun: Callable[..., Any], *, has_aux: bool = False, tables: SparseSpec = None
) -> Callable[..., tuple[Any, Any]]:
  """Equinox's `filter_value_and_grad`, with gradients of tables as rows.

  It differentiates by the floating arrays of the first argument. All else there
  is left alone, integers, functions and numbers of Python, and the gradients
  hold None in its place. Apply updates by `zenjax.apply_updates`.

  Args:
    fun: A function whose first argument is any pytree, say a module.
    has_aux: As for `value_and_grad`.
    tables: Likewise.

  Returns:
    A function with the arguments of `fun`, which returns the value and the
    gradients.

  Raises:
    ValueError: As for `value_and_grad`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> model = {"table": jnp.ones((5, 2)), "act": jnp.tanh, "rate": 0.5}
    >>> def loss(model, ids):
    ...   return model["act"](model["table"][ids]).sum() * model["rate"]
    >>> both = zenjax.rows.filter_value_and_grad(loss)
    >>> _, grads = both(model, jnp.array([4, 0]))
    >>> grads["act"], grads["rate"], grads["table"]
    (None, None, SparseRows(rows [4 0] of 5, values float32[2,2]))
  """

  @functools.wraps(fun)
  def value_and_grad_of(model, *args, **kwargs):
    is_none = lambda x: x is None

    def loss(params, *args, **kwargs):
      whole = jax.tree.map(
        lambda x, rest: rest if x is None else x, params, model, is_leaf=is_none
      )
      return fun(whole, *args, **kwargs)

    params = jax.tree.map(lambda x: x if _is_floating(x) else None, model)
    both = value_and_grad(loss, has_aux=has_aux, tables=tables)
    return both(params, *args, **kwargs)

  return value_and_grad_of


def _is_floating(x: Any) -> bool:
  return leaf_util.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def apply(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Runs a function of parameters of which tables are sharded.

  For evaluation and serving: the forward half of `value_and_grad`. `fun` is
  written for whole tables and may only look up rows of them, which come from
  the devices that own them.

  Args:
    fun: Takes trees of arrays, some of them made by `zenjax.tables.shard`.

  Returns:
    A function of the same arguments, with the same results.

  Raises:
    ValueError: `fun` uses a sharded table in another way, or ids depend on rows
      of one.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> table = jnp.arange(2000.0).reshape(1000, 2)
    >>> params = zenjax.tables.shard({"t": table}, mesh, "data", tables=True)
    >>> score = lambda params, ids: params["t"][ids].sum(-1)
    >>> zenjax.tables.apply(score)(params, jnp.array([0, 999])).tolist()
    [1.0, 3997.0]
  """

  @functools.wraps(fun)
  def applied(*args, **kwargs):
    loss = partial_loss(fun, (), args, kwargs)
    if not loss.frozen:
      return fun(*args, **kwargs)
    found = table_uses.find(loss, None).require()
    taps, _, drawn = _fetched(found)

    def outputs(types, taps):
      run = tapping.Run(taps=taps, drawn=drawn)
      return found.traced.run(run, types, found.rows)

    outs = _without_tables(found, outputs, taps)
    return loss.result(found.traced.rebuild(outs))

  return applied


def prefetch(
  fun: Callable[..., Any], argnums: int | Sequence[int] = 0
) -> Callable[..., sharded_tables.Ahead]:
  """Sends the ids of a batch to the owners of rows, ahead of its step.

  Ids are known before the step in which their rows are looked up. In the step
  before they travel while that computes, and the next one waits for rows alone.
  Results are those without it, to the bit.

  Args:
    fun: The loss that `zenjax.value_and_grad` takes.
    argnums: As there.

  Returns:
    A function with the arguments of `fun`, of the batch to come; parameters may
    be those of any step. It returns a tree of arrays to carry to that step, for
    `value_and_grad(fun, prefetched=..)`. Look-ups of another batch are NaN
    there. Inside `shard_map` all of it is split over the batch's axes.

  Raises:
    ValueError: No table of the arguments is sharded, or as for
      `zenjax.tables.apply`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> table = jnp.arange(2000.0).reshape(1000, 2)
    >>> table = zenjax.tables.shard(table, mesh, "data", tables=True)
    >>> loss = lambda table, ids: table[ids].sum()
    >>> one, two = jnp.array([0, 999]), jnp.array([7, 7])
    >>> ahead = zenjax.tables.prefetch(loss)(table, one)
    >>> both = zenjax.value_and_grad(loss, prefetched=ahead)
    >>> float(both(table, one)[0]), float(both(table, two)[0])
    (3998.0, nan)
  """

  @functools.wraps(fun)
  def prefetch_of(*args, **kwargs):
    loss = partial_loss(fun, argnums, args, kwargs)
    found = table_uses.find(loss, None).require()
    if not found.away:
      raise ValueError(
        "`fun` of prefetch must look up rows of a sharded table, and none of"
        " its parameters is one; call `zenjax.tables.shard` first, or leave"
        " prefetch out."
      )
    tables, asked, _ = _look_ups(found)
    return _ahead_of(tables, asked)

  return prefetch_of


def _differentiate(found, options, prefetched):
  """`[loss, *aux]`, and the gradient of every leaf."""
  leaves = found.traced.leaves
  plain = {i: x for i, x in enumerate(leaves) if i not in found.rows}
  taps, shown, drawn = _fetched(found, prefetched)
  if not found.away and prefetched is not None:
    raise ValueError(
      "`prefetched` must be None where no table is sharded; call"
      " `zenjax.tables.shard` first."
    )

  def both(types, plain, taps):
    def loss(plain, taps):
      run = tapping.Run(taps=taps, drawn=drawn)
      given = [plain.get(i, types[i]) for i in range(len(leaves))]
      outs = found.traced.run(run, given, found.rows)
      return outs[0], (outs, run.ids)

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, **options)
    return both(plain, taps)

  (value, (outs, ids)), (dense, rows) = _without_tables(
    found, both, plain, taps
  )
  # Of a loss that is linear in the rows, gradients would not wait for the
  # lookups, and XLA:CPU would copy a table that is updated meanwhile.
  value, rows = lax.optimization_barrier((value, rows))
  parts: dict[int, list[SparseRows]] = {i: [] for i in found.rows}
  for path, site in found.sites.items():
    flat = batch_layout.flattened(ids[path].to, rows[path], len(site.lengths))
    leaf = leaves[site.param]
    num_rows = leaf.num_rows if is_sharded(leaf) else leaf.shape[0]
    parts[site.param].append(SparseRows(*flat, num_rows))
  grads = [
    _joined(leaf, parts[i], shown.get(i)) if i in parts else dense[i]
    for i, leaf in enumerate(leaves[: found.wanted])
  ]
  return [value, *outs[1:]], grads


def _without_tables(found: table_uses.Tables, f: Callable[..., Any], *args):
  """Returns `f(leaves, *args)`, which knows only the types of sharded tables.

  Where there are none, it is given the leaves themselves.
  """
  if not found.away:
    return f(found.traced.leaves, *args)
  of = lambda types, args: f(types, *args)
  closed, kinds = jax.make_jaxpr(of, return_shape=True)(
    found.traced.types, args
  )
  types, given = found.traced.leaves, jax.tree.leaves(args)
  jaxpr, read = jaxprs.needed(closed)
  for i in found.away:
    if read[i]:
      raise AssertionError("a table that is away is read")
  # Of a sharded table the value, which nothing reads, stands for its type.
  given = [*types, *given]
  given = [x for x, is_read in zip(given, read, strict=True) if is_read]
  outs = jaxprs.run(jaxpr, jaxprs.opened(closed)[1], given)
  return jax.tree.unflatten(jax.tree.structure(kinds), outs)


def _fetched(
  found: table_uses.Tables, prefetched: Any = None
) -> tuple[dict[Path, Any], dict[int, Any], dict[Path, Any]]:
  """Taps of all lookups; of tables that are away the rows, from their owners.

  And what fetching the rows of each such table has shown, and results of
  callbacks that have run for it.
  """
  taps = {path: site.tap() for path, site in found.sites.items()}
  if not found.away:
    return taps, {}, {}
  tables, asked, drawn = _look_ups(found)
  rows, shown = _rows_of(tables, asked, taps, prefetched)
  return taps | dict(rows), shown, drawn


def _look_ups(found: table_uses.Tables):
  """Ids of tables that are away, computed before any row is read.

  Returns:
    These tables, by number; `[(path, ids, turns)]` of the lookups of each; and
    results of callbacks that have run for it, which must not run again: they
    may be other ones.
  """
  flat, structure = jax.tree.flatten(found.kinds)
  ids, drawn = structure.unflatten(range(len(flat)))  # Numbers of outputs.
  sites = {p: x for p, x in found.sites.items() if x.param in found.away}
  ids = {path: ids[path].read for path in sites}

  def program(outs):
    """The part of the program that some outputs need, and what it reads."""
    outs = [k in outs for k in range(len(flat))]
    return jaxprs.needed(found.ids, outs, effects=False)

  def tables_read(outs):
    _, read = program(outs)
    return [found.names[i] for i in sorted(found.away) if read[i]]

  if names := tables_read(ids.values()):
    raise ValueError(
      "`fun` must look up rows of sharded tables by ids that are known before"
      f" any row is read, and some ids depend on rows of {names[0]!r}; keep"
      " that table whole, by `tables=` of `zenjax.tables.shard`."
    )
  drawn = {path: outs for path, outs in drawn.items() if not tables_read(outs)}
  wanted = sorted({*ids.values(), *jax.tree.leaves(drawn)})
  jaxpr, read = program(wanted)
  leaves = found.traced.leaves
  args = [x for x, is_read in zip(leaves, read, strict=True) if is_read]
  outs = jaxprs.run(jaxpr, jaxprs.opened(found.ids)[1], args)
  value = dict(zip(wanted, outs, strict=True))
  asked: dict[int, list[Any]] = {}
  for path, site in sites.items():
    one = path, value[ids[path]], len(site.lengths)
    asked.setdefault(site.param, []).append(one)
  tables = {i: leaves[i] for i in sorted(found.away)}
  asked = {i: asked[i] for i in tables if i in asked}
  return tables, asked, jax.tree.map(value.get, drawn)


def _batch_devices(parts) -> tuple[Any, int]:
  """The mesh around sharded tables, and devices that share a batch there."""
  mesh, over = sharded_tables.mesh_of(parts), parts[0].batch_axes
  if mesh is None:
    return None, 1
  return mesh, math.prod([mesh.shape[axis] for axis in over])


def _flat_look_ups(parts, ids, turns, devices):
  """Ids `[K]` of each table's look-ups, and what shapes rows as these were."""
  flat, backs = [], []
  for table, some, of in zip(parts, ids, turns):
    both = [batch_layout.flat_ids(*x, devices) for x in zip(some, of)]
    flat.append([jnp.where(x < 0, table.num_rows, x) for x, _ in both])
    backs.append([back for _, back in both])
  return flat, backs


def _ahead_of(tables, asked) -> sharded_tables.Ahead:
  """Sends the ids of `asked[table]: [(number, ids, turns)]` to owners."""
  if not asked:
    raise ValueError(
      "`fun` of prefetch must look up rows of a sharded table, and looks up"
      " none; leave prefetch out."
    )
  parts = [tables[i] for i in asked]
  mesh, devices = _batch_devices(parts)
  turns = [[turns for *_, turns in of] for of in asked.values()]

  def ahead_of(parts, ids):
    around = sharded_tables.mesh_of(parts)  # With automatic axes in here.
    flat, _ = _flat_look_ups(parts, ids, turns, devices)
    return sharded_tables.ask_on(around, parts, flat)

  if mesh is not None and compat.explicit_of(mesh):
    split = NamedSharding(mesh, PartitionSpec(parts[0].batch_axes))
    ahead_of = compat.on_automatic_axes(ahead_of, mesh, split)
  return ahead_of(parts, [[ids for _, ids, _ in of] for of in asked.values()])


def _rows_of(tables, asked, taps, prefetched):
  """Rows of `asked[table]: [(number, ids, turns)]`, each with its number.

  And what fetching them has shown, by table. `taps`, by number, are as these
  rows shall lie.
  """
  if not asked:
    return [], {}
  parts = [tables[i] for i in asked]
  mesh, devices = _batch_devices(parts)
  turns = [[turns for *_, turns in of] for of in asked.values()]

  def rows_of(parts, ids, prefetched):
    around = sharded_tables.mesh_of(parts)  # With automatic axes in here.
    flat, backs = _flat_look_ups(parts, ids, turns, devices)
    rows, known = sharded_tables.fetch_on(around, parts, flat, prefetched)
    each = zip(rows, backs)
    return [[back(x) for x, back in zip(*of)] for of in each], known

  if mesh is not None and compat.explicit_of(mesh):
    place = lambda x: NamedSharding(mesh, PartitionSpec(*x))
    lie = [
      [place(compat.explicit_spec(taps[k])) for k, *_ in of]
      for of in asked.values()
    ]
    rows_of = compat.on_automatic_axes(rows_of, mesh, (lie, place(())))
  rows, (most, fetched) = rows_of(
    parts, [[ids for _, ids, _ in of] for of in asked.values()], prefetched
  )
  found = [
    (number, x)
    for of, some in zip(asked.values(), rows)
    for (number, *_), x in zip(of, some)
  ]
  # A device's gradients may be of others' look-ups, who asked for fewer rows.
  own = lambda of: mesh is None or _stay(of, devices)
  shown = {
    i: (x if own(of) else None, counts)
    for (i, of), x, counts in zip(asked.items(), most, fetched)
  }
  return found, shown


def _stay(of: Sequence[tuple[int, Any, int]], devices: int) -> bool:
  """True if devices have the gradients of the rows that each asked for.

  Those of one look-up lie as it does. Those of several are joined, each
  device's beside each other, if devices divide them and no scan is between.
  """
  if any(turns for *_, turns in of):
    return False
  if len(of) == 1:
    return True
  spread = batch_layout.spread_of([ids for _, ids, _ in of])
  by_all = all(ids.size % spread.devices == 0 for _, ids, _ in of)
  return not spread.axes and spread.devices % devices == 0 and by_all


def _joined(leaf: Any, parts: list[SparseRows], shown: Any) -> Any:
  """The gradient of a table, of its look-ups."""
  if not is_sharded(leaf):
    return sparse_rows.concatenated(parts or [sparse_rows.no_rows(leaf)])
  if not parts:
    none = jnp.full(leaf.devices, leaf.num_rows, jnp.int32)
    values = jnp.zeros((leaf.devices, leaf.shape[-1]), leaf.dtype)
    parts = [SparseRows(none, values, leaf.num_rows)]
  if shown is None:  # No look-up, and no row.
    nothing = jnp.zeros(len(sharded_tables.Fetched._fields), jnp.float32)
    shown = jnp.int32(0), nothing
  return leaf.with_value(sparse_rows.concatenated(parts).with_lookups(shown))
