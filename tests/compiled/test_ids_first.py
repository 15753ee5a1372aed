"""`ids_first`: ids of look-ups are on their way while values are computed."""

from typing import Any

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from benchmarks import targets
import zenjax

ROWS, WIDTH, LOOK_UPS = 400_000, 128, 4096
LAYERS = 4


def schedule(ids_first: bool) -> list[str]:
  """A step's instructions for eight H200, in the order of their start."""
  try:
    devices = targets.TARGETS["gpu-h200"]()
  except ImportError as error:
    pytest.skip(str(error))
  mesh = Mesh(np.array(devices), ("data",))
  tx = optax.chain(
    zenjax.zen_sync("data", tuning=zenjax.Tuning(ids_first=ids_first)),
    zenjax.lazy_rows(optax.adagrad(0.1)),
  )

  def loss(params, ids, targets):
    x = params["table"][ids]
    for layer in params["layers"]:
      x = jax.nn.relu(x @ layer)
    return jnp.mean((x - targets) ** 2)

  def step(params, state, ids, targets):
    value, grads = zenjax.value_and_grad(loss)(params, ids, targets)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state, value[None]

  def described(spec, tree):
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  layer = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
  table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
  params = {"table": table, "layers": [layer] * LAYERS}
  count = mesh.size * LOOK_UPS
  batch: Any = (
    jax.ShapeDtypeStruct((count,), jnp.int32),
    jax.ShapeDtypeStruct((count, WIDTH), jnp.float32),
  )
  with jax.numpy_dtype_promotion("standard"):
    state = jax.eval_shape(tx.init, params)
    mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), P(), P("data"), P("data")),
      out_specs=(P(), P(), P("data")),
    )
    lowered = jax.jit(mapped).lower(
      described(P(), params),
      described(P(), state),
      *described(P("data"), batch),
    )
    text = lowered.compile().as_text()
  assert text is not None and "is_scheduled=true" in text
  return hlo.computations(text)[""]


@pytest.mark.parametrize(
  "ids_first", [pytest.param(False, marks=pytest.mark.every_target), True]
)
def test_compiled_for_gpus_they_leave_before_the_forward_pass(ids_first):
  found = schedule(ids_first)
  starts = hlo.lines(found, r" all-to-all-start\(.*push/all_to_all")
  ends = hlo.lines(found, r" all-to-all-done\(.*push/all_to_all")
  forward = hlo.lines(found, r"^ *%gemm.*/jvp\(\)/dot_general")
  backward = hlo.lines(
    found, r"^ *%gemm.*transpose\(jvp\(\)\)/(dot_general|transpose)"
  )
  assert len(forward) == LAYERS <= len(backward)
  # The last one on the way to the table's rows: values wait for it.
  to_table = backward[LAYERS - 1]
  if not ids_first:
    (start,) = starts
    assert start > to_table
    return
  ids, values = starts
  assert ids < forward[0] and values > to_table
  # What lies between a start and its end runs beside it.
  assert ends[0] > to_table
