"""Lookups of sharded tables, whose rows come from the devices that own them.

Ids are computed first, by a part of the loss that reads no rows. Their rows are
fetched, all in one exchange, and the loss runs with these rows alone: the
tables themselves are only types to it.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.gradients import table_uses
from zenjax._src.gradients import tapping
from zenjax._src.gradients.loss import partial_loss
from zenjax._src.gradients.tapping import Path
from zenjax._src.rows import batch_layout
from zenjax._src.tables import fetch
from zenjax._src.tables import sharded_table


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
    >>> apply = jax.jit(zenjax.tables.apply(score))
    >>> apply(params, jnp.array([0, 999])).tolist()
    [1.0, 3997.0]
  """

  @functools.wraps(fun)
  def applied(*args, **kwargs):
    loss = partial_loss(fun, (), args, kwargs)
    if not loss.frozen:
      return fun(*args, **kwargs)
    found = table_uses.find(loss, None).require()
    asked = Asked.of(found)
    taps = {path: site.tap() for path, site in found.sites.items()}
    rows = asked.rows(taps)

    def outputs(types, rows):
      run = tapping.Run(taps=rows, drawn=asked.drawn)
      return found.traced.run(run, types, found.rows)

    outs = without_tables(found, outputs, rows)
    return loss.result(found.traced.rebuild(outs))

  return applied


def prefetch(
  fun: Callable[..., Any], argnums: int | Sequence[int] = 0
) -> Callable[..., fetch.Ahead]:
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
    return Asked.of(found).ahead()

  return prefetch_of


class Asked(NamedTuple):
  """Lookups of sharded tables, by ids that are computed before any row is read.

  Attributes:
    tables: The leaves that are looked up.
    paths: Of each table, where its lookups are.
    turns: Likewise, dimensions of ids that scans have put in front.
    ids: Likewise, `[*turns, *batch]`.
    drawn: Results of callbacks that have run, by path. They must not run again:
      they may return other ids.
  """

  tables: list[Any]
  paths: list[list[Path]]
  turns: list[list[int]]
  ids: list[list[jax.Array]]
  drawn: dict[Path, list[Any]]

  @classmethod
  def of(cls, found: table_uses.Tables) -> "Asked":
    """Computes the ids.

    Raises:
      ValueError: Some depend on rows of a sharded table.
    """
    sites = {p: x for p, x in found.sites.items() if x.param in found.away}
    numbers = sorted({x.param for x in sites.values()})
    paths = [[p for p, x in sites.items() if x.param == i] for i in numbers]
    ids, drawn = _ids(found, sites)
    return cls(
      tables=[found.traced.leaves[i] for i in numbers],
      paths=paths,
      turns=[[len(sites[path].lengths) for path in of] for of in paths],
      ids=[[ids[path] for path in of] for of in paths],
      drawn=drawn,
    )

  def ahead(self) -> fetch.Ahead:
    """Sends the ids to the owners of their rows."""
    if not self.tables:
      raise ValueError(
        "`fun` of prefetch must look up rows of a sharded table, and looks up"
        " none; leave prefetch out."
      )

    def ahead_of(tables, ids):
      flat, _ = self._flat(tables, ids)
      return fetch.ask_on(sharded_table.mesh_of(tables), tables, flat)

    mesh = sharded_table.mesh_of(self.tables)
    if mesh is not None and compat.explicit_of(mesh):
      split = NamedSharding(mesh, PartitionSpec(self.tables[0].batch_axes))
      ahead_of = compat.on_automatic_axes(ahead_of, mesh, split)
    return ahead_of(self.tables, self.ids)

  def rows(
    self, taps: dict[Path, Any], prefetched: fetch.Ahead | None = None
  ) -> dict[Path, Any]:
    """Fetches the rows.

    Args:
      taps: Of each lookup, placed as its rows shall be.
      prefetched: What `ahead` returned.

    Returns:
      The rows of each lookup.
    """
    if not self.tables:
      return {}
    backs: list[Any] = []

    def fetched(tables, ids, prefetched):
      flat, backs[:] = self._flat(tables, ids)
      mesh = sharded_table.mesh_of(tables)
      return fetch.fetch_on(mesh, tables, flat, prefetched)

    def expanded(tables, rows, numbers):
      mesh = sharded_table.mesh_of(tables)
      rows = fetch.expanded_on(mesh, tables, rows, numbers)
      return [[back(x) for x, back in zip(*of)] for of in zip(rows, backs)]

    mesh = sharded_table.mesh_of(self.tables)
    if mesh is not None and compat.explicit_of(mesh):
      place = lambda x: NamedSharding(mesh, PartitionSpec(*x))
      as_tap = lambda path: place(compat.explicit_spec(taps[path]))
      split = place((self.tables[0].batch_axes,))
      fetched = compat.on_automatic_axes(fetched, mesh, split)
      expanded = compat.on_automatic_axes(
        expanded, mesh, [list(map(as_tap, of)) for of in self.paths]
      )
    _, values, numbers = fetched(self.tables, self.ids, prefetched)
    rows = expanded(self.tables, values, numbers)
    return dict(zip(sum(self.paths, []), sum(rows, []), strict=True))

  def _flat(self, tables: list[Any], ids: list[list[Any]]) -> Any:
    """Ids `[K]` of each lookup, and what shapes rows as these were."""
    mesh, over = sharded_table.mesh_of(tables), tables[0].batch_axes
    sizes = [] if mesh is None else [mesh.shape[axis] for axis in over]
    devices = math.prod(sizes)
    flat, backs = [], []
    for table, some, of in zip(tables, ids, self.turns):
      both = [batch_layout.flat_ids(*x, devices) for x in zip(some, of)]
      flat.append([jnp.where(x < 0, table.num_rows, x) for x, _ in both])
      backs.append([back for _, back in both])
    return flat, backs


def _ids(
  found: table_uses.Tables, sites: dict[Path, tapping.Site]
) -> tuple[dict[Path, jax.Array], dict[Path, list[Any]]]:
  """Computes ids of lookups, and what callbacks return that read no rows."""
  flat, structure = jax.tree.flatten(found.kinds)
  ids, drawn = structure.unflatten(range(len(flat)))  # Numbers of outputs.
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
  given = zip(found.traced.leaves, read, strict=True)
  args = [x for x, is_read in given if is_read]
  outs = jaxprs.run(jaxpr, jaxprs.opened(found.ids)[1], args)
  value = dict(zip(wanted, outs, strict=True)).get
  return jax.tree.map(value, ids), jax.tree.map(value, drawn)


def without_tables(
  found: table_uses.Tables, f: Callable[..., Any], *args: Any
) -> Any:
  """Returns `f(leaves, *args)`, which knows only the types of sharded tables.

  If there are none, it is given the leaves themselves.
  """
  leaves = found.traced.leaves
  if not found.away:
    return f(leaves, *args)
  closed, kinds = jax.make_jaxpr(f, return_shape=True)(
    found.traced.types, *args
  )
  jaxpr, read = jaxprs.needed(closed)
  if any(read[i] for i in found.away):
    raise AssertionError("a sharded table is read")
  given = zip([*leaves, *jax.tree.leaves(args)], read, strict=True)
  operands = [x for x, is_read in given if is_read]
  outs = jaxprs.run(jaxpr, jaxprs.opened(closed)[1], operands)
  return jax.tree.structure(kinds).unflatten(outs)
