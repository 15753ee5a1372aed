"""Looks up rows of sharded tables, and runs functions on them.

Ids are computed first, by the part of the function that reads no rows. All rows
are fetched in one exchange. Then the function runs on these rows, with only the
types of the tables.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
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
from zenjax._src.tables import table_update


def apply(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Runs a function of sharded tables without gradients.

  Use it for evaluation and serving. Write `fun` as if tables were arrays. It
  may only look up whole rows of them, and not inside `lax.cond`, `lax.switch`
  or `lax.while_loop`. Rows are fetched from the devices that own them.

  Args:
    fun: A function of pytrees, with tables from `zenjax.tables.shard`.

  Returns:
    A function of the same arguments, with the same results.

  Raises:
    ValueError: `fun` does more with a sharded table than look up rows, or ids
      depend on rows of one.

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
    traced, asked = found.traced, Asked.of(found)
    rows = asked.rows() | asked.called_back
    outputs = lambda types, rows: traced.run(types, found.rows, rows)[0]
    outs = without_tables(traced, outputs, rows)
    return loss.result(traced.rebuild(outs))

  return applied


def prefetch(
  fun: Callable[..., Any], argnums: int | Sequence[int] = 0
) -> Callable[..., fetch.Ahead]:
  """Sends the ids of the next batch to the owners of rows.

  Use it to hide latency: call it in the step before the batch is used, so that
  ids are sent during that step. The next step then waits only for rows. Results
  are bit-identical to those without `prefetch`.

  Args:
    fun: The loss that you pass to `zenjax.value_and_grad`.
    argnums: Positions of the arguments to differentiate by.

  Returns:
    A function of the arguments of `fun` for the next batch, with parameters of
    any step. It returns a pytree to pass to the next step, for
    `value_and_grad(fun, prefetched=..)`. If that step looks up other ids, their
    rows are NaN. Inside `shard_map`, the pytree is sharded like the batch.

  Raises:
    ValueError: No table is sharded, `fun` does more with a sharded table than
      look up rows, or ids depend on rows of one.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> table = jnp.arange(2000.0).reshape(1000, 2)
    >>> table = zenjax.tables.shard(table, mesh, "data", tables=True)
    >>> loss = lambda table, ids: table[ids].sum()
    >>> one, two = jnp.array([0, 999]), jnp.array([7, 7])
    >>> ahead = jax.jit(zenjax.tables.prefetch(loss))(table, one)
    >>> both = jax.jit(zenjax.value_and_grad(loss, prefetched=ahead))
    >>> float(both(table, one)[0]), float(both(table, two)[0])
    (3998.0, nan)
  """

  @functools.wraps(fun)
  def prefetch_of(*args, **kwargs):
    loss = partial_loss(fun, argnums, args, kwargs)
    return Asked.of(table_uses.find(loss, None).require()).ahead()

  return prefetch_of


class Asked(NamedTuple):
  """Lookups of sharded tables, with the ids of the rows.

  Attributes:
    tables: The tables.
    sites: The lookups of each table.
    ids: The ids of each lookup, `[*turns, *batch]`.
    called_back: Results of callbacks, by path. Callbacks must not run again,
      because they may return other ids.
  """

  tables: list[Any]
  sites: list[dict[Path, Site]]
  ids: list[list[jax.Array]]
  called_back: dict[Path, list[Any]]

  @classmethod
  def of(cls, found: table_uses.Tables) -> "Asked":
    """Computes the ids, by the part of the program that reads no rows.

    Raises:
      ValueError: Some ids depend on rows of a sharded table.
    """
    ids, called_back = _ids(found)
    numbers = sorted({found.sites[path].param for path in ids})
    sites = [
      {path: x for path, x in found.sites.items() if x.param == i}
      for i in numbers
    ]
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
        "`fun` of prefetch looks up no sharded table. Call"
        " `zenjax.tables.shard` first, or leave prefetch out."
      )
    ahead_of = lambda *args: self._on_devices(fetch.ask_all, *args)[0]
    split = PartitionSpec(self.tables[0].batch_axes)
    mesh = sharded_table.mesh_of(self.tables)
    ahead_of = compat.on_automatic_axes(ahead_of, mesh, split)
    return ahead_of(self.tables, self.ids)

  def rows(self, prefetched: fetch.Ahead | None = None) -> dict[Path, Any]:
    """Fetches the rows of each lookup.

    Args:
      prefetched: The result of `ahead`.
    """
    if not self.tables:
      return {}

    def rows_of(*args):
      rows, reshapes = self._on_devices(fetch.fetch_all, *args)
      return {
        path: reshape(x)
        for of_table in zip(self.sites, reshapes, rows)
        for path, reshape, x in zip(*of_table)
      }

    places = {path: x.place for of in self.sites for path, x in of.items()}
    mesh = sharded_table.mesh_of(self.tables)
    rows_of = compat.on_automatic_axes(rows_of, mesh, places)
    return rows_of(self.tables, self.ids, prefetched)

  def _on_devices(self, f: Any, tables: list[Any], ids: Any, *args: Any) -> Any:
    """Runs `f` on each device, with its part of the tables and of flat ids.

    Returns:
      The results, and for each lookup a function that reshapes its rows.
    """
    mesh, axes = sharded_table.mesh_of(tables), tables[0].batch_axes
    sizes = {} if mesh is None else mesh.shape
    devices = math.prod([sizes.get(axis, 1) for axis in axes])
    flat, reshapes = [], []
    for table, some, sites in zip(tables, ids, self.sites):
      both = [
        batch_layout.flat_ids(x, len(site.lengths), devices, table.num_rows)
        for x, site in zip(some, sites.values())
      ]
      flat.append([x for x, _ in both])
      reshapes.append([reshape for _, reshape in both])
    split = PartitionSpec(axes)
    specs = PartitionSpec(tables[0].axes), split, *[split] * len(args)
    f = table_update.on_devices(f, mesh, axes, specs, split)
    return f(tables, flat, *args), reshapes


def _ids(
  found: table_uses.Tables,
) -> tuple[dict[Path, jax.Array], dict[Path, list[Any]]]:
  """Computes ids of lookups, and results of callbacks that need no rows."""
  flat, structure = jax.tree.flatten(found.kinds)
  told = structure.unflatten(range(len(flat)))  # numbers of outputs
  away = found.traced.away
  paths = [path for path, x in found.sites.items() if x.param in away]
  ids = {path: told[path].read for path in paths}

  def program(outs):
    """Returns the part of the program that computes some outputs."""
    outs = [k in outs for k in range(len(flat))]
    return jaxprs.needed(found.ids, outs, effects=False)

  def tables_read(outs):
    _, read = program(outs)
    return [found.names[i] for i in sorted(away) if read[i]]

  if names := tables_read(ids.values()):
    raise ValueError(
      "`fun` must look up rows of sharded tables by ids that are known before"
      f" any row is read, but some ids depend on rows of {names[0]!r}. Keep"
      " that table replicated, by `tables=` of `zenjax.tables.shard`."
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
  """Runs `f(leaves, *args)` with only the types of sharded tables."""
  if not traced.away:
    return f(traced.leaves, *args)
  make = jax.make_jaxpr(f, return_shape=True)
  program, kinds = make(traced.types, *args)
  needed, read = jaxprs.needed(program)
  given = zip([*traced.leaves, *jax.tree.leaves(args)], read, strict=True)
  outs = jex_core.jaxpr_as_fun(needed)(*[x for x, is_read in given if is_read])
  return jax.tree.structure(kinds).unflatten(outs)
