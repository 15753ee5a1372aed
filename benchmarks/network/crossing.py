"""At which density a sparse scheme no longer pays, from the sweep."""

from collections.abc import Iterator, Sequence
import math

from benchmarks import workloads
from benchmarks.network.cells import Cell
from benchmarks.network.cells import Findings
from benchmarks.network.show import BASELINE
from benchmarks.network.variants import VARIANTS

_DENSE = ("dense", "ring")


def percent(cell: Cell) -> float:
  """Of its table's rows, those that one host touches."""
  return 100 * cell.facts["density"]


def crossovers(cells: Sequence[Cell]) -> list[tuple[str, float, float]]:
  """Where the time of a sparse variant meets that of the plain sum.

  Args:
    cells: Timed ones of the sweep, of the same hosts and rate.

  Returns:
    (variant, per cent of rows, ms), on straight lines between measured points
    of logarithmic axes, of each variant the first where it becomes slower.
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


def lines(found: Findings) -> Iterator[str]:
  """Says all crossovers, a line for each number of hosts and rate."""
  panels: dict[tuple[int, str], list[Cell]] = {}
  for cell in found.cells.values():
    if cell.workload in workloads.SWEEP and cell.host_times_s:
      panels.setdefault((cell.hosts, cell.rate), []).append(cell)
  for (hosts, rate), cells in panels.items():
    if said := [f"{v} {x:.3g} %" for v, x, _ in crossovers(cells)]:
      yield (
        f"As slow as {BASELINE} with {hosts} hosts at {rate} from this share of"
        f" rows on: {', '.join(said)}."
      )
