"""The file of a study: cells that are done are not run again."""

from collections.abc import Mapping
import json
import os
from pathlib import Path
from typing import Any

import jax
from study_cells import Cell


class StudyFile:
  """Cells of one task, in memory, and in a file if there is one.

  Args:
    path: What is gone on from, if it exists; None for memory alone.
    task: "lm" or "cnn".
    options: What all cells must share.

  Raises:
    ValueError: The file is none of a study, or was made with other options.
  """

  def __init__(self, path: Path | None, task: str, options: Mapping[str, Any]):
    self._path = path
    self._document = {
      "task": task,
      "jax": jax.__version__,
      "cores": os.cpu_count(),
      "options": dict(options),
      "cells": [],
    }
    if path and path.exists():
      self._read(path)

  @property
  def cells(self) -> list[dict[str, Any]]:
    """All records."""
    return self._document["cells"]

  def find(self, cell: Cell) -> dict[str, Any] | None:
    """The record of a cell, if it is done."""
    for found in self.cells:
      if all(found[name] == getattr(cell, name) for name in Cell.__slots__):
        return found
    return None

  def add(self, record: dict[str, Any]) -> None:
    """Keeps a record; the file is whole at any time."""
    self.cells.append(record)
    if self._path is None:
      return
    self._path.parent.mkdir(parents=True, exist_ok=True)
    partial = self._path.with_name(f".partial-{self._path.name}")
    try:
      partial.write_text(self._text(), encoding="utf-8")
      partial.replace(self._path)
    finally:
      partial.unlink(missing_ok=True)

  def _text(self) -> str:
    """A line for each cell, so that files can be compared."""
    head = {k: v for k, v in self._document.items() if k != "cells"}
    cells = ",\n".join(json.dumps(cell) for cell in self.cells)
    return f'{json.dumps(head)[:-1]}, "cells": [\n{cells}\n]}}\n'

  def _read(self, path: Path) -> None:
    try:
      found = json.loads(path.read_text(encoding="utf-8"))
      made_with = {"task": found["task"], "jax": found["jax"]}
      made_with |= found["options"]
      self._document["cores"] = found["cores"]
      cells = found["cells"]
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(
        f"must name a study's file or a new one, but {path} is none: {error!r}"
      ) from error
    now = {"task": self._document["task"], "jax": self._document["jax"]}
    now |= self._document["options"]
    for name, value in now.items():
      if made_with.get(name) != value:
        raise ValueError(
          f"must name a new file, or one of the same study: {path} was made"
          f" with {name} {made_with.get(name)!r}, got {value!r}"
        )
    self._document["cells"] = cells
