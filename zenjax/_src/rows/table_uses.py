"""Which parameters of a loss are only looked up, and why the others are not."""

from collections.abc import Callable, Iterator, Sequence
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
from zenjax._src.rows import leaf_util
from zenjax._src.rows import tapping
from zenjax._src.rows.sharded_tables import is_sharded
from zenjax._src.rows.tapping import Nest
from zenjax._src.rows.tapping import Refusal
from zenjax._src.rows.tapping import Site
from zenjax._src.rows.tapping import View


@dataclasses.dataclass(frozen=True)
class Traced:
  """A loss as a function of the leaves of its parameters.

  Attributes:
    leaves: Of the parameters, by which to differentiate. One that is sharded
      was traced as the whole table's type.
    jaxpr: `leaves -> [loss, *aux]`.
    consts: Of it.
    rebuild: From `[loss, *aux]` to what the loss returned.
    varying: Mesh axes over which the loss varies.
  """

  leaves: Sequence[Any]
  jaxpr: Any
  consts: Sequence[Any]
  rebuild: Callable[[Sequence[Any]], Any]
  varying: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Tables:
  """Parameters that are tables, and why the others are not.

  Attributes:
    names: Of all leaves.
    rows: Indices of the leaves whose gradients are rows.
    sites: Look-ups of these, in the order of the program.
    look_ups: Of each leaf, how many rows are read in all.
    refusals: Of the other leaves, why.
    demanded: Leaves of which the user wants rows.
    away: Leaves of which each device has its own rows.
    stacks: Shapes of those of them that are stacks of tables.
  """

  names: Sequence[str]
  rows: Sequence[int]
  sites: Sequence[Site | Nest]
  look_ups: dict[int, int]
  refusals: dict[int, Refusal]
  demanded: Sequence[int]
  away: frozenset[int]
  stacks: dict[int, tuple[int, ...]]

  def require(self) -> None:
    """Raises ValueError if rows are demanded of a leaf that has none."""
    for i in self.demanded:
      refusal = self.refusals.get(i)
      if refusal is not None:
        at = f", at {refusal.place}" if refusal.place else ""
        if i in self.away:
          raise ValueError(
            f"`fun` must only look up rows of {self.names[i]!r}, of which each"
            f" device has its own, but it {refusal.reason}{at};"
            f" {self._of_one_table(i)}keep that table whole, by `tables=` of"
            " `zenjax.tables.shard`."
          )
        raise ValueError(
          f"`tables` demands rows of {self.names[i]!r}, which must be only"
          f" looked up, but it {refusal.reason}{at}; leave it out of `tables`"
          " and its gradient is dense."
        )

  def _of_one_table(self, i: int) -> str:
    """A remedy for a stack of tables."""
    if i not in self.stacks:
      return ""
    *stack, rows, width = self.stacks[i]
    return (
      f"look up rows `t * {rows} + id` of it reshaped to"
      f" `{(math.prod(stack) * rows, width)}`, or "
    )


def trace(loss: Callable[[Any], Any], params: Any) -> Traced:
  """Traces `loss(params)`, every leaf local to its device.

  Under `shard_map(check_vma=True)` leaves are cast to vary over what the loss
  varies over, before they are differentiated by: autodiff sums the gradients
  of what it sees being cast.
  """
  leaves, structure = jax.tree.flatten(params, is_leaf=is_sharded)
  of_leaves = lambda x: loss(jax.tree.unflatten(structure, x))
  traced = _trace(of_leaves, leaves)
  axes_of = lambda x: compat.varying_axes(x.value if is_sharded(x) else x)
  lacking = [tuple(traced.varying - axes_of(x)) for x in leaves]
  if not any(lacking):
    return traced
  local = [
    lax.pcast(x, axes, to="varying") if axes else x
    for x, axes in zip(leaves, lacking)
  ]
  return _trace(of_leaves, local)


