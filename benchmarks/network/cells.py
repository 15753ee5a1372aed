"""What a run has found out, cell by cell, and the file that it resumes from."""

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks import interrupts
from benchmarks import netns
from benchmarks import record

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# What numbers depend on, beside what is installed. Tables and plots may change.
_CODE = (
  "zenjax/**/*.py",
  "kernels/**/*.py",
  "benchmarks/network/collectives.py",
  "benchmarks/network/common_start.py",
  "benchmarks/network/exchange.py",
  "benchmarks/network/host.py",
  "benchmarks/network/local_work.py",
  "benchmarks/shared_compiler.py",
  "benchmarks/network/variants.py",
  "benchmarks/served.py",
  "benchmarks/ids.py",
  "benchmarks/netns.py",
  "benchmarks/workloads.py",
)
# What must be the same for two runs to share a file.
_SAME = ("python", "jax", "jaxlib", "numpy", "machine", "cores")


class Key(NamedTuple):
  """One variant of one workload on links of one rate between some hosts."""

  hosts: int
  rate: str
  workload: str
  variant: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Cell:
  """What was found out about a key; its fields are those in the file.

  Attributes:
    repeats: Timed rounds that were asked for.
    batches: Different batches that rounds go through in turn.
    wrong: Elements that differ from the float64 sum, over hosts and batches.
    compile_s: Of the host that compiles for all.
    wire_bytes: What zenjax says that a host receives, mean over batches.
    least_wire_bytes: Of the batch with the least.
    received_bytes: Of the busiest host by its interface, an exchange; NaN on
      loopback.
    facts: Of the workload: density, union_density, dense_bytes, bound_bytes.
    host_times_s: Of every round, the seconds of each host.
  """

  hosts: int
  rate: str
  workload: str
  variant: str
  repeats: int
  batches: int
  wrong: int
  compile_s: float
  wire_bytes: float
  least_wire_bytes: float
  received_bytes: float
  facts: dict[str, float]
  host_times_s: list[list[float]] = dataclasses.field(default_factory=list)

  @property
  def key(self) -> Key:
    return Key(self.hosts, self.rate, self.workload, self.variant)

  @property
  def times_s(self) -> list[float]:
    """Of every round, the seconds until the last host had its answer."""
    return [max(times) for times in self.host_times_s]

  @property
  def median_s(self) -> float:
    return float(np.median(self.times_s)) if self.host_times_s else math.nan

  @property
  def spread_s(self) -> float:
    """Half the distance between the quartiles."""
    if not self.host_times_s:
      return math.nan
    low, high = np.percentile(self.times_s, [25, 75])
    return float(high - low) / 2

  def is_done(self, repeats: int, batches: int) -> bool:
    """Whether there is nothing more to measure. What is wrong is tried anew."""
    whole = len(self.host_times_s) == self.repeats and not self.wrong
    return whole and (self.repeats, self.batches) == (repeats, batches)


