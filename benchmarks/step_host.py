"""What every host of `step --hosts` runs: `python -m benchmarks.step_host`."""

from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from benchmarks import harness
from benchmarks import served
from benchmarks import whole_step
from benchmarks.harness import Built
from benchmarks.shared_compiler import SharedCompiler
from benchmarks.variants import AXIS


class Host:
  """This host's share of the steps."""

  def __init__(self, compiler: SharedCompiler):
    self._compiler = compiler
    self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self._built: list[Built] = []

  def build(self, variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a variant and checks its parameters on this host."""
    setting_ = whole_step.Setting(**setting)
    built = whole_step.build(
      variant, setting_, self._mesh, self._compiler.compile
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
    assert run is not None  # As some of `benchmarks.kernels` have none.
    return harness.seconds_of(run)


def main() -> None:
  """Serves until stdin ends."""
  served.configure()
  served.serve(Host(served.join()))


if __name__ == "__main__":
  main()
