"""Trains a word-level language model with sparse gradient synchronization.

  python examples/train_lm.py                    # zen_sync
  python examples/train_lm.py --grads rows       # no gradient of table size
  python examples/train_lm.py --sync compare     # zen_sync beside pmean
  python examples/train_lm.py --sparsifier exdyna --density 0.01 --optimizer sgd
  python examples/train_lm.py --sparsifier top_k --out runs/top_k
  python examples/train_lm.py --corpus book.txt --checkpoint runs/book
  python examples/train_lm.py --steps 32 --trace runs/trace

Data-parallel on all accelerators, or else on 8 devices that the CPU plays; over
several hosts with --coordinator, --num-processes and --process-id. The text is
the source code of Python's standard library unless --corpus names another.
Ctrl-C ends the step in progress, saves a checkpoint if there is a directory for
it, and leaves with exit code 130.
"""

import argparse
from collections.abc import Callable, Sequence
import os
import sys

from interrupts import Interrupt
from interrupts import INTERRUPTED
from interrupts import stopped
import jax
import lm_compare
import lm_data
import lm_flags
import lm_plot
from lm_text import load
import lm_trace
from lm_trainer import is_lazy
from lm_trainer import Trainer
import processes
import sparsified
from step_log import StepLog
import train_flags
from train_loop import fit
from train_loop import History
from train_loop import make_mesh

import zenjax

_SAVE_EVERY = 500


