"""Files that are there whole, or not at all; and the lines of a run's log."""

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
from pathlib import Path
import subprocess
import sys
from typing import Any

from examples.studies.common.loop import Run

LOG_NAME = "steps.jsonl"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
  """Gives a path to write to, which becomes `path` at the end, or is removed.

  Its name ends as `path` does.
  """
  partial = path.with_name(f".partial-{path.name}")
  try:
    yield partial
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def finite(value: Any) -> Any:
  """Returns `value` with None, which is null, for what JSON does not have."""
  if isinstance(value, Mapping):
    return {key: finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [finite(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def environment() -> dict[str, Any]:
  """Returns the command and the commit that make a file."""
  module = getattr(sys.modules["__main__"], "__spec__", None)
  name = module.name.removesuffix(".__main__") if module else sys.argv[0]
  return {
    "command": ["python", "-m", name, *sys.argv[1:]],
    "git": _git("rev-parse", "HEAD"),
    "git_dirty": bool(_git("status", "--porcelain")),
  }


def _git(*command: str) -> str | None:
  try:
    return subprocess.run(
      ["git", *command],
      cwd=Path(__file__).parent,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None  # No git on this machine, or no repository.


class StepLog:
  """A file with a line of JSON for every step, also of resumed runs.

  {"step": 1, "loss": 2.3, "seconds": 0.1, "compressed": {"density": 0.01, ..}}

  Args:
    directory: Made if missing.
    start: Steps done before. Lines of later ones, of a run that ended before
      its checkpoint, go.

  Raises:
    ValueError: There is a file, and `start` is 0; or it lacks steps before.
  """

  def __init__(self, directory: str, start: int):
    self.path = Path(directory, LOG_NAME)
    if not start and self.path.exists():
      raise ValueError(f"must name a new directory, but {self.path} exists")
    self._made = not self.path.parent.exists()
    self.path.parent.mkdir(parents=True, exist_ok=True)
    kept = _lines(self.path)[:start] if start else []
    if len(kept) < start:
      raise ValueError(
        f"must name the directory of the run that is resumed, but {self.path}"
        f" has {len(kept)} of its {start} steps"
      )
    self._file = open(self.path, "w", encoding="utf-8")
    self._file.writelines(kept)

  def write(self, run: Run, **more: float) -> None:
    """Adds the last step of `run`, and `more` numbers of it."""
    line: dict[str, Any] = {
      "step": run.done,
      "loss": run.losses[-1],
      "seconds": run.seconds[-1],
      **more,
      **run.stats[-1],
    }
    self._file.write(json.dumps(finite(line)) + "\n")
    self._file.flush()

  def close(self, *, keep: bool) -> None:
    """Ends the file, and removes it unless it is to be kept."""
    self._file.close()
    if keep:
      return
    self.path.unlink()
    if self._made:
      self.path.parent.rmdir()


def read_log(directory: str | Path) -> list[dict[str, Any]]:
  """Returns what was written, step by step."""
  return [json.loads(line) for line in _lines(Path(directory, LOG_NAME))]


def _lines(path: Path) -> list[str]:
  if not path.is_file():
    return []
  with open(path, encoding="utf-8") as file:
    return [line for line in file if line.endswith("\n")]
