"""The table of a run on the network, and what follows from it in words."""

from collections.abc import Iterator, Mapping, Sequence
import math

from benchmarks import table
from benchmarks import workloads
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
    if not cell.host_times_s or VARIANTS[variant].rows_out or scheme == "auto":
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
  """Prints all cells, and what follows from them in words."""
  groups = (
    (f"{workload}, {hosts} hosts, {rate}", {c.variant: c for c in cells})
    for (workload, hosts, rate), cells in found.sections().items()
  )
  first = "workload, hosts, rate\n  variant"
  table.show_groups(title, first, COLUMNS, groups, note=best_peer)
  for line in (*paper_lines(found), *crossing_lines(found)):
    print(line)


# Variants of zen that give back a whole table, as the peers do.
_ZEN = ("zen", "zen-hash", "zen-columns")
# What stands for a system, and how much faster than it Zen's communication was
# at most in "Zen: Near-Optimal Sparse Tensor Synchronization" (OSDI 2025).
_SPLIT = ("split_all_gather", "split_dense_gather")
PEERS: dict[str, tuple[tuple[str, ...], float | None]] = {
  "all-reduce": (("psum", "ring"), 6.77),
  "AGsparse": (("all_gather",), None),
  "SparCML": (("recursive_doubling", *_SPLIT), 2.82),
  "OmniReduce": (("block_sparse",), 5.16),
}


def paper_lines(found: cells_lib.Findings) -> Iterator[str]:
  """Says where zen leads the best peer most, and each: best forms of both."""
  every = tuple(name for names, _ in PEERS.values() for name in names)
  for peer, (names, paper) in {"the best peer": (every, None), **PEERS}.items():
    leads = []
    for section, cells in found.sections().items():
      theirs, ours = (_seconds(cells, forms) for forms in (names, _ZEN))
      if theirs and ours:
        leads.append((min(theirs) / min(ours), section))
    if leads:
      ratio, (workload, hosts, rate) = max(leads)
      beside = f"; {paper}x in the Zen paper" if paper else ""
      yield (
        f"Zen over {peer}, at most: {ratio:.2f}x ({workload}, {hosts} hosts,"
        f" {rate}){beside}."
      )


def _seconds(cells: list[Cell], names: tuple[str, ...]) -> list[float]:
  """Returns those of all forms of these, pinned or not."""
  return [
    cell.median_s
    for cell in cells
    if cell.variant.removesuffix("-pinned") in names and cell.host_times_s
  ]


_DENSE = ("dense", "ring")


def percent(cell: Cell) -> float:
  """Returns the share of its table's rows that one host touches."""
  return 100 * cell.facts["density"]


def crossovers(cells: Sequence[Cell]) -> list[tuple[str, float, float]]:
  """Returns where the time of a sparse variant meets that of the plain sum.

  Of timed cells of the sweep, of the same hosts and rate: (variant, per cent of
  rows, ms), on straight lines between measured points of logarithmic axes, of
  each variant the first where it becomes slower.
  """
  base = {percent(c): c.median_s for c in cells if c.variant == BASELINE}
  found = []
  for variant in dict.fromkeys(c.variant for c in cells):
    if VARIANTS[variant].options["scheme"] in _DENSE:
      continue
    # The logarithm of how many times slower than the plain sum, by density.
    slower = sorted(
      (percent(c), math.log(c.median_s / base[percent(c)]))
      for c in cells
      if c.variant == variant and percent(c) in base
    )
    for (x0, y0), (x1, y1) in zip(slower, slower[1:]):
      if y0 < 0 <= y1:
        part = -y0 / (y1 - y0)
        between = lambda a, b, part=part: a * (b / a) ** part
        ms = 1e3 * between(base[x0], base[x1])
        found.append((variant, between(x0, x1), ms))
        break
  return found


def crossing_lines(found: cells_lib.Findings) -> Iterator[str]:
  """Says all crossovers, a line for each number of hosts and rate."""
  timed = (c for c in found.cells.values() if c.host_times_s)
  sweep = (c for c in timed if c.workload in workloads.SWEEP)
  panels = cells_lib.grouped(sweep, lambda c: (c.hosts, c.rate))
  for (hosts, rate), cells in panels.items():
    if said := [f"{v} {x:.3g} %" for v, x, _ in crossovers(cells)]:
      yield (
        f"As slow as {BASELINE} with {hosts} hosts at {rate} from this share of"
        f" rows on: {', '.join(said)}."
      )
