"""`predict`: the formulas' record on what `network --json` has left."""

import argparse
from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from benchmarks import campaign
from benchmarks import library
from benchmarks import table as tables
from benchmarks import workloads
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.testbed import netns
import zenjax


def table_of(workload: workloads.Workload, unit: int | None) -> library.Table:
  """The workload's table, or the same in blocks of `unit` elements."""
  shape = workload.rows, workload.width
  if unit is not None:
    shape = -(-math.prod(shape) // unit), unit
  return library.table("table", *shape)


def profile_of(
  workload: workloads.Workload, n: int, unit: int | None, batches: int
) -> zenjax.planner.Profile:
  """Mean over the batches that were timed, of rows or of blocks."""
  num_rows = table_of(workload, unit).num_rows
  slots = library.partition.Layout(
    num_rows=num_rows, groups=n, contiguous=True
  ).slots
  found = []
  for seed in range(batches):
    ids = workloads.sets(workload, n, seed)
    if unit is not None:
      ids = [_blocks(i, workload.width, unit) for i in ids]
    union = workloads.union(ids)
    rows = float(np.mean([len(i) for i in ids]))
    fullest = max(map(len, ids))
    pushed = max(_fullest_range(i, slots, n) for i in ids) * n / fullest
    pulled = _fullest_range(union, slots, n) * n / len(union)
    found.append((rows, fullest, len(union), pushed, pulled))
  rows, fullest, union, pushed, pulled = np.mean(found, axis=0)
  return zenjax.planner.Profile(
    rows=rows, fullest=fullest, union=union, devices=n, skew=(pushed, pulled)
  )


def _blocks(ids: np.ndarray, width: int, unit: int) -> np.ndarray:
  """Blocks of the flat table in which these rows have elements."""
  first, last = ids * width // unit, ((ids + 1) * width - 1) // unit
  most = int((last - first).max(initial=0))
  spans = [np.minimum(first + k, last) for k in range(most + 1)]
  return np.unique(np.concatenate(spans))


def _fullest_range(ids: np.ndarray, slots: int, n: int) -> int:
  return int(np.bincount(ids // slots, minlength=n).max())


# Hosts to which the formula is carried on, beyond those that were run.
_BEYOND = (16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
  """A measured cell and what was predicted for it."""

  cell: Cell
  predicted: library.Prediction
  line_s: float  # that the link needs for its bytes

  @property
  def error(self) -> float:
    return self.predicted.seconds / self.cell.median_s - 1

  @property
  def by_cores(self) -> bool:
    """True if the link is busy for less than half of the time predicted.

    The rest are the hosts' shared cores: local work, and what Gloo and the
    kernel take to move the bytes.
    """
    return self.line_s < self.predicted.seconds / 2


def link_of(found: Findings, hosts: int, rate: str) -> zenjax.planner.Link:
  """The links of one testbed as the run itself measured them."""
  points: dict[str, list[tuple[float, float]]] = {}
  for point, told in found.calibration.items():
    if (point.hosts, point.rate) == (hosts, rate):
      seconds = float(np.median(told["times_s"]))
      points.setdefault(point.op, []).append((point.received_bytes, seconds))
  work = found.work.get(hosts)
  if not points or work is None:
    raise ValueError(
      f"FILE must hold a calibration of {hosts} hosts at {rate}, and has none:"
      " run `network` without --no-calibration."
    )
  # Older files have a price of a collective beside its curve as well. Two runs
  # on one machine found it ten times apart, and times fit no better with it.
  work = {name: s for name, s in work.items() if name != "collective"}
  return zenjax.planner.Link(
    bandwidth=_line_rate(rate),
    latency_s=min(y for curve in points.values() for _, y in curve) / hosts,
    curves={(op, hosts): tuple(sorted(c)) for op, c in points.items()},
    work=zenjax.planner.Work(**work),
  )


def predicted(
  name: str,
  workload: workloads.Workload,
  hosts: int,
  batches: int,
  on: zenjax.planner.Link,
) -> library.Prediction | None:
  """Predicts a variant whose sizes fit; returns None for the others."""
  variant = VARIANTS[name]
  scheme = variant.options["scheme"]
  sparse = library.SPARSE.get(scheme)
  if sparse and not variant.pinned or variant.rows_out:
    return None
  unit = sparse and sparse.unit
  table = table_of(workload, unit)
  profile = profile_of(workload, hosts, unit, batches)
  groups = 1
  if scheme == "zen":
    partition = variant.options.get("partition", "auto")
    groups = library.buffer_sizes.choose_column_groups(table, hosts, partition)
  return library.predict(scheme, table, profile, hosts, on, groups)


def judged_cells(found: Findings) -> list[Judged]:
  """Every cell of a run for which there is a prediction."""
  judged = []
  for (name, hosts, rate), members in sorted(found.sections().items()):
    on, workload = link_of(found, hosts, rate), workloads.get(name)
    for variant, cell in timed(members).items():
      # Past break-even every scheme takes the dense path.
      dense = cell.wire_bytes >= cell.facts["dense_bytes"] and variant != "ring"
      taken = "psum" if dense else variant
      if p := predicted(taken, workload, hosts, cell.batches, on):
        judged.append(Judged(cell, p, p.received / on.bandwidth))
  return judged


def _line_rate(rate: str) -> float:
  limit = netns.RATES[rate]
  return limit.bytes_per_s if limit else 1e10


def timed(members: Sequence[Cell]) -> dict[str, Cell]:
  """Returns by variant the cells that are right and were timed."""
  return {c.variant: c for c in members if c.host_times_s and not c.wrong}


# How near to the best measured time is good enough, and to `psum`.
NEAR, NO_SLOWER = 1.10, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
  """The choice of `scheme="auto"` in one section, and how it did."""

  section: tuple[str, int, str]  # Workload, hosts, rate.
  chosen: str  # The variant that it takes.
  best: str  # Luck decides which of equals: `over_best` errs to a miss.
  over_best: campaign.Ratio  # Its measured time over the fastest one's.
  over_psum: campaign.Ratio  # The same over `psum`'s.

  @property
  def good(self) -> bool:
    return self.over_best.median <= NEAR

  @property
  def harmful(self) -> bool:
    return self.over_psum.median > NO_SLOWER


def all_picks(found: Findings) -> list[Pick]:
  """One for every section in which all that `auto` may take was timed."""
  picks = []
  for section, members in sorted(found.sections().items()):
    hosts, cells = section[1], timed(members)
    variants = {
      ("dense", 1): "psum",
      ("all_gather", 1): "all_gather-pinned",
      ("recursive_doubling", 1): "recursive_doubling-pinned",
      ("zen", 1): "zen-hash-pinned",
      ("zen", hosts): "zen-columns-pinned",
    }
    if set(variants.values()) <= set(cells):
      chosen = _choice(found, cells["psum"], variants)
      best = min(variants.values(), key=lambda v: cells[v].median_s)
      times = cells[chosen].times_s
      over = (campaign.ratio(times, cells[v].times_s) for v in (best, "psum"))
      picks.append(Pick(section, chosen, best, *over))
  return picks


def _choice(
  found: Findings, psum: Cell, variants: dict[tuple[str, int], str]
) -> str:
  """Returns the variant that stands for what `auto` takes beside `psum`."""
  workload, hosts = workloads.get(psum.workload), psum.hosts
  tuning = zenjax.Tuning(
    link=link_of(found, hosts, psum.rate),
    profile={"table": profile_of(workload, hosts, None, psum.batches)},
  )
  options = library.sync_options.check(
    "data", sparse=True, scheme="auto", tuning=tuning
  )
  (choice,) = library.leaf_tables.choose(
    [table_of(workload, None)], options, library.context(hosts)
  )
  if choice.scheme != "zen":
    return variants[choice.scheme, 1]
  # A grid between hash and columns counts as the nearer end.
  groups = choice.column_groups or 1
  return variants["zen", 1 if groups * groups < hosts else hosts]


def run(options: argparse.Namespace) -> int:
  """Prints all tables; ValueError if `network --json` wrote no such file."""
  try:
    found = Findings.read(options.file)
    judged, picks = judged_cells(found), all_picks(found)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"FILE must be what `network --json` wrote, with its calibration, got"
      f" {options.file} ({type(error).__name__}: {error}). Run `network` again."
    ) from error
  _show_cells(judged)
  _show_picks(picks)
  first = next(iter(found.cells.values()))
  for name in dict.fromkeys(one.cell.workload for one in judged):
    _show_beyond(workloads.get(name), first.rate, first.batches)
  return 0


def _show_cells(judged: Sequence[Judged]) -> None:
  rows = [
    (
      f"{one.cell.workload}, {one.cell.hosts}, {one.cell.rate}",
      one.cell.variant,
      f"{one.predicted.seconds * 1e3:.1f}",
      f"{one.cell.median_s * 1e3:.1f}",
      f"{one.error * 100:+.0f}",
      "cores" if one.by_cores else "link",
    )
    for one in judged
  ]
  headers = "workload, hosts, rate", "variant", "predicted ms", "measured ms"
  title, more = "Predicted beside measured", ("error %", "limited by")
  tables.show_rows(title, (*headers, *more), rows)
  linked = [abs(one.error) for one in judged if not one.by_cores]
  if linked:
    middle, most = np.percentile(linked, [50, 90]) * 100
    print(
      f"{len(linked)} of {len(judged)} cells are limited by the link: error"
      f" {middle:.0f} % at the median, {most:.0f} % at the 90th percentile."
    )


def _show_picks(picks: Sequence[Pick]) -> None:
  table = tables.made(
    'What scheme="auto" takes; in brackets 95 % intervals over paired rounds',
    *("workload, hosts, rate", "taken", "best measured", "over best"),
    "over psum",
  )
  for pick in picks:
    style = "red" if pick.harmful else None if pick.good else "yellow"
    words = "{}, {}, {}".format(*pick.section), pick.chosen, pick.best
    over = _ratio_text(pick.over_best, 2), _ratio_text(pick.over_psum, 3)
    table.add_row(*words, *over, style=style)
  tables.console().print(table)
  if not picks:
    return
  near, slower = NEAR, NO_SLOWER
  best, psum = [p.over_best for p in picks], [p.over_psum for p in picks]
  print(
    f"By medians the best or within 10 % of it in {sum(p.good for p in picks)}"
    f" of {len(picks)} sections; slower than psum by more than 5 % in"
    f" {sum(p.harmful for p in picks)}.\n"
    "By intervals the best measured or surely within 10 % of it in"
    f" {sum(r.surely_within(near) for r in best)}, surely not in"
    f" {sum(r.surely_above(near) for r in best)}; surely no slower than psum"
    f" by more than 5 % in {sum(r.surely_within(slower) for r in psum)},"
    f" surely slower in {sum(r.surely_above(slower) for r in psum)}."
  )


def _ratio_text(ratio: campaign.Ratio, digits: int) -> str:
  text = f"{ratio.median:.{digits}f}"
  if ratio.interval is None or ratio.interval.low == ratio.interval.high:
    return text  # Too few rounds, or a variant over itself.
  low, high = (f"{x:.{digits}f}" for x in ratio.interval)
  return f"{text} ({low}-{high})"


def _show_beyond(workload: workloads.Workload, rate: str, batches: int) -> None:
  """Predicts more hosts than were run, by formula alone.

  The union grows by the power law through what 8 hosts touch, links are at line
  rate, local work is left out.
  """
  profile = profile_of(workload, 8, None, batches)
  on = zenjax.planner.Link(bandwidth=_line_rate(rate), latency_s=20e-6)
  rows = []
  for hosts in _BEYOND:
    schemes = {}  # The fastest first.
    for p in library.choices(table_of(workload, None), profile, hosts, on):
      schemes.setdefault(p.scheme, p)
    dense = schemes.pop("dense").seconds
    best, second = list(schemes.values())[:2]
    name, ratio = f"{best.scheme}/{best.column_groups}", dense / best.seconds
    ms = [f"{p.seconds * 1e3:.1f}" for p in (best, second)]
    rows.append([str(hosts), name, ms[0], second.scheme, ms[1], f"{ratio:.1f}"])
  tables.show_rows(
    f"{workload.name} at {rate}: by formula alone, line rate, no local work",
    ("hosts", "fastest", "ms", "next", "ms", "times faster than psum"),
    rows,
  )
