"""Programs that users run, compiled for chips with none attached.

A table of programs and chips. Every program updates its tables in place and
sends no array of a table's size, except in the dense path of array gradients.
Some of the table is compiled by default, and
`python -m pytest -m "every_target or not every_target" tests/compiled` compiles
all of it, which takes many minutes.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import chips
import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

# A table is 205 MB: smaller ones XLA may move to a TPU's fast memory and back.
# 128 divides the columns of a device, or a TPU lays a table out anew.
ROWS, WIDTH, LOOK_UPS, HIDDEN = 200_000, 256, 1024, 64


class Program(NamedTuple):
  """A training step as a user writes it, and how its arguments are placed."""

  build: Callable[[Mesh], tuple[Any, Any, Any]]  # step, parameters, state
  axes: tuple[str, ...] = ("data",)  # a second one has two devices
  batch: Any = P("data")
  table: Any = P()


def loss(params, ids, targets):
  x = jax.nn.relu(params["table"][ids] @ params["in"]) @ params["out"]
  return jnp.mean((x[:, 0] - targets) ** 2)


def init():
  key = jax.random.key(0)
  shapes = {"table": (ROWS, WIDTH), "in": (WIDTH, HIDDEN), "out": (HIDDEN, 1)}
  return {name: jax.random.normal(key, x) for name, x in shapes.items()}


def arrays(mesh):
  """Array gradients in `shard_map`."""
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))

  def step(params, state, *batch):
    seen = zenjax.unreduced(params, "data")
    value, grads = jax.value_and_grad(loss)(seen, *batch)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), P("data"), P("data")),
    out_specs=P(),
  )
  params = jax.eval_shape(init)
  return step, params, jax.eval_shape(tx.init, params)


def in_jit(tx, params):
  """Row gradients of the whole batch, in plain `jit`."""

  def step(params, state, *batch):
    value, grads = zenjax.value_and_grad(loss)(params, *batch)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state, value

  return step, params, jax.eval_shape(tx.init, params)


def rows(mesh, axes: Any = "data"):
  tx = zenjax.lazy_rows(optax.adam(0.1))
  tx = optax.chain(zenjax.zen_sync(axes, mesh=mesh), tx)
  return in_jit(tx, jax.eval_shape(init))


def hierarchy(mesh):
  return rows(mesh, ("host", "device"))


def sharded_optimizer(mesh):
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", mesh=mesh)
  return in_jit(tx, jax.eval_shape(init))


def sharded_table(mesh):
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", mesh=mesh)
  is_table = lambda name, _: name == "table"
  shard = lambda: zenjax.tables.shard(init(), mesh, "data", tables=is_table)
  return in_jit(tx, jax.eval_shape(shard))


PROGRAMS = {
  "arrays": Program(arrays),
  "rows": Program(rows),
  "columns": Program(rows, axes=("data", "model"), table=P(None, "model")),
  "hierarchy": Program(
    hierarchy, axes=("host", "device"), batch=P(("host", "device"))
  ),
  "sharded_optimizer": Program(sharded_optimizer),
  "sharded_table": Program(sharded_table),
}
# By default each program is compiled for one chip, and some for CPUs.
DEFAULT = {
  ("arrays", "cpu"),
  ("sharded_table", "cpu"),
  ("arrays", "v5e:2x4"),
  ("rows", "gpu-h200"),
  ("columns", "v5e:2x4"),
  ("hierarchy", "gpu-h200"),
  ("sharded_optimizer", "v5e:2x4"),
  ("sharded_table", "gpu-h200"),
}


def compiled(program: Program, devices: Any) -> Any:
  sizes = (len(devices),) if len(program.axes) == 1 else (-1, 2)
  mesh = Mesh(np.array(devices).reshape(sizes), program.axes)
  step, *tree = program.build(mesh)

  def placed(x, spec):
    is_table = x.shape == (ROWS, WIDTH)
    return chips.placed(x, mesh, program.table if is_table else spec)

  copies = [size for axis, size in mesh.shape.items() if axis != "model"]
  count = LOOK_UPS * math.prod(copies)
  batch = [
    placed(jax.ShapeDtypeStruct((count,), dtype), program.batch)
    for dtype in (jnp.int32, jnp.float32)
  ]
  tree = jax.tree.map(placed, tree, zenjax.state_specs(tree, "data"))
  step = jax.jit(step, donate_argnums=(0, 1))
  return step.lower(*tree, *batch).compile()


@pytest.mark.parametrize(("name", "chip"), chips.cases(PROGRAMS, DEFAULT))
def test_program(name, chip):
  devices = chips.devices(chip)
  program = compiled(PROGRAMS[name], devices)
  memory = program.memory_analysis()
  table = ROWS * WIDTH * 4  # bytes on a device
  if name == "columns":
    table //= 2
  if name == "sharded_table":
    table //= len(devices)
  found = hlo.collectives(program.as_text(), len(devices))
  assert "all-to-all" in {x.op for x in found}
  large = [x for x in found if x.elements * 4 >= table / 4]
  # The dense path of an array is a loop that turns once or not at all.
  assert all(name == "arrays" and "while" in x.inside for x in large), large
  # Tables are updated in place.
  assert memory.alias_size_in_bytes >= table
  # SparseCores of a TPU 7x take some megabytes of scratch for a sharded table.
  most = {"arrays": 2.1, "sharded_optimizer": 1.2, "sharded_table": 0.7}
  most = most.get(name, 0.5)
  assert memory.temp_size_in_bytes < most * table
