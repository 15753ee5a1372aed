"""Forms in which a program holds and trains a table, and the costs of each.

    dense        whole on every device; XLA sums an array of its gradient
    rows         whole; `zen_sync` sums touched rows, `lazy_rows` updates them
    owners       whole; `sharded_optimizer` has owners update rows and keep the
    state row-sharded  each device has a range of rows, `P(axes, None)`, by XLA
    alone sharded      `tables.shard`: each device has the rows that it owns;
    where
                 devices lie along several axes, those of the last one, and
                 every group along it has a copy

Letters: `R` rows, `D` columns, `n` devices, `K` look-ups of a device.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

import jax

from zenjax._src.core.partition import Layout
from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Links
from zenjax._src.machine.link_models import Phase
from zenjax._src.planner import strategies
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.rows import sharded_tables
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes

FORMS = ("dense", "rows", "owners", "row-sharded", "sharded")
# Forms in which the optimizer sees arrays of all rows, touched or not.
OF_ARRAYS = ("dense", "row-sharded")
# Forms of which all tables share one exchange.
_JOINT = ("rows", "owners", "sharded")
_ZEN = strategies.Strategy(scheme="zen")


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
  """A table that a loss looks rows up in, and what is known of it.

  Attributes:
    gradient: Its gradient, as one device makes it.
    profile: Its densities.
    state_row: Bytes of the optimizer's state for one row.
  """

  gradient: Gradient
  profile: Profile
  state_row: float

  @property
  def rows(self) -> int:
    return math.prod(self.gradient.shape[:-1])

  @property
  def row(self) -> int:
    """Bytes of a row."""
    return self.gradient.shape[-1] * self.gradient.dtype.itemsize

  @property
  def look_ups(self) -> float:
    """Look-ups of a device; at least one for each row that is touched."""
    found = self.gradient.look_ups
    return self.profile.rows if found is None else found


def costs(table: Table, context: Context, links: Links) -> dict[str, Cost]:
  """Predicts a table in each form that it can have.

  Args:
    table: The table.
    context: Axes and sizes.
    links: Link of each axis.
  """
  n, last = context.devices, context.sizes[-1]
  work = link_models.of_axis(context.axes[-1], links).work
  whole = table.rows * (table.row + table.state_row)
  # An optimizer reads and writes rows and state, and reads the gradient.
  step_row = 3 * table.row + 2 * table.state_row
  moved = lambda rows, row: rows * (row * work.move_byte + work.move_row)
  union = min(table.profile.union_of(n), table.rows)

  def made(messages, local_s, memory) -> Cost:
    phases = [p for m in messages for p in cost.phases_of(m, context)]
    received = float(received_bytes(messages, context))
    return Cost(
      phases=tuple(phases), local_s=local_s, received=received, memory=memory
    )

  # All of an array is written, zeros first, and read.
  sweep = table.rows * (step_row + 2 * table.row) * work.mask_byte
  dense = Message("all_reduce", context.axes, table.rows * table.row / 4)
  found = {"dense": made([dense], sweep, whole + 2 * table.rows * table.row)}
  # The schemes' formulas serve traced numbers as well: these are none.
  with jax.ensure_compile_time_eval():
    one = strategies.table_of(table.gradient, _ZEN)
    zen = cost.predict("zen", one, table.profile, context, links, 1)
  kept = whole + 2 * zen.received
  found["rows"] = Cost(
    phases=zen.phases,
    local_s=zen.local_s + moved(union, step_row),
    received=zen.received,
    memory=kept,
  )
  two = len(table.gradient.shape) == 2
  if len(context.axes) == 1:
    slots = Layout(num_rows=table.rows, groups=n).slots
    state = (table.rows - slots) * table.state_row
    found["owners"] = dataclasses.replace(
      found["rows"],
      local_s=zen.local_s + moved(union / n, step_row),
      memory=kept - state,
    )
  if two and table.rows % n == 0:  # Or XLA cannot split it.
    messages = row_sharded_messages(table.gradient, table.look_ups, context)
    batch = n * table.look_ups
    found["row-sharded"] = made(
      messages,
      sweep / n + moved(2 * batch, table.row),
      (whole + table.rows * table.row) / n + 2 * batch * table.row,
    )
  if two and last > 1:
    messages = owned_messages(
      table.gradient, table.look_ups, table.profile, context
    )
    pushed = min(table.profile.union_of(last), table.rows) / last
    rows = sum(m.words for m in messages) * 4 / max(table.row, 1)
    found["sharded"] = made(
      messages,
      moved(rows + table.look_ups, table.row) + moved(pushed, step_row),
      Layout(num_rows=table.rows, groups=last).slots
      * (table.row + table.state_row)
      + 4 * 4 * sum(m.words for m in messages),
    )
  return found


def seconds(chosen: Sequence[tuple[str, Cost]], links: Links) -> float:
  """Returns the time of a step's exchanges and updates of these tables.

  Tables of one form share its collectives, but those that XLA makes.
  """
  total = sum(found.local_s for _, found in chosen)
  for form in FORMS:
    parts = [found for name, found in chosen if name == form]
    if form not in _JOINT:
      total += sum(link_models.wire_s(p.phases, links) for p in parts)
      continue
    joint: dict[tuple[int, str, str, int], float] = {}
    for part in parts:
      for k, (axis, op, n, more) in enumerate(part.phases):
        at = k, axis, op, n
        joint[at] = joint.get(at, 0.0) + more
    phases = [(*at[1:], size) for at, size in joint.items()]
    total += link_models.wire_s(phases, links)
  return total


def once_s(form: str, found: Cost, links: Links) -> float:
  """Returns the part of a table's time that others of its form share."""
  if form not in _JOINT:
    return 0.0
  return link_models.wire_s([(*p[:3], 0.0) for p in found.phases], links)


