"""For each table: replicate it and send rows, or shard it and send activations?

AutoDDL's question, answered by bytes and memory. A sharded table sends ids and
gets rows in the forward pass, and sends their gradients in the backward pass:
twice a device's rows. A replicated one receives a device's rows once and the
union of all devices once (zen), or itself about twice (dense). A union is never
smaller than what one device holds, so sharding that asks for distinct rows
never receives more than zen, padding and latency apart: for the Zen paper's
LSTM a seventh at 64 devices. Where every look-up is asked for, text that
repeats its words makes it dearer. What else speaks for
replicas: no change to the model, tied or swept tables, and no exchange that the
forward pass waits for.
"""

from collections.abc import Sequence
import dataclasses

from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table

# Sharding changes a model: it must save more of the time than this.
_WORTH = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
  """A table and how steps use it.

  Attributes:
    table: As it is synchronized.
    profile: Its nonzero rows.
    look_ups: Of a device and step, where sharding would ask for each of them;
      None where it asks for distinct rows.
  """

  table: Table
  profile: Profile
  look_ups: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
  """One way to keep a table.

  Attributes:
    name: "replicate, dense", "replicate, zen" or "shard".
    received: Bytes of a device and step.
    seconds: On the link and to find and pack rows; nothing overlaps.
    memory_bytes: Of a device: table and optimizer state.
  """

  name: str
  received: float
  seconds: float
  memory_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
  """What to do with one table.

  Attributes:
    table: Its name.
    choice: One of `ways`.
    ways: All of them, the fastest first.
    reason: Why, in words.
  """

  table: str
  choice: Way
  ways: tuple[Way, ...]
  reason: str

  def __str__(self) -> str:
    lines = [f"{self.table}: {self.choice.name}, for {self.reason}"]
    for way in self.ways:
      lines.append(
        f"  {way.name:<16} {way.received / 1e6:9.3f} MB received"
        f" {way.seconds * 1e3:9.3f} ms {way.memory_bytes / 1e9:9.3f} GB held"
      )
    return "\n".join(lines)


def replicate_or_shard(
  uses: Sequence[Use],
  devices: int,
  link: Link,
  *,
  state_copies: float = 2.0,
  memory_bytes: float | None = None,
) -> list[Advice]:
  """Advice for each table of a model.

  A table is sharded where that saves more than a tenth of the time, and where
  not all tables fit: those first that cost the least time a byte.

  Args:
    uses: The tables.
    devices: That hold replicas, or shards.
    link: Between them.
    state_copies: Arrays of a table's size in the optimizer's state: 2 for Adam.
    memory_bytes: That tables and their state may take on a device; by default
      there is no limit.

  Raises:
    ValueError: They fit in no way.

  Example:
    >>> import jax.numpy as jnp
    >>> f32 = jnp.dtype("float32")
    >>> table = Table(name="embed", num_rows=10**6, width=64, dtype=f32,
    ...   wire_dtype=f32)
    >>> seen = Profile(rows=1000, fullest=1000, union=5000, devices=8)
    >>> use = Use(table=table, profile=seen)
    >>> link = Link(bandwidth=12.5e9, latency_s=1e-5)
    >>> print(replicate_or_shard([use], 8, link)[0].choice.name)
    replicate, zen
    >>> use = dataclasses.replace(use, look_ups=1000)
    >>> small = replicate_or_shard([use], 8, link, memory_bytes=2e8)[0]
    >>> small.choice.name, small.reason
    ('shard', 'replicas of all tables exceed 0.200 GB')
  """
  if not isinstance(devices, int) or devices < 2:
    raise ValueError(
      f"`devices` must be at least 2, got {devices!r}: one device has all rows."
    )
  every = [_ways(use, devices, link, state_copies) for use in uses]
  advice = [_by_time(use, ways) for use, ways in zip(uses, every)]
  if memory_bytes is None:
    return advice
  return _within(advice, memory_bytes)


def _ways(use, devices, link, copies) -> tuple[Way, ...]:
  table = use.table
  context = Context(axes=("data",), sizes=(devices,), mean=True)
  whole = table.num_rows * table.width * table.dtype.itemsize * (1 + copies)
  found = cost.choices(table, use.profile, context, link)
  ways = [
    Way(
      name=f"replicate, {scheme}",
      received=best.received,
      seconds=best.seconds,
      memory_bytes=whole,
    )
    for scheme in ("dense", "zen")
    for best in [next(p for p in found if p.scheme == scheme)]
  ]
  ways.append(_shard(use, devices, link, whole))
  return tuple(sorted(ways, key=lambda way: way.seconds))


def _shard(use, devices, link, whole) -> Way:
  """Ids there, rows back, their gradients there: three exchanges."""
  table = use.table
  asked = use.profile.fullest if use.look_ups is None else use.look_ups
  # Owners by a hash, as zen's; buffers as large as the fullest pair.
  pair = buffer_sizes.fullest(asked, devices, devices * devices)
  row = table.width * table.wire_dtype.itemsize
  messages = [(devices - 1) * pair * size for size in (4, row, row)]
  return Way(
    name="shard",
    received=sum(messages),
    seconds=sum(link.seconds("all_to_all", devices, m) for m in messages),
    memory_bytes=whole / devices,
  )


def _named(advice: Advice, name: str) -> Way:
  return next(way for way in advice.ways if way.name == name)


def _by_time(use: Use, ways: tuple[Way, ...]) -> Advice:
  replica = next(way for way in ways if way.name != "shard")
  shard = next(way for way in ways if way.name == "shard")
  saved = 1 - shard.seconds / replica.seconds
  choice = shard if saved > _WORTH else replica
  if choice is shard:
    reason = f"it takes {saved:.0%} less time than replicas"
  elif saved > 0:
    reason = f"a shard would save no more than {saved:.0%} of its time"
  else:
    reason = f"a shard would take {-saved:.0%} more time"
  return Advice(table=use.table.name, choice=choice, ways=ways, reason=reason)


def _within(advice: list[Advice], limit: float) -> list[Advice]:
  """Shards tables until they fit."""
  least = sum(_named(a, "shard").memory_bytes for a in advice)
  if least > limit:
    raise ValueError(
      f"`memory_bytes` must be at least {least:,.0f}, what shards of all tables"
      f" and their state take, got {limit:,.0f}: take more devices, narrower"
      " tables or an optimizer with less state."
    )

  def price(index: int) -> float:
    shard, choice = _named(advice[index], "shard"), advice[index].choice
    saved = choice.memory_bytes - shard.memory_bytes
    return (shard.seconds - choice.seconds) / saved

  found = list(advice)
  replicas = [i for i, a in enumerate(advice) if a.choice.name != "shard"]
  for index in sorted(replicas, key=price):
    if sum(a.choice.memory_bytes for a in found) <= limit:
      break
    found[index] = dataclasses.replace(
      found[index],
      choice=_named(found[index], "shard"),
      reason=f"replicas of all tables exceed {limit / 1e9:.3f} GB",
    )
  return found
