"""`step --hosts`: the same steps on hosts that links of a known rate join.

Every host runs `python -m benchmarks.campaigns.step_links`.
"""

import argparse
from contextlib import AbstractContextManager
import dataclasses
import itertools
from typing import Any

from benchmarks import campaign
from benchmarks.cases import step
from benchmarks.harness import Case
from benchmarks.testbed import served

COLUMNS = step.COLUMNS


def cases(options: argparse.Namespace) -> AbstractContextManager[list[Case]]:
  """Returns a context that yields cases as `step.cases` does."""
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

  def build(self, variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a variant and checks its parameters on this host."""
    built = step.build(
      variant, step.Setting(**setting), self.mesh, self.compiler.compile
    )
    assert built.run is not None  # As some of `cases.kernels` have none.
    self.cases.append(built.run)
    names = ("wrong", "compile_s", "facts")
    return {name: getattr(built, name) for name in names}


if __name__ == "__main__":
  served.main(_Worker)
