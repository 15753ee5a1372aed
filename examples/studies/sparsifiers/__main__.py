"""Compares what sparsifiers learn beside the dense mean, for how many bytes.

  python -m examples.studies.sparsifiers lm --json lm.json --plot lm.png
  python -m examples.studies.sparsifiers cnn --json cnn.json --plot cnn.png
  python -m examples.studies.sparsifiers cnn --kinds exdyna --densities 0.01 \\
    --devices 8 --seeds 0 1 2 --steps 1000

Trains the language model or the images dense and with every sparsifier, density
and number of devices that the CPU plays: first the dense mean and the first
sparsifier at --main from every seed, then all others from the first. A step is
of the same examples on any number of devices. Flags of `examples.studies.lm`
and `examples.studies.cnn` that say what is trained go with it.

`--json FILE` keeps every cell as soon as it is done, and the same command goes
on from there: Ctrl-C loses the cell in progress and no other. `--plot FILE.png`
draws FILE-loss.png and FILE-perplexity.png or FILE-accuracy.png, against steps
and against bytes, and FILE-selection.png, what was selected.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

import jax

from examples.studies.common import cluster
from examples.studies.common import flags as common
from examples.studies.common import loop
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.common.sparsifier import KINDS
from examples.studies.common.study import Study
from examples.studies.sparsifiers import cells as cells_of
from examples.studies.sparsifiers import plot
from examples.studies.sparsifiers import table
from examples.studies.sparsifiers.cells import Cell
from examples.studies.sparsifiers.cells import StudyFile
from examples.studies.sparsifiers.tasks import TASKS

_KINDS = ("exdyna", "micro", "top_k")
_MEASURES = 12  # In a run, beside that before it.


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Reads which cells there are, and what they have in common."""
  parser = common.parser(__doc__ or "", "sparsifiers")
  add = parser.add_argument
  add("task", choices=tuple(TASKS))
  add("--kinds", nargs="+", choices=KINDS, default=_KINDS)
  add("--densities", nargs="+", type=float, default=(0.001, 0.01, 0.05))
  add("--devices", nargs="+", type=int, default=(2, 4, 8))
  add("--seeds", nargs="+", type=int, default=(0, 1, 2))
  add("--main", type=float, default=0.01, help="density of all seeds")
  add("--json", type=Path, metavar="FILE")
  add("--plot", type=Path, metavar="FILE")
  flags, rest = parser.parse_known_args(argv)
  if broken := _broken_rule(flags):
    parser.error(broken)
  task = TASKS[flags.task]
  usual, given = task.parse([]), task.parse(rest)
  for name, default in vars(usual).items():
    if getattr(given, name) != default and name not in task.options(given):
      parser.error(
        f"--{name.replace('_', '-')} does not go with a study, got"
        f" {getattr(given, name)}; see --help"
      )
  return flags, given


def _broken_rule(flags: argparse.Namespace) -> str | None:
  for density in (*flags.densities, flags.main):
    if not 0 < density <= 1:
      return f"--densities and --main must be in (0, 1], got {density}"
  if min(flags.seeds) < 0:
    return f"--seeds must not be negative, got {min(flags.seeds)}"
  for count in flags.devices:
    if count < 1 or max(flags.devices) % count:
      return (
        "--devices must be positive and divide the largest of them, so that a"
        f" step is the same on all, got {count} and {max(flags.devices)}"
      )
  return None


def train(study: Study, cell: Cell, interrupt: Interrupt) -> dict | None:
  """Returns the record of a cell; nothing if Ctrl-C came."""
  mesh = cluster.make_mesh(cell.devices)
  trainer = study.trainer(mesh, cell.seed, sparsifier=cell.sparsifier)
  run = loop.fit(
    trainer,
    study.batches(cell.devices, cell.seed),
    range(study.steps),
    label=cell.label,
    unit=study.unit,
    interrupt=interrupt,
    measure=study.taken(trainer, max(study.steps // _MEASURES, 1)),
  )
  if interrupt.agreed():
    return None
  elements = sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
  return cells_of.record(cell, run, elements)


def run_all(
  kind: type[Study],
  flags: argparse.Namespace,
  cells: Sequence[Cell],
  file: StudyFile,
  interrupt: Interrupt,
) -> None:
  """Runs cells that are not done, until Ctrl-C."""
  missing = [cell for cell in cells if file.find(cell) is None]
  if not missing:
    return
  most = max(cell.devices for cell in cells)
  try:
    cluster.make_mesh(most)
  except ValueError as error:
    raise SystemExit(f"--devices {error}") from error
  study = kind(flags, most)
  for number, cell in enumerate(missing):
    print(f"cell {number + 1} of {len(missing)}: {cell.label}", flush=True)
    record = train(study, cell, interrupt)
    if record is None:
      print(f"Stopped by Ctrl-C; {number} of {len(missing)} cells were done.")
      return
    file.add(record)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs what is missing, shows all, and returns the exit code."""
  flags, task_flags = parse(argv)
  task = TASKS[flags.task]
  try:
    file = StudyFile(flags.json, flags.task, task.options(task_flags))
  except (OSError, ValueError) as error:
    raise SystemExit(f"--json {error}") from error
  cells = cells_of.grid(
    flags.kinds, flags.densities, flags.devices, flags.seeds, flags.main
  )
  interrupt = Interrupt()
  with interrupt:
    run_all(task.study, task_flags, cells, file, interrupt)
  measure = task.study.measure
  for show in (table.seeds, table.table):
    print(f"\n{show(cells, file, measure, task.gap)}")
  if flags.plot and not interrupt.requested:
    for path in plot.save(cells, file, measure, flags.plot):
      print(f"plot: {path}")
  return INTERRUPTED if interrupt.requested else 0


if __name__ == "__main__":
  sys.exit(main())
