"""`plan`: chooses the way of every gradient of a model on a machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import gradient_trace
from zenjax._src.planner import recorded_runs
from zenjax._src.planner.choosing import answer
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.rows import leaf_util
from zenjax._src.sync.plans import Plan


def plan(
  value_and_grad: Callable[..., Any],
  *args: Any,
  topology: Topology,
  axis_name: AxisName = "data",
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  compute_seconds: float = 0.0,
  overlap: bool = False,
  wire_dtypes: Sequence[Any] = (),
  capacities: Mapping[str, tuple[int, int]] | None = None,
  memory_bytes: float | None = None,
) -> Plan:
  """Chooses how every gradient of a model travels, and predicts the gain.

  The model is traced and not run: its loss and the shapes of parameters and
  batch (`jax.ShapeDtypeStruct`) are enough, and no recorded trace is needed.
  Each way is predicted from the bytes that its scheme declares, the links of
  the topology, and the device's own work; the best ways, and the leaves that
  share an exchange, are searched on a timeline of the step. Where nothing
  gains, the plan says so, and all leaves take pmean. Where less is gained than
  predictions err, it says that there is no difference.

  Printed, the plan also tells what its tables would move if they were sharded
  by rows in plain `jit`. That is another program: `plan_tables` chooses it.

  Args:
    value_and_grad: `jax.value_and_grad(loss)`, or zenjax's for tables that are
      only looked up, called on one device's part of a batch.
    *args: Its arguments: parameters first.
    topology: The machine, by `Topology.preset` or `measure_links`.
    axis_name: Axes as `zen_sync` will have them: one for every level of the
      topology, the slowest first.
    profile: Densities by leaf name, as `zenjax.planner.profile(state)` returns
      them after some steps. Other leaves are assumed to be as vocabularies, but
      for those of which zenjax's `value_and_grad` gives an array: the loss uses
      all of their rows.
    trace: A directory that `zenjax.planner.record` wrote, in place of
      `profile`: it has densities for any number of devices.
    compute_seconds: Time of a step on one device without any exchange. Put
      `jax.lax.optimization_barrier(grads)` in its place, or XLA joins gradient
      and optimizer as no exchange lets it.
    overlap: True where exchanges overlap the backward pass, as XLA schedules
      them on TPU and GPU and does not on CPU.
    wire_dtypes: Dtypes to which rows may be rounded on the wire, used for
      leaves whose range they have: bfloat16 has float32's, float16 has not.
    capacities: Buffer sizes `(push, pull)` by leaf name.
    memory_bytes: Limit on the buffers of one leaf's exchange.

  Returns:
    The plan: print it, and give it to `zen_sync(plan=...)`.

  Raises:
    TypeError: `value_and_grad` returns no pair, a dtype is not floating, or
      an argument is of another kind.
    ValueError: An argument is out of range, names a leaf that is not there, or
      no way of a leaf fits the memory.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.mean((params["table"][ids] @ params["w"]) ** 2)
    >>> shape = jax.ShapeDtypeStruct
    >>> params = {"table": shape((100_000, 64), jnp.float32),
    ...           "w": shape((64, 64), jnp.float32)}
    >>> plan = zenjax.planner.plan(
    ...   zenjax.value_and_grad(loss), params, shape((512,), jnp.int32),
    ...   topology=zenjax.planner.Topology.network("10 Gbit/s", 8),
    ... )
    >>> [(leaf.name, leaf.scheme == "dense") for leaf in plan.leaves]
    [('w', True), ('table', False)]
    >>> plan.leaves[1].dense_seconds / plan.leaves[1].seconds > 10
    True

  References:
    Wang et al., Espresso, EuroSys 2023, for the timeline; Wang et al.,
    MergeComp, 2021, for groups; Agarwal et al., On the Utility of Gradient
    Compression, MLSys 2022, for asking whether it pays at all.
  """
  axes = arguments.axes(axis_name)
  check(axes, topology, compute_seconds, memory_bytes)
  gradients = gradient_trace.gradients(value_and_grad, *args)
  if not gradients:
    raise ValueError(
      "`value_and_grad` must return gradients, got a tree without leaves; give"
      " parameters as its first argument."
    )
  known = densities(profile, trace, gradients, topology.devices)
  pins = arguments.pins(capacities)
  _check_names(gradients, pins, "capacities")
  return answer(
    Question(
      gradients=tuple(gradients),
      topology=topology,
      axes=axes,
      profiles=_used_whole(value_and_grad, gradients, topology.devices) | known,
      compute_seconds=float(compute_seconds),
      overlap=arguments.boolean("overlap", overlap),
      wire_dtypes=_wires(wire_dtypes),
      capacities=pins,
      memory_bytes=None if memory_bytes is None else float(memory_bytes),
    )
  )


def densities(
  profile: Mapping[str, Profile] | None,
  trace: str | os.PathLike | None,
  gradients: Sequence[Gradient],
  devices: int,
) -> dict[str, Profile]:
  """Returns the densities that a profile or a trace tells, by leaf name.

  Raises:
    TypeError: `profile` is no mapping of profiles.
    ValueError: Both are given, or one names a leaf that is not there.
  """
  if trace is not None:
    if profile is not None:
      raise ValueError(
        "`trace` must be left out where `profile` is given: both tell"
        " densities."
      )
    profile = recorded_runs.profiles(trace, gradients, devices)
  cost.check_profile(profile)
  _check_names(gradients, profile, "profile")
  return dict(profile or {})


def _used_whole(
  value_and_grad: Callable[..., Any],
  gradients: Sequence[Gradient],
  devices: int,
) -> dict[str, Profile]:
  """Returns densities of tables that are used otherwise than by look-ups.

  A tied softmax touches all rows. Where zenjax's `value_and_grad` gives an
  array, the loss does such a thing; of `jax.value_and_grad` nothing is known.
  """
  listed = any(gradient.look_ups is not None for gradient in gradients)
  if not listed and not getattr(value_and_grad, "gives_rows", False):
    return {}
  found = {}
  for gradient in gradients:
    if gradient.look_ups is None and gradient.shape:
      shape: Any = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
      rows, _ = leaf_util.table_shape(shape, "row")
      found[gradient.name] = Profile(
        rows=rows, fullest=rows, union=rows, devices=devices
      )
  return found


def check(
  axes: Sequence[str],
  topology: Any,
  compute_seconds: float,
  memory_bytes: float | None,
) -> None:
  """Raises TypeError or ValueError where an argument of a plan is wrong."""
  if not isinstance(topology, Topology):
    raise TypeError(
      "`topology` must be a zenjax.planner.Topology, got"
      f" {type(topology).__name__}; give `zenjax.planner.Topology.preset(..)`"
      " or what `zenjax.planner.measure_links` found."
    )
  if len(axes) != len(topology.levels):
    names = [level.name for level in topology.levels]
    raise ValueError(
      "`axis_name` must name an axis for every level of the topology, the"
      f" slowest first: its levels are {names}, got {tuple(axes)}."
    )
  if not 0 <= arguments.number("compute_seconds", compute_seconds) < math.inf:
    raise ValueError(
      "`compute_seconds` must be what a step takes without any exchange, not"
      f" negative, got {compute_seconds!r}."
    )
  if memory_bytes is None:
    return
  if not arguments.number("memory_bytes", memory_bytes) > 0:
    raise ValueError(
      f"`memory_bytes` must be positive, got {memory_bytes!r}; leave it out for"
      " any."
    )


def _wires(dtypes: Any) -> tuple[str, ...]:
  if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
    raise TypeError(
      "`wire_dtypes` must be a sequence of floating dtypes, got"
      f" {dtypes!r}; give (jnp.bfloat16,) for one."
    )
  wires = [arguments.wire_dtype("wire_dtypes", dtype) for dtype in dtypes]
  return tuple(jnp.dtype(wire).name for wire in wires)


def _check_names(
  gradients: Sequence[Gradient], given: Mapping[str, Any] | None, argument: str
) -> None:
  known = [gradient.name for gradient in gradients]
  unknown = sorted(set(given or ()) - set(known))
  if unknown:
    raise ValueError(
      f"`{argument}` must name leaves of the model, got {unknown}; they are"
      f" {known}: was it recorded with another model?"
    )
