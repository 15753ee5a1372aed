"""`step --hosts`: the same steps on hosts that links of a known rate join."""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import itertools
import tempfile

from benchmarks import step
from benchmarks import whole_step
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.served import Served
from benchmarks.testbed import Testbed

_BUILD_S, _STEP_S = 1200.0, 120.0


@contextlib.contextmanager
def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
  """As `step.cases`, of hosts that are there while the context is.

  Raises:
    ValueError: There is too little memory, or no such variant, rate or number
      of hosts.
    RuntimeError: This machine or user cannot have namespaces.
  """
  names = options.variants or list(whole_step.VARIANTS)
  step.check_memory(names, options, options.hosts)
  rate = options.rate or ("unlimited" if options.loopback else "1gbit")
  bed = Testbed(options.hosts, rate, options.loopback)
  with contextlib.ExitStack() as stack:
    stack.enter_context(bed)
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    served = Served(
      bed, "benchmarks.step_host", cache, keep_memory=options.keep_memory
    )
    built = itertools.count()
    group = f"{step.title(options)}, {options.hosts} hosts, {rate}"
    yield [
      Case(
        group=group,
        name=f"{name} {rows:,}",
        build=_building(
          served, built, name, whole_step.Setting.of(options, rows)
        ),
      )
      for rows, name in itertools.product(options.rows, names)
    ]


def _building(
  served: Served,
  built: Iterator[int],
  name: str,
  setting: whole_step.Setting,
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
