"""`value_and_grad`: gradients of embedding tables as rows."""

from collections.abc import Callable, Sequence
import functools
import math
import sys
from typing import Any, NamedTuple

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
from zenjax._src.rows.sharded_tables import is_sharded
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.rows.tapping import Nest
from zenjax._src.rows.tapping import View


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

  The loss is traced and tables that it only looks up are found: through
  `jnp.take`, `table[ids]`, the embedding layers of Flax, Haiku and Equinox,
  inside `jit`, `vmap`, `scan`, `jax.checkpoint`, after casts, factors and a row
  set to a constant for padding. Models need no change. Their gradients are the
  rows looked up, one for each look-up: no array of the table's size is made.
  All other gradients are as `jax.value_and_grad` gives them, of tables too that
  are used in another way (as the weights of a softmax, in a norm, in a `cond`),
  or are looked up as often as they have rows; `explain_tables` says which and
  why.

  Under `shard_map(check_vma=True)` all gradients are those of the device's own
  part, as if `fun` had been given `zenjax.unreduced(params)`.

  Arguments may be modules of Flax's nnx, as `nnx.value_and_grad` takes them.
  Gradients by their `nnx.Param` come in an `nnx.State`, and what the loss
  changes of a module, as counts of dropout, is written back to it. For modules
  of Equinox there is `zenjax.rows.filter_value_and_grad`.

  Args:
    fun: As for `jax.value_and_grad`.
    argnums: Likewise.
    has_aux: Likewise.
    holomorphic: Likewise.
    allow_int: Likewise.
    tables: Which leaves give rows: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. None finds all that can.
    prefetched: What `zenjax.tables.prefetch(fun)` returned for the arguments
      that the function will be given, where tables are sharded.

  Returns:
    A function with the arguments of `fun`. It returns the value and the
    gradients, in the structure of the arguments but for SparseRows in the place
    of tables.

  Raises:
    ValueError: `tables` demands rows of a leaf that is used otherwise; the
      message says where. Or the loss writes to an `nnx.Param`, or adds
      variables to an nnx module, or two arguments share one.

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
    params, loss, modules = partial_loss(fun, argnums, args, kwargs)
    structure = jax.tree.structure(params, is_leaf=is_sharded)
    traced = table_uses.trace(loss, params)
    found = table_uses.find(traced, params, tables)
    found.require()
    out, grads = _differentiate(traced, found, options, prefetched)
    value = traced.rebuild(out)
    if modules:
      value, changed = value
      for module, state in zip(modules, changed):
        sys.modules["flax.nnx"].update(module, state)
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
      raise TypeError(
        "`fun` must return a pair (loss, aux) with `has_aux=True`, got"
        f" {jax.tree.structure(value)}; return a pair or leave `has_aux` out."
      )
    return value, jax.tree.unflatten(structure, grads)

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


def partial_loss(
  fun: Callable[..., Any],
  argnums: int | Sequence[int],
  args: Sequence[Any],
  kwargs: dict[str, Any],
) -> tuple[Any, Callable[[Any], Any], list[Any]]:
  """Makes the loss a function of what it is differentiated by.

  Returns:
    The arguments to differentiate by, the loss as a function of them, and the
    nnx modules among all arguments. Where there are any the function returns a
    pair: what `fun` does, and the new states of these modules.
  """
  one = isinstance(argnums, int)
  wanted = (argnums,) if one else tuple(argnums)
  for i in wanted:
    if not -len(args) <= i < len(args):
      raise ValueError(
        f"`argnums` must be positions of the {len(args)} positional arguments,"
        f" got {i}; pass what is differentiated by position."
      )
  at = [i % len(args) for i in wanted]
  parts = _nnx_parts(args, at, kwargs)
  params = [parts[i].params if i in parts else args[i] for i in at]

  def loss(params):
    changed = list(args)
    for i, part in parts.items():
      changed[i] = part
    for i, value in zip(at, (params,) if one else params):
      changed[i] = parts[i]._replace(params=value) if i in parts else value
    if not parts:
      return fun(*changed, **kwargs)
    merged = {i: changed[i].merged() for i in parts}
    out = fun(*[merged.get(i, x) for i, x in enumerate(changed)], **kwargs)
    return out, [changed[i].rest_of(module) for i, module in merged.items()]

  modules = [part.module for part in parts.values()]
  return params[0] if one else tuple(params), loss, modules


