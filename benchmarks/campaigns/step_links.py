"""`step --hosts`: the same steps on hosts that links of a known rate join.

Every host runs `python -m benchmarks.campaigns.step_links`.
"""

import argparse
from contextlib import AbstractContextManager
import dataclasses
import itertools
from typing import Any

from benchmarks import campaign
from benchmarks import harness
from benchmarks.cases import step
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.testbed import served
from benchmarks.testbed.served import SharedCompiler

COLUMNS = step.COLUMNS


def cases(
  options: argparse.Namespace,
) -> AbstractContextManager[list[Case]]:
  """Returns a context that yields cases as `step.cases` does.

  Raises:
    ValueError: There is too little memory, or no such variant, rate or number
      of hosts.
    RuntimeError: This machine or user cannot have namespaces.
  """
  names = options.variants or list(step.VARIANTS)
  step.check_memory(names, options, options.hosts)
  arguments = {
    f"{name} {rows:,}": {
      "variant": name,
      "setting": dataclasses.asdict(step.Setting.of(options, rows)),
    }
    for rows, name in itertools.product(options.rows, names)
  }
  return campaign.cases(
    "step_links",
    options,
    options.rate or ("unlimited" if options.loopback else "1gbit"),
    step.title(options),
    arguments,
    keep_memory=options.keep_memory,
  )


class _Worker(served.Worker):
  """This host's share of the steps."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    super().__init__(compiler, epoch)
    self._built: list[Built] = []

  def build(self, variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a variant and checks its parameters on this host."""
    built = step.build(
      variant, step.Setting(**setting), self.mesh, self.compiler.compile
    )
    self._built.append(built)
    return {
      "wrong": built.wrong,
      "compile_s": built.compile_s,
      "facts": built.facts,
    }

  def step(self, number: int) -> float:
    """Takes a step of what was built so many builds after the first."""
    run = self._built[number].run
    assert run is not None  # As some of `benchmarks.cases.kernels` have none.
    return harness.seconds_of(run)


if __name__ == "__main__":
  served.main(_Worker)
