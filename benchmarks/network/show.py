"""The table of a run on the network, one section a (workload, hosts, rate)."""

from collections.abc import Callable, Mapping
import dataclasses
import math

import rich.box
import rich.table

from benchmarks import netns
from benchmarks import table
from benchmarks.network.cells import Cell
from benchmarks.network.cells import Findings
from benchmarks.network.variants import VARIANTS

BASELINE = "psum"

# The cells of a section, by variant.
Peers = Mapping[str, Cell]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
  """A column; the README defines each. NaN prints as a dash."""

  header: str
  value: Callable[[Cell, Peers], float]
  format: str = ".2f"


def faster(cell: Cell, peers: Peers) -> float:
  """How many times as fast as the plain sum; NaN if that was not timed."""
  base = peers.get(BASELINE)
  return base.median_s / cell.median_s if base else math.nan


def best_peer(peers: Peers) -> str:
  """How the fastest form of Zen compares with the fastest of the others.

  Zen's rows are not among its forms here: the others give back whole tables.
  """
  zen, others = {}, {}
  for variant, cell in peers.items():
    scheme = VARIANTS[variant].options["scheme"]
    if not cell.host_times_s or VARIANTS[variant].rows_out or scheme == "auto":
      continue
    (zen if scheme == "zen" else others)[variant] = cell.median_s
  if not zen or not others:
    return ""
  ours, theirs = (min(times, key=times.__getitem__) for times in (zen, others))
  return f"{ours}: {others[theirs] / zen[ours]:.2f} x {theirs}"


def over_bound(cell: Cell) -> float:
  """Declared bytes over the volume bound."""
  return cell.wire_bytes / cell.facts["bound_bytes"]


def over_bound_time(cell: Cell) -> float:
  """Time over what the link needs for the volume bound; NaN without a limit."""
  limit = netns.RATES[cell.rate]
  if limit is None:
    return math.nan
  return cell.median_s * limit.bytes_per_s / cell.facts["bound_bytes"]


COLUMNS = (
  Column("wire\nMB", lambda c, _: c.wire_bytes / 1e6, ".3f"),
  Column("received\nMB", lambda c, _: c.received_bytes / 1e6, ".3f"),
  Column("wire/\nbound", lambda c, _: over_bound(c)),
  Column("compile\ns", lambda c, _: c.compile_s),
  Column("wrong\nelements", lambda c, _: c.wrong, ".0f"),
  Column("time\nms", lambda c, _: c.median_s * 1e3, ".1f"),
  Column("±\nms", lambda c, _: c.spread_s * 1e3, ".1f"),
  Column(f"x faster\nthan {BASELINE}", faster),
  Column("time/\nbound", lambda c, _: over_bound_time(c)),
)


def show(title: str, found: Findings) -> None:
  """Prints all cells."""
  lines = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
  )
  lines.add_column("workload, hosts, rate\n  variant", no_wrap=True)
  for column in COLUMNS:
    lines.add_column(column.header, justify="right", no_wrap=True)
  for (workload, hosts, rate), cells in found.sections():
    peers = {cell.variant: cell for cell in cells}
    lines.add_row(f"[bold]{workload}, {hosts} hosts, {rate}[/bold]")
    for cell in cells:
      values = [_text(column, cell, peers) for column in COLUMNS]
      style = "bold red" if cell.wrong else None
      lines.add_row(f"  {cell.variant}", *values, style=style)
    if said := best_peer(peers):
      lines.add_row(f"  [italic]{said}[/italic]")
    lines.add_section()
  table.console().print(lines)


def _text(column, cell, peers):
  value = column.value(cell, peers)
  return format(value, column.format) if math.isfinite(value) else "-"
