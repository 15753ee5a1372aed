"""The file that a run leaves: raw samples, and what produced them."""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax
import jaxlib.version
import numpy as np

from benchmarks.harness import Result


def finish(
  options: argparse.Namespace,
  results: Sequence[Result],
  *,
  complete: bool,
  told: dict[str, Any] | None = None,
) -> int:
  """Saves every sample, and `told` with them, if a file is wanted.

  Returns 1 where an answer is wrong, 130 after Ctrl-C.
  """
  if not complete:
    print("Interrupted: this is what was measured until then.")
  kept = [
    dataclasses.asdict(r) | {"median_s": r.median_s, "spread_s": r.spread_s}
    for r in results
  ]
  document = {"complete": complete, "environment": environment()}
  save(options, document | (told or {}) | {"results": kept})
  if not complete:
    return 130
  return int(any(result.wrong for result in results))


def settings(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of a command, as JSON holds them."""
  return {
    name: str(value) if isinstance(value, pathlib.Path) else value
    for name, value in vars(options).items()
  }


def save(options: argparse.Namespace, document: dict[str, Any]) -> None:
  """Writes what a command has counted, and of whom, if a file is wanted."""
  if options.json:
    told = {"environment": software(), "options": settings(options)}
    write_json(options.json, told | document)
    print(f"Saved {options.json}")


def write_json(path: pathlib.Path, document: dict[str, Any]) -> None:
  """Writes `document`; the file is never there in part."""
  # NaN is not JSON: what does not apply is null.
  text = json.dumps(_finite(document), indent=1, allow_nan=False)
  with whole(path) as partial:
    partial.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A file to write that takes the place of `path` when it is whole."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".partial-{path.name}")
  try:
    yield partial
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def _finite(x):
  if isinstance(x, dict):
    return {key: _finite(value) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [_finite(value) for value in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x


def environment() -> dict[str, Any]:
  """Versions, devices, commit and command."""
  device = jax.devices()[0]
  return software() | {
    "platform": device.platform,
    "device_kind": device.device_kind,
    "devices": jax.device_count(),
  }


def software() -> dict[str, Any]:
  """Versions, machine, commit and command: what starts no device."""
  return {
    "command": ["python", "-m", "benchmarks.run", *sys.argv[1:]],
    "git": _git("rev-parse", "HEAD"),
    "git_dirty": bool(_git("status", "--porcelain")),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "numpy": np.__version__,
    "machine": platform.machine(),
    "cores": os.cpu_count(),
  }


def _git(*command):
  where = pathlib.Path(__file__).parent
  try:
    return subprocess.run(
      ["git", *command], cwd=where, capture_output=True, text=True, check=True
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None  # No git on this machine, or no repository.
