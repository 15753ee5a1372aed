"""A whole training step on one table, and what it must leave behind.

Letters: `n` devices, `T` look-ups a device, `R` rows, `D` width.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import compiled_step
from benchmarks import oracle
from benchmarks.harness import Built
from benchmarks.variants import AXIS
import zenjax

_RATE = 0.5
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
  "adam": lambda: optax.adam(_RATE),
  "adagrad": lambda: optax.adagrad(_RATE, initial_accumulator_value=0.0),
  "row_adagrad": lambda: zenjax.rows.row_adagrad(_RATE),
  "sgd": lambda: optax.sgd(_RATE),
}
OPTIMIZERS = tuple(_OPTIMIZERS)
# Of a table's size beside the parameters.
_STATES = {"adam": 2.0, "adagrad": 1.0, "row_adagrad": 0.1, "sgd": 0.0}
# float32 over two steps of an optimizer, against float64.
_RELATIVE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """What the variants on one table share."""

  rows: int
  width: int
  look_ups: int
  distinct: int  # rows that ids are drawn from
  optimizer: str
  batches: int

  @classmethod
  def of(cls, options: argparse.Namespace, rows: int) -> Self:
    """Of a table with so many rows."""
    return cls(
      rows=rows,
      width=options.width,
      look_ups=options.look_ups,
      distinct=min(options.rows),
      optimizer=options.optimizer,
      batches=options.batches,
    )


def _pmean():
  mean = functools.partial(jax.lax.pmean, axis_name=AXIS)
  return optax.stateless(lambda grads, _: jax.tree.map(mean, grads))


def _dense(inner, capacities):
  del capacities
  return optax.chain(_pmean(), inner)


def _zen(inner, capacities):
  sync = zenjax.zen_sync(AXIS, sparse=True, capacities=capacities)
  return optax.chain(sync, inner)


def _rows(inner, capacities):
  return _zen(zenjax.lazy_rows(inner), capacities)


def _owners(inner, capacities):
  return zenjax.owner_update(inner, AXIS, sparse=True, capacities=capacities)


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
  """How a step comes by its update.

  Attributes:
    transformation: Of an optimizer and the capacities to pin.
    rows: Whether gradients are SparseRows.
    pinned: Whether capacities are found by a rehearsal.
    whole_state: Whether every device holds the optimizer's state of all rows.
  """

  transformation: Callable[[Any, Any], Any]
  rows: bool
  pinned: bool = False
  whole_state: bool = True


VARIANTS = {
  "dense": _Variant(_dense, rows=False),
  "zen": _Variant(_zen, rows=False),
  "rows": _Variant(_rows, rows=True),
  "rows-pinned": _Variant(_rows, rows=True, pinned=True),
  "owners": _Variant(_owners, rows=True, whole_state=False),
}


def tables_alive(name: str, optimizer: str, devices: int) -> float:
  """Arrays of the table's size that a device needs, parameters included."""
  if name not in VARIANTS:
    raise ValueError(
      f"`--variants` must be among {', '.join(VARIANTS)}, got {name!r}."
    )
  variant = VARIANTS[name]
  state = _STATES[optimizer] / (1 if variant.whole_state else devices)
  return 1 + state + (0.1 if variant.rows else 2)


# Lowered -> compiled, and the seconds that took.
Compile = Callable[[jax.stages.Lowered], tuple[jax.stages.Compiled, float]]


def _compile_here(lowered):
  start = time.perf_counter()
  return lowered.compile(), time.perf_counter() - start


def build(
  name: str, setting: Setting, mesh: Mesh, compile: Compile = _compile_here
) -> Built:
  """Compiles a variant and checks the parameters after two steps."""
  variant = VARIANTS[name]
  capacities = None
  if variant.pinned:
    rehearsal = _Runner(variant, setting, mesh, compile, None)
    for _ in range(setting.batches):
      rehearsal()
    capacities = zenjax.advise(rehearsal.state)
    del rehearsal
  runner = _Runner(variant, setting, mesh, compile, capacities)
  wrong = runner.check()
  usage: Any = runner.compiled.memory_analysis()
  facts = {
    "state_bytes": float(usage.argument_size_in_bytes),
    "temporary": float(usage.temp_size_in_bytes),
    "wire_bytes": runner.wire_bytes(),
  }
  return Built(run=runner, wrong=wrong, compile_s=runner.seconds, facts=facts)


