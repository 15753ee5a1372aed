"""A training program: one run of a study, or zen_sync and pmean compared."""

import argparse
from collections.abc import Callable
import dataclasses
import os
from typing import Any

import jax

from examples.studies.common import cluster
from examples.studies.common import comparison
from examples.studies.common import loop
from examples.studies.common import plots
from examples.studies.common import sparsifier as sparsifiers
from examples.studies.common.files import StepLog
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.common.interrupts import stopped
from examples.studies.common.loop import Run
from examples.studies.common.sparsifier import Sparsifier
from examples.studies.common.study import Study
from examples.studies.common.trainer import Trainer
import zenjax

_SAVE_EVERY = 500


def main(
  flags: argparse.Namespace,
  make: Callable[[argparse.Namespace, int], Study],
  read: str,
) -> int:
  """Runs a program and returns its exit code.

  Args:
    flags: As parsed.
    make: Makes the study for so many devices.
    read: What it reads, for a message: "the text was".
  """
  cluster.join(flags)
  with cluster.only_first_prints(flags):
    interrupt = Interrupt()
    try:
      mesh = cluster.make_mesh(getattr(flags, "devices", None))
    except ValueError as error:
      raise SystemExit(f"--devices {error}") from error
    try:
      study = make(flags, mesh.devices.size)
    except KeyboardInterrupt:
      print(f"Stopped by Ctrl-C while {read} read.")
      return INTERRUPTED
    program = Program(flags, study, mesh, interrupt)
    with interrupt:
      return program.compare() if flags.sync == "compare" else program.train()


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
  """Runs of one study on one mesh; Ctrl-C ends them."""

  flags: argparse.Namespace
  study: Study
  mesh: jax.sharding.Mesh
  interrupt: Interrupt

  def train(self) -> int:
    """Trains once, resumed and saved if asked. Returns the exit code."""
    flags, study = self.flags, self.study
    store = self._checkpoints() if flags.checkpoint else None
    trainer = self._trainer(flags.sync, flags.grads)
    if flags.trace:
      trainer.record(flags.trace, flags.trace_steps)
    start = store.restore(trainer) if store else 0
    if start >= study.steps:
      raise SystemExit(
        f"--steps must exceed the {start} steps done, got {study.steps}"
      )
    log = self._log(start)

    def after_step(run: Run) -> None:
      if log:
        measured = self._every and run.done in run.measured
        log.write(run, **({study.measure: run.last} if measured else {}))
      if store and run.done % _SAVE_EVERY == 0:
        store.save(run.done, trainer)

    sparse = flags.sparsifier != "none"
    label = flags.sparsifier if sparse else flags.sync
    run = self._fit(trainer, label, start, after_step=after_step)
    stop = self.interrupt.agreed()
    if log:
      log.close(keep=store is not None or not stop)
    if recorded := trainer.recorded():
      print(f"trace of {recorded} steps: {flags.trace}")
    if store:
      store.save(run.done, trainer)
      store.close()
    if stop:
      return stopped(run.done, flags.checkpoint)
    study.print_end(run)
    if flags.sync != "pmean":
      print(zenjax.report(trainer.opt_state))
    if sparse:
      print("\n".join(sparsifiers.lines(run)))
    self._plot({label: run})
    return 0

  def compare(self) -> int:
    """Trains with zen_sync and pmean on the same batches; as `train`."""
    flags, study = self.flags, self.study
    runs: dict[str, Run] = {}
    report = ""
    for sync, grads in (("zen", flags.grads), ("pmean", "dense")):
      trainer = self._trainer(sync, grads)
      runs[sync] = self._fit(trainer, sync, first=not runs)
      if self.interrupt.agreed():
        return stopped(runs[sync].done)
      report = report or zenjax.report(trainer.opt_state)
      del trainer  # Two at a time would need twice the memory.
    if study.reordered:
      trainer = self._trainer("pmean", "dense")
      again = self._fit(trainer, "pmean reordered", reorder=study.reordered)
      if self.interrupt.agreed():
        return stopped(again.done)
      runs["pmean reordered"] = again
    lines = comparison.table(
      runs["zen"], runs["pmean"], flags.grads, study.measure, study.table_form
    )
    print("\n".join(["", *lines, "", study.verdict(runs), "", report]))
    self._plot(runs)
    return 0

  @property
  def _every(self) -> int | None:
    return getattr(self.flags, "eval_every", None)

  def _trainer(self, sync: str, grads: str) -> Trainer:
    flags, sparsifier = self.flags, None
    if flags.sparsifier != "none":
      sparsifier = Sparsifier(flags.sparsifier, flags.density)
    return self.study.trainer(
      self.mesh, flags.seed, sync=sync, grads=grads, sparsifier=sparsifier
    )

  def _fit(
    self,
    trainer: Trainer,
    label: str,
    start: int = 0,
    *,
    first: bool = True,
    reorder: Callable[[Any], Any] | None = None,
    after_step: Callable[[Run], object] = lambda run: None,
  ) -> Run:
    study = self.study
    batches = study.batches(self.mesh.devices.size, self.flags.seed, start)
    return loop.fit(
      trainer,
      map(reorder, batches) if reorder else batches,
      range(start, study.steps),
      label=label,
      unit=study.unit,
      interrupt=self.interrupt,
      measure=None if reorder else study.taken(trainer, self._every),
      at_start=study.print_start if first else lambda run: None,
      after_step=after_step,
    )

  def _log(self, start: int) -> StepLog | None:
    if not self.flags.out or jax.process_index() > 0:
      return None
    try:
      return StepLog(self.flags.out, start)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--out {error}") from error

  def _checkpoints(self):
    # Orbax takes seconds to import, and is needed for this only.
    from examples.studies.common.checkpoints import Checkpoints

    settings = self.study.settings()
    flags = self.flags
    return Checkpoints(flags.checkpoint, settings, resume=flags.resume)

  def _plot(self, runs: dict[str, Run]) -> None:
    if self.flags.plot and jax.process_index() == 0:
      plots.save(runs, self.study.panels, self.flags.plot)
      print(f"plot: {os.path.abspath(self.flags.plot)}")
