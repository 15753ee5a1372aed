"""What a synchronization would take on links that are not here: predictions.

Time on the link by zenjax's own formulas (`_cost`, as `scheme="auto"` takes
them) from a nominal rate and an assumed latency, plus local work as measured.
Nothing is assumed to overlap, and nothing of it was measured on a link.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import jax.numpy as jnp
import rich.box
import rich.table

from benchmarks import local_sync
from benchmarks import table as tables
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table

# Nominal: NVLink 4 has 18 links of 25 GB/s each way. Latencies are assumed.
LINKS = {
  "NVLink 4, 450 GB/s": Link(bandwidth=450e9, latency_s=3e-6),
  "400 Gbit/s": Link(bandwidth=50e9, latency_s=10e-6),
  "100 Gbit/s": Link(bandwidth=12.5e9, latency_s=10e-6),
}
DENSE = "dense (psum)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
  """One way to synchronize, and a device's own part in it, in seconds."""

  name: str
  column_groups: int
  local_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
  """Of one way on one link, in seconds."""

  link: str
  bandwidth: float
  latency_s: float
  way: str
  wire_s: float
  local_s: float
  received_bytes: float

  @property
  def seconds(self) -> float:
    return self.wire_s + self.local_s


def predictions(
  rows: int, width: int, profile: Profile, ways: Sequence[Way]
) -> list[Predicted]:
  """Every way and the dense exchange on every link.

  The local work of the dense one, a sum in memory, counts as nothing.
  """
  dtype = jnp.dtype(jnp.float32)
  table = Table(
    name=local_sync.LEAF,
    num_rows=rows,
    width=width,
    dtype=dtype,
    wire_dtype=dtype,
  )
  context = Context(
    axes=(local_sync.AXIS,), sizes=(local_sync.DEVICES,), mean=False
  )
  found = []
  for name, link in LINKS.items():
    dense = cost.predict("dense", table, profile, context, link)
    found.append(_predicted(name, link, DENSE, dense, 0.0))
    for way in ways:
      zen = cost.predict(
        "zen", table, profile, context, link, way.column_groups
      )
      found.append(_predicted(name, link, way.name, zen, way.local_s))
  return found


def _predicted(name, link, way, prediction, local_s):
  return Predicted(
    link=name,
    bandwidth=link.bandwidth,
    latency_s=link.latency_s,
    way=way,
    wire_s=prediction.wire_s,
    local_s=local_s,
    received_bytes=prediction.received,
  )


def over_dense(found: Sequence[Predicted]) -> Mapping[tuple[str, str], float]:
  """How many times as fast as the dense exchange, by link and way."""
  dense = {p.link: p.seconds for p in found if p.way == DENSE}
  return {(p.link, p.way): dense[p.link] / p.seconds for p in found}


def show(found: Sequence[Predicted]) -> None:
  """Prints them; a dash where local work was not measured."""
  shown = rich.table.Table(
    title=(
      f"Predicted, not measured: {local_sync.DEVICES} devices on links of"
      " nominal rate and assumed latency"
    ),
    box=rich.box.SIMPLE_HEAD,
    title_justify="left",
    padding=(0, 1),
  )
  shown.add_column("link\n  variant", no_wrap=True)
  headers = (
    "receives\nMB",
    "link\nms",
    "local\nms",
    "both\nms",
    "times as fast\nas dense",
  )
  for header in headers:
    shown.add_column(header, justify="right", no_wrap=True)
  faster = over_dense(found)
  for name, link in LINKS.items():
    latency = f"{link.latency_s * 1e6:.0f} us a message assumed"
    shown.add_row(f"[bold]{name}[/bold], {latency}")
    for p in found:
      if p.link == name:
        ms = [_ms(s) for s in (p.wire_s, p.local_s, p.seconds)]
        times = faster[name, p.way]
        gain = f"{times:.1f}" if math.isfinite(times) else "-"
        received = f"{p.received_bytes / 1e6:.1f}"
        shown.add_row(f"  {p.way}", received, *ms, gain)
    shown.add_section()
  tables.console().print(shown)


def _ms(seconds):
  return f"{seconds * 1e3:.3f}" if math.isfinite(seconds) else "-"
