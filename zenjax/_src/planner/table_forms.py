"""Predicts the costs of each form in which a program can hold a table.

    replicated         replicated; XLA sums an array of its gradient
    replicated-sparse  replicated; `zen_sync` sums touched rows, and `lazy_rows`
                       updates them
    replicated-zero1   replicated; `sharded_optimizer` has owners update rows
                       and keep the state
    sharded-xla        sharded by ranges of rows, `P(axes, None)`, by XLA alone
    sharded            sharded by `tables.shard`: each device has the rows that
                       it owns. With several axes, owners are along the last
                       one, and every group along it has a copy.

Letters: `R` rows, `D` columns, `n` devices, `K` lookups of a device.
"""

import dataclasses
import math

from zenjax._src.core.partition import Layout
from zenjax._src.core.row_wire import RowWire
from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.cost import Way
from zenjax._src.planner.questions import Gradient
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.sync.plans import DENSE
from zenjax._src.tables import fetch

REPLICATED, ROWS, ZERO1, XLA, SHARDED = FORMS = (
  "replicated",
  "replicated-sparse",
  "replicated-zero1",
  "sharded-xla",
  "sharded",
)
# Forms in which the optimizer sees arrays of all rows, touched or not.
OF_ARRAYS = (REPLICATED, XLA)
# Forms in which the optimizer of a device sees only the rows it owns.
OF_OWNERS = (ZERO1, SHARDED)


def costs(
  gradient: Gradient, profile: Profile, state_row: float, model: CostModel
) -> dict[str, Prediction]:
  """Predicts the costs of a table in each form that it can have.

  Args:
    gradient: The gradient of the table.
    profile: Its densities.
    state_row: Bytes of the optimizer's state for one row.
    model: The cost model of the machine.
  """
  context, work = model.context, model.work
  n, last = context.devices, context.sizes[-1]
  rows = gradient.table.num_rows
  row = gradient.shape[-1] * gradient.dtype.itemsize
  # Without a number of lookups, each touched row counts as one.
  look_ups = float(gradient.look_ups or profile.rows)
  whole = rows * (row + state_row)
  # An optimizer reads and writes rows and state, and it reads the gradient.
  step_row = 3 * row + 2 * state_row
  moved = lambda rows, row: rows * (row * work.move_byte + work.move_row)
  # The gradient's array is filled with zeros, and all of it is read.
  sweep = rows * (step_row + 2 * row) * work.mask_byte
  union = min(profile.union_of(n), rows)
  # XLA makes one collective for each array, so arrays do not share latency.
  apart = lambda prediction: dataclasses.replace(prediction, once_s=0.0)
  dense = model.of_messages(
    DENSE,
    [Message("all_reduce", context.axes, rows * row / 4)],
    local_s=sweep,
    memory=whole + 2 * rows * row,
  )
  zen = model.of_way(Way("zen"), gradient.table, profile)
  sparse = dataclasses.replace(
    zen,
    exchange=ROWS,
    seconds=zen.seconds + moved(union, step_row),
    memory=whole + 2 * zen.received,
  )
  by_form = {REPLICATED: apart(dense), ROWS: sparse}
  if len(context.axes) == 1:
    slots = Layout(num_rows=rows, groups=n).slots
    by_form[ZERO1] = dataclasses.replace(
      sparse,
      exchange=ZERO1,
      seconds=zen.seconds + moved(union / n, step_row),
      memory=sparse.memory - (rows - slots) * state_row,
    )
  if len(gradient.shape) != 2:
    return by_form
  if rows % n == 0:  # Otherwise XLA cannot shard the table.
    batch = n * look_ups
    by_form[XLA] = apart(
      model.of_messages(
        XLA,
        _by_xla(look_ups, row, context),
        local_s=sweep / n + moved(2 * batch, row),
        memory=(whole + rows * row) / n + 2 * batch * row,
      )
    )
  if last > 1:
    messages = _by_owners(gradient, look_ups, profile, context)
    words = sum(m.words for m in messages)
    pushed = min(profile.union_of(last), rows) / last
    slots = Layout(num_rows=rows, groups=last).slots
    by_form[SHARDED] = model.of_messages(
      SHARDED,
      messages,
      local_s=moved(words * 4 / max(row, 1) + look_ups, row)
      + moved(pushed, step_row),
      memory=slots * (row + state_row) + 16 * words,
    )
  return by_form


def _by_xla(look_ups: float, row: int, context: Context) -> list[Message]:
  """Returns the collectives of a table that XLA shards in plain `jit`.

  On automatic axes, with a table `P("data", None)` and a batch `P("data")`, XLA
  gathers the ids of all devices. Each device looks up the rows that it holds,
  and a sum brings the rows of the whole batch to every device. The backward
  pass gathers the cotangents of the whole batch. XLA does not remove
  duplicates: a row that is looked up twice is sent twice.
  """
  words = look_ups * row / 4
  return [
    Message("all_gather", context.axes, look_ups),
    Message("all_reduce", context.axes, context.devices * words),
    Message("all_gather", context.axes, words),
  ]


def _by_owners(
  gradient: Gradient, look_ups: float, profile: Profile, context: Context
) -> list[Message]:
  """Returns the collectives of a step with a table of `zenjax.tables.shard`.

  Owners are along the last axis. With further axes, owners of the same rows
  gather each other's sums.
  """
  rows, width = gradient.shape
  *others, last = context.axes
  n = context.sizes[-1]
  layout = Layout(num_rows=rows, groups=n)
  touched = min(profile.fullest, look_ups)
  most = min(buffer_sizes.fullest(touched, n, n * n), layout.slots)
  row_wire = RowWire.of(gradient.dtype, None, width)
  sizes = (math.ceil(most),)  # As `zenjax.tune` chooses them.
  size = fetch.buffer_size(math.ceil(look_ups), layout, sizes)
  ids, brought, pushed = map(float, fetch.words_of_round(size, n, row_wire))
  messages = [
    Message("all_to_all", (last,), ids),
    Message("all_reduce", context.axes, 1.0),  # The number of rounds.
    Message("all_to_all", (last,), brought),
    Message("all_to_all", (last,), pushed),
  ]
  if others:
    messages.append(Message("all_gather", tuple(others), pushed))
  return messages
