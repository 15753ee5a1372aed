"""`python -m zenjax plan`."""

import argparse
import math

from zenjax._columns import columns
from zenjax._planner import _cli_arguments as arguments
from zenjax._planner._choosing import answer
from zenjax._planner._from_trace import Recorded


def run(options: argparse.Namespace) -> None:
  """Plans for what a trace tells, prints and saves."""
  machine = arguments.topology(options)
  recorded = arguments.recorded(options)
  plan = answer(
    recorded.question(machine, options.batch, **arguments.settings(options))
  )
  print(_densities(options, recorded, machine.devices))
  print(plan)
  for note in arguments.notes(options, recorded, machine):
    print(note)
  if options.json:
    options.json.write_text(plan.to_json(), encoding="utf-8")
    print(f"saved {options.json}")


def _densities(
  options: argparse.Namespace, recorded: Recorded, devices: int
) -> str:
  """What the trace says of each table, for so many devices."""
  rows = [("table", "rows", "of a device", f"of {devices}", "error")]
  profiles = recorded.profiles(devices, options.batch)
  for name, growth in recorded.growths.items():
    profile, sets = profiles[name], devices * options.batch
    error = growth.error(sets) if sets <= growth.pooled else math.nan
    rows.append(
      (
        name,
        str(growth.rows),
        f"{profile.rows / growth.rows:.2%}",
        f"{profile.union / growth.rows:.2%}",
        f"{error:.1%}" if math.isfinite(error) else "-",
      )
    )
  return "\n".join(
    [f"nonzero rows, as {options.trace} has them", *columns(rows)]
  )
