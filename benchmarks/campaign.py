"""Measurements between hosts: cells in a file, resumed, by turns.

A campaign is a grid of cells. Every host of a testbed runs one program
(`testbed.served`), which is asked for one thing at a time. What was measured is
saved as it goes, so that the same command goes on from its file. Programs take
turns within a round, so that whatever else the machine does falls on all of
them, and sample `i` of each is of round `i` and of the same batch.
"""

import abc
import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from benchmarks import harness
from benchmarks import record
from benchmarks.testbed import interrupts
from benchmarks.testbed import testbed
from benchmarks.testbed.served import Served
from benchmarks.testbed.testbed import Testbed

T = TypeVar("T")
CALL_S = 300.0
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# What must be the same for two runs to share a file.
_SAME = ("python", "jax", "jaxlib", "numpy", "machine", "cores", "hosts")
_DRAWS = 10_000
_PERCENTILES = (2.5, 97.5)
# Of fewer rounds even the range of all ratios holds the true one in less than
# 15 of 16 cases (a sign test), and a resampled interval claims more.
LEAST_ROUNDS = 5


def times_s(host_times_s: Sequence[Sequence[float]]) -> list[float]:
  """Returns of every round the seconds until the last host was through."""
  return [max(times) for times in host_times_s]


class Interval(NamedTuple):
  """An interval in which a ratio lies, at 95 %."""

  low: float
  high: float


class Ratio(NamedTuple):
  """Two programs' times, the first over the second."""

  median: float  # The ratio of their medians.
  interval: Interval | None  # None of too few rounds.

  def surely_above(self, limit: float) -> bool:
    return self.interval is not None and self.interval.low > limit

  def surely_within(self, limit: float) -> bool:
    return self.interval is not None and self.interval.high <= limit

  def __str__(self) -> str:
    if self.interval is None:
      return f"{self.median:.2f}x"
    return "{:.2f}x ({:.2f} to {:.2f})".format(self.median, *self.interval)


def ratio(times: Sequence[float], base: Sequence[float]) -> Ratio:
  """Returns how `times` compare with `base`, round by round."""
  median = float(np.median(times) / np.median(base))
  return Ratio(median, interval(times, base))


def interval(times: Sequence[float], base: Sequence[float]) -> Interval | None:
  """Returns where `median(times) / median(base)` lies: rounds drawn as pairs.

  The percentile bootstrap, always with the same draws. At 5 rounds it is nearly
  the range of the ratios: of normal and of skewed noise it held the true ratio
  in 93 to 98 of 100 cases at 5 to 20 rounds, where that of mean logarithms held
  it in 80 to 93. Programs that a later run has added to a file are no such
  pairs, and the file does not say which. Where a run was interrupted in the
  middle of a round one program has a sample more, which is left out. None where
  there are fewer than `LEAST_ROUNDS` pairs.
  """
  rounds = min(len(times), len(base))
  if rounds < LEAST_ROUNDS:
    return None
  rng = np.random.default_rng(0)
  drawn = rng.integers(0, rounds, (_DRAWS, rounds))
  over, under = (np.median(np.asarray(x)[drawn], 1) for x in (times, base))
  low, high = np.percentile(over / under, _PERCENTILES)
  return Interval(float(low), float(high))


class Timed:
  """A cell whose programs took turns."""

  __slots__ = ()
  host_times_s: dict[str, list[list[float]]]  # [round][host].
  ways: Any  # By name, each with its `program`.

  def right(self) -> list[str]:
    """Returns the programs that are not wrong, once each."""
    ways = self.ways.values()
    return list(dict.fromkeys(way.program for way in ways if not way.wrong))

  def times_s(self, program: str) -> list[float]:
    """Returns of every round the seconds until the last host was through."""
    return times_s(self.host_times_s.get(program, []))

  def median_s(self, program: str) -> float:
    """Returns NaN where it was not timed."""
    return harness.median(self.times_s(program))

  def over(self, program: str, base: str) -> Ratio:
    """Returns how a program's times compare with those of another."""
    return ratio(self.times_s(program), self.times_s(base))