class _Runner:
  """A compiled step that hands its state to the next."""

  def __init__(self, variant, setting, mesh, compile, capacities):
    self._setting, self._mesh = setting, mesh
    inner = _OPTIMIZERS[setting.optimizer]()
    tx = variant.transformation(inner, capacities)
    everywhere = NamedSharding(mesh, P())
    make = jax.jit(
      lambda: jnp.zeros((setting.rows, setting.width)), out_shardings=everywhere
    )
    self.params = make()
    self.state = zenjax.init(tx, self.params, mesh, AXIS)
    self._drawn = [_draw(setting, mesh.size, s) for s in range(setting.batches)]
    self._placed = [
      tuple(compiled_step.split(mesh, x) for x in batch)
      for batch in self._drawn
    ]
    self._turn = 0
    start = time.perf_counter()
    specs = zenjax.state_specs(self.state, AXIS)
    step = _step(tx, variant.rows, mesh, specs)
    lowered = step.lower(self.params, self.state, *self._placed[0])
    lower_s = time.perf_counter() - start
    self.compiled, seconds = compile(lowered)
    self.seconds = lower_s + seconds

  def __call__(self):
    batch = self._placed[self._turn % len(self._placed)]
    self._turn += 1
    self.params, self.state = self.compiled(self.params, self.state, *batch)
    return self.params

  def check(self) -> int:
    """Wrong elements after the first batch twice, on every device.

    The same rows twice: nothing that a lazy optimizer leaves out would happen.
    """
    self()
    self._turn = 0
    self()
    ids, values = self._drawn[0]
    touched = np.unique(ids)
    grads = oracle.row_sums(
      np.searchsorted(touched, ids.reshape(-1)),
      values.reshape(-1, self._setting.width),
      len(touched),
    )
    want = _after_two_steps(grads / len(ids), self._setting.optimizer)
    read = jax.jit(lambda x, i: (x[i], jnp.count_nonzero(x)))
    wrong = 0
    for shard in self.params.addressable_shards:
      got, nonzero = map(np.asarray, read(shard.data, touched))
      near = np.abs(got - want) <= _RELATIVE * np.maximum(np.abs(want), 1e-6)
      wrong += int(got.size - np.count_nonzero(near))
      wrong += abs(int(nonzero) - int(np.count_nonzero(got)))
    return wrong

  def wire_bytes(self) -> float:
    """What a device receives in a step."""
    try:
      stats = zenjax.stats(self.state)
    except ValueError:
      n, size = self._mesh.size, self.params.nbytes
      return 2 * (n - 1) / n * size
    return sum(leaf["wire_bytes"] for leaf in stats.values())


def _step(tx, rows, mesh, specs):
  both = zenjax.value_and_grad if rows else jax.value_and_grad

  def loss(params, ids, values):
    return jnp.sum(jnp.take(params, ids, axis=0, mode="clip") * values)

  def step(params, state, ids, values):
    _, grads = both(loss)(params, ids[0], values[0])
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs),
    check_vma=False,
  )
  return jax.jit(mapped, donate_argnums=(0, 1))


def _draw(setting, n, seed):
  """Ids as a text has them, `[n, T]`, spread over the table, and values."""
  rng = np.random.default_rng(seed)
  weights = 1.0 / (np.arange(setting.distinct) + 2.7)
  shape = (n, setting.look_ups)
  ids = rng.choice(setting.distinct, shape, p=weights / weights.sum())
  spread = ids * (setting.rows // setting.distinct)
  values = oracle.values(rng, (n * setting.look_ups, setting.width))
  return spread.astype(np.int32), values.reshape(*shape, setting.width)


def _after_two_steps(grads, optimizer):
  """Parameters of `[k, D] float64` gradients, the same twice, from zero."""
  if optimizer == "sgd":
    return -_RATE * 2 * grads
  if optimizer == "adam":
    # Both moments over their corrections are the gradient and its square.
    return -_RATE * 2 * grads / (np.abs(grads) + 1e-8)
  squares = grads**2
  if optimizer == "row_adagrad":
    squares = squares.mean(axis=1, keepdims=True)
  scale = np.where(squares > 0, squares, np.inf) ** -0.5
  return -_RATE * grads * scale * (1 + 2**-0.5)
