"""Steps one after the other: states, plans, optimizers, owners, checkpoints."""

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import optax
import runners
import steps

import zenjax

from . import data
from . import truth
from .front import Front

STEPS = 3


class Trained:
  """A chain on a mesh, begun anew for every case."""

  def __init__(self, tx, params, n: int, donate: bool = False):
    # Donated states would be gone for the next case.
    self.trainer = steps.Trainer(
      steps.lenient(tx), params, runners.mesh(n), check_vma=not donate
    )
    self.start = self.trainer.params, self.trainer.state

  def begin(self) -> steps.Trainer:
    self.trainer.params, self.trainer.state = self.start
    return self.trainer


def _histories(shapes: dict[str, tuple], n: int, draw: Callable = data.stack):
  """Gradients of several steps: a list of trees of `[n, ...]`."""

  def make(rng):
    count = int(rng.integers(1, STEPS + 1))
    return [
      {
        name: draw(rng, n, *shape, np.dtype(dtype))
        for name, (shape, dtype) in shapes.items()
      }
      for _ in range(count)
    ]

  return make


# --- every step is the mean ---------------------------------------------------


def means(name: str, tx: Callable[[], Any], shapes: dict, n: int, wires=()):
  """A front of several tables whose state remembers the steps before."""
  wires = dict(wires)

  def build():
    params = {
      key: jnp.zeros(shape, dtype) for key, (shape, dtype) in shapes.items()
    }
    trained = Trained(tx(), params, n)

    def run(history):
      trainer = trained.begin()
      got = [trainer(stacks) for stacks in history]
      trainer.check_replicas()
      return got

    return run

  def draw(rng):
    history = _histories(shapes, n)(rng)
    for stacks in history:
      for key in wires:  # The largest float32 is infinite in bfloat16.
        large = np.abs(stacks[key]) > 3e38
        stacks[key][large & np.isfinite(stacks[key])] = 3e38
    return history

  def check(history, got):
    for stacks, synced in zip(history, got, strict=True):
      for key, stack in stacks.items():
        truth.check_mean(stack, synced[key], wire_dtype=wires.get(key))

  return Front(name, build, draw, check, weight=0.5)


_TABLES = {
  "a": ((600, 4), np.float32),
  "b": ((70, 3), cases.BFLOAT16),
  "c": ((130, 8), np.float32),
  "d": ((5, 6), cases.FLOAT16),
}


def _plan(*ways: dict[str, Any]):
  leaves = [
    zenjax.planner.LeafPlan(
      name=name, shape=shape, dtype=np.dtype(dtype).name, **way
    )
    for (name, (shape, dtype)), way in zip(_TABLES.items(), ways)
  ]
  plan = zenjax.planner.Plan(leaves=tuple(leaves), mesh=(("data", 4),))
  return lambda: zenjax.zen_sync("data", plan=plan)


# --- what waits ---------------------------------------------------------------


def _kept(
  name: str,
  tx: Callable[[], Any],
  residual: Callable[[Any], Any],
  shape: tuple[int, int],
  dtype: Any,
  scale: int,
  n: int = 4,
  weight: float = 0.5,
):
  """A front of which every step conserves what it was given."""

  def build():
    trained = Trained(tx(), {"t": jnp.zeros(shape, dtype)}, n)

    def run(history):
      trainer = trained.begin()
      read = lambda: np.asarray(residual(trainer.state)).reshape(n, *shape)
      kept, out = [read()], []
      for stacks in history:
        out.append(trainer(stacks)["t"])
        kept.append(read())
      return out, kept

    return run

  def check(history, result):
    out, kept = result
    for i, stacks in enumerate(history):
      truth.check_kept(stacks["t"], kept[i], out[i], kept[i + 1], scale, dtype)

  draw = _histories({"t": (shape, dtype)}, n)
  return Front(name, build, draw, check, weight)


def _carry(**options: Any):
  return lambda: zenjax.zen_sync(
    "data", sparse=True, on_overflow="carry", **options
  )


def _waits(state):
  return state.leaves["t"].residual


def _feedback():
  top = zenjax.sparsify.top_k(0.1, sparse=True)
  return optax.chain(
    zenjax.sparsify.error_feedback(top, "data"),
    zenjax.zen_sync("data", sparse=True, unit="element"),
  )


# --- optax around it ----------------------------------------------------------


