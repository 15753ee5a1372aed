"""`sparsified`: steps of a dense model between hosts, whole and sparsified.

Three layers of `width x width`; all hosts' selections are exchanged, and what
is not selected waits on its host.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import itertools
import math
import tempfile

from benchmarks import sparsified_host
from benchmarks import table
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.served import Served
from benchmarks.sparsified_host import Setting
from benchmarks.testbed import Testbed

_BUILD_S, _STEP_S = 1200.0, 300.0
MB = 1e6
NONE, DENSE = "none", "pmean"


def _fewer_bytes(result, peers):
  """Than `pmean`."""
  wire = result.facts.get("wire_bytes", math.nan)
  dense = peers[DENSE].facts["wire_bytes"] if DENSE in peers else math.nan
  return dense / wire


def _faster(result, peers):
  return table.median_s(peers, DENSE) / result.median_s


def _amdahl(result, peers):
  """How much faster it could be: bytes are saved, computation is not."""
  nothing, dense = (table.median_s(peers, x) for x in (NONE, DENSE))
  return dense / (nothing + (dense - nothing) / _fewer_bytes(result, peers))


def _over_bound(result, _):
  facts = result.facts
  return facts.get("wire_bytes", math.nan) / facts.get("bound_bytes", math.nan)


COLUMNS = (
  table.fact("density\n%", "density", ".3f", unit=0.01),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=MB),
  table.Column("wire/\nbound", _over_bound, ".2f"),
  table.Column("fewer\nbytes", _fewer_bytes, ".1f"),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  table.Column("times\nas fast", _faster, ".2f"),
  table.Column("Amdahl's\nbound", _amdahl, ".2f"),
)


@contextlib.contextmanager
def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
  """Every variant on hosts that are there while the context is.

  Raises:
    ValueError: There is no such variant.
    RuntimeError: This machine or user cannot have namespaces.
  """
  known = sparsified_host.VARIANTS
  names = options.variants or list(known)
  if unknown := sorted(set(names) - set(known)):
    raise ValueError(
      f"`--variants` must be among {', '.join(known)}, got {unknown[0]!r}."
    )
  setting = Setting(
    width=options.width,
    batch=options.batch,
    density=options.density,
    top=options.top,
  )
  rate = "unlimited" if options.loopback else options.rate
  bed = Testbed(options.hosts, rate, options.loopback)
  with contextlib.ExitStack() as stack:
    stack.enter_context(bed)
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    served = Served(bed, "benchmarks.sparsified_host", cache, keep_memory=True)
    built = itertools.count()
    size = 3 * setting.width**2
    group = f"{size:,} parameters, {options.hosts} hosts, {rate}"
    yield [
      Case(
        group=group, name=name, build=_building(served, built, name, setting)
      )
      for name in names
    ]


def _building(
  served: Served, built: Iterator[int], name: str, setting: Setting
) -> Callable[[], Built]:
  def build():
    number = next(built)
    replies = served.ask(
      "build",
      timeout=_BUILD_S,
      variant=name,
      setting=dataclasses.asdict(setting),
    )
    first = replies[0]
    return Built(
      # Until the last host has answered.
      run=lambda: served.ask("step", timeout=_STEP_S, number=number) and None,
      wrong=sum(reply["wrong"] for reply in replies),
      compile_s=first["compile_s"],
      facts=first["facts"],
    )

  return build
