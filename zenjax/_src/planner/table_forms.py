"""Predicts the costs of each form in which a program can hold a table.

    replicated         replicated; an array of its gradient is all-reduced
    replicated-sparse  replicated; a scheme of `zen_sync` sums touched rows, and
                       `lazy_rows` updates them
    replicated-zero1   replicated; `sharded_optimizer` has owners update rows
                       and keep the state
    sharded-xla        sharded by ranges of rows, `P(axes, None)`, by XLA alone
    sharded            sharded by `tables.shard`: each device has the rows that
                       it owns. With several axes, owners are along the last
                       one, and every group along it has a copy.

Letters: `R` rows, `D` columns, `n` devices, `K` lookups of a device.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp

from zenjax._src.core.arguments import Capacity
from zenjax._src.core.partition import Layout
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Way
from zenjax._src.machine.cost import Ways
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.zen import PushOnly
from zenjax._src.sync.plans import SHARDED
from zenjax._src.sync.plans import XLA
from zenjax._src.sync.plans import ZERO1
from zenjax._src.tables import fetch


def every_form(
  question: Question,
  gradient: Gradient,
  ways: Ways,
  wire_dtypes: Sequence[str],
) -> dict[Way, Prediction]:
  """Predicts the costs of a table in each form that it can have.

  Args:
    question: The question, with an optimizer.
    gradient: The gradient of the table.
    ways: Every way to sum the gradient if the table is replicated. They are
      returned with the costs of the update and of the table itself.
    wire_dtypes: Dtypes to which rows may be rounded when they are sent.
  """
  assert question.optimizer is not None
  state_row = question.optimizer.state_row(gradient.name)
  profile, model = question.profile(gradient), question.model
  context, work = model.context, model.work
  n, last = context.devices, context.sizes[-1]
  # Owners that clip need the norm of all sums first, so rows are pushed twice.
  clips = int(question.optimizer.clip_norm is not None)
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
  found = {}
  for way, x in ways.items():
    gradient_bytes = rows * row if way == PMEAN else x.received
    found[way] = dataclasses.replace(
      x,
      seconds=x.seconds + (sweep if way == PMEAN else moved(union, step_row)),
      memory=whole + gradient_bytes + x.memory,
    )
  if len(context.axes) == 1:
    zen, slots = ways[Way("zen")], Layout(num_rows=rows, groups=n).slots
    push, _ = zen.sizes or (0.0, 0.0)
    words = n * push * (row + 4) / 4
    first = model.of_messages(
      ZERO1, clips * [Message("all_to_all", context.axes, words)]
    )
    found[Way(ZERO1)] = dataclasses.replace(
      zen,
      exchange=ZERO1,
      sizes=None,  # `zenjax.tune` chooses them.
      seconds=zen.seconds + first.seconds + moved(union / n, step_row),
      once_s=zen.once_s + first.once_s,
      received=zen.received + first.received,
      memory=found[Way("zen")].memory - (rows - slots) * state_row,
    )
  if len(gradient.shape) != 2:
    return found
  if rows % n == 0:  # Otherwise XLA cannot shard the table.
    batch = n * look_ups
    by_xla = model.of_messages(
      XLA,
      _by_xla(look_ups, row, context),
      local_s=sweep / n + moved(2 * batch, row),
      memory=(whole + rows * row) / n + 2 * batch * row,
    )
    # XLA makes collectives for each array, so tables do not share latency.
    found[Way(XLA)] = dataclasses.replace(by_xla, once_s=0.0)
  layout = Layout(num_rows=rows, groups=last)
  touched = min(profile.fullest, look_ups)
  push = min(buffer_sizes.fullest(touched, last, last**2), layout.slots)
  pull = min(buffer_sizes.fullest(union, last, last), layout.slots)
  sizes = Capacity(math.ceil(push), math.ceil(pull))
  for name in (None, *wire_dtypes) if last > 1 else ():
    wire_dtype = jnp.dtype(name or gradient.dtype)
    table = dataclasses.replace(gradient.table, wire_dtype=wire_dtype)
    messages = _by_owners(table, look_ups, sizes, context, clips)
    nbytes = 4 * sum(m.words for m in messages)
    updated = moved(min(profile.union_of(last), rows) / last, step_row)
    by_owners = model.of_messages(
      SHARDED,
      messages,
      local_s=moved(nbytes / max(row, 1) + look_ups, row) + updated,
      memory=layout.slots * (row + state_row) + 4 * nbytes,
    )
    by_owners = dataclasses.replace(by_owners, sizes=sizes)
    found[Way(SHARDED, wire_dtype=name)] = by_owners
  return found


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
  table: Table,
  look_ups: float,
  sizes: Capacity,
  context: Context,
  clips: int,
) -> list[Message]:
  """Returns the collectives of a step with a table of `zenjax.tables.shard`.

  Owners are along the last axis. With further axes, owners of the same rows
  exchange their sums. If `clips` is 1, gradients are sent twice.

  Args:
    table: The table, with the dtype in which rows are sent.
    look_ups: Lookups of a device.
    sizes: Buffers that are just large enough, as `zenjax.tune` makes them.
    context: The devices.
    clips: How often a norm of all gradients is taken first.
  """
  last, n = context.axes[-1:], context.sizes[-1]
  plan = buffer_sizes.plan_table(
    [table],
    groups=n,
    column_groups=1,
    devices=context.devices,
    sizes=[sizes],
  )
  size = fetch.buffer_size(math.ceil(look_ups), plan.layout, sizes[:1])
  ids, brought, _ = fetch.words_of_round(size, n, plan.row_wire)
  with jax.ensure_compile_time_eval():
    *pushes, _ = PushOnly().expected_messages(plan, context, *sizes)
    pushes = [m._replace(words=float(m.words)) for m in pushes]
  return [
    Message("all_to_all", last, float(ids)),
    Message("all_reduce", context.axes, 1.0),  # The number of rounds.
    Message("all_to_all", last, float(brought)),
    *(1 + clips) * pushes,
  ]
