"""Checkpoints of a training run: parameters, optimizer state and step."""

from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from examples.studies.common.trainer import Trainer

_KEEP = 2


class Checkpoints:
  """A directory of checkpoints that all were made with the same settings.

  Args:
    directory: Made if missing.
    settings: Flag -> value: what a run must share with the one it resumes.
    resume: Whether to go on from the newest checkpoint, which must exist, or to
      start, when there must be none.

  Raises:
    SystemExit: The directory does not fit `settings` and `resume`.
  """

  def __init__(
    self, directory: str, settings: Mapping[str, object], *, resume: bool
  ):
    if resume and not Path(directory).is_dir():
      raise SystemExit(
        f"--resume needs a checkpoint, but {directory} is missing"
      )
    self._settings = settings
    self._manager = ocp.CheckpointManager(
      Path(directory).absolute(),
      options=ocp.CheckpointManagerOptions(max_to_keep=_KEEP, create=True),
    )
    self._latest = self._manager.latest_step
    if resume:
      self._check_settings(directory)
    elif self._latest() is not None:
      raise SystemExit(
        f"--checkpoint must name a new directory, but {directory} holds step"
        f" {self._latest()}: add --resume to go on from there"
      )

  def save(self, step: int, trainer: Trainer) -> None:
    """Saves the state after `step` steps, unless that is there already."""
    if step == self._latest():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(trainer.saved),
        settings=ocp.args.JsonSave(self._settings),
      ),
    )
    # The next step donates the buffers that are being written.
    self._manager.wait_until_finished()

  def restore(self, trainer: Trainer) -> int:
    """Loads the newest checkpoint, if any, and returns the steps done."""
    if (latest := self._latest()) is None:
      return 0
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, trainer.saved)
    found = self._manager.restore(
      latest, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
    )
    trainer.restore(found["state"])
    return latest

  def close(self) -> None:
    """Ends orbax's threads."""
    self._manager.close()

  def _check_settings(self, directory: str) -> None:
    if (latest := self._latest()) is None:
      raise SystemExit(
        f"--resume needs a checkpoint, but {directory} holds none"
      )
    found = self._manager.restore(
      latest, args=ocp.args.Composite(settings=ocp.args.JsonRestore())
    )["settings"]
    for flag, value in self._settings.items():
      if found.get(flag) != value:
        raise SystemExit(
          f"{flag} must be what the checkpoint was made with,"
          f" {found.get(flag)!r}, got {value!r}"
        )
