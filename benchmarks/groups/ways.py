"""Ways to group gradients into exchanges, and what each should take.

A way is its stops: after how many gradients of the backward pass each of its
exchanges leaves. The last stop is the number of gradients.
"""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import optax

from benchmarks.planned.programs import AXIS
from benchmarks.planner import baselines
from benchmarks.planner import exhaustive
import zenjax
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import GroupCosts
from zenjax._src.planner.timeline import iteration_seconds
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import Tensor
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context

Stops = tuple[int, ...]
ZEN = "zen"
ONE, EACH = "one exchange", "each leaf"
MERGECOMP, SEARCH = "MergeComp", "exact search"
_OVERLAP = ", if they overlapped"


def program(stops: Stops) -> str:
  """Ways of the same stops are one program."""
  return ",".join(map(str, stops))


def by_hand(leaves: int) -> dict[str, Stops]:
  """One exchange, one a leaf, two cut after each quarter, and four."""
  quarters = dict.fromkeys(round(leaves * k / 4) for k in (1, 2, 3))
  cuts = [cut for cut in quarters if 0 < cut < leaves]
  ways: dict[str, Stops] = {ONE: (leaves,)}
  ways |= {f"2, cut after {cut}": (cut, leaves) for cut in cuts}
  if len(cuts) == 3:
    ways["4"] = (*cuts, leaves)
  return ways | {EACH: tuple(range(1, leaves + 1))}


def exchanges(
  names: Sequence[str],
  stops: Stops,
  capacities: Mapping[str, tuple[int, int]] | None,
  *,
  kept: Sequence[str] = (),
) -> optax.GradientTransformation:
  """A `zen_sync` for each group; plans by hand are of rows, these elements.

  Args:
    names: Of the gradients, as the backward pass completes them.
    stops: Of the way.
    capacities: To be pinned.
    kept: Of gradients that go nowhere.
  """
  syncs: dict[Hashable, optax.GradientTransformation] = {
    "whole": zenjax.zen_sync(AXIS, sparse=False),
    "kept": optax.identity(),
  }
  group_of = dict.fromkeys(kept, "kept")
  for group, (start, stop) in enumerate(zip((0, *stops), stops)):
    members = names[start:stop]
    group_of |= dict.fromkeys(members, str(group))
    pinned = capacities and {name: capacities[name] for name in members}
    syncs[str(group)] = zenjax.zen_sync(
      AXIS, sparse=True, unit="element", capacities=pinned
    )

  def labels(params):
    return {name: group_of.get(name, "whole") for name in params}

  return optax.partition(syncs, labels)


class Priced(NamedTuple):
  """Gradients with what each takes by itself, and what some take together.

  Attributes:
    tensors: As the backward pass completes them.
    groups: Costs of those that share an exchange.
    once: What of that an exchange pays once.
  """

  tensors: tuple[Tensor, ...]
  groups: GroupCosts
  once: Option

  def together(self, stops: Stops) -> float:
    """Seconds of a way's exchanges by zen, one after another."""
    found = 0.0
    for i, j in zip((0, *stops), stops):
      exchange = self.groups.exchange(i, j, ZEN)
      assert exchange is not None, (i, j)
      found += exchange.option.work_s + exchange.option.link_s
    return found


def priced(
  gradients: Sequence[Gradient],
  profiles: Mapping[str, Profile],
  topology: zenjax.planner.Topology,
  compute_seconds: float,
) -> Priced:
  """As the planner has it, of elements in the place of rows.

  The pass ends with the last of `gradients`: what it does after that is taken
  to be before the first.

  Args:
    gradients: As the backward pass completes them.
    profiles: Selected elements, by name.
    topology: The links.
    compute_seconds: Of a step without any exchange.
  """
  axes = tuple(level.name for level in topology.levels)
  context = Context(axes=axes, sizes=topology.sizes, mean=True)
  tensors, once = [], math.inf
  before = gradients[-1].ready - 1.0
  for gradient in gradients:
    size = math.prod(gradient.shape)
    table = buffer_sizes.Table(
      name=gradient.name,
      num_rows=size,
      width=1,
      dtype=jnp.dtype(gradient.dtype),
      wire_dtype=jnp.dtype(gradient.dtype),
    )
    profile = profiles[gradient.name]
    p = cost.predict(ZEN, table, profile, context, topology.links)
    option = Option(ZEN, p.mask_s, p.wire_s, p.local_s - p.mask_s, p.received)
    once = min(once, p.once_s, p.wire_s)
    tensors.append(
      Tensor(
        name=gradient.name,
        bytes=size * gradient.dtype.itemsize,
        backward_s=(gradient.ready - before) * compute_seconds,
        options=(option,),
      )
    )
    before = gradient.ready
  return _with(tuple(tensors), Option(ZEN, link_s=once))


def chosen(costs: Priced) -> dict[str, Stops]:
  """What MergeComp's halving and the exact search take.

  Both as hosts run that do nothing beside an exchange, and as they would
  choose if exchanges ran beside the backward pass.
  """
  none = _one_by_one(costs)
  found = {
    MERGECOMP: baselines.mergecomp(none.groups),
    SEARCH: exhaustive.exhaustive(none.groups)[0],
    MERGECOMP + _OVERLAP: baselines.mergecomp(costs.groups),
    SEARCH + _OVERLAP: exhaustive.exhaustive(costs.groups)[0],
  }
  return {name: stops_of(ways) for name, ways in found.items()}


def _one_by_one(costs: Priced) -> Priced:
  """The same where all is work of the device, beside which nothing runs."""

  def serial(option: Option) -> Option:
    seconds = option.work_s + option.link_s
    return Option(option.name, before_s=seconds, bytes=option.bytes)

  tensors = tuple(
    dataclasses.replace(t, options=tuple(map(serial, t.options)))
    for t in costs.tensors
  )
  return _with(tensors, serial(costs.once))


def _with(tensors: tuple[Tensor, ...], once: Option) -> Priced:
  return Priced(tensors, GroupCosts(tensors, {ZEN: once}), once)


def stops_of(assignment: Assignment | None) -> Stops:
  """After how many tensors each exchange leaves."""
  assert assignment is not None  # All of them share their schemes.
  return tuple(exchange.stop for exchange in assignment)


def seconds_of(costs: Priced, assignment: Assignment | None) -> float:
  """Of a step in which exchanges run beside the backward pass."""
  assert assignment is not None
  return iteration_seconds(costs.tensors, assignment)
