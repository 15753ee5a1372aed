"""`sparsity`: which rows steps touch, and what that means for an exchange."""

import argparse
import dataclasses

import tqdm

from benchmarks import record
from benchmarks import table
from benchmarks.cases import row_sets
from benchmarks.cases.row_sets import Balance
from benchmarks.cases.row_sets import Distribution
from benchmarks.cases.row_sets import PERCENTILES
from benchmarks.cases.row_sets import Sparsity


def show(sparsity: Sparsity) -> None:
  """Prints all that was counted of one table."""
  console = table.console()
  console.print(
    f"[bold]{sparsity.name}[/bold]  {sparsity.rows:,} x {sparsity.width}"
    f" {sparsity.dtype}, {sparsity.steps} steps of {sparsity.devices} devices"
  )
  for part in (_shares, _skew, _scales, _balance):
    console.print(part(sparsity))
  for note in _notes(sparsity):
    console.print(note)


def _shares(sparsity):
  headers = "n", "mean", *(f"p{p}" for p in PERCENTILES)
  made = table.made("share of rows, %", "", *headers)
  made.add_row("density of a device", *_distribution(sparsity.density, 3))
  for name, overlap in (
    ("overlap, devices of a step", sparsity.overlap_devices),
    ("overlap, consecutive steps", sparsity.overlap_steps),
  ):
    cells = _distribution(overlap, 1) if overlap else ["-"] * len(headers)
    made.add_row(name, *cells)
  return made


def _distribution(d: Distribution, digits: int) -> list[str]:
  shares = d.mean, *d.percentiles.values()
  return [str(d.count), *(f"{100 * share:.{digits}f}" for share in shares)]


def _skew(sparsity):
  made = table.made("skew", "parts", *(str(s.parts) for s in sparsity.skew))
  made.add_row("densest part / d", *(f"{s.ratio:.2f}" for s in sparsity.skew))
  made.add_row(
    "nonzero rows in the first, %",
    *(f"{100 * s.first:.1f}" for s in sparsity.skew),
  )
  return made


def _scales(sparsity):
  made = table.made(
    "densification", "devices", "steps", "d %", "dn %", "dn / d", "2 / (d + dn)"
  )
  for scale in sparsity.scales:
    both = scale.density + scale.union_density
    made.add_row(
      f"{scale.devices}{' pooled' if scale.pooled else ''}",
      str(scale.steps),
      f"{100 * scale.density:.3f}",
      f"{100 * scale.union_density:.2f}",
      f"{scale.densification:.2f}",
      table.number(2 / both if both else None, ".1f"),
    )
  return made


def _balance(sparsity):
  made = table.made(
    "balance",
    *("devices\n  partition", "imbalance\npush", "\npull", "\npaid"),
    *("capacity\npush", "\npull", "wire\nMB", "over\nideal"),
  )
  for scale in sparsity.scales:
    made.add_row(f"[bold]{scale.devices}[/bold]")
    for name in row_sets.NAMES:
      made.add_row(f"  {name}", *_balance_cells(scale.balance[name]))
    made.add_section()
  return made


def _balance_cells(balance: Balance) -> list[str]:
  push, pull = balance.capacity or (None, None)
  return [
    *(f"{x:.3f}" for x in (balance.push, balance.pull, balance.paid)),
    *(table.number(capacity, ".0f") for capacity in (push, pull)),
    table.number(balance.bytes, ".3f", 1e-6),
    table.number(balance.over_ideal, ".3f"),
  ]


def _notes(sparsity):
  pooled = [scale for scale in sparsity.scales if scale.pooled]
  if pooled:
    yield (
      f"pooled: the trace has {sparsity.devices} devices; the sets of several"
      " steps stand for those of one step of more devices."
    )
  if sparsity.too_few:
    yield (
      f"Left out: {', '.join(map(str, sparsity.too_few))} devices, for"
      f" {sparsity.steps} steps of {sparsity.devices} devices are too few sets;"
      " record more."
    )


def run(options: argparse.Namespace) -> int:
  """Counts, prints and saves what is asked for; returns the exit code.

  Raises:
    ValueError: The source is none, broken or too short.
  """
  observed = row_sets.load(
    options.source,
    steps=options.steps,
    seed=options.seed,
    full_size=options.full_size,
  )
  devices = sorted(set(options.devices))
  parts = len(observed) * (len(devices) + 1)
  found: list[Sparsity] = []
  with tqdm.tqdm(total=parts, unit="part", disable=None, leave=False) as bar:
    for one in observed:
      bar.set_description(one.table.name)
      for part in row_sets.analyze(one, devices, seed=options.seed):
        if part is None:
          bar.update()
        else:
          found.append(part)
  for sparsity in found:
    show(sparsity)
  counted = [dataclasses.asdict(sparsity) for sparsity in found]
  environment = record.environment()
  record.save(options, {"environment": environment, "tables": counted})
  if options.plot:
    from benchmarks.cases import sparsity_plot  # Imports matplotlib.

    with record.whole(options.plot) as path:
      sparsity_plot.save_plot(path, found)
    print(f"Saved {options.plot}")
  return 0
