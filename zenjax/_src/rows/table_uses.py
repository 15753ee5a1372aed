"""Which parameters of a loss are only looked up, and why the others are not."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import leaf_util
from zenjax._src.rows import tapping
from zenjax._src.rows.tapping import Nest
from zenjax._src.rows.tapping import Refusal
from zenjax._src.rows.tapping import Site
from zenjax._src.rows.tapping import View


@dataclasses.dataclass(frozen=True)
class Traced:
  """A loss as a function of the leaves of its parameters.

  Attributes:
    leaves: Of the parameters, by which to differentiate.
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
  """

  names: Sequence[str]
  rows: Sequence[int]
  sites: Sequence[Site | Nest]
  look_ups: dict[int, int]
  refusals: dict[int, Refusal]
  demanded: Sequence[int]

  def require(self) -> None:
    """Raises ValueError if rows are demanded of a leaf that has none."""
    for i in self.demanded:
      refusal = self.refusals.get(i)
      if refusal is not None:
        at = f", at {refusal.place}" if refusal.place else ""
        raise ValueError(
          f"`tables` demands rows of {self.names[i]!r}, which must be only"
          f" looked up, but it {refusal.reason}{at}; leave it out of `tables`"
          " and its gradient is dense."
        )


def trace(loss: Callable[[Any], Any], params: Any) -> Traced:
  """Traces `loss(params)`, every leaf local to its device.

  Under `shard_map(check_vma=True)` leaves are cast to vary over what the loss
  varies over, before they are differentiated by: autodiff sums the gradients
  of what it sees being cast.
  """
  leaves, structure = jax.tree.flatten(params)
  of_leaves = lambda x: loss(jax.tree.unflatten(structure, x))
  traced = _trace(of_leaves, leaves)
  lacking = [tuple(traced.varying - compat.varying_axes(x)) for x in leaves]
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

  def flat(leaves):
    nonlocal structure, others
    found, structure = jax.tree.flatten(loss(leaves))
    others = [_Array if isinstance(x, _ARRAYS) else x for x in found]
    return [x for x in found if isinstance(x, _ARRAYS)]

  closed = jax.make_jaxpr(flat)(leaves)
  jaxpr, consts = jaxprs.opened(closed)

  def rebuild(outs):
    left = iter(outs)
    found = [next(left) if x is _Array else x for x in others]
    return jax.tree.unflatten(structure, found)

  aval = jaxpr.outvars[0].aval if jaxpr.outvars else None
  manual = getattr(aval, "mat", None)
  varying = frozenset(manual.varying) if manual is not None else frozenset()
  return Traced(leaves, jaxpr, consts, rebuild, varying)


_ARRAYS = (jax.Array, np.ndarray, np.generic, float, int, complex)


class _Array:
  """Stands for an output that is an array; what is none passes as it is."""


def find(
  traced: Traced,
  tree: Any,
  spec: SparseSpec,
) -> Tables:
  """Decides for every leaf of `tree`, and runs the program once to see."""
  named = leaf_util.named_leaves(tree)
  names = [name for name, _ in named]
  leaves = traced.leaves
  wanted = [None] * len(leaves)
  if spec is not None:
    wanted = leaf_util.explicit(tree, spec, "tables")
    leaf_util.require_bools(names, wanted, "tables")
    leaf_util.warn_of_none(tree, spec, wanted, "tables")
  unfit = {i: _unfit(x, w) for i, (x, w) in enumerate(zip(leaves, wanted))}
  candidates = [i for i, reason in unfit.items() if not reason]
  run = _look(traced, leaves, candidates)
  look_ups = dict.fromkeys(candidates, 0)
  summed = set()
  for site, turns in _flat(run.sites):
    look_ups[site.param] += turns * math.prod(site.shape[:-1])
    if site.varying - traced.varying:
      summed.add(site.param)
  for i in candidates:
    count, num_rows = look_ups[i], leaves[i].shape[0]
    if not count:
      unfit[i] = "is not looked up"
    elif i in summed:
      unfit[i] = _SUMMED
    elif count >= num_rows and not wanted[i]:
      unfit[i] = f"is looked up {count} times, and has {num_rows} rows"
  refusals = {i: Refusal(reason, "") for i, reason in unfit.items() if reason}
  refusals |= run.refusals
  rows = [i for i in candidates if i not in refusals]
  if rows != candidates:
    # What is no table after all takes no taps.
    run = _look(traced, leaves, rows)
  demanded = [i for i, w in enumerate(wanted) if w]
  return Tables(names, rows, run.sites, look_ups, refusals, demanded)


_SUMMED = (
  "is looked up at ids that differ between devices, for a loss that does not:"
  " its gradient is a sum over devices"
)


def _look(traced, leaves, tables) -> tapping.Run:
  found = tapping.Run()

  def run(leaves):
    nonlocal found
    found = tapping.Run()
    args = [View(i, x) if i in tables else x for i, x in enumerate(leaves)]
    outs = found.run(traced.jaxpr, traced.consts, args)
    return tapping.wholes(outs)

  jax.eval_shape(run, leaves)
  return found


def _flat(sites: Sequence[Site | Nest], turns: int = 1):
  for site in sites:
    if isinstance(site, Site):
      yield site, turns
    else:
      yield from _flat(site.sites, turns * (site.length or 1))


def _unfit(leaf, wanted) -> str:
  if wanted is False:
    return "is left out by `tables`"
  if jnp.ndim(leaf) != 2:
    return f"has {jnp.ndim(leaf)} dimensions, not 2"
  if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
    return f"has dtype {jnp.result_type(leaf)}"
  return ""
