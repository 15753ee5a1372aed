"""Exchanges overlap with computation in programs compiled for GPUs."""

import re

import chips
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import zenjax
from zenjax import compress

LAYERS, WIDTH, BATCH = 4, 4096, 512
SYNCS = {
  "zen_sync": lambda: zenjax.zen_sync("data"),
  "int4": lambda: compress.all_reduce(compress.LowBit(4), "data"),
}
# A collective begins or ends, or two matrices are multiplied.
_EVENT = re.compile(r"^ *%gemm\S* =|-(start|done)\(", re.M)


def _schedule(tx, axes=("data",), sizes=(8,)) -> str:
  """Compiles a step, and returns its program in the order of execution."""
  devices = chips.devices("gpu-h200")
  mesh = Mesh(np.array(devices).reshape(sizes), axes)

  def loss(ws, x):
    for w in ws:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(ws, state, x):
    grads = jax.grad(loss)(ws, x)
    updates, state = tx.update(grads, state, ws)
    return optax.apply_updates(ws, updates), state

  ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
  state = jax.eval_shape(lambda p: zenjax.init_state(tx, p, mesh, axes), ws)
  specs = zenjax.state_specs(state, axes)
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(axes)),
    out_specs=(P(), specs),
    check_vma=False,
  )
  placed = lambda x, spec: chips.placed(x, mesh, spec)
  x = jax.ShapeDtypeStruct((len(devices) * BATCH, WIDTH), jnp.float32)
  lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(
    [placed(w, P()) for w in ws],
    jax.tree.map(placed, state, specs),
    placed(x, P(axes)),
  )
  text = str(lowered.compile().as_text())
  assert "is_scheduled=true" in text
  return text[text.index("\nENTRY") :]


def _beside(schedule: str, first: int, last: int) -> int:
  """Counts the products `first` to `last - 1` that run beside a collective."""
  under_way, products, found = 0, 0, 0
  for event in _EVENT.finditer(schedule):
    if event[1]:
      under_way += 1 if event[1] == "start" else -1
    else:
      found += under_way > 0 and first <= products < last
      products += 1
  assert products == 3 * LAYERS - 1
  return found


@pytest.mark.parametrize("name", SYNCS)
def test_the_exchange_runs_beside_the_forward_pass(name):
  sync = SYNCS[name]
  plain = optax.chain(sync(), optax.sgd(0.1))
  delayed = optax.chain(zenjax.delayed(sync(), "data"), optax.sgd(0.1))
  assert _beside(_schedule(plain), 0, LAYERS) == 0
  assert _beside(_schedule(delayed), 0, LAYERS) > 0


@pytest.mark.parametrize(
  ("axes", "sizes"), [(("data",), (8,)), (("host", "device"), (2, 4))]
)
def test_parts_are_sent_beside_the_backward_pass(axes, sizes):
  def beside(parts):
    leaves = [
      zenjax.planner.LeafPlan(
        name=str(i),
        shape=(WIDTH, WIDTH),
        dtype="float32",
        scheme="dense",
        compressor="LowBit(4)",
        group=part,
      )
      for i, part in enumerate(parts)
    ]
    plan = zenjax.planner.Plan(
      leaves=tuple(leaves), mesh=tuple(zip(axes, sizes))
    )
    tx = optax.chain(compress.all_reduce(plan, axes), optax.sgd(0.1))
    return _beside(_schedule(tx, axes, sizes), LAYERS, 3 * LAYERS)

  assert beside((0, 0, 0, 0)) == 0
  # The last layers' part goes first.
  assert beside((2, 2, 1, 0)) >= LAYERS - 1
