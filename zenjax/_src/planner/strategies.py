"""Strategies: all ways in which each gradient may travel, with predictions."""

from collections.abc import Mapping, Sequence
import dataclasses

import jax
import numpy as np

from zenjax._src.core.wire import has_range_of
from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine import measure
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Links
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.timeline import GroupCosts
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import Tensor
from zenjax._src.rows import leaf_util
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.registry import DENSE
from zenjax._src.sync import gradient_tree

PMEAN = "dense"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
  """One way to synchronize a leaf, as `LeafPlan` has it."""

  scheme: str
  column_groups: int = 1
  wire_dtype: str | None = None

  @property
  def name(self) -> str:
    """Name of its options, say `zen/2 bfloat16`."""
    columns = f"/{self.column_groups}" if self.scheme == "zen" else ""
    return f"{self.scheme}{columns} {self.wire_dtype or ''}".strip()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
  """The strategies to choose from, for every tensor.

  Attributes:
    tensors: In the order in which the backward pass completes them, with the
      times of sparse strategies raised by the margin.
    once: Seconds on the link that a group pays once, by the names of options.
    strategies: Strategies by the names of options.
    predictions: For each tensor, by the names of its options; not raised.
    links: Link of each axis.
    margin: Factor by which pmean is preferred to sparse strategies.
  """

  tensors: tuple[Tensor, ...]
  once: Mapping[str, float]
  strategies: Mapping[str, Strategy]
  predictions: tuple[Mapping[str, Prediction], ...]
  links: Links
  margin: float

  @property
  def groups(self) -> GroupCosts:
    """Costs of consecutive tensors that share an exchange."""
    latencies = {name: Option(name, link_s=s) for name, s in self.once.items()}
    return GroupCosts(self.tensors, latencies)


def space(
  gradients: Sequence[Gradient],
  profiles: Mapping[str, Profile],
  context: Context,
  links: Mapping[str, Link],
  *,
  compute_seconds: float,
  wire_dtypes: Sequence[str],
  margin: float,
  memory_bytes: float | None,
) -> Space:
  """Predicts every strategy of every gradient.

  Args:
    gradients: Gradients, as the program completes them.
    profiles: Densities by name; those of a vocabulary are assumed for others.
    context: Axes and sizes.
    links: Link of each axis.
    compute_seconds: Time of a step without any exchange.
    wire_dtypes: Names of dtypes that rows may be rounded to.
    margin: A sparse strategy must be predicted to take less than this part of
      pmean's time to be preferred to it: predictions err.
    memory_bytes: Limit on the buffers of a leaf; None for no limit.

  Raises:
    ValueError: No strategy of a leaf fits the memory.
  """
  strategies: dict[str, Strategy] = {}
  tensors, predictions = [], []
  before = 0.0
  lasting = {axis: measure.lasting(link) for axis, link in links.items()}
  for gradient in gradients:
    found = {}
    profile = profiles.get(gradient.name)
    for strategy in _strategies(gradient, context, wire_dtypes):
      prediction = _predict(strategy, gradient, profile, context, lasting)
      strategies[strategy.name] = strategy
      found[strategy.name] = prediction
    found = _fitting(gradient, found, memory_bytes)
    options = [_option(*x, margin) for x in found.items()]
    tensors.append(
      Tensor(
        name=gradient.name,
        bytes=_size(gradient),
        backward_s=max(gradient.ready - before, 0.0) * compute_seconds,
        options=tuple(options),
      )
    )
    before = gradient.ready
    predictions.append(found)
  return Space(
    tensors=tuple(tensors),
    once=_once(predictions, margin),
    strategies=strategies,
    predictions=tuple(predictions),
    links=links,
    margin=margin,
  )


def profile_of(
  gradient: Gradient, profiles: Mapping[str, Profile], context: Context
) -> Profile:
  """Returns the densities of a table, those of a vocabulary if not known."""
  table = table_of(gradient, Strategy(scheme=PMEAN))
  found = profiles.get(gradient.name)
  return found or cost.assumed(table, context.devices)


def raised_by(scheme: str, margin: float) -> float:
  """Returns the factor on the times of a scheme: sparse ones are raised."""
  return 1.0 if scheme in DENSE else 1 / margin


def has_choice(gradient: Gradient, context: Context) -> bool:
  """Returns True for tables, where there is more than one device."""
  leaf = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  listed = gradient.look_ups is not None
  return context.devices > 1 and (listed or leaf_util.is_table(leaf))


