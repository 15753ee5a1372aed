"""Records which rows of each sparse table's gradient every device touched.

`zenjax.traces` says what the files hold.
"""

from typing import Any

import jax

import zenjax
from zenjax import traces


class Recorder:
  """Writes the first steps of a run as a trace.

  Args:
    directory: Must be missing or empty; made with the first step.
    steps: How many to record.

  Raises:
    ValueError: `directory` holds files.
  """

  def __init__(self, directory: str, steps: int):
    traces.check_free(directory)
    self._directory = directory
    self._steps = steps
    self._recorder: zenjax.planner.Recorder | None = None

  def start(self, params: Any) -> None:
    """Finds the tables; before the first step is traced."""
    try:
      self._recorder = zenjax.planner.record(
        self._directory, params, steps=self._steps
      )
    except ValueError as error:
      raise SystemExit(
        f"--trace: {error} Here: raise --vocab or lower --width"
      ) from error

  @property
  def wants_more(self) -> bool:
    return self._recorder is None or self._recorder.wants_more

  def rows(self, grads: Any) -> dict[str, jax.Array]:
    """Within the step: which rows of local gradients are not zero, in bits."""
    return self._started.rows(grads)

  def write(self, packed: dict[str, jax.Array]) -> None:
    """Writes one step: what `rows` gave on all devices."""
    self._started.write(packed)

  def close(self) -> None:
    """Ends the trace, also where fewer steps were taken than announced."""
    done = self._recorder.close() if self._recorder else 0
    if done:
      print(f"trace of {done} steps: {self._directory}")

  @property
  def _started(self) -> zenjax.planner.Recorder:
    assert self._recorder is not None  # The trainer starts it.
    return self._recorder
