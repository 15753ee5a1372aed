"""Refuses a step after which devices would hold different replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from zenjax import _flows
from zenjax import _select
from zenjax._collectives import Axes


def checked(
  step: Callable[..., tuple[Any, Any, Any]], specs: Any, mesh: Mesh, axes: Axes
) -> Callable[..., tuple[Any, Any, Any]]:
  """`step`, looked at when it is traced.

  Args:
    step: `(params, opt_state, *batch) -> (params, opt_state, aux)` of a device.
    specs: Of `opt_state`.
    mesh: That it is mapped over.
    axes: Along which batches, and parts of the state, are split.
  """
  several = frozenset(axis for axis in axes if mesh.shape[axis] > 1)
  if not several:
    return step
  is_spec = lambda x: isinstance(x, PartitionSpec)
  split = [spec != PartitionSpec() for spec in jax.tree.leaves(specs, is_spec)]

  def traced(params, opt_state, *batch):
    made: list[tuple[Any, list[str]]] = []

    def flat(*given):
      out = step(*given)
      leaves, structure = jax.tree.flatten(out)
      made.append((structure, [*_names(*out[:2])]))
      return leaves

    # Traced once: the program is read, then run in the place of the step.
    program = jax.make_jaxpr(flat)(params, opt_state, *batch)
    ((structure, names),) = made
    own = _flows.Flow(several, frozenset())
    count = len(jax.tree.leaves(params))
    common = [_flows.COMMON] * count
    common += [own if x else _flows.COMMON for x in split]
    given = jax.tree.leaves((params, opt_state, batch))
    found = _flows.flows(
      program, [*common, *[own] * (len(given) - len(common))], several
    )
    may_differ = [False] * (len(names) - len(split)) + split
    _require_equal(
      [
        (name, flow.parting)
        for name, flow, free in zip(names, found, may_differ)
        if flow.parting and not free
      ],
      axes,
    )
    return structure.unflatten(jex_core.jaxpr_as_fun(program)(*given))

  return traced


def _names(params: Any, opt_state: Any) -> list[str]:
  return [
    f"leaf {name!r} of `{argument}`"
    for argument, tree in (("params", params), ("opt_state", opt_state))
    for name, _ in _select.named_leaves(tree)
  ]


def _require_equal(
  parting: Sequence[tuple[str, frozenset[str]]], axes: Axes
) -> None:
  if not parting:
    return
  (name, missing), *others = parting
  lacking = tuple(axis for axis in axes if axis in missing)
  shown = " and ".join(map(repr, lacking))
  lacking, wanted = (x[0] if len(x) == 1 else x for x in (lacking, axes))
  more = f" (and {len(others)} more)" if others else ""
  raise ValueError(
    "`step` must return parameters and state that are equal on all devices,"
    f" but it makes {name}{more} of the device's own part of the batch with no"
    f" collective over {shown} on the way; put `zenjax.zen_sync({wanted!r})`"
    " first in the optimizer's chain, or average what the leaf is made of by"
    f" `lax.pmean(x, {lacking!r})`."
  )
