"""Trains a small ResNet, whose gradients are dense, and sends a part of them.

  python examples/train_cnn.py                       # the dense mean
  python examples/train_cnn.py --sparsifier exdyna --density 0.01
  python examples/train_cnn.py --sparsifier top_k --devices 4 --out runs/top_k
  python examples/train_cnn.py --data cifar-10-batches-bin --epochs 20
  python examples/train_cnn.py --data photos --checkpoint runs/photos

Data-parallel on all accelerators, or else on 8 devices that the CPU plays. The
images are scikit-learn's digits (8 by 8, grey) unless --data names a directory
of CIFAR-10's binary files, or one with a subdirectory of images for each class.
Ctrl-C ends the step in progress, saves a checkpoint if there is a directory for
it, and leaves with exit code 130.
"""

import argparse
from collections.abc import Sequence
import os
import sys
from typing import Any

import cnn_flags
import cnn_images
import cnn_plot
from cnn_trainer import Trainer
from interrupts import Interrupt
from interrupts import INTERRUPTED
from interrupts import stopped
from measured_run import Measure
from measured_run import Run
from measured_run import run
import sparsified
from step_log import StepLog
import train_flags
from train_loop import make_mesh

_SAVE_EVERY = 500


class Job:
  """A run: flags, devices, images and Ctrl-C."""

  def __init__(self, flags: argparse.Namespace, interrupt: Interrupt):
    self._flags = flags
    self._interrupt = interrupt
    try:
      self._mesh = make_mesh(flags.devices)
    except ValueError as error:
      raise SystemExit(f"--devices {error}") from error
    self._images = self._load()
    per_epoch = self._images.train.size // flags.batch
    self._steps = flags.steps or flags.epochs * per_epoch

  def train(self) -> int:
    """Trains, resumed and saved if asked. Returns the exit code."""
    flags = self._flags
    store = self._checkpoints() if flags.checkpoint else None
    trainer = self._trainer()
    start = store.restore(trainer) if store else 0
    if start >= self._steps:
      raise SystemExit(
        f"--steps must exceed the {start} steps done, got {self._steps}"
      )
    log, held_out = self._log(start), self._images.held_out

    def after_step(found: Run) -> None:
      if log:
        measured = found.done in found.measured
        more = {"accuracy": found.last} if measured else {}
        log.write(found.done, found.history, **more)
      if store and found.done % _SAVE_EVERY == 0:
        store.save(found.done, trainer)

    found = run(
      trainer,
      cnn_images.batches(self._images.train, flags.batch, flags.seed, start),
      range(start, self._steps),
      Measure("accuracy", ".2%", lambda: trainer.accuracy(held_out)),
      label=self._label,
      unit="images",
      eval_every=flags.eval_every,
      interrupt=self._interrupt,
      after_step=after_step,
    )
    stop = self._interrupt.agreed()
    if log:
      log.close(keep=store is not None or not stop)
    if store:
      store.save(found.done, trainer)
      store.close()
    if stop:
      return stopped(found.done, flags.checkpoint)
    self._print(found)
    return 0

  @property
  def _label(self) -> str:
    sparsifier = self._flags.sparsifier
    return "dense" if sparsifier == "none" else sparsifier

  def _load(self) -> cnn_images.Images:
    flags, devices = self._flags, self._mesh.devices.size
    try:
      images = cnn_images.load(flags.data, flags.image_size)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data {error}") from error
    if flags.batch % devices or flags.batch > images.train.size:
      raise SystemExit(
        f"--batch must be a multiple of the {devices} devices and at most the"
        f" {images.train.size:,} images to train on, got {flags.batch}"
      )
    print(
      f"{images.train.size:,} images to train on, {images.held_out.size:,} held"
      f" out, {images.classes} classes; {devices} devices, {flags.batch} images"
      " a step",
      flush=True,
    )
    return images

  def _trainer(self) -> Trainer:
    flags = self._flags
    sparsifier = None
    if flags.sparsifier != "none":
      sparsifier = sparsified.Sparsifier(flags.sparsifier, flags.density)
    return Trainer(
      shape=self._images.train.images.shape[1:],
      classes=self._images.classes,
      width=flags.width,
      seed=flags.seed,
      learning_rate=flags.lr,
      mesh=self._mesh,
      sparsifier=sparsifier,
    )

  def _checkpoints(self):
    # Orbax takes seconds to import, and is needed for this only.
    from checkpoints import Checkpoints

    devices = self._mesh.devices.size
    flags: dict[str, Any] = vars(self._flags) | {"devices": devices}
    names = ("sparsifier", "density", "devices", "batch", "width", "lr", "seed")
    settings = train_flags.settings(flags, (*names, "image_size"))
    # The images may lie elsewhere by now.
    settings["--data"] = flags["data"] and os.path.basename(
      os.path.abspath(flags["data"])
    )
    return Checkpoints(
      self._flags.checkpoint, settings, resume=self._flags.resume
    )

  def _log(self, start: int) -> StepLog | None:
    if not self._flags.out:
      return None
    try:
      return StepLog(self._flags.out, start)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--out {error}") from error

  def _print(self, found: Run) -> None:
    flags, history = self._flags, found.history
    seconds = history.step_time
    print(
      f"accuracy on held-out images: {found.measured[found.start]:.2%} after"
      f" {found.start} steps, {found.last:.2%} after {found.done}; median"
      f" step {seconds:.3f} s, {1 / seconds:.2f} steps a second"
    )
    if flags.sparsifier != "none":
      print("\n".join(sparsified.lines(history)))
    if flags.plot:
      cnn_plot.save(found, self._label, flags.plot)
      print(f"plot: {os.path.abspath(flags.plot)}")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  flags = cnn_flags.parse(__doc__ or "", argv)
  interrupt = Interrupt()
  try:
    job = Job(flags, interrupt)
  except KeyboardInterrupt:
    print("Stopped by Ctrl-C while the images were read.")
    return INTERRUPTED
  with interrupt:
    return job.train()


if __name__ == "__main__":
  sys.exit(main())