class Job:
  """What all runs of this program share: flags, devices, text and Ctrl-C."""

  def __init__(self, flags: argparse.Namespace, interrupt: Interrupt):
    self._flags = flags
    self._interrupt = interrupt
    self._mesh = make_mesh()
    self._devices = self._mesh.devices.size
    self._windows, self._held_out, self._vocab = load(flags, self._devices)

  def train(self) -> int:
    """Trains once, resumed and saved if asked. Returns the exit code."""
    flags = self._flags
    store = self._checkpoints() if flags.checkpoint else None
    recorder = self._recorder()
    trainer = self._trainer(flags.sync, flags.grads, recorder)
    start = store.restore(trainer) if store else 0
    if start >= flags.steps:
      raise SystemExit(
        f"--steps must exceed the {start} steps done, got {flags.steps}"
      )
    self._print_perplexity(trainer, start)

    log, history = self._log(start), History()

    def after_step(step: int) -> None:
      if log:
        log.write(step, history)
      if store and step % _SAVE_EVERY == 0:
        store.save(step, trainer)

    label = flags.sync if flags.sparsifier == "none" else flags.sparsifier
    self._fit(trainer, label, start, after_step=after_step, history=history)
    done, stop = start + len(history.losses), self._interrupt.agreed()
    if log:
      log.close(keep=store is not None or not stop)
    if recorder:
      recorder.close()
    if store:
      store.save(done, trainer)
      store.close()
    if stop:
      return stopped(done, flags.checkpoint)
    self._print_perplexity(trainer, done)
    seconds = history.step_time
    print(f"median step {seconds:.3f} s, {1 / seconds:.2f} steps a second")
    if flags.sync == "zen":
      print(zenjax.report(trainer.opt_state))
    if flags.sparsifier != "none":
      print("\n".join(sparsified.lines(history)))
    self._plot({label: history})
    return 0

  def compare(self) -> int:
    """Trains with zen_sync and pmean on the same batches; as `train`."""
    grads = self._flags.grads
    outcomes, report = {}, ""
    for sync, taken in (("zen", grads), ("pmean", "dense")):
      trainer = self._trainer(sync, taken)
      if not outcomes:
        self._print_perplexity(trainer, 0)
      history = self._fit(trainer, sync)
      if self._interrupt.agreed():
        return stopped(len(history.losses))
      perplexity = trainer.perplexity(self._held_out)
      outcomes[sync] = lm_compare.Outcome(history, perplexity)
      report = report or zenjax.report(trainer.opt_state)
      del trainer  # Two at a time would need twice the memory.
    runs = {sync: outcome.history for sync, outcome in outcomes.items()}
    reordered = None
    # Where the optimizers differ, more than rounding parts the two runs.
    if not is_lazy(grads, self._flags.optimizer):
      trainer = self._trainer("pmean", "dense")
      reordered = self._fit(trainer, "pmean reordered", rotate=True)
      if self._interrupt.agreed():
        return stopped(len(reordered.losses))
      runs["pmean reordered"] = reordered
    table = lm_compare.table(**outcomes, grads=grads, reordered=reordered)
    print(f"\n{table}\n\n{report}")
    self._plot(runs)
    return 0

  def _recorder(self) -> lm_trace.Recorder | None:
    flags = self._flags
    if not flags.trace:
      return None
    return lm_trace.Recorder(flags.trace, flags.trace_steps)

  def _sparsifier(self) -> sparsified.Sparsifier | None:
    flags = self._flags
    if flags.sparsifier == "none":
      return None
    return sparsified.Sparsifier(flags.sparsifier, flags.density)

  def _trainer(
    self, sync: str, grads: str, recorder: lm_trace.Recorder | None = None
  ) -> Trainer:
    return Trainer(
      vocab=self._vocab,
      width=self._flags.width,
      seed=self._flags.seed,
      sync=sync,
      grads=grads,
      optimizer=self._flags.optimizer,
      learning_rate=self._flags.lr,
      mesh=self._mesh,
      sparsifier=self._sparsifier(),
      recorder=recorder,
    )

  def _fit(
    self,
    trainer: Trainer,
    label: str,
    start: int = 0,
    *,
    rotate: bool = False,
    after_step: Callable[[int], object] = lambda step: None,
    history: History | None = None,
  ) -> History:
    batches = lm_data.batches(
      self._windows,
      devices=self._devices,
      batch_tokens=self._flags.batch_tokens,
      negatives=self._flags.negatives,
      vocab=self._vocab,
      seed=self._flags.seed,
      first_step=start,
    )
    if rotate:
      batches = (batch.rotated(self._devices) for batch in batches)
    return fit(
      trainer,
      batches,
      range(start, self._flags.steps),
      label=label,
      unit="tokens",
      interrupt=self._interrupt,
      after_step=after_step,
      history=history,
    )

  def _log(self, start: int) -> StepLog | None:
    if not self._flags.out or jax.process_index() > 0:
      return None
    try:
      return StepLog(self._flags.out, start)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--out {error}") from error

  def _checkpoints(self):
    # Orbax takes seconds to import, and is needed for this only.
    from checkpoints import Checkpoints

    flags = vars(self._flags) | {"vocab": self._vocab}
    names = ("sync", "grads", "optimizer", "vocab", "width", "lr")
    names += ("batch_tokens", "negatives", "seed", "sparsifier", "density")
    settings = train_flags.settings(flags, names)
    return Checkpoints(
      self._flags.checkpoint, settings, resume=self._flags.resume
    )

  def _print_perplexity(self, trainer: Trainer, steps: int) -> None:
    perplexity = trainer.perplexity(self._held_out)
    print(
      f"held-out perplexity after {steps} steps: {perplexity:,.1f}", flush=True
    )

  def _plot(self, runs: dict[str, History]) -> None:
    if self._flags.plot and jax.process_index() == 0:
      lm_plot.save(runs, self._flags.plot)
      print(f"plot: {os.path.abspath(self._flags.plot)}")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  flags = lm_flags.parse(__doc__ or "", argv)
  processes.join(flags)
  with processes.only_first_prints(flags):
    return run(flags)


def run(flags: argparse.Namespace) -> int:
  interrupt = Interrupt()
  try:
    job = Job(flags, interrupt)
  except KeyboardInterrupt:
    print("Stopped by Ctrl-C while the text was read.")
    return INTERRUPTED
  with interrupt:
    return job.compare() if flags.sync == "compare" else job.train()


if __name__ == "__main__":
  sys.exit(main())
