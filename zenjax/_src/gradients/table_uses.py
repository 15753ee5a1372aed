"""Which parameters of a loss are only looked up, and why the others are not."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.gradients import tapping
from zenjax._src.gradients.loss import Loss
from zenjax._src.gradients.tapping import Path
from zenjax._src.gradients.tapping import Refusal
from zenjax._src.gradients.tapping import Site
from zenjax._src.gradients.tapping import View
from zenjax._src.rows import leaf_util
from zenjax._src.tables.sharded_table import is_sharded


@dataclasses.dataclass(frozen=True)
class Traced:
  """A loss as a function of the leaves of its parameters.

  Attributes:
    leaves: Of the parameters, by which to differentiate.
    types: The leaves, sharded ones as the whole table's type.
    away: Numbers of these, of which each device has its own rows.
    program: `types -> [loss, *aux]`, a closed jaxpr.
    rebuild: From `[loss, *aux]` to what the loss returned.
    varying: Mesh axes over which the loss varies.
  """

  leaves: Sequence[Any]
  types: Sequence[Any]
  away: frozenset[int]
  program: Any
  rebuild: Callable[[Sequence[Any]], Any]
  varying: frozenset[str]

  def run(
    self,
    leaves: Sequence[Any],
    tables: Sequence[int],
    given: dict[Path, Any] | None = None,
  ) -> tuple[list[Any], tapping.Run]:
    """Runs the loss.

    Args:
      leaves: Of the parameters.
      tables: Which of these are views.
      given: See `tapping.Run`.

    Returns:
      Its outputs, and what the run has found.
    """
    run = tapping.Run(given=given or {}, replays=bool(self.away))
    args = [
      View.of(i, x, i in self.away) if i in tables else x
      for i, x in enumerate(leaves)
    ]
    outs = run.run(*jaxprs.opened(self.program), args, ())
    for out in outs:
      if isinstance(out, View) and out.away:  # It would be all of the table.
        refusal = Refusal("is returned by the loss", "")
        run.refusals.setdefault(out.param, refusal)
    return tapping.wholes(outs), run


@dataclasses.dataclass(frozen=True)
class Tables:
  """Parameters that are tables, and why the others are not.

  Attributes:
    traced: The loss.
    names: Of all leaves.
    rows: Indices of the leaves whose gradients are rows.
    sites: Lookups of these, in the order of the program.
    refusals: Of the other leaves, why.
    demanded: Leaves of which the user wants rows.
    wanted: How many of the leaves, the first ones, have gradients.
    ids: A traced program from leaves to ids of all lookups and results of
      callbacks.
    kinds: What it returns, as shapes, by path.
  """

  traced: Traced
  names: Sequence[str]
  rows: Sequence[int]
  sites: dict[Path, Site]
  refusals: dict[int, Refusal]
  demanded: Sequence[int]
  wanted: int
  ids: Any
  kinds: Any

  def require(self) -> "Tables":
    """Raises ValueError if rows are demanded of a leaf that has none."""
    for i in self.demanded:
      refusal = self.refusals.get(i)
      if refusal is None:
        continue
      at = f", at {refusal.place}" if refusal.place else ""
      if i in self.traced.away:
        raise ValueError(
          f"`fun` must only look up rows of {self.names[i]!r}, of which each"
          f" device has its own, but it {refusal.reason}{at};"
          f" {_of_one_table(self.traced.leaves[i])}keep that table whole, by"
          " `tables=` of `zenjax.tables.shard`."
        )
      raise ValueError(
        f"`tables` demands rows of {self.names[i]!r}, which must be only"
        f" looked up, but it {refusal.reason}{at}; leave it out of `tables`"
        " and its gradient is dense."
      )
    return self


def _of_one_table(table: Any) -> str:
  """A remedy for a stack of tables."""
  if not table.stack:
    return ""
  *stack, rows, width = table.shape
  return (
    f"look up rows `t * {rows} + id` of it reshaped to"
    f" `{(math.prod(stack) * rows, width)}`, or "
  )


def trace(loss: Loss) -> Traced:
  """Traces a loss, every leaf of its parameters local to its device.

  Under `shard_map(check_vma=True)` leaves are cast to vary over what the loss
  varies over, before they are differentiated by: autodiff sums the gradients
  of what it sees being cast.
  """
  leaves, structure = jax.tree.flatten(loss.params, is_leaf=is_sharded)
  count = len(leaves)
  leaves += loss.frozen.values()
  away = frozenset([i for i, x in enumerate(leaves) if is_sharded(x)])
  rebuild: Any = None
  varying: frozenset[str] = frozenset()

  def flat(types):
    nonlocal rebuild, varying
    # The type of a whole table varies over nothing.
    given = [
      compat.cast_like(x, leaves[i].value) if i in away else x
      for i, x in enumerate(types)
    ]
    value = loss.of(structure.unflatten(given[:count]), given[count:])
    arrays, rebuild = leaf_util.arrays_of(
      value, lambda x: isinstance(x, _ARRAYS)
    )
    varying = frozenset().union(*map(compat.varying_axes, arrays[:1]))
    return arrays

  types = list(map(_type_of_whole, leaves))
  program = jax.make_jaxpr(flat)(types)
  arrays = [x.value if i in away else x for i, x in enumerate(leaves)]
  lacking = [tuple(varying - compat.varying_axes(x)) for x in arrays]
  if any(lacking):
    leaves = [
      lax.pcast(x, axes, to="varying") if axes else x
      for x, axes in zip(leaves, lacking)
    ]
    types = list(map(_type_of_whole, leaves))
    program = jax.make_jaxpr(flat)(types)
  return Traced(leaves, types, away, program, rebuild, varying)


def _type_of_whole(leaf: Any) -> Any:
  """A sharded table's type, as a loss sees it; other leaves as they are."""
  if not is_sharded(leaf):
    return leaf
  lies = None
  if compat.explicit_axes(leaf.value):  # Such a loss sees it on every device.
    mesh = jax.typeof(leaf.value).sharding.mesh
    lies = NamedSharding(mesh, PartitionSpec())
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)