class _NnxParts(NamedTuple):
  """An nnx module, taken apart.

  Attributes:
    position: Among the arguments.
    module: As it was given.
    wanted: Whether gradients are taken by it.
    graph: Its structure.
    params: What gradients are taken by; empty where none are.
    rest: All other variables.
  """

  position: int
  module: Any
  wanted: bool
  graph: Any
  params: Any
  rest: Any

  def merged(self) -> Any:
    """Returns a module of the same variables that the trace may write to."""
    nnx = sys.modules["flax.nnx"]
    return nnx.merge(self.graph, self.params, self.rest, copy=True)

  def rest_of(self, merged: Any) -> Any:
    """Returns the variables of a merged module that a loss may change."""
    graph, params, rest = _nnx_split(merged, self.wanted)
    said = f"`fun` must leave argument {self.position}, an nnx module,"
    old, new = jax.tree.leaves(self.params), jax.tree.leaves(params)
    if any(x is not y for x, y in zip(old, new, strict=True)):
      raise ValueError(
        f"{said} its nnx.Param as they are, and it writes to one; return the"
        " new value with `has_aux=True`, and write it after the gradients are"
        " taken."
      )
    if graph != self.graph:
      raise ValueError(
        f"{said} the variables that it has, and it adds or removes some;"
        " return new ones with `has_aux=True`."
      )
    return rest


def _nnx_parts(
  args: Sequence[Any], at: Sequence[int], kwargs: dict[str, Any]
) -> dict[int, _NnxParts]:
  """Takes apart the nnx modules among the arguments, by position."""
  nnx = sys.modules.get("flax.nnx")  # No module is there before this is.
  if nnx is None:
    return {}
  parts: dict[int, _NnxParts] = {}
  is_module = lambda x: isinstance(x, nnx.Module)
  owners: dict[int, int | str] = {}  # of variables, by their identity
  for i, argument in (*enumerate(args), *kwargs.items()):
    leaves = jax.tree.leaves(argument, is_leaf=is_module)
    modules = [x for x in leaves if is_module(x)]
    if is_module(argument):
      if isinstance(i, int):
        parts[i] = _NnxParts(
          i, argument, i in at, *_nnx_split(argument, i in at)
        )
    elif modules and i in at:
      raise ValueError(
        f"`fun` must be given an nnx module as an argument of its own, and"
        f" argument {i} holds one; what the loss changes of that would be lost."
      )
    for node in [x for module in modules for _, x in nnx.iter_graph(module)]:
      if not isinstance(node, nnx.Variable):
        continue
      if owners.setdefault(id(node), i) != i:
        raise ValueError(
          f"`fun` must be given each nnx variable once, and argument {i} has"
          f" one of argument {owners[id(node)]}, through which no gradient"
          " would be taken; use it from there."
        )
  return parts


