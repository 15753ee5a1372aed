"""Advice on a table: replicate it and send rows, or shard it?

AutoDDL's question, answered by bytes. A sharded table sends ids and gets rows
in the forward pass, and sends their gradients in the backward pass: twice a
device's rows. A replicated one receives a device's rows once and the union of
all devices once (zen), or itself about twice (dense). A union is never smaller
than what one device holds, so sharding that asks for distinct rows never
receives more than zen, padding and latency apart: for the Zen paper's LSTM a
seventh at 64 devices. Where every look-up is asked for, text that repeats its
words makes it dearer. What else speaks for replicas: no change to the model,
tied or swept tables, and no exchange that the forward pass waits for.
"""

import dataclasses

from benchmarks import library
import zenjax

# Sharding changes a model: it must save more of the time than this.
_WORTH = 0.1
# Arrays of a table's size beside it in the optimizer's state: Adam's.
_STATE = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
  """One way to keep a table, of a device and step."""

  name: str  # "replicate, dense", "replicate, zen" or "shard".
  received: float  # Bytes.
  seconds: float  # On the link and to find and pack rows; nothing overlaps.
  memory_bytes: float  # Of table and optimizer state.


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
  """Advice on one table."""

  table: str
  choice: Way
  ways: tuple[Way, ...]  # The fastest first.
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
  table: library.Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
  *,
  look_ups: float | None = None,
) -> Advice:
  """Returns advice for a table: a shard where it saves more than a tenth.

  `look_ups` are of a device and step, where sharding would ask for each of
  them; None where it asks for distinct rows. Of two devices at least.
  """
  whole = table.num_rows * table.width * table.dtype.itemsize * (1 + _STATE)
  found = library.choices(table, profile, devices, link)
  ways = []
  for scheme in ("dense", "zen"):
    best = next(p for p in found if p.scheme == scheme)
    name = f"replicate, {scheme}"
    ways.append(Way(name, best.received, best.seconds, whole))
  replica = min(ways, key=lambda way: way.seconds)
  # Ids there, rows back, their gradients there: three exchanges. Owners by a
  # hash, as zen's; buffers as large as the fullest pair.
  asked = profile.fullest if look_ups is None else look_ups
  pair = library.buffer_sizes.fullest(asked, devices, devices * devices)
  row = table.width * table.wire_dtype.itemsize
  messages = [(devices - 1) * pair * size for size in (4, row, row)]
  seconds = sum(link.seconds("all_to_all", devices, m) for m in messages)
  shard = Way("shard", sum(messages), seconds, whole / devices)
  saved = 1 - shard.seconds / replica.seconds
  if saved > _WORTH:
    reason = f"it takes {saved:.0%} less time than replicas"
  elif saved > 0:
    reason = f"a shard would save no more than {saved:.0%} of its time"
  else:
    reason = f"a shard would take {-saved:.0%} more time"
  choice = shard if saved > _WORTH else replica
  ways = tuple(sorted([*ways, shard], key=lambda way: way.seconds))
  return Advice(table.name, choice, ways, reason)
