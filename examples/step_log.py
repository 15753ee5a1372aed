"""Numbers of every step in a file: a line of JSON each, also of resumed runs.

{"step": 1, "loss": 2.3, "seconds": 0.1, "sparsifier": {"density": 0.01, ..}}
"""

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

from train_loop import History

NAME = "steps.jsonl"


class StepLog:
  """The file of one run.

  Args:
    directory: Made if missing.
    start: Steps done before. Lines of later ones, of a run that ended before
      its checkpoint, go.

  Raises:
    ValueError: There is a file, and `start` is 0; or it lacks steps before.
  """

  def __init__(self, directory: str, start: int):
    self.path = Path(directory, NAME)
    if not start and self.path.exists():
      raise ValueError(f"must name a new directory, but {self.path} exists")
    self._made = not self.path.parent.exists()
    self.path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start:
      kept = _lines(self.path)[:start]
      if len(kept) < start:
        raise ValueError(
          f"must name the directory of the run that is resumed, but {self.path}"
          f" has {len(kept)} of its {start} steps"
        )
    self._file = open(self.path, "w", encoding="utf-8")
    self._file.writelines(kept)

  def write(self, step: int, history: History, **more: float) -> None:
    """Adds step number `step`, the last one of `history`."""
    line: dict[str, Any] = {
      "step": step,
      "loss": history.losses[-1],
      "seconds": history.seconds[-1],
      **more,
      **history.stats[-1],
    }
    self._file.write(json.dumps(finite(line)) + "\n")
    self._file.flush()

  def close(self, *, keep: bool) -> None:
    """Ends the file; of a run that cannot be resumed nothing is kept."""
    self._file.close()
    if keep:
      return
    self.path.unlink()
    if self._made:
      self.path.parent.rmdir()


def read(directory: str | Path) -> list[dict[str, Any]]:
  """What was written, step by step."""
  return [json.loads(line) for line in _lines(Path(directory, NAME))]


def finite(value: Any) -> Any:
  """JSON has no NaN: null stands for it."""
  if isinstance(value, Mapping):
    return {key: finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [finite(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _lines(path: Path) -> list[str]:
  if not path.is_file():
    return []
  with open(path, encoding="utf-8") as file:
    return [line for line in file if line.endswith("\n")]