def _chains() -> dict[str, Callable[[Any], Any]]:
  """By name: a chain for what averages."""
  labels = {"a": "table", "w": "rest"}
  return {
    "MultiSteps": lambda sync: optax.MultiSteps(
      optax.chain(sync, optax.sgd(0.5)), 2
    ).gradient_transformation(),
    "partition": lambda sync: optax.chain(
      sync,
      optax.partition(
        {"table": optax.adagrad(0.5), "rest": optax.adam(0.5)}, labels
      ),
    ),
    "masked": lambda sync: optax.chain(
      sync, optax.masked(optax.adam(0.5), {"a": True, "w": False})
    ),
    "inject_hyperparams": lambda sync: optax.chain(
      sync,
      optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1.0, 0.1, 4)
      ),
    ),
    "flatten": lambda sync: optax.chain(sync, optax.flatten(optax.adam(0.5))),
    "freeze": lambda sync: optax.chain(
      sync, optax.transforms.freeze({"a": False, "w": True}), optax.sgd(0.5)
    ),
    "clip, apply_if_finite": lambda sync: optax.chain(
      sync,
      optax.clip_by_global_norm(1.0),
      optax.apply_if_finite(optax.adamw(0.5), 2),
    ),
  }


_PARAMS = {"a": ((60, 4), np.float32), "w": ((4, 4), np.float32)}


def _optax(name: str) -> Front:
  """The same as with `pmean`: sums of small integers are exact."""

  def build():
    make = _chains()[name]
    zen = zenjax.zen_sync("data", sparse={"a": True, "w": False})
    params = {k: jnp.ones(shape, t) for k, (shape, t) in _PARAMS.items()}
    ways = [Trained(make(x), params, 8) for x in (zen, steps.pmean("data"))]

    def run(history):
      found = []
      for way in ways:
        trainer = way.begin()
        for stacks in history:
          trainer(stacks)
        trainer.check_replicas()
        found.append(jax.tree.map(runners.shards, trainer.params))
      return found

    return run

  def draw(rng):
    history = _histories(_PARAMS, 8, data.integers)(rng)
    if rng.random() < 0.2:
      special = rng.choice(np.array([np.nan, np.inf], np.float32))
      history[-1]["a"][tuple(rng.integers(0, (8, 60, 4)))] = special
    return history

  def check(history, found):
    del history
    for key in _PARAMS:
      zen, plain = (params[key] for params in found)
      # What follows the mean may be compiled in another way.
      np.testing.assert_allclose(zen, plain, 2e-6, 2e-6, err_msg=key)

  return Front(f"optax: {name}", build, draw, check, weight=0.5)


# --- owners, and states that are put away -------------------------------------


def _owners(n: int, num_rows: int, rows: bool) -> Front:
  """Adagrad at the owners beside Adagrad in float64; `n` divides no table."""
  shape, rate, begin, eps = (num_rows, 3), 0.5, 0.1, 1e-7

  def tx():
    adagrad = optax.adagrad(rate, initial_accumulator_value=begin, eps=eps)
    return zenjax.sharded_optimizer(adagrad, "data", sparse=True)

  def build():
    mesh, made = runners.mesh(n), tx()
    zeros = jnp.zeros(shape)
    start = zenjax.init_state(made, zeros, mesh, "data")

    def step(state, ids, values):
      table, state = state
      looked_up = zenjax.SparseRows(ids[0], values[0], num_rows)
      grads: Any = looked_up if rows else looked_up.to_dense()
      with jax.numpy_dtype_promotion("standard"):
        updates, state = made.update(grads, state, table)
        return (zenjax.apply_updates(table, updates), state), ()

    train = jax.jit(zenjax.data_parallel(step, mesh, "data"))

    def run(history):
      state = zeros, start
      for given in history:
        state, _ = train(state, given.ids, given.values)
      return runners.shards(state[0])

    return run

  def draw(rng):
    count = int(rng.integers(1, STEPS + 1))
    drawn = [
      data.rows(rng, n, 16, num_rows, 3, np.float32) for _ in range(count)
    ]
    small = lambda x: np.round(np.nan_to_num(np.clip(x, -9, 9)))
    return [x._replace(values=small(x.values)) for x in drawn]

  def check(history, copies):
    truth.same_everywhere(copies, "table")
    table, squares = np.zeros(shape), np.full(shape, begin)
    for ids, values in history:
      grad = np.zeros((num_rows + 1, 3))
      at = np.where(ids < 0, ids + num_rows, ids).reshape(-1)
      np.add.at(grad, at, values.reshape(-1, 3).astype(np.float64))
      grad = grad[:-1] / n
      squares += grad * grad
      table -= rate * grad / np.sqrt(squares + eps)
    np.testing.assert_allclose(copies[0], table, rtol=1e-5, atol=1e-6)

  kind = "rows" if rows else "arrays"
  return Front(f"owners, {n} and {kind}", build, draw, check, weight=0.5)


