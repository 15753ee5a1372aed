"""Zen beside each peer in one run, and in the paper that it comes from."""

from collections.abc import Iterator
import math

from benchmarks.network.cells import Cell
from benchmarks.network.cells import Findings

# Variants of zen that give back a whole table, as the peers do.
_ZEN = ("zen", "zen-hash", "zen-columns")
# What stands for a system, and how much faster than it Zen's communication was
# at most in "Zen: Near-Optimal Sparse Tensor Synchronization" (OSDI 2025).
PEERS: dict[str, tuple[tuple[str, ...], float | None]] = {
  "all-reduce": (("psum", "ring"), 6.77),
  "AGsparse": (("all_gather",), None),
  "SparCML": (
    ("recursive_doubling", "split_all_gather", "split_dense_gather"),
    2.82,
  ),
  "OmniReduce": (("block_sparse",), 5.16),
}


def largest(
  found: Findings, peer: str
) -> tuple[float, tuple[str, int, str]] | None:
  """Where zen leads a peer most: its best form's time in the peer's best.

  Returns:
    (ratio, (workload, hosts, rate)), or None if no section has both.
  """
  ratios = []
  for section, cells in found.sections():
    zen = _fastest(cells, _ZEN)
    other = _fastest(cells, PEERS[peer][0])
    if math.isfinite(zen) and math.isfinite(other):
      ratios.append((other / zen, section))
  return max(ratios) if ratios else None


def lines(found: Findings) -> Iterator[str]:
  """Says all of them, and the lead over the best peer."""
  leads = []
  for section, cells in found.sections():
    zen = _fastest(cells, _ZEN)
    best = min(_fastest(cells, names) for names, _ in PEERS.values())
    if math.isfinite(zen) and math.isfinite(best):
      leads.append((best / zen, section))
  if leads:
    yield f"Zen over the best peer, at most: {_said(*max(leads))}."
  for peer, (_, paper) in PEERS.items():
    if lead := largest(found, peer):
      beside = f"; {paper}x in the Zen paper" if paper else ""
      yield f"Zen over {peer}, at most: {_said(*lead)}{beside}."


def _fastest(cells: list[Cell], names: tuple[str, ...]) -> float:
  """Seconds of the fastest form of these, pinned or not."""
  times = [
    cell.median_s
    for cell in cells
    if cell.variant.removesuffix("-pinned") in names and cell.host_times_s
  ]
  return min(times, default=math.inf)


def _said(ratio: float, section: tuple[str, int, str]) -> str:
  workload, hosts, rate = section
  return f"{ratio:.2f}x ({workload}, {hosts} hosts, {rate})"
