"""Forms in which a program holds and trains a table, and the costs of each.

    replicated         whole on every device; XLA sums an array of its gradient
    replicated-sparse  whole; `zen_sync` sums touched rows, `lazy_rows` updates
                       them
    replicated-zero1   whole; `sharded_optimizer` has owners update rows and
                       keep the state
    sharded-xla        each device has a range of rows, `P(axes, None)`, by XLA
                       alone
    sharded            `tables.shard`: each device has the rows that it owns;
                       where devices lie along several axes, those of the last
                       one, and every group along it has a copy

Letters: `R` rows, `D` columns, `n` devices, `K` look-ups of a device.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

from zenjax._src.core.partition import Layout
from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.cost import Way
from zenjax._src.machine.link_models import Links
from zenjax._src.planner.plan_model import Gradient
from zenjax._src.planner.plan_model import rows_of
from zenjax._src.planner.plan_model import table_of
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
# Forms in which a device sees some rows only.
OF_OWNERS = (ZERO1, SHARDED)


class Table(NamedTuple):
  """A table that a loss looks rows up in, and what is known of it."""

  gradient: Gradient
  profile: Profile
  state_row: float  # Bytes of the optimizer's state for one row.


def costs(
  table: Table, context: Context, links: Links
) -> dict[str, Prediction]:
  """Predicts a table in each form that it can have."""
  gradient, profile, state_row = table
  n, last = context.devices, context.sizes[-1]
  rows, row = rows_of(gradient), gradient.shape[-1] * gradient.dtype.itemsize
  # At least one look-up has touched each row.
  look_ups = float(gradient.look_ups or profile.rows)
  work = link_models.of_axis(context.axes[-1], links).work
  whole = rows * (row + state_row)
  # An optimizer reads and writes rows and state, and reads the gradient.
  step_row = 3 * row + 2 * state_row
  moved = lambda rows, row: rows * (row * work.move_byte + work.move_row)
  # All of an array is written, zeros first, and read.
  sweep = rows * (step_row + 2 * row) * work.mask_byte
  union = min(profile.union_of(n), rows)

  def made(
    form: str, messages: Sequence[Message], local_s: float, memory: float
  ) -> Prediction:
    return cost.of_messages(
      form, messages, context, links, local_s=local_s, memory=memory
    )

  # XLA makes a collective for each array: they do not wait together.
  apart = lambda found: dataclasses.replace(found, once_s=0.0)
  dense = Message("all_reduce", context.axes, rows * row / 4)
  zen = cost.predict(Way("zen"), table_of(gradient), profile, context, links)
  sparse = dataclasses.replace(
    zen,
    exchange=ROWS,
    seconds=zen.seconds + moved(union, step_row),
    memory=whole + 2 * zen.received,
  )
  found = {
    REPLICATED: apart(made(DENSE, [dense], sweep, whole + 2 * rows * row)),
    ROWS: sparse,
  }
  if len(context.axes) == 1:
    slots = Layout(num_rows=rows, groups=n).slots
    found[ZERO1] = dataclasses.replace(
      sparse,
      exchange=ZERO1,
      seconds=zen.seconds + moved(union / n, step_row),
      memory=sparse.memory - (rows - slots) * state_row,
    )
  if len(gradient.shape) != 2:
    return found
  if rows % n == 0:  # Or XLA cannot split it.
    batch = n * look_ups
    found[XLA] = apart(
      made(
        XLA,
        _by_xla(look_ups, row, context),
        sweep / n + moved(2 * batch, row),
        (whole + rows * row) / n + 2 * batch * row,
      )
    )
  if last > 1:
    messages = _by_owners(gradient, look_ups, profile, context)
    words = sum(m.words for m in messages)
    pushed = min(profile.union_of(last), rows) / last
    found[SHARDED] = made(
      SHARDED,
      messages,
      moved(words * 4 / max(row, 1) + look_ups, row) + moved(pushed, step_row),
      Layout(num_rows=rows, groups=last).slots * (row + state_row) + 16 * words,
    )
  return found


def _by_xla(look_ups: float, row: int, context: Context) -> list[Message]:
  """Returns what a table sharded by rows moves in plain `jit`.

  On automatic axes, with a table `P("data", None)` and a batch `P("data")`, XLA
  gathers the ids of all devices. Each device looks up those rows that it holds,
  and a sum brings the rows of the whole batch to every device. In the backward
  pass the cotangents of the whole batch are gathered. Every look-up counts, one
  of a row that was looked up before as well.
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
  """Returns what a step with a table of `zenjax.tables.shard` moves.

  Owners lie along the last axis. Where there are more, owners of the same rows
  bring together what each has summed.
  """
  rows, width = gradient.shape
  *others, last = context.axes
  n = context.sizes[-1]
  layout, fullest = Layout(num_rows=rows, groups=n), profile.fullest
  fullest = min(fullest, look_ups)
  most = min(buffer_sizes.fullest(fullest, n, n * n), layout.slots)
  ids, brought, pushed = map(
    float,
    fetch.words_of_step(
      math.ceil(look_ups), most, layout, width, gradient.dtype
    ),
  )
  messages = [
    Message("all_to_all", (last,), ids),
    Message("all_reduce", context.axes, 1.0),  # Agrees on sizes.
    Message("all_to_all", (last,), brought),
    Message("all_to_all", (last,), pushed),
  ]
  if others:
    messages.append(Message("all_gather", tuple(others), pushed))
  return messages