def assumed(gradient: Gradient, devices: int) -> Profile:
  """Returns densities of a table that was not measured, by its look-ups."""
  return cost.assumed(strategies.table_of(gradient, _ZEN), devices)


def owned_messages(
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
  words = sharded_tables.words_of_step(
    math.ceil(look_ups), most, layout, width, gradient.dtype
  )
  ids, found, pushed = map(float, words)
  to_owner = functools.partial(Message, "all_to_all", (last,))
  messages = [
    to_owner(ids),
    Message("all_reduce", context.axes, 1.0),  # Agrees on sizes.
    to_owner(found),
    to_owner(pushed),
  ]
  if others:
    messages.append(Message("all_gather", tuple(others), pushed))
  return messages


def row_sharded_messages(
  gradient: Gradient, look_ups: float, context: Context
) -> list[Message]:
  """Returns what a table sharded by rows moves in plain `jit`.

  On automatic axes, with a table `P("data", None)` and a batch `P("data")`, XLA
  gathers the ids of all devices. Each device looks up those rows that it holds,
  and a sum brings the rows of the whole batch to every device. In the backward
  pass the cotangents of the whole batch are gathered. Every look-up counts, one
  of a row that was looked up before as well.

  Args:
    gradient: The table's.
    look_ups: Look-ups of a device in a step.
    context: Axes and sizes.
  """
  row = gradient.shape[-1] * gradient.dtype.itemsize / 4
  return [
    Message("all_gather", context.axes, look_ups),
    Message("all_reduce", context.axes, context.devices * look_ups * row),
    Message("all_gather", context.axes, look_ups * row),
  ]


def cheapest(
  tables: Sequence[Mapping[str, Cost]],
  links: Links,
  limit: float,
  together: Sequence[frozenset[str]],
  margin: float,
) -> list[str] | None:
  """Returns the form of each table with the shortest step within a memory.

  Every set of forms that may be used together is tried, and one with more forms
  taken if it gains a tenth. In each a table takes the form that adds least;
  where these do not fit, memory is traded for time by dynamic programming over
  all tables, in steps of a part of the limit.

  Args:
    tables: Costs of each, by the forms that it can have.
    links: Link of each axis.
    limit: Bytes of memory that all tables may take; may be infinite.
    together: Sets of forms that one program can have.
    margin: A form must take less than this part of dense's time to be preferred
      to it: predictions err.

  Returns:
    Names of forms; None if nothing fits.
  """
  raised = lambda form: 1.0 if form == "dense" else 1 / margin
  best, best_s, most = None, math.inf, 0
  for forms in sorted(together, key=len):
    open_to = []
    for found in tables:
      own = {}
      for form in forms & found.keys():
        one = found[form]
        alone = seconds([(form, one)], links) - once_s(form, one, links)
        own[form] = max(alone, 0.0) * raised(form), one.memory
      open_to.append(own)
    if not all(open_to):
      continue
    names = within(open_to, limit)
    if names is None:
      continue
    chosen = [(name, found[name]) for name, found in zip(names, tables)]
    parts = [
      seconds([x for x in chosen if x[0] == form], links) * raised(form)
      for form in sorted(forms)
    ]
    least = _WORTH * best_s if len(forms) > most else best_s
    if sum(parts) < least:
      best, best_s, most = names, sum(parts), len(forms)
  return best


# A form more is an exchange more, and must leave less than this part of a step.
_WORTH = 0.9
# Parts of the memory limit that sums of memory are rounded up to.
_BUCKETS = 512


def within(
  tables: Sequence[Mapping[str, tuple[float, float]]], limit: float
) -> list[str] | None:
  """Returns names of the least time whose memory is within the limit."""
  fastest = [min(own, key=lambda name: own[name]) for own in tables]
  if sum(own[name][1] for own, name in zip(tables, fastest)) <= limit:
    return fastest
  leanest = [min(own, key=lambda name: own[name][::-1]) for own in tables]
  if sum(own[name][1] for own, name in zip(tables, leanest)) > limit:
    return None
  # From the least memory of all on, so that rounding never says that none fits.
  least = [own[name][1] for own, name in zip(tables, leanest)]
  step = (limit - sum(least)) / _BUCKETS
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