def _restarted() -> Front:
  """A state put away as NumPy has it, and a run that goes on with it."""
  n, shape = 4, (60, 3)

  def build():
    tx = _carry(capacities=(2, 5))()
    trained = Trained(tx, {"t": jnp.zeros(shape)}, n)

    def run(history):
      on, found = trained.begin(), []
      for stacks in history:
        found.append(on(stacks)["t"])
      again, other = trained.begin(), []
      for stacks in history:
        other.append(again(stacks)["t"])
        saved = jax.tree.map(np.asarray, again.state)
        place = lambda x, spec: jax.device_put(
          x, NamedSharding(again.mesh, spec)
        )
        again.state = jax.tree.map(place, saved, again.specs)
      return found, other

    return run

  def check(history, result):
    del history
    for one, other in zip(*result, strict=True):
      assert one.tobytes() == other.tobytes(), "a restored run went elsewhere"

  shapes = {"t": (shape, np.float32)}
  return Front("restarted", build, _histories(shapes, n), check, weight=0.3)


# --- row gradients ------------------------------------------------------------


def _row_gradients(form: str, loss: Callable[[Any, Any], Any]) -> Front:
  """`zenjax.value_and_grad` beside `jax.value_and_grad`, ids of any kind."""
  num_rows, width, count = 40, 4, 8

  def build():
    ours = jax.jit(zenjax.value_and_grad(loss))
    plain = jax.jit(jax.value_and_grad(loss))

    def run(case):
      value, rows = ours(*case)
      assert isinstance(rows, zenjax.SparseRows), "no row gradient"
      want = jax.tree.map(np.asarray, plain(*case))
      return np.asarray(value), np.asarray(rows.to_dense()), want

    return run

  def draw(rng):
    table = data.values(rng, (num_rows, width), np.float32)
    table = np.clip(np.nan_to_num(table), -100, 100)
    kind = rng.integers(3)
    low, high = [(0, num_rows), (-num_rows, num_rows), (-90, 90)][kind]
    ids = rng.integers(low, high, count)
    ids[rng.random(count) < 0.3] = ids[0]
    return table, ids.astype(np.int32)

  def check(case, result):
    del case
    value, grad, (want_value, want) = result
    np.testing.assert_allclose(value, want_value, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-4)

  return Front(f"row gradients: {form}", build, draw, check, weight=0.5)


def _weighted(rows):
  weights = jnp.arange(1, rows.size + 1, dtype=jnp.float32).reshape(rows.shape)
  return jnp.sum(jnp.tanh(rows) * weights)


def _in_scan(table, ids):
  turn = lambda total, i: (total + _weighted(table[i]), None)
  return jax.lax.scan(turn, jnp.zeros(()), ids)[0]


FRONTS = (
  means(
    "plan",
    _plan(
      dict(scheme="zen", column_groups=1, capacities=(4, 12)),
      dict(scheme="zen", column_groups=1, group=1),
      dict(scheme="all_gather"),
      dict(scheme="dense"),
    ),
    _TABLES,
    4,
  ),
  means(
    "plan, columns and a wire",
    _plan(
      dict(scheme="zen", column_groups=4, wire_dtype="bfloat16"),
      dict(scheme="recursive_doubling"),
      dict(scheme="zen", column_groups=4),
      dict(scheme="zen", column_groups=2),
    ),
    _TABLES,
    4,
    {"a": cases.BFLOAT16},
  ),
  means(
    "overlap",
    lambda: zenjax.zen_sync(
      "data", sparse=True, tuning=zenjax.Tuning(overlap=True)
    ),
    _TABLES,
    4,
  ),
  _kept(
    "carry, bfloat16",
    _carry(capacities=(2, 5)),
    _waits,
    (60, 3),
    cases.BFLOAT16,
    4,
  ),
  _kept(
    "carry, sum",
    _carry(capacities=(1, 1), op="sum", partition="hash"),
    _waits,
    (41, 3),
    np.float32,
    1,
  ),
  _kept(
    "carry by columns",
    _carry(partition="columns"),
    _waits,
    (300, 8),
    np.float32,
    4,
  ),
  _kept(
    "micro",
    lambda: zenjax.sparsify.micro("data", 0.05),
    lambda state: state.residual,
    (40, 5),
    np.float32,
    4,
  ),
  _kept(
    "exdyna",
    lambda: zenjax.sparsify.exdyna("data", 0.01),
    lambda state: state.residual,
    (512, 64),
    np.float32,
    4,
    weight=0.1,
  ),
  _kept(
    "error_feedback",
    _feedback,
    lambda state: state[0].leaves["t"].residual,
    (40, 5),
    np.float32,
    4,
  ),
  *(_optax(name) for name in _chains()),
  _owners(3, 100, True),
  _owners(3, 100, False),
  _owners(5, 33, True),
  _restarted(),
  _row_gradients("index", lambda t, i: _weighted(t[i])),
  _row_gradients(
    "take", lambda t, i: _weighted(jnp.take(t, i, axis=0, mode="clip"))
  ),
  _row_gradients("scaled", lambda t, i: _weighted((-t * 1.5)[i.reshape(2, 4)])),
  _row_gradients("scan", _in_scan),
)
