"""Steps in plain `jit` of a table and a dense layer, beside plain optax."""

from collections.abc import Callable
import contextlib
from typing import Any, NamedTuple

import hlo
import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import runners

ROWS, WIDTH, EXAMPLES, STEPS = 3000, 8, 64, 3


class Case(NamedTuple):
  """A loss of parameters, ids and targets, and where each is."""

  loss: Callable[..., jax.Array]
  mesh: Any
  axes: Any = "data"  # of the exchange
  table: Any = P()
  dense: Any = P()
  batch: Any = P("data")
  examples: int = EXAMPLES


class Trained(NamedTuple):
  """What some steps have made."""

  losses: list[float]
  params: dict[str, jax.Array]
  state: Any
  program: str  # compiled


def drawn(case: Case) -> tuple[Any, list[Any]]:
  """Returns parameters and batches, placed."""
  rng = np.random.default_rng(0)
  place = lambda x, spec: jax.device_put(x, NamedSharding(case.mesh, spec))
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  params = {
    "table": place(normal(ROWS, WIDTH), case.table),
    "dense": place(normal(WIDTH, 4), case.dense),
  }
  draw = lambda: (
    rng.integers(0, ROWS, case.examples, np.int32),
    normal(case.examples, 4),
  )
  return params, [place(draw(), case.batch) for _ in range(STEPS)]


def train(case: Case, tx: Any, value_and_grad: Any, init: Any = None):
  """Takes steps from `init(params)`, the state that `tx` makes if not given."""
  explicit = AxisType.Explicit in case.mesh.axis_types
  with jax.set_mesh(case.mesh) if explicit else contextlib.nullcontext():
    params, batches = drawn(case)
    state = (init or tx.init)(params)
    # With counters on one device the step would be compiled twice.
    everywhere = NamedSharding(case.mesh, P())
    on_one = lambda x: len(x.sharding.device_set) == 1
    state = jax.tree.map(
      lambda x: jax.device_put(x, everywhere) if on_one(x) else x, state
    )

    @jax.jit
    def step(params, state, ids, targets):
      loss, grads = value_and_grad(case.loss)(params, ids, targets)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, loss

    losses, batch = [], ()
    for batch in batches:
      params, state, loss = step(params, state, *batch)
      losses.append(float(loss))
    compiled: Any = step.lower(params, state, *batch).compile()
  return Trained(losses, params, state, compiled.as_text())


def check(
  case: Case, got: Trained, plain: Any, *, arrays: bool = False
) -> None:
  """Compares with steps of `plain`; nothing of a table's size is sent.

  Args:
    case: What was trained.
    got: Its steps with zenjax.
    plain: An optimizer of optax.
    arrays: Whether there is a dense path, a loop that turns where it is taken.
  """
  want = train(case, plain, jax.value_and_grad)
  np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
  for key, x in want.params.items():
    np.testing.assert_allclose(got.params[key], x, rtol=1e-5, atol=1e-6)
    assert got.params[key].sharding.is_equivalent_to(x.sharding, 2), key
  for leaf in jax.tree.leaves(got.state):
    if leaf.sharding.is_fully_replicated:
      on_devices = runners.shards(leaf)
      assert (on_devices == on_devices[:1]).all()
  size = ROWS * WIDTH // (1 if case.table == P() else 2)
  large = lambda program: [
    found for found in hlo.collectives(program) if found.elements >= size
  ]
  assert large(want.program) or case.batch == P()
  assert all(arrays and found.inside for found in large(got.program))
