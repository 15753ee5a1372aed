"""Compares what a language model learns from compressed gradients.

  python -m examples.studies.compressors --json study.json --plot study.png
  python -m examples.studies.compressors --ways dense int8 --optimizers sgd \\
    --seeds 0 --steps 200

Trains the model of `examples.studies.lm` with every way to average gradients,
optimizer and seed. Before that it tries some learning rates with the first
seed. `--json FILE` keeps every run as soon as it is done, and the same command
goes on from there. Other flags are those of `examples.studies.lm`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

import jax
from jax.sharding import Mesh

from examples.studies.common import cluster
from examples.studies.common import flags as common
from examples.studies.common import loop
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.compressors import cells as cells_of
from examples.studies.compressors import table
from examples.studies.compressors import ways
from examples.studies.compressors.cells import Cell
from examples.studies.lm import study as lm
from examples.studies.sparsifiers.cells import StudyFile
from examples.studies.sparsifiers.tasks import TASKS
import zenjax

_TASK = TASKS["lm"]
_SIZES = ("--batch-tokens=512", "--steps=1000")
_PER_CELL = ("optimizer", "lr")
_MEASURES = 8  # In a run, except for the first.


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Reads which runs there are, and what they have in common."""
  parser = common.parser(__doc__ or "", "compressors")
  add = parser.add_argument
  add("--ways", nargs="+", choices=ways.WAYS, default=ways.WAYS)
  names = ("sgd", "adam")
  add("--optimizers", nargs="+", choices=names, default=names)
  most = max(map(len, cells_of.TRIED.values()))
  add(
    "--rates",
    type=int,
    choices=range(1, most + 1),
    help="so many learning rates to try, by default all",
  )
  add("--devices", type=int, default=4)
  add("--seeds", nargs="+", type=int, default=(0, 1, 2))
  add("--json", type=Path, metavar="FILE")
  add("--plot", type=Path, metavar="FILE")
  flags, rest = parser.parse_known_args(argv)
  return flags, _TASK.parse([*_SIZES, *rest])


def train(
  study: lm.Language,
  flags: argparse.Namespace,
  cell: Cell,
  mesh: Mesh,
  interrupt: Interrupt,
) -> dict | None:
  """Returns the record of a cell; None after Ctrl-C."""
  devices = mesh.devices.size
  trainer = lm.make_trainer(
    flags.vocab,
    flags.width,
    cell.optimizer,
    cell.lr,
    mesh,
    cell.seed,
    sync=ways.synchronization(cell.way),
  )
  batches = study.batches(devices, cell.seed)
  if cell.way == ways.REORDERED:
    batches = (batch.rotated(devices) for batch in batches)
  run = loop.fit(
    trainer,
    batches,
    range(study.steps),
    label=cell.label,
    unit=study.unit,
    interrupt=interrupt,
    measure=study.taken(trainer, max(study.steps // _MEASURES, 1)),
  )
  if interrupt.agreed():
    return None
  elements = sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
  # A ring's; a compressor counts its own.
  received = 2 * (devices - 1) / devices * elements * ways.itemsize(cell.way)
  if cell.way in ways.COMPRESSORS:
    received = zenjax.stats(trainer.opt_state)["compressed"]["wire_bytes"]
  return cells_of.record(cell, run, elements, received)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs what is missing, shows all, and returns the exit code."""
  flags, lm_flags = parse(argv)
  options = {"devices": flags.devices, **_TASK.options(lm_flags)}
  options = {k: v for k, v in options.items() if k not in _PER_CELL}
  try:
    file = StudyFile(flags.json, "compressors", options)
  except (OSError, ValueError) as error:
    raise SystemExit(f"--json {error}") from error
  mesh = cluster.make_mesh(flags.devices)
  study = lm.Language(lm_flags, flags.devices)
  interrupt = Interrupt()

  def run(cells: Sequence[Cell]) -> None:
    missing = [cell for cell in cells if file.find(cell) is None]
    for cell in missing:
      if interrupt.agreed():
        return
      if found := train(study, lm_flags, cell, mesh, interrupt):
        file.add(found)

  searches = cells_of.searches(
    flags.ways, flags.optimizers, flags.seeds[0], flags.rates
  )
  with interrupt:
    run(searches)
    cells = cells_of.grid(flags.ways, flags.optimizers, flags.seeds, file)
    run(cells)
  if not interrupt.requested:
    file.finish()
  for show in (table.perplexities, table.sizes):
    print(f"\n{show(cells, file)}")
  print(f"\n{table.rates(searches, file)}")
  if flags.plot and not interrupt.requested:
    table.plot(cells, file, flags.plot)
    print(f"plot: {flags.plot}")
  return INTERRUPTED if interrupt.requested else 0


if __name__ == "__main__":
  sys.exit(main())