def _nnx_split(module: Any, wanted: bool) -> tuple[Any, Any, Any]:
  nnx = sys.modules["flax.nnx"]
  return nnx.split(module, nnx.Param if wanted else nnx.Nothing(), ...)


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
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_sharded)
    named = [*leaf_util.named_leaves(args, is_sharded)]
    named += leaf_util.named_leaves(kwargs, is_sharded)
    at = {name: i for i, (name, x) in enumerate(named) if is_sharded(x)}
    if not at:
      return fun(*args, **kwargs)

    def of_tables(tables):
      whole = list(leaves)
      for name, i in at.items():
        whole[i] = tables[name]
      args, kwargs = structure.unflatten(whole)
      return fun(*args, **kwargs)

    tables = {name: leaves[i] for name, i in at.items()}
    traced = table_uses.trace(of_tables, tables)
    found = table_uses.find(traced, tables, None)
    found.require()

    def outputs(types, taps):
      return _run(traced, found, types, [], taps)[0]

    taps, _ = _fetched(traced, found, [])
    return traced.rebuild(_without_tables(traced, found, outputs, taps).run())

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
    params, loss, _ = partial_loss(fun, argnums, args, kwargs)
    traced = table_uses.trace(loss, params)
    found = table_uses.find(traced, params, None)
    found.require()
    if not found.away:
      raise ValueError(
        "`fun` of prefetch must look up rows of a sharded table, and none of"
        " its parameters is one; call `zenjax.tables.shard` first, or leave"
        " prefetch out."
      )
    plain = [x for i, x in enumerate(traced.leaves) if i not in found.rows]
    tables, asked, _, _ = _look_ups(traced, found, plain)
    return _ahead_of(tables, asked)

  return prefetch_of


def _differentiate(traced, found, options, prefetched):
  """`[loss, *aux]`, and the gradient of every leaf."""
  leaves = traced.leaves
  is_table = [i in found.rows for i in range(len(leaves))]
  plain = [x for x, is_ in zip(leaves, is_table) if not is_]
  taps = [site.tap() for site in found.sites]
  shown: dict[int, Any] = {}
  if found.away:
    taps, shown = _fetched(traced, found, plain, prefetched)
  elif prefetched is not None:
    raise ValueError(
      "`prefetched` must be None where no table is sharded; call"
      " `zenjax.tables.shard` first."
    )

  def both(types, plain, taps):
    def loss(plain, taps):
      outs, run = _run(traced, found, types, plain, taps)
      return outs[0], (outs, run.ids)

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, **options)
    return both(plain, taps)

  program = _without_tables(traced, found, both, plain, taps)
  (value, (outs, ids)), (dense, rows) = program.run()
  # Of a loss that is linear in the rows, gradients would not wait for the
  # look-ups, and XLA:CPU would copy a table that is updated meanwhile.
  value, rows = lax.optimization_barrier((value, rows))
  outs = [value, *outs[1:]]
  parts: dict[int, list[SparseRows]] = {i: [] for i in found.rows}
  _collect(found.sites, ids, rows, leaves, parts)
  left = iter(dense)
  grads = [
    _joined(leaves[i], parts[i], shown.get(i)) if is_ else next(left)
    for i, is_ in enumerate(is_table)
  ]
  return outs, grads


def _run(traced, found, types, plain, taps) -> tuple[list, tapping.Run]:
  """Runs the program with taps; of tables that are away it has `types`."""
  left = iter(plain)
  args = [
    View.of_leaf(i, types.get(i, x), i in found.away)
    if i in found.rows
    else next(left)
    for i, x in enumerate(traced.leaves)
  ]
  run = tapping.Run(taps=taps)
  outs = run.run(traced.jaxpr, traced.consts, args)
  return tapping.wholes(outs), run


class _Program(NamedTuple):
  """A function of arrays that was traced with tables as types alone."""

  jaxpr: Any
  consts: Sequence[Any]
  args: list[Any]  # those that it reads
  unread: list[bool]  # of all that it was given
  structure: Any  # of what it returns

  def run(self) -> Any:
    return self.structure.unflatten(
      jaxprs.run(self.jaxpr, self.consts, self.args)
    )


