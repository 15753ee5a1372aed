"""A table sharded by rows in plain `jit`, for comparison: another program.

On automatic axes, with a table `P("data", None)` and a batch `P("data")`, XLA
gathers the ids of all devices. Each device looks up those rows that it holds,
and a sum brings the rows of the whole batch to every device. In the backward
pass the cotangents of the whole batch are gathered. Every look-up counts, one
of a row that was looked up before as well.
"""

from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Links
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes


def exchange(
  gradient: Gradient, look_ups: float, context: Context, links: Links
) -> tuple[float, float]:
  """Predicts what such a table moves in a step.

  Args:
    gradient: The table's.
    look_ups: Look-ups of a device in a step.
    context: Axes and sizes.
    links: Link of each axis.

  Returns:
    Bytes that a device receives, and seconds on the links.
  """
  row = gradient.shape[-1] * gradient.dtype.itemsize / 4
  messages = (
    Message("all_gather", context.axes, look_ups),
    Message("all_reduce", context.axes, context.devices * look_ups * row),
    Message("all_gather", context.axes, look_ups * row),
  )
  phases = [p for m in messages for p in cost.phases_of(m, context)]
  received = float(received_bytes(messages, context))
  return received, link_models.wire_s(phases, links)