@dataclasses.dataclass(slots=True)
class Findings:
  """All that is in a file.

  Attributes:
    software: What has measured: versions, machine, code.
    links: What `Testbed.probe` said, one a (hosts, rate).
    calibration: Single collectives, as `calibration.record` makes them.
    work: Seconds of each kind of local work, as `zenjax.planner.Work` has them,
      by number of hosts: until the last one is through, all at it together.
    cells: By key, in the order of measuring.
  """

  software: dict[str, Any]
  links: dict[tuple[int, str], dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  calibration: dict[tuple[int, str, str, int], dict[str, Any]] = (
    dataclasses.field(default_factory=dict)
  )
  work: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
  cells: dict[Key, Cell] = dataclasses.field(default_factory=dict)

  def add(self, cell: Cell) -> None:
    """Puts a cell in the place of any with its key."""
    self.cells[cell.key] = cell

  def sections(self) -> Iterator[tuple[tuple[str, int, str], list[Cell]]]:
    """The cells of every (workload, hosts, rate)."""
    sections: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in self.cells.values():
      section = (cell.workload, cell.hosts, cell.rate)
      sections.setdefault(section, []).append(cell)
    yield from sections.items()

  def save(
    self, path: pathlib.Path, options: dict[str, Any], *, complete: bool
  ) -> None:
    """Writes all of it; what was there stays until all is written."""
    document = {
      "complete": complete,
      "environment": self.software,
      "options": options,
      "links": list(self.links.values()),
      "calibration": list(self.calibration.values()),
      "work": {str(hosts): work for hosts, work in self.work.items()},
      "cells": [_record(cell) for cell in self.cells.values()],
    }
    with interrupts.held():
      record.write_json(path, document)


def least_s(cell: Cell) -> float:
  """Seconds that the link needs for the bytes that the variant declares."""
  limit = netns.RATES[cell.rate]
  return cell.least_wire_bytes / limit.bytes_per_s if limit else 0.0


def require_limit(cell: Cell, seconds: float) -> None:
  """Raises RuntimeError if an exchange took less than its bytes need."""
  least = least_s(cell)
  if seconds < least:
    raise RuntimeError(
      f"{cell.variant} on {cell.workload} between {cell.hosts} hosts took"
      f" {seconds * 1e3:.2f} ms, but its {cell.least_wire_bytes:,.0f} bytes"
      f" need {least * 1e3:.2f} ms at {cell.rate}: the testbed lends bandwidth,"
      " or the variant declares bytes that it does not send. No time of this"
      " run counts until it is known which."
    )


def software(*, loopback: bool, keep_memory: bool = False) -> dict[str, Any]:
  """What measures: versions, commit, code, and what joins the hosts."""
  place = "loopback" if loopback else "namespaces"
  if keep_memory:
    place += ", memory kept"
  return record.software() | {"hosts": place, "code": digest(_CODE)}


def load(path: pathlib.Path, now: dict[str, Any]) -> Findings:
  """What `path` holds; nothing if it is not there.

  Args:
    path: What `Findings.save` has written.
    now: What will go on measuring: `software()`.

  Raises:
    ValueError: The file is broken, or something else has measured it.
  """
  if not path.exists():
    return Findings(now)
  try:
    document = json.loads(path.read_text(encoding="utf-8"))
    then = document["environment"]
    found = Findings(now)
    for x in document["links"]:
      found.links[x["hosts"], x["rate"]] = x
    for x in document["calibration"]:
      found.calibration[x["hosts"], x["rate"], x["op"], x["words"]] = x
    found.work = {int(n): work for n, work in document["work"].items()}
    for x in document["cells"]:
      found.add(_cell(x))
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"`--json {path}` is not a whole file of this command"
      f" ({type(error).__name__}: {error}). Delete it or name another."
    ) from error
  require_same(path, then, now)
  return found


def require_same(
  path: pathlib.Path, then: dict[str, Any], now: dict[str, Any]
) -> None:
  """Raises ValueError where another `software()` has measured what is there."""
  different = [
    f"{key} {then.get(key)}, now {now[key]}"
    for key in (*_SAME, "hosts")
    if then.get(key) != now[key]
  ]
  if then.get("code") != now["code"]:
    commits = (str(x.get("git"))[:12] for x in (then, now))
    different.append("other code (commit {}, now {})".format(*commits))
  if different:
    raise ValueError(
      f"`--json {path}` holds what something else has measured:"
      f" {'; '.join(different)}. Delete it or name another."
    )


def _record(cell):
  summary = {
    "times_s": cell.times_s,
    "median_s": cell.median_s,
    "spread_s": cell.spread_s,
  }
  return dataclasses.asdict(cell) | summary


def _cell(saved):
  # A field that is missing is an error of the file: none has a default here.
  values = {f.name: saved[f.name] for f in dataclasses.fields(Cell)}
  if values["received_bytes"] is None:
    values["received_bytes"] = math.nan
  return Cell(**values)


def digest(globs: Sequence[str]) -> str:
  """Of the files that these match, names and contents."""
  paths = {p.resolve() for glob in globs for p in _ROOT.glob(glob)}
  digest = hashlib.sha256()
  for path in sorted(paths):
    name = path.relative_to(_ROOT).as_posix()
    text = path.read_bytes()
    digest.update(f"{name} {len(text)}\n".encode() + text)
  return digest.hexdigest()
