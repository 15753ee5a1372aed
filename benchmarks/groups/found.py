"""What a run has found out, and the file that tells it."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from benchmarks import interrupts
from benchmarks import record
from benchmarks.groups import ways
from benchmarks.groups.simulated import Simulated
from benchmarks.groups.ways import Stops
from benchmarks.network import paired
from benchmarks.network.paired import Interval


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to group.

  Attributes:
    stops: After which leaves an exchange leaves.
    exchanges_s: What its exchanges should take.
    wrong: Parameters that are not those of one exchange, over hosts, or that
      differ between hosts.
    compile_s: Of the host that compiles for all.
    told: What zen_sync counts of the last step.
  """

  stops: Stops
  exchanges_s: float
  wrong: int = 0
  compile_s: float = 0.0
  told: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def program(self) -> str:
    """Ways with the same program were measured as one."""
    return ways.program(self.stops)


@dataclasses.dataclass(slots=True, kw_only=True)
class Section:
  """All that was found out about links of one rate.

  Attributes:
    rate: Its name.
    topology: The links, measured, as JSON.
    ways: By name.
    host_times_s: By program, of every round the seconds of each host; "none"
      is a step without the exchanges.
  """

  rate: str
  topology: str
  ways: dict[str, Way]
  host_times_s: dict[str, list[list[float]]]

  def times_s(self, program: str) -> list[float]:
    """Of every round, the seconds until the last host was through."""
    return [max(x) for x in self.host_times_s.get(program, [])]

  def median_s(self, program: str) -> float:
    """NaN where it was not timed."""
    times = self.times_s(program)
    return float(np.median(times)) if times else float("nan")

  def best(self) -> str | None:
    """The program with the least median; None where there is none."""
    programs = {way.program for way in self.ways.values()}
    timed = [x for x in programs if self.times_s(x)]
    return min(timed, key=self.median_s, default=None)

  def over(self, program: str, base: str) -> tuple[float, Interval | None]:
    """Of the medians, and where their ratio lies at 95 %."""
    ratio = self.median_s(program) / self.median_s(base)
    times = self.times_s(program), self.times_s(base)
    return ratio, paired.interval(*times)


@dataclasses.dataclass(slots=True, kw_only=True)
class Found:
  """All that is in a file.

  Attributes:
    environment: What has measured.
    options: What it was asked.
    complete: Whether nothing is missing.
    lost: Elements that are in no update and no residual after a first step.
    leaves: Those that are compressed, as the backward pass completes them.
    sections: In the order of measuring.
    simulated: On machines that are not there.
  """

  environment: dict[str, Any]
  options: dict[str, Any]
  complete: bool = False
  lost: int = 0
  leaves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  sections: list[Section] = dataclasses.field(default_factory=list)
  simulated: list[Simulated] = dataclasses.field(default_factory=list)

  @property
  def wrong(self) -> int:
    """Elements of all answers together."""
    every = [way for x in self.sections for way in x.ways.values()]
    return self.lost + sum(way.wrong for way in every)

  def save(self, path: pathlib.Path) -> None:
    """Writes all of it; what was there stays until all is written."""
    with interrupts.held():
      record.write_json(path, dataclasses.asdict(self))


def read(path: pathlib.Path) -> Found:
  """What `path` holds.

  Raises:
    ValueError: The file is missing, broken or not of this command.
  """
  try:
    fields = json.loads(path.read_text(encoding="utf-8"))
    sections = [_section(x) for x in fields.pop("sections")]
    simulated = simulated_of(fields.pop("simulated"))
    return Found(**fields, sections=sections, simulated=simulated)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{path} is not a whole file of this command ({type(error).__name__}:"
      f" {error}). Delete it or name another."
    ) from error


def _section(fields: dict[str, Any]) -> Section:
  known = fields.pop("ways")
  for way in known.values():
    way["stops"] = tuple(way["stops"])
  return Section(ways={k: Way(**x) for k, x in known.items()}, **fields)


def simulated_of(told: list[dict[str, Any]]) -> list[Simulated]:
  """Of what JSON makes lists of."""
  tuples = ("cuts_s", "mergecomp", "search")
  listed: list[dict[str, Any]] = [
    {k: tuple(v) if k in tuples else v for k, v in x.items()} for x in told
  ]
  return [Simulated(**x) for x in listed]
