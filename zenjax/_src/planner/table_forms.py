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

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

from zenjax._src.core.partition import Layout
from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Links
from zenjax._src.machine.link_models import Phase
from zenjax._src.planner.plan_model import Gradient
from zenjax._src.planner.plan_model import MARGIN
from zenjax._src.planner.plan_model import rows_of
from zenjax._src.planner.plan_model import table_of
from zenjax._src.planner.plan_model import Way
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
  """Predicted costs of a table in one form.

  Attributes:
    phases: Collectives of a step, one after the other.
    local_s: Time of the device's own work, the optimizer's included.
    received: Bytes that a device receives in a step.
    memory: Bytes that a device holds: rows, state, gradient and buffers.
  """

  phases: tuple[Phase, ...]
  local_s: float
  received: float
  memory: float


class Table(NamedTuple):
  """A table that a loss looks rows up in, and what is known of it."""

  gradient: Gradient
  profile: Profile
  state_row: float  # Bytes of the optimizer's state for one row.


def costs(table: Table, context: Context, links: Links) -> dict[str, Cost]:
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

  def made(messages: Sequence[Message], local_s: float, memory: float) -> Cost:
    return Cost(
      phases=tuple(cost.phases_of(messages, context)),
      local_s=local_s,
      received=float(received_bytes(messages, context)),
      memory=memory,
    )

  zen = cost.predict(
    "zen", table_of(gradient, Way("zen")), profile, context, links
  )
  sparse = Cost(
    phases=zen.phases,
    local_s=zen.local_s + moved(union, step_row),
    received=zen.received,
    memory=whole + 2 * zen.received,
  )
  dense = Message("all_reduce", context.axes, rows * row / 4)
  found = {
    REPLICATED: made([dense], sweep, whole + 2 * rows * row),
    ROWS: sparse,
  }
  if len(context.axes) == 1:
    slots = Layout(num_rows=rows, groups=n).slots
    found[ZERO1] = dataclasses.replace(
      sparse,
      local_s=zen.local_s + moved(union / n, step_row),
      memory=sparse.memory - (rows - slots) * state_row,
    )
  if len(gradient.shape) != 2:
    return found
  if rows % n == 0:  # Or XLA cannot split it.
    batch = n * look_ups
    found[XLA] = made(
      _by_xla(look_ups, row, context),
      sweep / n + moved(2 * batch, row),
      (whole + rows * row) / n + 2 * batch * row,
    )
  if last > 1:
    messages = _by_owners(gradient, look_ups, profile, context)
    words = sum(m.words for m in messages)
    pushed = min(profile.union_of(last), rows) / last
    found[SHARDED] = made(
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


# --- the choice ---------------------------------------------------------------


def alone_s(found: Cost, links: Links) -> float:
  """Returns the time of a table by itself."""
  return found.local_s + link_models.wire_s(found.phases, links)


def seconds(
  chosen: Sequence[tuple[str, Cost]], links: Links, margin: float = 1.0
) -> float:
  """Returns the time of a step's exchanges and updates of these tables.

  Tables of one form wait once for the messages of its exchange, except for the
  collectives that XLA makes.

  Args:
    chosen: The form of each, and its costs.
    links: Link of each axis.
    margin: All forms except "replicated" are taken to last longer by its
      inverse: predictions err.
  """
  total, waits = 0.0, {}
  for form, found in chosen:
    raised = 1.0 if form == REPLICATED else 1 / margin
    wait = 0.0 if form in OF_ARRAYS else _wait_s(found, links)
    total += (alone_s(found, links) - wait) * raised
    waits[form] = max(waits.get(form, 0.0), wait * raised)
  return total + sum(waits.values())


def _wait_s(found: Cost, links: Links) -> float:
  return link_models.wire_s([(*p[:3], 0.0) for p in found.phases], links)


# A form more is an exchange more, and must leave less than this part of a step.
_WORTH = 0.9


def cheapest(
  tables: Sequence[Mapping[str, Cost]],
  links: Links,
  limit: float,
  together: Sequence[frozenset[str]],
) -> list[str] | None:
  """Returns the form of each table with the shortest step within a memory.

  Every set of forms that may be used together is tried, and one with more forms
  taken if it gains a tenth. In each a table takes the form that adds least;
  where these do not fit, memory is traded for time.

  Args:
    tables: Costs of each, by the forms that it can have.
    links: Link of each axis.
    limit: Bytes of memory that all tables may take; may be infinite.
    together: Sets of forms that one program can have.

  Returns:
    Names of forms; None if nothing fits.
  """
  best, best_s, most = None, math.inf, 0
  for forms in sorted(together, key=len):
    open_to = []
    for found in tables:
      own = {}
      for form in forms & found.keys():
        wait = 0.0 if form in OF_ARRAYS else _wait_s(found[form], links)
        added = seconds([(form, found[form])], links, MARGIN) - wait / MARGIN
        own[form] = max(added, 0.0), found[form].memory
      open_to.append(own)
    names = _within(open_to, limit) if all(open_to) else None
    if names is None:
      continue
    chosen = [(name, found[name]) for name, found in zip(names, tables)]
    step_s = seconds(chosen, links, MARGIN)
    if step_s < (_WORTH * best_s if len(forms) > most else best_s):
      best, best_s, most = names, step_s, len(forms)
  return best


# Parts of the memory limit that sums of memory are rounded up to.
_BUCKETS = 512


def _within(
  tables: Sequence[Mapping[str, tuple[float, float]]], limit: float
) -> list[str] | None:
  """Returns names of the least time whose memory is within the limit.

  By dynamic programming over all tables, in steps of a part of the limit.
  """
  fastest = [min(own, key=lambda name: own[name]) for own in tables]
  if sum(own[name][1] for own, name in zip(tables, fastest)) <= limit:
    return fastest
  leanest = [min(own, key=lambda name: own[name][::-1]) for own in tables]
  least = [own[name][1] for own, name in zip(tables, leanest)]
  # From the least memory of all on, so that rounding never says that none fits.
  step = (limit - sum(least)) / _BUCKETS
  if step < 0:
    return None
  best: dict[int, tuple[float, list[str]]] = {0: (0.0, [])}
  for own, few in zip(tables, least):
    new: dict[int, tuple[float, list[str]]] = {}
    for used, (spent, names) in best.items():
      for name, (more_s, memory) in own.items():
        extra = memory - few
        at = used + (math.ceil(extra / step) if extra > 0 and step else 0)
        if at > _BUCKETS or (extra > 0 and not step):
          continue
        if at not in new or spent + more_s < new[at][0]:
          new[at] = spent + more_s, [*names, name]
    best = new
  return min(best.values(), key=lambda x: x[0])[1]
