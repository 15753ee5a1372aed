"""What every host of `sparsified` runs: `python -m benchmarks.sparsified_host`.

Letters: `n` hosts, `N` parameters, `k` selected elements of all hosts.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax

from benchmarks import harness
from benchmarks import served
from benchmarks.planned.models import Model
from benchmarks.planned.programs import AXIS
from benchmarks.planned.programs import Place
from benchmarks.planned.programs import Program
from benchmarks.shared_compiler import SharedCompiler
import zenjax
from zenjax._src.core import wire
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import SparsifierState

_BATCHES = 4
# Until capacities are known, and until a controlled threshold has settled.
_WARM_UP, _SETTLED = 8, 100
# Of these, the last so many tell what a step sends.
_TOLD = 20
# float32 sums, and a learning rate that was multiplied with and divided by.
_RELATIVE = 1e-4
_RATE = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """What the variants share.

  Attributes:
    width: Of the three square layers.
    batch: Examples of a host.
    density: What is selected of all hosts together, by `exdyna` and `micro`.
    top: What each host selects by magnitude.
  """

  width: int
  batch: int
  density: float
  top: float


def _pmean(setting: Setting, capacities: Any) -> Any:
  del setting, capacities
  return optax.stateless(lambda grads, _: lax.pmean(grads, AXIS))


def _exdyna(setting: Setting, capacities: Any) -> Any:
  del capacities
  return zenjax.sparsify.exdyna(AXIS, setting.density)


def _micro(setting: Setting, capacities: Any) -> Any:
  del capacities
  return zenjax.sparsify.micro(AXIS, setting.density)


def _top(setting: Setting, capacities: Any) -> Any:
  top = zenjax.sparsify.top_k(setting.top, method="sampled")
  return optax.chain(
    zenjax.sparsify.error_feedback(top, AXIS),
    zenjax.zen_sync(AXIS, unit="element", capacities=capacities),
  )


@contextlib.contextmanager
def _slots_only() -> Iterator[None]:
  """Indices as numbers, where zenjax would send a bitmap for it is smaller."""
  with mock.patch.multiple(
    wire,
    index_words=lambda capacity, num_slots: capacity,
    encode_index=lambda slots, num_slots: slots.astype(jnp.uint32),
    decode_index=lambda words, capacity, num_slots: words.astype(jnp.int32),
  ):
    yield


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
  """How gradients become updates.

  Attributes:
    make: Of the setting and what to pin.
    pinned: Whether capacities are found by a rehearsal.
    tracing: Within which the step is traced.
    warm_up: Steps before those that are timed.
  """

  make: Callable[[Setting, Any], Any]
  pinned: bool = False
  tracing: Callable[[], Any] = contextlib.nullcontext
  warm_up: int = _WARM_UP


VARIANTS = {
  "none": _Variant(lambda setting, capacities: optax.identity()),
  "pmean": _Variant(_pmean),
  "exdyna": _Variant(_exdyna, warm_up=_SETTLED),
  "micro": _Variant(_micro, warm_up=_SETTLED),
  "top zen": _Variant(_top, pinned=True),
  "top zen, slots": _Variant(_top, pinned=True, tracing=_slots_only),
}


def model(setting: Setting, hosts: int) -> Model:
  """Three layers of `width x width`, random vectors in and out."""
  rng = np.random.default_rng(0)
  shape = (setting.width, setting.width)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  params = {f"w{i}": draw(*shape) * setting.width**-0.5 for i in range(3)}

  def loss(params, x, y):
    for name in sorted(params):
      x = jnp.tanh(x @ params[name])
    return jnp.mean((x - y) ** 2)

  size = (setting.batch * hosts, setting.width)
  return Model(
    params, loss, [(draw(*size), draw(*size)) for _ in range(_BATCHES)]
  )


class Host:
  """This host's share of the steps."""

  def __init__(self, compiler: SharedCompiler):
    self._compiler = compiler
    self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self._programs: list[Program] = []
    self._place: Place | None = None
    self._mean: np.ndarray | None = None

  def build(self, variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a variant, checks its first step, and warms it up."""
    known, made = VARIANTS[variant], Setting(**setting)
    self._width = made.width
    if self._place is None:
      self._place = Place(model(made, self._mesh.size), self._mesh)
      pmean = self._program(_pmean(made, None))
      self._mean = self._step_of(pmean)
      del pmean
    capacities = None
    if known.pinned:
      rehearsal = self._program(known.make(made, None))
      _take(rehearsal, _WARM_UP)
      capacities = zenjax.advise(rehearsal.state())
      del rehearsal
    with known.tracing():
      program = self._program(known.make(made, capacities))
    self._programs.append(program)
    wrong = 0 if variant == "none" else self._wrong(program)
    told = min(_TOLD, known.warm_up)
    _take(program, known.warm_up - told)
    facts = []
    for _ in range(told):
      program()
      facts.append(self._facts(program, variant))
    return {
      "wrong": wrong,
      "compile_s": program.compile_s,
      "facts": {
        key: float(np.mean([of_step[key] for of_step in facts]))
        for key in facts[0]
      },
    }

  def _program(self, tx: optax.GradientTransformation) -> Program:
    assert self._place is not None
    chain = optax.chain(tx, optax.sgd(_RATE))
    return Program(self._place, chain, False, self._compiler)

  def _step_of(self, program: Program) -> np.ndarray:
    """`[N]`, what the first step takes from the parameters over the rate."""
    before = _flat(program.params())
    program()
    return (before - _flat(program.params())) / _RATE

  def _wrong(self, program: Program) -> int:
    """Elements of which update and residuals are not all that there was."""
    assert self._mean is not None
    got = self._step_of(program) + _mean_residual(program.state(whole=True))
    far = np.abs(got - self._mean) > _RELATIVE * np.abs(self._mean).max()
    return int(np.sum(far))

  def _facts(self, program: Program, variant: str) -> dict[str, float]:
    n, size = self._mesh.size, 3 * self._width**2 * 4.0
    part = (n - 1) / n
    dense = 2 * part * size
    if variant in ("none", "pmean"):
      return {"wire_bytes": dense} if variant == "pmean" else {}
    found = zenjax.stats(program.state())
    told = found.get("sparsifier")
    if told:  # Values that all have to be summed, at `k` places.
      bound = dense * told["density"]
      return {
        "wire_bytes": told["wire_bytes"],
        "bound_bytes": bound,
        "density": told["density"],
      }
    leaves = found.values()
    rows = sum(x["num_rows"] for x in leaves)
    mean = lambda key: sum(x[key] * x["num_rows"] for x in leaves) / rows
    both = mean("density") + mean("union_density")
    return {
      "wire_bytes": sum(x["wire_bytes"] for x in leaves),
      "bound_bytes": part * both * size,
      "density": mean("density"),
      "rounds": max(x["rounds"] for x in leaves),
    }

  def step(self, number: int) -> float:
    """Takes a step of what was built so many builds after the first."""
    return harness.seconds_of(self._programs[number])


def _take(program: Program, steps: int) -> None:
  for _ in range(steps):
    program()


def _flat(tree: Any) -> np.ndarray:
  """`[N]` float64, as this host has it."""
  parts = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  return np.concatenate(parts)


def _mean_residual(state: Any) -> np.ndarray:
  """`[N]` float64 over hosts; 0 where nothing is kept."""
  kinds = ErrorFeedbackState | SparsifierState
  nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
  for node in nodes:
    if isinstance(node, SparsifierState):
      return np.asarray(node.residual, np.float64).mean(axis=0)
    if isinstance(node, ErrorFeedbackState):
      leaves: Mapping[str, Any] = node.leaves
      parts = [leaves[name].residual for name in sorted(leaves)]
      means = [np.asarray(x, np.float64).mean(axis=0) for x in parts]
      return np.concatenate([x.ravel() for x in means])
  return np.zeros(1)


def main() -> None:
  """Serves until stdin ends."""
  served.configure()
  served.serve(Host(served.join()))


if __name__ == "__main__":
  main()
