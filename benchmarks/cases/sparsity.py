"""`sparsity`: which rows steps touch, and what that means for an exchange."""

import argparse
import dataclasses
import math

from benchmarks import harness
from benchmarks import record
from benchmarks import table
from benchmarks.cases import row_sets

_room = lambda b: b.capacity or (math.nan, math.nan)
_BALANCE = (
  table.Column("imbalance\npush", lambda b, _: b.push, ".3f"),
  table.Column("\npull", lambda b, _: b.pull, ".3f"),
  table.Column("\npaid", lambda b, _: b.paid, ".3f"),
  table.Column("capacity\npush", lambda b, _: _room(b)[0], ".0f"),
  table.Column("\npull", lambda b, _: _room(b)[1], ".0f"),
  table.Column("wire\nMB", lambda b, _: (b.bytes or math.nan) / 1e6, ".3f"),
  table.Column("over\nideal", lambda b, _: b.over_ideal or math.nan, ".3f"),
)


def show(sparsity: row_sets.Sparsity) -> None:
  """Prints all that was counted of one table."""
  console = table.console()
  console.print(
    f"[bold]{sparsity.name}[/bold]  {sparsity.rows:,} x {sparsity.width}"
    f" {sparsity.dtype}, {sparsity.steps} steps of {sparsity.devices} devices"
  )
  headers = "", "n", "mean", *(f"p{p}" for p in row_sets.PERCENTILES)
  rows = []
  for name, shares, digits in (
    ("density of a device", sparsity.density, 3),
    ("overlap, devices of a step", sparsity.overlap_devices, 1),
    ("overlap, consecutive steps", sparsity.overlap_steps, 1),
  ):
    cells = ["-"] * (len(headers) - 1)
    if shares:
      found = shares.mean, *shares.percentiles.values()
      cells = [str(shares.count), *(f"{100 * x:.{digits}f}" for x in found)]
    rows.append([name, *cells])
  table.show_rows("share of rows, %", headers, rows)

  of = sparsity.skew
  densest = "densest part / d", *(f"{s.ratio:.2f}" for s in of)
  first = "nonzero rows in the first, %", *(f"{100 * s.first:.1f}" for s in of)
  headers = "parts", *(str(s.parts) for s in of)
  table.show_rows("skew", headers, [densest, first])

  rows = []
  for scale in sparsity.scales:
    both = scale.density + scale.union_density
    row = (
      f"{scale.devices}{' pooled' if scale.pooled else ''}",
      str(scale.steps),
      f"{100 * scale.density:.3f}",
      f"{100 * scale.union_density:.2f}",
      f"{scale.densification:.2f}",
      table.number(2 / both if both else None, ".1f"),
    )
    rows.append(row)
  headers = "devices", "steps", "d %", "dn %", "dn / d", "2 / (d + dn)"
  table.show_rows("densification", headers, rows)

  groups = [(str(scale.devices), scale.balance) for scale in sparsity.scales]
  table.show_groups("balance", "devices\n  partition", _BALANCE, groups)

  if any(scale.pooled for scale in sparsity.scales):
    console.print(
      f"pooled: the trace has {sparsity.devices} devices; the sets of several"
      " steps stand for those of one step of more devices."
    )
  if sparsity.too_few:
    console.print(
      f"Left out: {', '.join(map(str, sparsity.too_few))} devices, for"
      f" {sparsity.steps} steps of {sparsity.devices} devices are too few sets;"
      " record more."
    )


def run(options: argparse.Namespace) -> int:
  """Counts, prints and saves what is asked for; returns the exit code.

  Raises:
    ValueError: The source is none, broken or too short.
  """
  names = ("steps", "seed", "full_size")
  asked = {name: getattr(options, name) for name in names}
  observed = row_sets.load(options.source, **asked)
  devices = sorted(set(options.devices))
  parts = len(observed) * (len(devices) + 1)
  found: list[row_sets.Sparsity] = []
  with harness.progress(total=parts, unit="part") as bar:
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
  return 0