def _trace(loss, leaves) -> Traced:
  structure: Any = None
  others: list[Any] = []
  own = [
    tuple(compat.varying_axes(x.value)) if is_sharded(x) else () for x in leaves
  ]

  def as_its(leaf, axes):
    return lax.pcast(leaf, axes, to="varying") if axes else leaf

  def flat(leaves):
    nonlocal structure, others
    found, structure = jax.tree.flatten(loss(list(map(as_its, leaves, own))))
    others = [_Array if isinstance(x, _ARRAYS) else x for x in found]
    return [x for x in found if isinstance(x, _ARRAYS)]

  closed = jax.make_jaxpr(flat)(list(map(type_of_whole, leaves)))
  jaxpr, consts = jaxprs.opened(closed)

  def rebuild(outs):
    left = iter(outs)
    found = [next(left) if x is _Array else x for x in others]
    return jax.tree.unflatten(structure, found)

  aval = jaxpr.outvars[0].aval if jaxpr.outvars else None
  manual = getattr(aval, "mat", None)
  varying = frozenset(manual.varying) if manual is not None else frozenset()
  return Traced(leaves, jaxpr, consts, rebuild, varying)


def type_of_whole(leaf: Any) -> Any:
  """A sharded table's type, as a loss sees it; other leaves as they are."""
  if not is_sharded(leaf):
    return leaf
  lies = None
  if compat.explicit_axes(leaf.value):  # Such a loss sees it on every device.
    mesh = jax.typeof(leaf.value).sharding.mesh
    lies = NamedSharding(mesh, PartitionSpec())
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)


_ARRAYS = (jax.Array, np.ndarray, np.generic, float, int, complex)


class _Array:
  """Stands for an output that is an array; what is none passes as it is."""


def find(
  traced: Traced,
  tree: Any,
  spec: SparseSpec,
) -> Tables:
  """Decides for every leaf of `tree`, and runs the program once to see."""
  named = leaf_util.named_leaves(tree, is_sharded)
  names = [name for name, _ in named]
  leaves = traced.leaves
  wanted: list[Any] = [None] * len(leaves)
  if spec is not None:
    wanted = leaf_util.explicit(tree, spec, "tables")
    leaf_util.require_bools(names, wanted, "tables")
    leaf_util.warn_of_none(tree, spec, wanted, "tables")
  for i, leaf in enumerate(leaves):
    if is_sharded(leaf):
      wanted[i] = True
  unfit = {i: _unfit(x, w) for i, (x, w) in enumerate(zip(leaves, wanted))}
  candidates = [i for i, reason in unfit.items() if not reason]
  run = _look(traced, leaves, candidates)
  look_ups = dict.fromkeys(candidates, 0)
  summed = set()
  for site, lengths in flat_sites(run.sites):
    look_ups[site.param] += math.prod([*lengths, *site.shape[:-1]])
    if site.varying - traced.varying:
      summed.add(site.param)
  for i in candidates:
    if not look_ups[i] and not is_sharded(leaves[i]):
      unfit[i] = "is not looked up"
    elif i in summed:
      unfit[i] = _SUMMED
  refusals = {i: Refusal(reason, "") for i, reason in unfit.items() if reason}
  refusals |= run.refusals
  rows = [i for i in candidates if i not in refusals]
  if rows != candidates:
    # What is no table after all takes no taps.
    run = _look(traced, leaves, rows)
  demanded = [i for i, w in enumerate(wanted) if w]
  away = frozenset([i for i, x in enumerate(leaves) if is_sharded(x)])
  stacks = {i: leaves[i].shape for i in away if leaves[i].stack}
  return Tables(
    names, rows, run.sites, look_ups, refusals, demanded, away, stacks
  )


_SUMMED = (
  "is looked up at ids that differ between devices, for a loss that does not:"
  " its gradient is a sum over devices"
)


def _look(traced, leaves, tables) -> tapping.Run:
  found = tapping.Run()

  def run(leaves):
    nonlocal found
    found = tapping.Run()
    args = [
      View.of_leaf(i, x, is_sharded(traced.leaves[i])) if i in tables else x
      for i, x in enumerate(leaves)
    ]
    outs = found.run(traced.jaxpr, traced.consts, args)
    found.note_returned(outs)
    return tapping.wholes(outs)

  jax.eval_shape(run, list(map(type_of_whole, leaves)))
  return found


def flat_sites(
  sites: Sequence[Site | Nest], lengths: tuple[int, ...] = ()
) -> Iterator[tuple[Site, tuple[int, ...]]]:
  """All sites in order, each with the lengths of the scans that it is in."""
  for site in sites:
    if isinstance(site, Site):
      yield site, lengths
    else:
      turns = () if site.length is None else (site.length,)
      yield from flat_sites(site.sites, (*lengths, *turns))


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
