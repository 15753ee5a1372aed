"""The tables that `sparsity` prints on the terminal."""

import rich.box
import rich.table

from benchmarks import owners
from benchmarks import table
from benchmarks.analysis import Balance
from benchmarks.analysis import Distribution
from benchmarks.analysis import PERCENTILES
from benchmarks.analysis import Sparsity


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


def _table(title: str, *headers: str) -> rich.table.Table:
  made = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
  )
  for number, header in enumerate(headers):
    made.add_column(header, justify="right" if number else "left", no_wrap=True)
  return made


def _shares(sparsity):
  headers = "n", "mean", *(f"p{p}" for p in PERCENTILES)
  made = _table("share of rows, %", "", *headers)
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
  made = _table("skew", "parts", *(str(s.parts) for s in sparsity.skew))
  made.add_row("densest part / d", *(f"{s.ratio:.2f}" for s in sparsity.skew))
  made.add_row(
    "nonzero rows in the first, %",
    *(f"{100 * s.first:.1f}" for s in sparsity.skew),
  )
  return made


def _scales(sparsity):
  made = _table(
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
      _or_dash(2 / both if both else None, ".1f"),
    )
  return made


def _balance(sparsity):
  made = _table(
    "balance",
    "devices\n  partition",
    "imbalance\npush",
    "\npull",
    "\npaid",
    "capacity\npush",
    "\npull",
    "wire\nMB",
    "over\nideal",
  )
  for scale in sparsity.scales:
    made.add_row(f"[bold]{scale.devices}[/bold]")
    for name in owners.NAMES:
      made.add_row(f"  {name}", *_balance_cells(scale.balance[name]))
    made.add_section()
  return made


def _balance_cells(balance: Balance) -> list[str]:
  push, pull = balance.capacity or (None, None)
  megabytes = None if balance.bytes is None else balance.bytes / 1e6
  return [
    f"{balance.push:.3f}",
    f"{balance.pull:.3f}",
    f"{balance.paid:.3f}",
    _or_dash(push, "d"),
    _or_dash(pull, "d"),
    _or_dash(megabytes, ".3f"),
    _or_dash(balance.over_ideal, ".3f"),
  ]


def _or_dash(value: float | None, form: str) -> str:
  return "-" if value is None else format(value, form)


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