@dataclasses.dataclass(slots=True)
class Findings(abc.ABC):
  """All that is in a file."""

  environment: dict[str, Any]  # What has measured: versions, machine, code.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  complete: bool = False

  @abc.abstractmethod
  def contents(self) -> dict[str, Any]:
    """Returns what was found, as JSON holds it."""

  @classmethod
  @abc.abstractmethod
  def parsed(cls, document: dict[str, Any]) -> Self:
    """Returns what `save` has written; any error if it is something else."""

  def save(self, path: pathlib.Path) -> None:
    """Writes all of it; what was there stays until all is written."""
    names = ("complete", "environment", "options")
    document = {name: getattr(self, name) for name in names}
    with interrupts.held():
      record.write_json(path, document | self.contents())

  @classmethod
  def read(cls, path: pathlib.Path) -> Self:
    """Returns what is in a file; ValueError if it is none of this command's."""
    try:
      return cls.parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{path} is not a whole file of this command ({type(error).__name__}:"
        f" {error}). Delete it or name another."
      ) from error

  @classmethod
  def load(cls, path: pathlib.Path | None, now: dict[str, Any]) -> Self:
    """Returns as `read` what a run goes on with; nothing if there is no file.

    ValueError also if something else than `now` has measured it.
    """
    if path is None or not path.exists():
      return cls(now)
    found = cls.read(path)
    then, found.environment = found.environment, now
    other = [key for key in _SAME if then.get(key) != now[key]]
    different = [f"{key} {then.get(key)}, now {now[key]}" for key in other]
    if then.get("code") != now["code"]:
      commits = (str(x.get("git"))[:12] for x in (then, now))
      different.append("other code (commit {}, now {})".format(*commits))
    if different:
      raise ValueError(
        f"`--json {path}` holds what something else has measured:"
        f" {'; '.join(different)}. Delete it or name another."
      )
    return found


def software(
  code: Sequence[str], *, loopback: bool, keep_memory: bool = False
) -> dict[str, Any]:
  """Returns what measures: versions, commit, code, what joins the hosts.

  `code` has globs of files that numbers depend on, beside what is installed.
  """
  place = "loopback" if loopback else "namespaces"
  place += ", memory kept" if keep_memory else ""
  digest = hashlib.sha256()
  for path in sorted({p.resolve() for glob in code for p in _ROOT.glob(glob)}):
    text = path.read_bytes()
    name = path.relative_to(_ROOT).as_posix()
    digest.update(f"{name} {len(text)}\n".encode() + text)
  return record.software() | {"hosts": place, "code": digest.hexdigest()}


def asked(
  options: argparse.Namespace, defaults: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[Any, ...]]:
  """Returns values of the arguments in `defaults`, once each, in order."""
  rates = {"rates": ("unlimited",)} if options.loopback else {}
  return {
    name: tuple(dict.fromkeys(getattr(options, name) or values))
    for name, values in {**defaults, **rates}.items()
  }


class Campaign(abc.ABC):
  """One run of a command that measures between hosts."""

  resumes = True  # Whether a run goes on from its file.
  options: argparse.Namespace
  found: Any  # What was found so far, `Findings`.

  @abc.abstractmethod
  def measure(self) -> None:
    """Measures what is missing; RuntimeError if a host dies or is silent."""

  @abc.abstractmethod
  def complete(self) -> bool:
    """Returns whether nothing is missing."""

  @abc.abstractmethod
  def show(self) -> None:
    """Prints what was found."""

  @abc.abstractmethod
  def failed(self) -> bool:
    """Returns whether something found is wrong or harmful."""

  def title(self) -> str:
    """Returns the command and the machine in words."""
    place = "processes" if self.options.loopback else "network namespaces"
    on = f"{os.cpu_count()} cores, JAX {self.found.environment['jax']}"
    return f"{self.options.command}: hosts simulated by {place} on {on}"

  def save(self) -> None:
    """Writes what was found so far, if a file was asked for."""
    if self.options.json:
      self.found.options = record.settings(self.options)
      self.found.complete = self.complete()
      self.found.save(self.options.json)

  def run(self) -> int:
    """Measures, saves, prints; returns the exit status."""
    status, last_words = 0, ""
    try:
      self.save()  # A file that cannot be written ends the run here.
      self.measure()
    except KeyboardInterrupt:
      status, last_words = 130, "Interrupted: this is what was measured."
      if self.options.json and self.resumes:
        last_words += " The same command goes on from there."
    except RuntimeError as error:
      status, last_words = 1, str(error)
    finally:
      self.save()
    self.show()
    if self.options.json:
      print(f"Saved {self.options.json}")
    if last_words:
      print(last_words, file=sys.stderr)
    return status or int(self.failed())


