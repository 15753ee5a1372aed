"""Compares local steps between exchanges with an exchange in each step.

  python -m examples.studies.local_steps --json local_steps.json
  python -m examples.studies.local_steps --every 8 --seeds 0 --steps 256

Trains the model of `examples.studies.lm` on the same samples: with AdamW and a
dense all-reduce in each step, and with `zenjax.local_steps`, an exchange after
`--every` steps of AdamW, with and without int4. Before that it tries some
learning rates with the first seed. `--json FILE` keeps every run as soon as it
is done, and the same command goes on from there. Other flags are those of
`examples.studies.lm`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
import optax

from examples.studies.common import cluster
from examples.studies.common import flags as common
from examples.studies.common import loop
from examples.studies.common.cluster import AXIS
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.common.trainer import Trainer
from examples.studies.lm import model
from examples.studies.lm import study as lm
from examples.studies.lm.data import LENGTH
from examples.studies.local_steps import cells as cells_of
from examples.studies.local_steps import table
from examples.studies.local_steps import trainer as local
from examples.studies.local_steps.cells import Cell
from examples.studies.local_steps.cells import DENSE
from examples.studies.sparsifiers.cells import StudyFile
from examples.studies.sparsifiers.tasks import TASKS
import zenjax
from zenjax import compress

_TASK = TASKS["lm"]
_SIZES = ("--batch-tokens=512", "--steps=2048")
_PER_CELL = ("optimizer", "lr")


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Reads which runs there are, and what they have in common."""
  parser = common.parser(__doc__ or "", "local_steps")
  add = parser.add_argument
  add("--every", nargs="+", type=int, default=(8, 32, 128))
  most = len(cells_of.LOCAL_RATES)
  add(
    "--rates",
    type=int,
    choices=range(1, most + 1),
    help="so many learning rates to try, by default all",
  )
  add("--devices", type=int, default=4)
  add("--seeds", nargs="+", type=int, default=(0, 1, 2))
  add("--json", type=Path, metavar="FILE")
  flags, rest = parser.parse_known_args(argv)
  lm_flags = parse_model(rest)
  for every in flags.every:
    if every < 2 or lm_flags.steps % every:
      parser.error(
        f"--every must be at least 2 and divide --steps {lm_flags.steps},"
        f" got {every}"
      )
  return flags, lm_flags


def parse_model(argv: Sequence[str]) -> argparse.Namespace:
  """Reads the flags of the model."""
  return _TASK.parse([*_SIZES, *argv])


def make_trainer(
  cell: Cell,
  flags: argparse.Namespace,
  vocab: int,
  mesh: Mesh,
  sync: optax.GradientTransformation,
) -> Trainer:
  """Makes the trainer of a cell; `sync` averages what devices send."""
  decay = optax.cosine_decay_schedule(cell.lr, flags.steps)
  adamw = optax.adamw(decay)
  if cell.every == DENSE:
    return Trainer(
      lambda: model.LanguageModel(vocab, flags.width, rngs=nnx.Rngs(cell.seed)),
      lm.LOSS,
      lm.mean_exact_loss,
      adamw,
      mesh,
      sync=sync,
    )
  return local.LocalTrainer(
    vocab,
    flags.width,
    adamw,
    optax.sgd(cell.outer_lr, cell.momentum or None, nesterov=True),
    sync,
    cell.every,
    mesh,
    cell.seed,
  )


def train(
  study: lm.Language,
  flags: argparse.Namespace,
  cell: Cell,
  mesh: Mesh,
  interrupt: Interrupt,
) -> dict | None:
  """Returns the record of a cell; None after Ctrl-C."""
  devices = mesh.devices.size
  sync = optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))
  if cell.int4:
    sync = compress.all_reduce(compress.LowBit(4), AXIS, leaves=True)
  trainer = make_trainer(cell, flags, study.vocab, mesh, sync)
  batches = study.batches(devices, cell.seed)
  if cell.every > DENSE:
    batches = local.rounds(batches, cell.every)
  run = loop.fit(
    trainer,
    batches,
    range(study.steps // cell.every),
    label=cell.label,
    unit=study.unit,
    interrupt=interrupt,
    measure=study.taken(trainer, None),
  )
  if interrupt.agreed():
    return None
  elements = sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
  received = 2 * (devices - 1) / devices * elements * 4  # a ring's, float32
  if cell.int4:
    received = zenjax.stats(trainer.opt_state)["compressed"]["wire_bytes"]
  samples = flags.batch_tokens // LENGTH * cell.every
  return cells_of.record(cell, run, received, samples)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs what is missing, shows all, and returns the exit code."""
  flags, lm_flags = parse(argv)
  options = {"devices": flags.devices, **_TASK.options(lm_flags)}
  options = {k: v for k, v in options.items() if k not in _PER_CELL}
  try:
    file = StudyFile(flags.json, "local_steps", options)
  except (OSError, ValueError) as error:
    raise SystemExit(f"--json {error}") from error
  mesh = cluster.make_mesh(flags.devices)
  study = lm.Language(lm_flags, flags.devices)
  interrupt = Interrupt()

  def run(cells: Sequence[Cell]) -> None:
    for cell in cells:
      if file.find(cell) is None and not interrupt.agreed():
        if found := train(study, lm_flags, cell, mesh, interrupt):
          file.add(found)

  searches = cells_of.searches(flags.every, flags.seeds[0], flags.rates)
  with interrupt:
    run(searches)
    cells = cells_of.grid(searches, flags.every, flags.seeds, file)
    run(cells)
  if not interrupt.requested:
    file.finish()
  print(f"\n{table.results(cells, file)}\n\n{table.rates(searches, file)}")
  return INTERRUPTED if interrupt.requested else 0


if __name__ == "__main__":
  sys.exit(main())