_ARRAYS = (jax.Array, np.ndarray, np.generic, float, int, complex)


def find(loss: Loss, spec: SparseSpec) -> Tables:
  """Decides for every parameter, and runs the program once to see."""
  traced = trace(loss)
  leaves, away, tree = traced.leaves, traced.away, loss.params
  names = [name for name, _ in leaf_util.named_leaves(tree, is_sharded)]
  count = len(names)
  wanted: list[Any] = [None] * count
  if spec is not None:
    wanted = leaf_util.explicit(tree, spec, "tables")
    leaf_util.warn_of_none(tree, spec, wanted, "tables")
  names += loss.frozen
  wanted += [True] * len(loss.frozen)
  wanted = [i in away or w for i, w in enumerate(wanted)]
  unfit = {i: _unfit(x, w) for i, (x, w) in enumerate(zip(leaves, wanted))}
  candidates = [i for i, reason in unfit.items() if not reason]
  run: Any = None

  def first_run(leaves):
    nonlocal run
    _, run = traced.run(leaves, candidates)
    return run.told

  ids, kinds = jax.make_jaxpr(first_run, return_shape=True)(traced.types)
  sites, refusals = run.sites, run.refusals
  summed = {s.param for s in sites.values() if s.varying - traced.varying}
  looked_up = {site.param for site in sites.values()}
  for i in candidates:
    # JAX drops lookups of no ids, so a table is not used with an empty batch.
    may_rest = wanted[i] or leaf_util.is_table(leaves[i])
    if i not in looked_up and not may_rest:
      unfit[i] = "is not looked up"
    elif i in summed:
      unfit[i] = _SUMMED
  reasons = {i: Refusal(reason, "") for i, reason in unfit.items() if reason}
  refusals = reasons | refusals
  rows = [i for i in candidates if i not in refusals]
  return Tables(
    traced=traced,
    names=names,
    rows=rows,
    sites={path: site for path, site in sites.items() if site.param in rows},
    refusals=refusals,
    demanded=[i for i, w in enumerate(wanted) if w],
    wanted=count,
    ids=ids,
    kinds=kinds,
  )


_SUMMED = (
  "is looked up at ids that differ between devices, for a loss that does not:"
  " its gradient is a sum over devices"
)


def _unfit(leaf, wanted) -> str:
  if wanted is False:
    return "is left out by `tables`"
  if is_sharded(leaf):
    return ""
  if jnp.ndim(leaf) != 2:
    return f"has {jnp.ndim(leaf)} dimensions, not 2"
  if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
    return f"has dtype {jnp.result_type(leaf)}"
  return ""
