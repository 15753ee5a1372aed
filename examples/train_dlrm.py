"""Trains a click model (DLRM) with sparse gradient synchronization.

  python examples/train_dlrm.py                    # zen_sync
  python examples/train_dlrm.py --grads rows       # no gradient of table size
  python examples/train_dlrm.py --sync compare     # zen_sync beside pmean
  python examples/train_dlrm.py --data train.txt --checkpoint runs/criteo
  python examples/train_dlrm.py --generate clicks.tsv --rows 1000000

Data-parallel on all accelerators, or else on 8 devices that the CPU plays; over
several hosts with --coordinator, --num-processes and --process-id. The 26
tables have the cardinalities of Criteo's Kaggle data, scaled by --scale. Rows
are made up, with clicks that can be predicted, unless --data names a file in
Criteo's format. Ctrl-C ends the step in progress, saves a checkpoint if there
is a directory for it, and leaves with exit code 130.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import os
from pathlib import Path
import sys

import dlrm_auc
import dlrm_compare
import dlrm_criteo
import dlrm_flags
from dlrm_planted import Planted
import dlrm_plot
from dlrm_rows import as_batch
from dlrm_rows import Batch
from dlrm_rows import Rows
from dlrm_rows import table_rows
from dlrm_run import Run
from dlrm_run import run
from dlrm_source import FileSource
from dlrm_source import PlantedSource
from dlrm_trainer import Trainer
from interrupts import Interrupt
from interrupts import INTERRUPTED
from interrupts import stopped
import jax
import processes
from tqdm import tqdm
import train_flags
from train_loop import make_mesh

import zenjax

_SAVE_EVERY = 500


def generate(flags: argparse.Namespace) -> int:
  """Writes the planted log to a file. Returns the exit code."""
  planted = Planted(flags.seed)
  try:
    with tqdm(total=flags.rows, unit=" rows", mininterval=1) as bar:

      def parts() -> Iterator[Rows]:
        for rows in planted.blocks(flags.rows):
          yield rows
          bar.update(len(rows))

      dlrm_criteo.write(flags.generate, parts())
  except OSError as error:
    raise SystemExit(f"--generate: {error}") from error
  print(f"{flags.rows:,} rows: {os.path.abspath(flags.generate)}")
  return 0


class Job:
  """What all runs of this program share: flags, devices, rows and Ctrl-C."""

  def __init__(self, flags: argparse.Namespace, interrupt: Interrupt):
    self._flags = flags
    self._interrupt = interrupt
    self._mesh = make_mesh()
    self._devices = self._mesh.devices.size
    self._tables = table_rows(flags.scale)
    self._source = (
      FileSource(flags.data) if flags.data else PlantedSource(flags.seed)
    )
    self._held_out = self._load_held_out()

  def train(self) -> int:
    """Trains once, resumed and saved if asked. Returns the exit code."""
    flags = self._flags
    store = self._checkpoints() if flags.checkpoint else None
    trainer = self._trainer(flags.sync, flags.grads)
    start = store.restore(trainer) if store else 0
    if start >= flags.steps:
      raise SystemExit(
        f"--steps must exceed the {start} steps done, got {flags.steps}"
      )

    def save_sometimes(step: int) -> None:
      if store and step % _SAVE_EVERY == 0:
        store.save(step, trainer)

    found = self._run(trainer, flags.sync, start, after_step=save_sometimes)
    if store:
      store.save(found.done, trainer)
      store.close()
    if self._interrupt.agreed():
      return stopped(found.done, flags.checkpoint)
    self._print(found)
    if flags.sync == "zen":
      print(zenjax.report(trainer.opt_state))
    self._plot({flags.sync: found})
    return 0

  def compare(self) -> int:
    """Trains with zen_sync and pmean on the same batches; as `train`."""
    grads = self._flags.grads
    trainer = self._trainer("zen", grads)
    zen = self._run(trainer, "zen")
    if self._interrupt.agreed():
      return stopped(zen.done)
    report = zenjax.report(trainer.opt_state)
    del trainer  # Two at a time would need twice the memory.
    pmean = self._run(self._trainer("pmean", "dense"), "pmean")
    if self._interrupt.agreed():
      return stopped(pmean.done)
    table = dlrm_compare.table(zen=zen, pmean=pmean, grads=grads)
    print(f"\n{table}\n\n{report}")
    self._plot({f"zen, {grads} gradients": zen, "pmean": pmean})
    return 0

  def _load_held_out(self) -> Batch:
    flags = self._flags
    count = flags.eval_rows // self._devices * self._devices
    if not count:
      raise SystemExit(
        f"--eval-rows must be at least 1 for each of {self._devices} devices,"
        f" got {flags.eval_rows}"
      )
    try:
      rows = self._source.held_out(count)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data: {error}") from error
    clicks = int(rows.labels.sum())
    if clicks in (0, count):
      raise SystemExit(
        f"--eval-rows must hold out clicks and other rows, got {clicks} clicks"
        f" in {count} rows: hold out more"
      )
    print(
      f"{sum(self._tables):,} rows in {len(self._tables)} tables;"
      f" {self._devices} devices, {self._devices * flags.batch:,} rows of the"
      f" log a step; {count:,} held out, {clicks / count:.1%} of them clicks"
    )
    if not flags.data:
      best = dlrm_auc.auc(rows.labels, Planted(flags.seed).logits(0, count))
      print(f"AUC that no model can pass but by chance: {best:.4f}")
    print("The first step compiles: on a CPU for a minute or two.", flush=True)
    return as_batch(rows, self._tables)

  def _trainer(self, sync: str, grads: str) -> Trainer:
    return Trainer(
      tables=self._tables,
      width=self._flags.width,
      seed=self._flags.seed,
      sync=sync,
      grads=grads,
      optimizer=self._flags.optimizer,
      learning_rate=self._flags.lr,
      mesh=self._mesh,
    )

  def _run(
    self,
    trainer: Trainer,
    label: str,
    start: int = 0,
    *,
    after_step: Callable[[int], object] = lambda step: None,
  ) -> Run:
    return run(
      trainer,
      self._batches(start),
      range(start, self._flags.steps),
      self._held_out,
      label=label,
      eval_every=self._flags.eval_every,
      interrupt=self._interrupt,
      after_step=after_step,
    )

  def _batches(self, first_step: int) -> Iterator[Batch]:
    held, size = self._held_out.size, self._devices * self._flags.batch
    try:
      for rows in self._source.batches(held, size, first_step):
        yield as_batch(rows, self._tables)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data: {error}") from error

  def _checkpoints(self):
    # Orbax takes seconds to import, and is needed for this only.
    from checkpoints import Checkpoints

    flags = vars(self._flags)
    names = ("sync", "grads", "optimizer", "scale", "width", "batch", "lr")
    names += ("seed", "eval_rows")
    settings = train_flags.settings(flags, names)
    # The file may lie elsewhere by now.
    settings["--data"] = flags["data"] and Path(flags["data"]).name
    return Checkpoints(
      self._flags.checkpoint, settings, resume=self._flags.resume
    )

  def _print(self, found: Run) -> None:
    seconds = found.history.step_time
    print(
      f"held-out AUC: {found.aucs[found.start]:.4f} after {found.start} steps,"
      f" {found.auc:.4f} after {found.done}; median step {seconds:.3f} s,"
      f" {1 / seconds:.2f} steps a second"
    )

  def _plot(self, runs: dict[str, Run]) -> None:
    if self._flags.plot and jax.process_index() == 0:
      dlrm_plot.save(runs, self._flags.plot)
      print(f"plot: {os.path.abspath(self._flags.plot)}")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  flags = dlrm_flags.parse(__doc__ or "", argv)
  if not flags.generate:
    processes.join(flags)
  with processes.only_first_prints(flags):
    return start(flags)


def start(flags: argparse.Namespace) -> int:
  interrupt = Interrupt()
  try:
    if flags.generate:
      return generate(flags)
    job = Job(flags, interrupt)
  except KeyboardInterrupt:
    what = "written: no file is left" if flags.generate else "read"
    print(f"Stopped by Ctrl-C while rows were {what}.")
    return INTERRUPTED
  with interrupt:
    return job.compare() if flags.sync == "compare" else job.train()


if __name__ == "__main__":
  sys.exit(main())
