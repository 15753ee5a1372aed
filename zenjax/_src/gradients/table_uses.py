"""Finds the parameters of a loss that are only looked up."""

from collections.abc import Callable, Sequence
import dataclasses
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
    leaves: The leaves of the parameters.
    types: The leaves, with the type of the whole table for sharded tables.
    away: Numbers of the leaves that are sharded tables.
    program: The closed jaxpr of `types -> [loss, *aux]`.
    rebuild: Makes the loss's result from `[loss, *aux]`.
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
      leaves: The leaves of the parameters.
      tables: Numbers of the leaves that are followed to their lookups.
      given: Values for lookups and callbacks, as `tapping.Run` takes them.

    Returns:
      The outputs, and the run with the lookups that it found.
    """
    run = tapping.Run(given=given or {}, replays=bool(self.away))
    args = [
      View.of(i, x, i in self.away) if i in tables else x
      for i, x in enumerate(leaves)
    ]
    outs = run.run(*jaxprs.opened(self.program), args, ())
    for out in outs:
      if isinstance(out, View) and out.away:
        refusal = Refusal("is returned by the loss")
        run.refusals.setdefault(out.param, refusal)
    return tapping.wholes(outs), run


@dataclasses.dataclass(frozen=True)
class Tables:
  """The parameters that are tables, and reasons why the others are not.

  Attributes:
    traced: The loss.
    names: The names of all leaves.
    rows: Numbers of the leaves whose gradients are rows.
    sites: The lookups of these leaves, in the order of the program.
    refusals: Why the other leaves have dense gradients.
    demanded: Numbers of the leaves of which the user wants rows.
    wanted: The number of leaves, from the first one, that have gradients.
    ids: The traced program from leaves to ids of lookups and results of
      callbacks.
    kinds: The shapes of its results, by path.
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
    """Raises ValueError if a leaf must give rows but has another use."""
    for i in self.demanded:
      if i not in self.refusals:
        continue
      name, (reason, place) = self.names[i], self.refusals[i]
      use = f"it {reason}, at {place}" if place else f"it {reason}"
      if i in self.traced.away:
        raise ValueError(
          f"`fun` must only look up rows of {name!r}, which is sharded, but"
          f" {use}. Do not shard this table: leave it out of `tables=` of"
          f" `zenjax.tables.shard`. Or {_all_rows(self.traced.leaves[i])}."
        )
      raise ValueError(
        f"`tables` demands rows of {name!r}, but {use}. Leave it out of"
        " `tables`: its gradient is an array."
      )
    return self


def _all_rows(table: Any) -> str:
  *_, rows, width = table.shape
  if table.stack:
    return (
      f"look up rows `t * {rows} + id` of it reshaped to"
      f" `{(table.num_rows, width)}`"
    )
  return f"look up all of its rows, by `[jnp.arange({rows})]`"


def trace(loss: Loss) -> Traced:
  """Traces a loss so that its gradients are not summed over devices.

  Under `shard_map(check_vma=True)`, autodiff sums the gradients of leaves that
  the loss casts to vary over more axes. Leaves are therefore cast first, to
  vary over all axes over which the loss varies.
  """
  leaves, structure = jax.tree.flatten(loss.params, is_leaf=is_sharded)
  count = len(leaves)
  leaves += loss.frozen.values()
  away = frozenset([i for i, x in enumerate(leaves) if is_sharded(x)])
  rebuild: Any = None
  varying: frozenset[str] = frozenset()

  def flat(types):
    nonlocal rebuild, varying
    # The type of a whole table does not vary.
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
  """Returns a sharded table's type as the loss sees it, or another leaf."""
  if not is_sharded(leaf):
    return leaf
  place = None
  if compat.explicit_axes(leaf.value):
    mesh = jax.typeof(leaf.value).sharding.mesh
    place = NamedSharding(mesh, PartitionSpec())
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


_ARRAYS = (jax.Array, np.ndarray, np.generic, float, int, complex)


def find(loss: Loss, spec: SparseSpec) -> Tables:
  """Finds the tables, by running the loss once on abstract values."""
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
  reasons = map(_unfit, leaves, wanted)
  refusals = {i: Refusal(reason) for i, reason in enumerate(reasons) if reason}
  candidates = [i for i in range(len(leaves)) if i not in refusals]
  run: Any = None

  def first_run(leaves):
    nonlocal run
    _, run = traced.run(leaves, candidates)
    return run.told

  ids, kinds = jax.make_jaxpr(first_run, return_shape=True)(traced.types)
  sites = run.sites
  summed = {s.param for s in sites.values() if s.varying - traced.varying}
  looked_up = {site.param for site in sites.values()}
  for i in candidates:
    # JAX drops lookups of no ids, so an empty batch does not use its table.
    may_rest = wanted[i] or leaf_util.is_table(leaves[i])
    if i not in looked_up and not may_rest:
      refusals[i] = Refusal("is not looked up")
    elif i in summed:
      refusals[i] = Refusal(_SUMMED)
  refusals |= run.refusals
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
  "is looked up at ids that differ between devices, although the loss does not"
  " differ, so its gradient is a sum over devices"
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
