"""Predicts every way to synchronize the gradients of a question."""

from collections.abc import Iterable, Sequence
import contextlib
import math

import jax.numpy as jnp

from zenjax._src.compress.compressor import Compressor
from zenjax._src.core import row_wire
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Way
from zenjax._src.planner import table_forms
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.schemes.base import Context

# How often a compressor reads or writes a gradient: add the residual, find a
# scale, round, keep the error; decode what came, round the sums, decode them.
_PASSES = 8


def every_way(question: Question) -> list[dict[Way, Prediction]]:
  """Predicts every way of every gradient, pmean first.

  Gradients of tables may be sent by rows, and tables may be sharded if their
  optimizer is known. Gradients of dense layers may be compressed. Small ones
  have one way.

  Raises:
    ValueError: A compressor can take none of the large gradients.
  """
  predicted, context = [], question.model.context
  large = [x for x in question.gradients if x.may_be_compressed]
  for compressor in question.compressors:
    if context.devices > 1 and large:
      if not fitting(compressor, large, context):
        compressor.messages([large[0].shape], context)  # It says why.
  rates = [(x, seconds_per_byte(question, x)) for x in question.compressors]
  for gradient in question.gradients:
    table, profile = gradient.table, question.profile(gradient)
    ways = {PMEAN: question.model.of_way(PMEAN, table, profile)}
    if question.may_send_rows(gradient):
      narrower = _narrower(question, gradient)
      ways = question.model.of_ways(table, profile, narrower)
      if question.optimizer is not None:
        ways = table_forms.every_form(question, gradient, ways, narrower)
    elif context.devices > 1 and gradient.may_be_compressed:
      for compressor, rate in rates:
        if fitting(compressor, [gradient], context):
          way = PMEAN._replace(compressor=str(compressor))
          ways[way] = compressed(question, compressor, rate, [gradient])
    predicted.append(ways)
  return predicted


def _narrower(question: Question, gradient: Gradient) -> list[str]:
  """Returns names of the allowed dtypes that make rows of a table smaller."""
  return [
    name
    for name in question.wire_dtypes
    if jnp.dtype(name).itemsize < gradient.dtype.itemsize
    and not row_wire.refusal(
      gradient.name, gradient.dtype, jnp.dtype(name), gradient.table.width
    )
  ]


def fitting(
  compressor: Compressor, gradients: Iterable[Gradient], context: Context
) -> list[Gradient]:
  """Returns the gradients that a compressor can take."""
  fits = []
  for gradient in gradients:
    if gradient.may_be_compressed:
      with contextlib.suppress(ValueError):
        compressor.messages([gradient.shape], context)
        fits.append(gradient)
  return fits


def seconds_per_byte(question: Question, compressor: Compressor) -> float:
  """Returns the seconds that a compressor computes for each byte."""
  model, name = question.model, str(compressor)
  if name not in question.local_seconds:
    return _PASSES * model.work.mask_byte
  measured = fitting(compressor, question.gradients, model.context)
  return question.local_seconds[name] / max(_size(measured), 1)


def compressed(
  question: Question,
  compressor: Compressor,
  rate: float,
  gradients: Sequence[Gradient],
) -> Prediction:
  """Predicts the compressed sum of gradients, which share its exchange.

  Args:
    question: The question.
    compressor: The compressor.
    rate: Seconds that it computes for each byte.
    gradients: Gradients that it can take.
  """
  model = question.model
  messages = compressor.messages([x.shape for x in gradients], model.context)
  local_s = rate * _size(gradients)
  return model.of_messages(str(compressor), messages, local_s=local_s)


def _size(gradients: Iterable[Gradient]) -> int:
  """Returns the bytes of gradients in float32."""
  return 4 * sum(math.prod(gradient.shape) for gradient in gradients)
