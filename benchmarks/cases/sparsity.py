"""`sparsity`: which rows steps touch, and what that means for an exchange."""

import argparse
import dataclasses

import tqdm

from benchmarks import record
from benchmarks import table
from benchmarks.cases import row_sets


def show(sparsity: row_sets.Sparsity) -> None:
  """Prints all that was counted of one table."""
  console = table.console()
  console.print(
    f"[bold]{sparsity.name}[/bold]  {sparsity.rows:,} x {sparsity.width}"
    f" {sparsity.dtype}, {sparsity.steps} steps of {sparsity.devices} devices"
  )
  headers = "n", "mean", *(f"p{p}" for p in row_sets.PERCENTILES)
  made = table.made("share of rows, %", "", *headers)
  for name, shares, digits in (
    ("density of a device", sparsity.density, 3),
    ("overlap, devices of a step", sparsity.overlap_devices, 1),
    ("overlap, consecutive steps", sparsity.overlap_steps, 1),
  ):
    cells = ["-"] * len(headers)
    if shares:
      found = shares.mean, *shares.percentiles.values()
      cells = [str(shares.count), *(f"{100 * x:.{digits}f}" for x in found)]
    made.add_row(name, *cells)
  console.print(made)

  made = table.made("skew", "parts", *(str(s.parts) for s in sparsity.skew))
  made.add_row("densest part / d", *(f"{s.ratio:.2f}" for s in sparsity.skew))
  shares = (f"{100 * s.first:.1f}" for s in sparsity.skew)
  made.add_row("nonzero rows in the first, %", *shares)
  console.print(made)

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
  console.print(made)

  made = table.made(
    "balance",
    *("devices\n  partition", "imbalance\npush", "\npull", "\npaid"),
    *("capacity\npush", "\npull", "wire\nMB", "over\nideal"),
  )
  for scale in sparsity.scales:
    made.add_row(f"[bold]{scale.devices}[/bold]")
    for name, balance in scale.balance.items():
      made.add_row(
        f"  {name}",
        *(f"{x:.3f}" for x in (balance.push, balance.pull, balance.paid)),
        *(table.number(x, ".0f") for x in balance.capacity or (None, None)),
        table.number(balance.bytes, ".3f", 1e-6),
        table.number(balance.over_ideal, ".3f"),
      )
    made.add_section()
  console.print(made)

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
  observed = row_sets.load(
    options.source,
    steps=options.steps,
    seed=options.seed,
    full_size=options.full_size,
  )
  devices = sorted(set(options.devices))
  parts = len(observed) * (len(devices) + 1)
  found: list[row_sets.Sparsity] = []
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
