"""What sparsifiers learn beside the dense mean, for how many bytes.

  python examples/sparsifier_study.py lm --json lm.json --plot lm.png
  python examples/sparsifier_study.py cnn --json cnn.json --plot cnn.png
  python examples/sparsifier_study.py cnn --kinds exdyna --densities 0.01 \\
    --devices 8 --seeds 0 1 2 --steps 1000

Trains the language model or the images dense and with every sparsifier, density
and number of devices that the CPU plays: first the dense mean and the first
sparsifier at --main from every seed, then all others from the first. A step is
of the same examples on any number of devices. Flags of train_lm.py and
train_cnn.py that say what is trained go with it.

`--json FILE` keeps every cell as soon as it is done, and the same command goes
on from there: Ctrl-C loses the cell in progress and no other. `--plot FILE.png`
draws FILE-loss.png and FILE-perplexity.png or FILE-accuracy.png, against steps
and against bytes, and FILE-selection.png, what was selected.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from interrupts import Interrupt
from interrupts import INTERRUPTED
import measured_run
from sparsified import KINDS
import study_cells
from study_cells import Cell
from study_file import StudyFile
import study_plot
import study_table
from study_tasks import Task
from study_tasks import TASKS
from train_loop import make_mesh

_KINDS = ("exdyna", "micro", "top_k")
_MEASURES = 12  # In a run, beside that before it.


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Which cells, and what they have in common."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
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


def train(
  task: Task, cell: Cell, steps: int, interrupt: Interrupt
) -> dict | None:
  """The record of a cell; nothing if Ctrl-C came."""
  start = task.start(cell, make_mesh(cell.devices))
  run = measured_run.run(
    start.trainer,
    start.batches,
    range(steps),
    start.measure,
    label=cell.label,
    unit=task.unit,
    eval_every=max(steps // _MEASURES, 1),
    interrupt=interrupt,
  )
  if interrupt.agreed():
    return None
  return study_cells.record(cell, run, start.elements)


def run_all(
  kind: type[Task],
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
    make_mesh(most)
  except ValueError as error:
    raise SystemExit(f"--devices {error}") from error
  task = kind(flags, most)
  for number, cell in enumerate(missing):
    print(f"cell {number + 1} of {len(missing)}: {cell.label}", flush=True)
    record = train(task, cell, flags.steps, interrupt)
    if record is None:
      print(f"Stopped by Ctrl-C; {number} of {len(missing)} cells were done.")
      return
    file.add(record)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs what is missing, shows all, and returns the exit code."""
  flags, task_flags = parse(argv)
  kind = TASKS[flags.task]
  try:
    file = StudyFile(flags.json, flags.task, kind.options(task_flags))
  except (OSError, ValueError) as error:
    raise SystemExit(f"--json {error}") from error
  cells = study_cells.grid(
    flags.kinds, flags.densities, flags.devices, flags.seeds, flags.main
  )
  interrupt = Interrupt()
  with interrupt:
    run_all(kind, task_flags, cells, file, interrupt)
  for show in (study_table.seeds, study_table.table):
    print(f"\n{show(cells, file, kind.measure, kind.gap)}")
  if flags.plot and not interrupt.requested:
    for path in study_plot.save(cells, file, kind.measure, flags.plot):
      print(f"plot: {path}")
  return INTERRUPTED if interrupt.requested else 0


if __name__ == "__main__":
  sys.exit(main())
