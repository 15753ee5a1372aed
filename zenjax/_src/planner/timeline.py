"""Predicts the time of a step in which sums overlap with the backward pass.

Gradients that are there early are summed while others are still computed: the
backward pass and the compressors take turns on a device, and the sums take
turns on the links. Plain all-reduces go in buckets. Rows of tables are complete
at the end of the backward pass, so they are not in this model.

The models of Agarwal et al., "On the Utility of Gradient Compression in
Distributed Training Systems" (MLSys 2022), and of Wang et al., "Hi-Speed DNN
Training with Espresso" (EuroSys 2023), are of this kind.
"""

from collections.abc import Iterable, Sequence
import itertools
import math
from typing import Any, NamedTuple

from jax.extend import core as jex_core

from zenjax._src.core import jaxprs
from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.schemes.base import Message

# Buckets as in torch's DDP, and how much longer the backward pass takes while
# something is summed: the Utility paper measured 1.04 to 1.1.
_BUCKET_BYTES = 25 * 2**20
_CONTENTION = 1.07
# The part of a step's computation that is the backward pass, if not told.
BACKWARD = 2 / 3


class Part(NamedTuple):
  """Gradients that are summed together."""

  ready: float  # the part of the backward pass after which all are there
  wire_s: float
  local_s: float = 0.0  # one half to encode, one half to decode

  @classmethod
  def of(cls, sent: Prediction, ready: float) -> "Part":
    """Returns the part of gradients whose exchange is predicted."""
    return cls(ready, sent.seconds - sent.local_s, sent.local_s)


def seconds(
  parts: Iterable[Part], compute_s: float, backward_s: float
) -> float:
  """Predicts when all sums are there.

  Args:
    parts: The parts of all gradients.
    compute_s: Time of a step without any exchange.
    backward_s: The part of it that is the backward pass.
  """
  parts = sorted(parts, key=lambda part: part.ready)
  forward_s = compute_s - backward_s
  encoded_s = link_s = beside_s = 0.0
  came = []
  for part in parts:
    encoded_s += part.local_s / 2
    start = max(link_s, forward_s + part.ready * backward_s + encoded_s)
    link_s = start + part.wire_s
    beside_s += max(min(link_s, compute_s) - start, 0.0)
    came.append(link_s)
  device_s = compute_s + encoded_s + (_CONTENTION - 1) * beside_s
  for part, at in zip(parts, came):
    device_s = max(device_s, at) + part.local_s / 2
  return device_s


def all_reduced(model: CostModel, nbytes: float) -> Prediction:
  """Predicts an all-reduce of so many bytes."""
  message = Message("all_reduce", model.context.axes, nbytes / 4)
  return model.of_messages(PMEAN.scheme, [message] if nbytes else [])


def buckets(
  model: CostModel, gradients: Iterable[tuple[float, float]]
) -> list[Part]:
  """Returns the plain all-reduces of dense gradients.

  Args:
    model: The machine.
    gradients: When each is ready, and its bytes.
  """
  parts, waiting = [], 0.0
  whole = all_reduced(model, _BUCKET_BYTES).seconds
  ready = 0.0
  for ready, nbytes in sorted(gradients):
    waiting += nbytes
    while waiting > _BUCKET_BYTES:
      parts.append(Part(ready, whole))
      waiting -= _BUCKET_BYTES
  if waiting:
    parts.append(Part(ready, all_reduced(model, waiting).seconds))
  return parts


def ready(closed: Any) -> list[float]:
  """Returns the part of the backward pass after which each result is there.

  It counts the operations of a traced `value_and_grad`, in its order. Those
  that only change a gradient's form take no time: of many models, parameters
  are cast at the beginning, so the casts of all gradients are traced last.
  Without products in the backward pass, results take as long as they are large.

  Args:
    closed: The result of `jax.make_jaxpr`.
  """
  done = 0.0

  def run(jaxpr: Any, inputs: Sequence[float]) -> list[float]:
    nonlocal done
    at = dict(zip(jaxpr.invars, inputs))
    read = lambda x: 0.0 if isinstance(x, jex_core.Literal) else at.get(x, 0.0)
    for eqn in jaxpr.eqns:
      given = [read(x) for x in eqn.invars]
      if eqn.primitive.name in jaxprs.CALLS:
        results = run(jaxprs.opened(jaxprs.called(eqn))[0], given)
      else:
        work = _operations(eqn)
        done += work
        results = [done if work else max(given, default=0.0)] * len(eqn.outvars)
      at.update(zip(eqn.outvars, results))
    return [read(x) for x in jaxpr.outvars]

  jaxpr = jaxprs.opened(closed)[0]
  places = run(jaxpr, [0.0] * len(jaxpr.invars))
  forward = (1 - BACKWARD) * done
  if max(places, default=0.0) <= forward:
    return in_order([math.prod(x.aval.shape) for x in jaxpr.outvars])
  return [max(x - forward, 0.0) / (done - forward) for x in places]


def in_order(sizes: Sequence[float]) -> list[float]:
  """Returns when gradients of these sizes are ready, one after the other."""
  return [x / max(sum(sizes), 1) for x in itertools.accumulate(sizes)]


def _operations(eqn: Any) -> float:
  """Counts multiplications and additions of products of arrays."""
  out = [math.prod(getattr(x.aval, "shape", ())) for x in eqn.outvars]
  if eqn.primitive.name == "dot_general":
    (axes, _), _ = eqn.params["dimension_numbers"]
    summed = [eqn.invars[0].aval.shape[axis] for axis in axes]
    return 2.0 * out[0] * math.prod(summed)
  if eqn.primitive.name == "conv_general_dilated":
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * out[0] * math.prod(kernel) / max(features, 1)
  inner = [
    jaxprs.opened(x)[0]
    for value in eqn.params.values()
    for x in (value if isinstance(value, (tuple, list)) else [value])
    if hasattr(jaxprs.opened(x)[0], "eqns")
  ]
  each = sum(_operations(x) for jaxpr in inner for x in jaxpr.eqns)
  return each * eqn.params.get("length", 1)
