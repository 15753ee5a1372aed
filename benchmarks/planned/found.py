"""What a run has found out, and the file that it resumes from."""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks import interrupts
from benchmarks import record
from benchmarks.network import cells
from benchmarks.network import paired

# What numbers depend on, beside what is installed.
_CODE = (
  "zenjax/**/*.py",
  "benchmarks/planned/*.py",
  "benchmarks/network/common_start.py",
  "benchmarks/shared_compiler.py",
  "benchmarks/served.py",
  "benchmarks/netns.py",
)


class Key(NamedTuple):
  """One model between some hosts on links of one rate."""

  hosts: int
  rate: str
  model: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to synchronize, as predicted and as measured.

  Attributes:
    program: Ways with the same program were measured as one.
    predicted_s: Of a step; None of what no plan predicts.
    received_bytes: By a host in a step, as predicted.
    wrong: Elements that are not those of `pmean`, over hosts.
    compile_s: Of the host that compiles for all.
    plan: The planner's, as JSON without the machine; None of other ways.
  """

  program: str
  predicted_s: float | None = None
  received_bytes: float = 0.0
  wrong: int = 0
  compile_s: float = 0.0
  plan: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Section:
  """All that was found out about a key.

  Attributes:
    hosts: How many.
    rate: Of their links.
    model: Its name.
    repeats: Timed rounds that were asked for.
    compute_s: Of a step without any exchange.
    ways: By name.
    host_times_s: By program, of every round the seconds of each host.
  """

  hosts: int
  rate: str
  model: str
  repeats: int
  compute_s: float
  ways: dict[str, Way]
  host_times_s: dict[str, list[list[float]]]

  @property
  def key(self) -> Key:
    return Key(self.hosts, self.rate, self.model)

  def times_s(self, way: str) -> list[float]:
    """Of every round, the seconds until the last host was through."""
    return [max(x) for x in self.host_times_s[self.ways[way].program]]

  def median_s(self, way: str) -> float:
    return float(np.median(self.times_s(way)))

  def ratio(self, way: str, base: str) -> tuple[float, paired.Interval | None]:
    """Of the medians, and where it lies at 95 %."""
    times, others = self.times_s(way), self.times_s(base)
    ratio = self.median_s(way) / self.median_s(base)
    return ratio, paired.interval(times, others)

  def is_done(self, repeats: int) -> bool:
    """Whether there is nothing more to measure. What is wrong is tried anew."""
    rounds = {len(x) for x in self.host_times_s.values()}
    wrong = any(way.wrong for way in self.ways.values())
    return self.repeats == repeats and rounds == {repeats} and not wrong


@dataclasses.dataclass(slots=True)
class Found:
  """All that is in a file.

  Attributes:
    software: What has measured.
    topologies: Measured links, as JSON, by hosts and rate.
    sections: By key, in the order of measuring.
  """

  software: dict[str, Any]
  topologies: dict[tuple[int, str], str] = dataclasses.field(
    default_factory=dict
  )
  sections: dict[Key, Section] = dataclasses.field(default_factory=dict)

  def save(
    self, path: pathlib.Path, options: dict[str, Any], *, complete: bool
  ) -> None:
    """Writes all of it; what was there stays until all is written."""
    document = {
      "complete": complete,
      "environment": self.software,
      "options": options,
      "topologies": [
        {"hosts": hosts, "rate": rate, "topology": text}
        for (hosts, rate), text in self.topologies.items()
      ],
      "sections": [dataclasses.asdict(s) for s in self.sections.values()],
    }
    with interrupts.held():
      record.write_json(path, document)


def software(*, loopback: bool) -> dict[str, Any]:
  """What measures: versions, commit, code, and what joins the hosts."""
  place = "loopback" if loopback else "namespaces"
  code = cells.digest(_CODE)
  return record.software() | {"hosts": place, "code": code}


def read(path: pathlib.Path) -> Found:
  """What `path` holds.

  Raises:
    ValueError: The file is missing, broken or not of this command.
  """
  try:
    document = json.loads(path.read_text(encoding="utf-8"))
    found = Found(document["environment"])
    for x in document["topologies"]:
      found.topologies[x["hosts"], x["rate"]] = x["topology"]
    for x in document["sections"]:
      ways = {name: Way(**way) for name, way in x.pop("ways").items()}
      section = Section(ways=ways, **x)
      found.sections[section.key] = section
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{path} is not a whole file of this command ({type(error).__name__}:"
      f" {error}). Delete it or name another."
    ) from error
  return found


def load(path: pathlib.Path, now: dict[str, Any]) -> Found:
  """As `read`, to go on with; nothing if there is no file.

  Raises:
    ValueError: As `read`, or something else has measured it.
  """
  if not path.exists():
    return Found(now)
  found = read(path)
  cells.require_same(path, found.software, now)
  return found