def require(options, hosts: Sequence[int], rates: Sequence[str]) -> None:
  """Raises ValueError or RuntimeError if there can be no such testbeds."""
  for count, rate in itertools.product(hosts, rates):
    testbed.require(count, rate, options.loopback)


@contextlib.contextmanager
def hosts(
  count: int,
  module: str,
  *,
  loopback: bool,
  rate: str = "unlimited",
  keep_memory: bool = True,
  one_gpu: bool = False,
) -> Iterator[Served]:
  """Yields hosts that run a module of `benchmarks`."""
  how = {"keep_memory": keep_memory, "one_gpu": one_gpu}
  with (
    tempfile.TemporaryDirectory(prefix="zenjax-hosts-") as cache,
    Testbed(count, rate, loopback) as bed,
  ):
    yield Served(bed, f"benchmarks.{module}", cache, **how)


def turns(names: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
  """Yields round after round, all names in each; round -1 is not timed."""
  for turn in range(-1, repeats):
    for i in harness.shuffled(len(names), turn):
      yield turn, names[i]


def compute_s(served: Served, programs: Sequence[str], rounds: int) -> float:
  """Returns the median seconds of a step of the last of programs by turns."""
  seconds = []
  for _ in range(1 + rounds):
    times = [served.ask("time", timeout=CALL_S, program=p) for p in programs]
    seconds.append(max(times[-1]))
  return harness.median(seconds[1:])


def time_programs(
  served: Served, cell: Timed, programs: Sequence[str], repeats: int
) -> Iterator[int]:
  """Times a step of every program in each round; yields the round's number.

  Hosts have built the programs; `cell` gets the times as they come.
  """
  cell.host_times_s = times = {program: [] for program in programs}
  for turn, program in turns(programs, repeats):
    yield turn
    seconds = served.ask("time", timeout=CALL_S, program=program)
    if turn >= 0:
      times[program].append(seconds)


@contextlib.contextmanager
def cases(
  module: str,
  options: argparse.Namespace,
  rate: str,
  group: str,
  arguments: Mapping[str, dict[str, Any]],
  *,
  keep_memory: bool = True,
) -> Iterator[list[harness.Case]]:
  """Yields cases that hosts build and step while the context is.

  Of each case `arguments` has what the `build` of `module` gets on every host,
  `group` names what they have in common.
  """
  loopback, numbers = options.loopback, itertools.count()

  def build(values):
    number = next(numbers)
    replies = served.ask("build", **values)
    return harness.Built(
      # Until the last host has answered.
      run=lambda: served.ask("step", timeout=CALL_S, number=number) and None,
      wrong=sum(reply["wrong"] for reply in replies),
      compile_s=replies[0]["compile_s"],
      facts=replies[0]["facts"],
    )

  how = {"keep_memory": keep_memory, "one_gpu": options.one_gpu}
  with hosts(
    options.hosts, module, loopback=loopback, rate=rate, **how
  ) as served:
    kind = served.ask("device")[0]
    on = f" on one {kind}" if options.one_gpu else ""
    group = f"{group}, {options.hosts} simulated hosts{on}, {rate}"
    yield [
      harness.case(group, name, build, values)
      for name, values in arguments.items()
    ]
