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
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.gradients import table_uses
from zenjax._src.gradients.loss import partial_loss
from zenjax._src.gradients.table_uses import Traced
from zenjax._src.gradients.tapping import Ids
from zenjax._src.gradients.tapping import Path
from zenjax._src.gradients.tapping import Site
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
    rows = asked.rows({path: x.tap() for path, x in found.sites.items()})

    def outputs(types, rows):
      given = rows | asked.called_back
      return found.traced.run(types, found.rows, given)[0]

    outs = without_tables(found.traced, outputs, rows)
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
    return Asked.of(table_uses.find(loss, None).require()).ahead()

  return prefetch_of


class Asked(NamedTuple):
  """Lookups of sharded tables, by ids that are computed before any row is read.

  Attributes:
    tables: The leaves that are looked up.
    sites: Lookups of each.
    ids: Of each lookup, `[*turns, *batch]`.
    called_back: Results of callbacks that have run, by path. They must not run
      again: they may return other ids.
  """

  tables: list[Any]
  sites: list[dict[Path, Site]]
  ids: list[list[jax.Array]]
  called_back: dict[Path, list[Any]]

  @classmethod
  def of(cls, found: table_uses.Tables) -> "Asked":
    """Computes the ids.

    Raises:
      ValueError: Some depend on rows of a sharded table.
    """
    numbers = sorted(
      found.traced.away & {x.param for x in found.sites.values()}
    )
    sites = [
      {path: x for path, x in found.sites.items() if x.param == i}
      for i in numbers
    ]
    ids, called_back = _ids(found, [path for of in sites for path in of])
    return cls(
      tables=[found.traced.leaves[i] for i in numbers],
      sites=sites,
      ids=[[ids[path] for path in of] for of in sites],
      called_back=called_back,
    )

  def ahead(self) -> fetch.Ahead:
    """Sends the ids to the owners of their rows."""
    if not self.tables:
      raise ValueError(
        "`fun` of prefetch must look up rows of a sharded table, and looks up"
        " none; call `zenjax.tables.shard` first, or leave prefetch out."
      )

    def ahead_of(tables, ids):
      flat, _ = self._flat(tables, ids)
      return fetch.ask_on(sharded_table.mesh_of(tables), tables, flat)

    split = PartitionSpec(self.tables[0].batch_axes)
    return self._on_automatic_axes(ahead_of, split)(self.tables, self.ids)

  def rows(
    self, taps: dict[Path, jax.Array], prefetched: fetch.Ahead | None = None
  ) -> dict[Path, jax.Array]:
    """Fetches the rows.

    Args:
      taps: Of each lookup, placed as its rows shall be.
      prefetched: What `ahead` returned.

    Returns:
      The rows of each lookup.
    """
    if not self.tables:
      return {}

    def rows_of(tables, ids, prefetched):
      flat, backs = self._flat(tables, ids)
      mesh = sharded_table.mesh_of(tables)
      rows = fetch.fetch_on(mesh, tables, flat, prefetched)
      return [
        {path: back(x) for path, back, x in zip(*of)}
        for of in zip(self.sites, backs, rows)
      ]

    place = lambda path: PartitionSpec(*compat.explicit_spec(taps[path]))
    places = [{path: place(path) for path in of} for of in self.sites]
    rows_of = self._on_automatic_axes(rows_of, places)
    rows = rows_of(self.tables, self.ids, prefetched)
    return {path: x for of in rows for path, x in of.items()}

  def _on_automatic_axes(self, f: Callable[..., Any], specs: Any) -> Any:
    """Returns `f` for explicit axes too, where its results lie by `specs`."""
    mesh = sharded_table.mesh_of(self.tables)
    if mesh is None or not compat.explicit_of(mesh):
      return f
    place = lambda spec: NamedSharding(mesh, spec)
    is_spec = lambda x: isinstance(x, PartitionSpec)
    places = jax.tree.map(place, specs, is_leaf=is_spec)
    return compat.on_automatic_axes(f, mesh, places)

  def _flat(self, tables: list[Any], ids: list[list[Any]]) -> Any:
    """Ids `[K]` of each lookup, and what shapes rows as these were."""
    mesh, over = sharded_table.mesh_of(tables), tables[0].batch_axes
    sizes = [] if mesh is None else [mesh.shape[axis] for axis in over]
    devices = math.prod(sizes)
    flat, backs = [], []
    for table, some, sites in zip(tables, ids, self.sites):
      turns = [len(site.lengths) for site in sites.values()]
      both = [batch_layout.flat_ids(*x, devices) for x in zip(some, turns)]
      flat.append([jnp.where(x < 0, table.num_rows, x) for x, _ in both])
      backs.append([back for _, back in both])
    return flat, backs


def _ids(
  found: table_uses.Tables, paths: Sequence[Path]
) -> tuple[dict[Path, jax.Array], dict[Path, list[Any]]]:
  """Computes ids of lookups, and what callbacks return that read no rows."""
  flat, structure = jax.tree.flatten(found.kinds)
  told = structure.unflatten(range(len(flat)))  # Numbers of outputs.
  ids = {path: told[path].read for path in paths}

  def program(outs):
    """The part of the program that some outputs need, and what it reads."""
    outs = [k in outs for k in range(len(flat))]
    return jaxprs.needed(found.ids, outs, effects=False)

  def tables_read(outs):
    _, read = program(outs)
    return [found.names[i] for i in sorted(found.traced.away) if read[i]]

  if names := tables_read(ids.values()):
    raise ValueError(
      "`fun` must look up rows of sharded tables by ids that are known before"
      f" any row is read, and some ids depend on rows of {names[0]!r}; keep"
      " that table whole, by `tables=` of `zenjax.tables.shard`."
    )
  called_back = {
    path: outs
    for path, outs in told.items()
    if not isinstance(outs, Ids) and not tables_read(outs)
  }
  wanted = sorted({*ids.values(), *jax.tree.leaves(called_back)})
  needed, read = program(wanted)
  args = [x for x, is_read in zip(found.traced.leaves, read) if is_read]
  outs = jex_core.jaxpr_as_fun(needed)(*args)
  value = dict(zip(wanted, outs, strict=True)).get
  return jax.tree.map(value, ids), jax.tree.map(value, called_back)


def without_tables(traced: Traced, f: Callable[..., Any], *args: Any) -> Any:
  """Returns `f(leaves, *args)`, which knows only the types of sharded tables.

  If there are none, it is given the leaves themselves.
  """
  if not traced.away:
    return f(traced.leaves, *args)
  make = jax.make_jaxpr(f, return_shape=True)
  program, kinds = make(traced.types, *args)
  needed, read = jaxprs.needed(program)
  if any(read[i] for i in traced.away):
    raise AssertionError("a sharded table is read")
  given = zip([*traced.leaves, *jax.tree.leaves(args)], read, strict=True)
  outs = jex_core.jaxpr_as_fun(needed)(*[x for x, is_read in given if is_read])
  return jax.tree.structure(kinds).unflatten(outs)
