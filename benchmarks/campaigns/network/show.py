"""The table of a run on the network."""

from collections.abc import Mapping
import math

from benchmarks import table
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.testbed import netns

BASELINE = "psum"

# The cells of a section, by variant.
Peers = Mapping[str, Cell]


def faster(cell: Cell, peers: Peers) -> float:
  """Returns the speed over that of the plain sum, NaN if that was not timed."""
  base = peers.get(BASELINE)
  return base.median_s / cell.median_s if base else math.nan


def best_peer(peers: Peers) -> str:
  """Compares the fastest form of Zen with the fastest of the others.

  Zen's rows are not among its forms here: the others give back whole tables.
  """
  zen, others = {}, {}
  for variant, cell in peers.items():
    scheme = VARIANTS[variant].options["scheme"]
    if not cell.host_times_s or VARIANTS[variant].rows:
      continue
    (zen if scheme == "zen" else others)[variant] = cell.median_s
  if not zen or not others:
    return ""
  ours, theirs = (min(times, key=times.__getitem__) for times in (zen, others))
  return f"{ours}: {others[theirs] / zen[ours]:.2f} x {theirs}"


def over_bound_time(cell: Cell) -> float:
  """Time over what the link needs for the volume bound; NaN without a limit."""
  bound_s = netns.least_s(cell.facts["bound_bytes"], cell.rate)
  return cell.median_s / bound_s if bound_s else math.nan


COLUMNS = (
  table.Column("wire\nMB", lambda c, _: c.wire_bytes / 1e6, ".3f"),
  table.Column("received\nMB", lambda c, _: c.received_bytes / 1e6, ".3f"),
  table.Column(
    "wire/\nbound", lambda c, _: c.wire_bytes / c.facts["bound_bytes"], ".2f"
  ),
  *(table.COMPILE, table.WRONG, table.TIME, table.SPREAD),
  table.Column(f"x faster\nthan {BASELINE}", faster, ".2f"),
  table.Column("time/\nbound", lambda c, _: over_bound_time(c), ".2f"),
)


def show(title: str, found: cells_lib.Findings) -> None:
  """Prints all cells."""
  groups = (
    (f"{workload}, {hosts} hosts, {rate}", {c.variant: c for c in cells})
    for (workload, hosts, rate), cells in found.sections().items()
  )
  first = "workload, hosts, rate\n  variant"
  table.show_groups(title, first, COLUMNS, groups, note=best_peer)
