"""Refuses a step after which devices would hold different replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from zenjax import _flows
from zenjax import _select
from zenjax import _state
from zenjax._collectives import Axes
from zenjax._flows import Flow
from zenjax._sparsify._local import SelectionState
from zenjax._sparsify._state import ErrorFeedbackState


def checked(
  step: Callable[..., tuple[Any, Any, Any]], specs: Any, mesh: Mesh, axes: Axes
) -> Callable[..., tuple[Any, Any, Any, list[Flow]]]:
  """`step`, looked at when it is traced.

  Args:
    step: `(params, opt_state, *batch) -> (params, opt_state, aux)` of a device.
    specs: Of `opt_state`.
    mesh: That it is mapped over.
    axes: Along which batches, and parts of the state, are split.

  Returns:
    The same, with what went into each array of `aux` beside it.
  """
  several = frozenset(axis for axis in axes if mesh.shape[axis] > 1)
  # Where there is one device only, what comes out is as for several.
  looked_at = several or frozenset(axes)
  is_spec = lambda x: isinstance(x, PartitionSpec)
  split = [spec != PartitionSpec() for spec in jax.tree.leaves(specs, is_spec)]

  def traced(params, opt_state, *batch):
    made: list[tuple[Any, list[str]]] = []

    def flat(*given):
      out = _three(step(*given))
      leaves, structure = jax.tree.flatten(out)
      made.append((structure, [*_names(*out[:2])]))
      return leaves

    # Traced once: the program is read, then run in the place of the step.
    program = jax.make_jaxpr(flat)(params, opt_state, *batch)
    ((structure, names),) = made
    own = _flows.own(looked_at)
    given = [_flows.COMMON] * len(jax.tree.leaves(params))
    given += [own if x else _flows.COMMON for x in split]
    given += [
      _flows.own(looked_at, examples=x.shape[0]) for x in jax.tree.leaves(batch)
    ]
    found = _flows.flows(program, given, looked_at)
    may_differ = [False] * (len(names) - len(split)) + split
    _require_equal(
      [
        (name, flow.parting)
        for name, flow, free in zip(names, found, may_differ)
        if flow.parting & several and not free
      ],
      axes,
      _selecting(opt_state),
    )
    values = jex_core.jaxpr_as_fun(program)(
      *jax.tree.leaves((params, opt_state, batch))
    )
    return *structure.unflatten(values), found[len(names) :]

  return traced


def _three(out: Any) -> tuple[Any, Any, Any]:
  if not isinstance(out, tuple) or len(out) != 3:
    shown = f"{len(out)} values" if isinstance(out, tuple) else f"{type(out)}"
    raise TypeError(
      "`step` must return `(params, opt_state, aux)`, got"
      f" {shown}; return `()` as `aux` if there is nothing to tell."
    )
  return out


def _names(params: Any, opt_state: Any) -> list[str]:
  return [
    f"leaf {name!r} of `{argument}`"
    for argument, tree in (("params", params), ("opt_state", opt_state))
    for name, _ in _select.named_leaves(tree)
  ]


def _selecting(opt_state: Any) -> str | None:
  """The sparsifier that sends nothing itself, if the state has one's."""
  if _state.nodes(opt_state, ErrorFeedbackState):
    return "error_feedback"
  if _state.nodes(opt_state, SelectionState):
    return "top_k, threshold or random_k"
  return None


def _require_equal(
  parting: Sequence[tuple[str, frozenset[str]]],
  axes: Axes,
  selecting: str | None,
) -> None:
  if not parting:
    return
  (name, missing), *others = parting
  lacking = tuple(axis for axis in axes if axis in missing)
  shown = " and ".join(map(repr, lacking))
  lacking, wanted = (x[0] if len(x) == 1 else x for x in (lacking, axes))
  more = f" (and {len(others)} more)" if others else ""
  place = "first in the optimizer's chain,"
  if selecting:
    place = (
      f"right behind {selecting} in the optimizer's chain, where it sends what"
      " was selected,"
    )
  raise ValueError(
    "`step` must return parameters and state that are equal on all devices,"
    f" but it makes {name}{more} of the device's own part of the batch with no"
    f" collective over {shown} on the way; put `zenjax.zen_sync({wanted!r})`"
    f" {place} or average what the leaf is made of by"
    f" `lax.pmean(x, {lacking!r})`."
  )