def _strategies(
  gradient: Gradient, context: Context, wire_dtypes: Sequence[str]
) -> list[Strategy]:
  """Lists the strategies of a leaf, pmean first."""
  ways = [Strategy(scheme=PMEAN)]
  if not has_choice(gradient, context):
    return ways
  n, width = context.sizes[-1], gradient.shape[-1]
  narrower = [
    name
    for name in wire_dtypes
    if jax.numpy.dtype(name).itemsize < gradient.dtype.itemsize
    and has_range_of(jax.numpy.dtype(name), gradient.dtype)
  ]
  for wire in (None, *narrower):
    for scheme in cost.CANDIDATES:
      if scheme in DENSE:
        continue
      groups = [1]
      if scheme == "zen":
        groups = [g for g in range(1, n + 1) if n % g == 0 and g <= width]
      ways += [
        Strategy(scheme=scheme, column_groups=g, wire_dtype=wire)
        for g in groups
      ]
  return ways


def _predict(
  strategy: Strategy,
  gradient: Gradient,
  profile: Profile | None,
  context: Context,
  links: Links,
) -> Prediction:
  table = table_of(gradient, strategy)
  profile = profile or cost.assumed(table, context.devices)
  # The schemes' formulas serve traced numbers as well: these are none.
  with jax.ensure_compile_time_eval():
    found = cost.predict(
      strategy.scheme, table, profile, context, links, strategy.column_groups
    )
  if strategy.scheme not in DENSE or _shares_buffer(gradient):
    return found
  more_s = link_models.buffer_s(context, links)
  return dataclasses.replace(
    found, wire_s=found.wire_s + more_s, apart_s=more_s
  )


def _shares_buffer(gradient: Gradient) -> bool:
  """Returns True for leaves that zen_sync sums in one buffer with others."""
  return _size(gradient) <= gradient_tree.JOINED_BYTES


def plain_pmean_s(
  gradients: Sequence[Gradient], context: Context, links: Links
) -> float:
  """Returns the time by which `lax.pmean`, a buffer a leaf, exceeds one sum."""
  own = sum(_shares_buffer(gradient) for gradient in gradients)
  return (own - 1) * link_models.buffer_s(context, links)


def table_of(gradient: Gradient, strategy: Strategy) -> buffer_sizes.Table:
  """Returns a gradient as its scheme has it."""
  leaf = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  rows, width = leaf_util.table_shape(leaf, "row")
  dtype = jax.numpy.dtype(gradient.dtype)
  sparse = strategy.scheme not in DENSE
  return buffer_sizes.Table(
    name=gradient.name,
    num_rows=rows,
    width=width,
    dtype=dtype,
    wire_dtype=jax.numpy.dtype(strategy.wire_dtype or dtype),
    look_ups=gradient.look_ups if sparse else None,
  )


def _fitting(
  gradient: Gradient,
  found: Mapping[str, Prediction],
  memory_bytes: float | None,
) -> dict[str, Prediction]:
  """Returns the strategies whose buffers fit."""
  if memory_bytes is None:
    return dict(found)
  need = {name: _buffers(gradient, p) for name, p in found.items()}
  fitting = {k: p for k, p in found.items() if need[k] <= memory_bytes}
  if not fitting:
    least = min(need, key=lambda name: need[name])
    raise ValueError(
      f"`memory_bytes` must hold the buffers of one way for every leaf, but"
      f" {gradient.name!r} needs {need[least] / 1e6:.1f} MB at least (by"
      f" {least}), got {memory_bytes / 1e6:.1f} MB; shard that table's rows"
      " over devices, or give more."
    )
  return fitting


def _buffers(gradient: Gradient, prediction: Prediction) -> float:
  """Returns bytes received, or of the copy that a sum may need."""
  if prediction.scheme in DENSE:
    return _size(gradient)
  return prediction.received


def _size(gradient: Gradient) -> float:
  return float(np.prod(gradient.shape)) * gradient.dtype.itemsize


def _option(name: str, p: Prediction, margin: float) -> Option:
  return Option(name, *_times(p, margin, p.wire_s), bytes=p.received)


def _times(
  p: Prediction, margin: float, wire_s: float
) -> tuple[float, float, float]:
  """Returns raised times before, on and after the link."""
  raised = raised_by(p.scheme, margin)
  return p.mask_s * raised, wire_s * raised, (p.local_s - p.mask_s) * raised


def _once(
  predictions: Sequence[Mapping[str, Prediction]], margin: float
) -> dict[str, float]:
  """Returns what a group pays once: the latency of its collectives."""
  once: dict[str, float] = {}
  for found in predictions:
    for name, p in found.items():
      raised = raised_by(p.scheme, margin)
      least = min(p.once_s, p.wire_s) * raised
      once[name] = min(once.get(name, least), least)
  return once