def _without_tables(
  traced: table_uses.Traced,
  found: table_uses.Tables,
  f: Callable[..., Any],
  *args: Any,
  effects: bool = True,
) -> Any:
  """Makes `f(types, *args)` a program in which no table that is away exists."""
  if not found.away:
    return _Direct(functools.partial(f, {}, *args))
  types = {
    i: table_uses.type_of_whole(traced.leaves[i]) for i in sorted(found.away)
  }
  structure: Any = None

  def flat(types, args):
    nonlocal structure
    leaves, structure = jax.tree.flatten(f(types, *args))
    return leaves

  closed = jax.make_jaxpr(flat)(types, args)
  jaxpr, read = jaxprs.needed(closed, effects)
  if any(read[: len(types)]):
    raise AssertionError("a table that is away is read")
  read = read[len(types) :]
  given = jax.tree.leaves(args)
  return _Program(
    jaxpr=jaxpr,
    consts=jaxprs.opened(closed)[1],
    args=[x for x, is_read in zip(given, read, strict=True) if is_read],
    unread=[not is_read for is_read in read],
    structure=structure,
  )


class _Direct(NamedTuple):
  """A function that needs no tracing, as a `_Program`."""

  run: Callable[[], Any]


def _fetched(
  traced, found, plain, prefetched=None
) -> tuple[list[Any], dict[int, Any]]:
  """Taps of all sites; of tables that are away the rows, from their owners.

  And what fetching the rows of each such table has shown.
  """
  tables, asked, taps, structure = _look_ups(traced, found, plain)
  rows, shown = _rows_of(tables, asked, taps, prefetched)
  for k, x in rows:
    taps[k] = x
  return structure.unflatten(taps), shown


def _look_ups(traced, found, plain):
  """Look-ups of tables that are away.

  Returns:
    These tables, by number; `[(number, ids, turns)]` of the look-ups of each;
    taps of all look-ups, by number; and their structure.
  """
  taps = [site.tap() for site in found.sites]
  sites = list(table_uses.flat_sites(found.sites))
  away = [site.param in found.away for site, _ in sites]

  def read(types, taps, plain):
    _, run = _run(traced, found, types, plain, taps)
    ids = jax.tree.leaves(run.read)
    return [x for x, is_away in zip(ids, away, strict=True) if is_away]

  program = _without_tables(traced, found, read, taps, plain, effects=False)
  for (site, _), is_away, unread in zip(sites, away, program.unread):
    if is_away and not unread:
      name = found.names[site.param]
      raise ValueError(
        f"`fun` must look up rows of {name!r} by ids that are known before any"
        " row is read, and some ids depend on rows of a sharded table; keep"
        " that table whole, by `tables=` of `zenjax.tables.shard`."
      )
  tables = {i: traced.leaves[i] for i in sorted(found.away)}
  asked: dict[int, list[Any]] = {i: [] for i in tables}
  flat_taps, structure = jax.tree.flatten(taps)
  at = [k for k, is_away in enumerate(away) if is_away]
  for k, ids in zip(at, program.run(), strict=True):
    site, turns = sites[k]
    asked[site.param].append((k, ids, len(turns)))
  return tables, {i: of for i, of in asked.items() if of}, flat_taps, structure


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
    return sparse_rows.concatenated(parts)
  if not parts:
    none = jnp.full(leaf.devices, leaf.num_rows, jnp.int32)
    values = jnp.zeros((leaf.devices, leaf.shape[-1]), leaf.dtype)
    parts = [SparseRows(none, values, leaf.num_rows)]
  if shown is None:  # No look-up, and no row.
    nothing = jnp.zeros(len(sharded_tables.Fetched._fields), jnp.float32)
    shown = jnp.int32(0), nothing
  return leaf.with_value(sparse_rows.concatenated(parts).with_lookups(shown))


def _collect(sites, ids, values, leaves, parts, turns=0):
  """Gives every table the ids and gradients of its look-ups."""
  for site, i, x in zip(sites, ids, values):
    if isinstance(site, Nest):
      inner = turns + (site.length is not None)
      _collect(site.sites, i, x, leaves, parts, inner)
    else:
      flat = batch_layout.flattened(i, x, turns)
      leaf = leaves[site.param]
      num_rows = leaf.num_rows if is_sharded(leaf) else leaf.shape[0]
      found = SparseRows(*flat, num_rows)
      parts[site.param].append(found)
