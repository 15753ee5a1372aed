"""Predicts the time of a step, in which plain all-reduces overlap.

Dense gradients are all-reduced in buckets while the backward pass still
computes others, and only the last bucket is waited for. Everything else starts
when all gradients are there: rows of tables, which are complete at the end of
the backward pass, and compressed gradients.

The model is from Agarwal et al., "On the Utility of Gradient Compression in
Distributed Training Systems" (MLSys 2022).
"""

import math

from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.schemes.base import Message

# Buckets as in torch's DDP, and how much they slow down the backward pass: the
# paper measured 1.04 to 1.1.
_BUCKET_BYTES = 25 * 2**20
_CONTENTION = 1.07
# The part of a step's computation that is the backward pass, if not told.
BACKWARD = 2 / 3


def all_reduced(model: CostModel, nbytes: float) -> Prediction:
  """Predicts an all-reduce of so many bytes."""
  message = Message("all_reduce", model.context.axes, nbytes / 4)
  return model.of_messages(PMEAN.scheme, [message] if nbytes else [])


def computed(
  model: CostModel, nbytes: float, compute_s: float, backward_s: float
) -> float:
  """Returns the time to compute a step and to all-reduce dense gradients.

  Args:
    model: The machine.
    nbytes: Bytes of all dense gradients.
    compute_s: Time of a step without any exchange.
    backward_s: The part of it that is the backward pass.
  """
  if not nbytes or model.context.devices == 1:
    return compute_s
  count = math.ceil(nbytes / _BUCKET_BYTES)
  before = (count - 1) * all_reduced(model, _BUCKET_BYTES).seconds
  last = all_reduced(model, nbytes - (count - 1) * _BUCKET_BYTES).seconds
  backward = max(_CONTENTION * backward_s, before)
  return compute_s - backward_s + backward + last
