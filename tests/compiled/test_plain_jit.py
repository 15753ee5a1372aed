"""Steps in plain `jit`, compiled for chips with none attached.

Each is compiled beside itself without zenjax: sums of a table's size are gone,
and what is moved is what that one moves, and one exchange.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
from one_exchange import moves
from one_exchange import of_table
from one_exchange import summed
import optax
import pytest

from benchmarks import targets
import zenjax

ROWS, WIDTH, HIDDEN, LOOK_UPS = 20_000, 32, 64, 2048


class Case(NamedTuple):
  """How a step's parameters lie, and how its gradients come."""

  axes: dict[str, int]
  kind: AxisType
  table: Any
  layer: Any
  arrays: bool = False


CASES = {
  "rows": Case({"data": 8}, AxisType.Auto, P(), P()),
  "arrays": Case({"data": 8}, AxisType.Explicit, P(), P(), arrays=True),
  "columns": Case(
    {"data": 4, "model": 2}, AxisType.Auto, P(None, "model"), P("data")
  ),
}


def step_of(case: Case, ours: bool) -> tuple[Any, Callable[..., Any]]:
  """The optimizer and a step of the whole batch, as a user writes them."""
  tx, both = optax.adagrad(0.1), jax.value_and_grad
  if ours and not case.arrays:
    tx, both = zenjax.lazy_rows(tx), zenjax.value_and_grad
  if ours:
    tx = optax.chain(zenjax.zen_sync("data"), tx)
  spread = P("data", None) if case.kind == AxisType.Explicit else None

  def loss(params, ids, targets):
    x = params["table"].at[ids].get(out_sharding=spread)
    x = jax.nn.relu(x @ params["in"]) @ params["out"]
    return jnp.mean((x - targets) ** 2)

  def step(params, state, *batch):
    seen = zenjax.unreduced(params, "data") if ours and case.arrays else params
    value, grads = both(loss)(seen, *batch)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state, value

  return tx, step


def compiled(target: str, case: Case, ours: bool) -> list[hlo.Found]:
  """Collectives of a step for the eight devices of a target."""
  try:
    devices = targets.TARGETS[target]()
  except ImportError as error:
    pytest.skip(str(error))
  mesh = Mesh(
    np.array(devices).reshape(*case.axes.values()),
    tuple(case.axes),
    axis_types=(case.kind,) * len(case.axes),
  )
  tx, step = step_of(case, ours)
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {
      "table": (ROWS, WIDTH),
      "in": (WIDTH, HIDDEN),
      "out": (HIDDEN, 1),
    }.items()
  }
  specs = {(ROWS, WIDTH): case.table}
  specs |= {params[name].shape: case.layer for name in ("in", "out")}

  def placed(x):
    on = NamedSharding(mesh, specs.get(x.shape, P()))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)

  split = NamedSharding(mesh, P("data"))
  batch = (
    jax.ShapeDtypeStruct((LOOK_UPS,), jnp.int32, sharding=split),
    jax.ShapeDtypeStruct((LOOK_UPS, 1), jnp.float32, sharding=split),
  )
  with jax.numpy_dtype_promotion("standard"):
    state = jax.eval_shape(tx.init, params)
    with jax.set_mesh(mesh):
      lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        *jax.tree.map(placed, (params, state)), *batch
      )
  text = lowered.compile().as_text()
  assert text is not None
  return hlo.collectives(text, case.axes["data"])


def _cases():
  """CI compiles each kind of step once at least, and for either chip."""
  in_ci = [("rows", "tpu-v5e"), ("arrays", "gpu-h200"), ("columns", "tpu-v5e")]
  for name in CASES:
    for target in ("tpu-v5e", "gpu-h200"):
      marks = [] if (name, target) in in_ci else [pytest.mark.every_target]
      yield pytest.param(name, target, marks=marks, id=f"{name}-{target}")


@pytest.mark.parametrize("name, target", [*_cases()])
def test_one_exchange_stands_in_for_the_sum_of_a_table(name, target):
  case = CASES[name]
  devices = case.axes["data"]
  plain, ours = (compiled(target, case, x) for x in (False, True))
  look_ups = None if case.arrays else LOOK_UPS // devices
  exchange = of_table(
    (ROWS, WIDTH), devices, look_ups=look_ups, platform="default"
  )
  # The dense path of an array alone, in a loop that turns where it is taken.
  assert [x for x in ours if x.op == "all-reduce" and x.inside] == [
    x for x in exchange if x.op == "all-reduce"
  ]
  table = ROWS * WIDTH // case.axes.get("model", 1)
  assert summed(plain) - summed(ours) + summed(exchange) == table
  assert moves(exchange) <= moves(ours)
  # Layers that lie over devices are moved as before; what XLA:GPU runs beside
  # other work names its operands too, and looks larger by them.
  rest = moves(ours) - moves(exchange)
  kinds = lambda found: Counter([(x.op, x.inside) for x in found.elements()])
  assert kinds(rest) == kinds(moves(plain))
  assert all(x.elements <= LOOK_UPS // devices * WIDTH for x in rest)
