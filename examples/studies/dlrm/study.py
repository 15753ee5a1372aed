"""The click model as a study: AUC on the first rows of a log."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from examples.studies.common import flags as common
from examples.studies.common import plots
from examples.studies.common.study import Study
from examples.studies.common.trainer import Trainer
from examples.studies.dlrm.auc import auc
from examples.studies.dlrm.criteo import ClickLog
from examples.studies.dlrm.flags import OPTIMIZERS
from examples.studies.dlrm.model import Dlrm
from examples.studies.dlrm.model import log_loss
from examples.studies.dlrm.planted import Planted
from examples.studies.dlrm.rows import as_batch
from examples.studies.dlrm.rows import Batch
from examples.studies.dlrm.rows import table_rows


class Clicks(Study):
  """Rows of a click log: a file's, or made up."""

  unit, measure, form, table_form = "rows", "AUC", ".4f", ".4f"
  measured_on = "held-out AUC"
  panels = (
    plots.losses("row"),
    plots.measures("Held-out rows", "AUC"),
    plots.measures("Held-out rows", "AUC", by_time=True),
  )

  def __init__(self, flags: argparse.Namespace, devices: int):
    super().__init__(flags, devices)
    self._tables = table_rows(flags.scale)
    self._log = ClickLog(flags.data) if flags.data else Planted(flags.seed)
    self._held_out = self._load_held_out()

  def _load_held_out(self) -> Batch:
    flags, devices = self._flags, self._devices
    count = flags.eval_rows // devices * devices
    if not count:
      raise SystemExit(
        f"--eval-rows must be at least 1 for each of {devices} devices, got"
        f" {flags.eval_rows}"
      )
    try:
      rows = self._log.held_out(count)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data: {error}") from error
    clicks = int(rows.labels.sum())
    if clicks in (0, count):
      raise SystemExit(
        f"--eval-rows must hold out clicks and other rows, got {clicks} clicks"
        f" in {count} rows: hold out more"
      )
    print(
      f"{sum(self._tables):,} rows in {len(self._tables)} tables; {devices}"
      f" devices, {devices * flags.batch:,} rows of the log a step; {count:,}"
      f" held out, {clicks / count:.1%} of them clicks"
    )
    if isinstance(self._log, Planted):
      best = auc(rows.labels, self._log.logits(0, count))
      print(f"AUC that no model can pass but by chance: {best:.4f}")
    print("The first step compiles: on a CPU for a minute or two.", flush=True)
    return as_batch(rows, self._tables)

  def trainer(self, mesh: Mesh, seed: int, **how) -> Trainer:
    flags = self._flags
    make, _ = OPTIMIZERS[flags.optimizer]
    return Trainer(
      lambda: Dlrm(self._tables, flags.width, rngs=nnx.Rngs(seed)),
      log_loss,
      Dlrm.__call__,
      make(flags.lr),
      mesh,
      joined=True,
      **how,
    )

  def batches(
    self, devices: int, seed: int, first_step: int = 0
  ) -> Iterator[Batch]:
    del devices, seed  # A log that is made up has the seed.
    held, size = self._held_out.size, self._devices * self._flags.batch
    try:
      for rows in self._log.batches(held, size, first_step):
        yield as_batch(rows, self._tables)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data: {error}") from error

  def measured(self, trainer: Trainer) -> float:
    held_out = self._held_out
    logits = trainer.evaluate(held_out.numbers, held_out.ids)
    return auc(held_out.labels, logits)

  def settings(self) -> dict[str, object]:
    names = ("sync", "grads", "optimizer", "scale", "width", "batch", "lr")
    found = common.settings(self._flags, (*names, "seed", "eval_rows"))
    # The file may lie elsewhere by now.
    data = self._flags.data
    return found | {"--data": data and Path(data).name}
