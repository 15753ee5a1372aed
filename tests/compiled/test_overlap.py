"""Exchanges of two tables beside the backward pass, in compiled schedules.

A click model that looks up twice: backward work is left when the gradient of
either table is complete.
"""

import re

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import whole_steps

import zenjax

ROWS, WIDTH, LOOK_UPS, LAYERS = 400_000, 128, 4096, 3
TABLES = ("late", "soon")  # by when their gradients are complete


def loss(params, ids, dense, target):
  x = _layers(params["bottom"], dense)
  x = _layers(params["middle"], x * params["late"][ids[:, 0]])
  x = _layers(params["top"], x * params["soon"][ids[:, 1]])
  return jnp.mean((x - target) ** 2)


def _layers(layers, x):
  for layer in layers:
    x = jax.nn.relu(x @ layer)
  return x


def compiled(target, rows, options, look_ups=LOOK_UPS):
  """The text of a whole step for the eight devices of a target."""
  mesh = Mesh(np.array(whole_steps.devices(target)), ("data",))
  inner = optax.sgd(0.5)
  tx = optax.chain(
    zenjax.zen_sync("data", tuning=zenjax.Tuning(overlap=True, ids_first=rows)),
    zenjax.lazy_rows(inner) if rows else inner,
  )

  def step(params, state, *batch):
    if rows:
      value, grads = zenjax.value_and_grad(loss)(params, *batch)
    else:
      local = zenjax.unreduced(params, "data")
      value, grads = jax.value_and_grad(loss)(local, *batch)
    updates, state = tx.update(grads, state, params)
    params = zenjax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  def placed(spec, tree):
    sharding = NamedSharding(mesh, spec)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, tree)

  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  parts = ("bottom", "middle", "top")
  params = {part: [shape(WIDTH, WIDTH)] * LAYERS for part in parts}
  params |= {name: shape(ROWS, WIDTH) for name in TABLES}
  count = mesh.size * look_ups
  values = shape(count, WIDTH)
  batch = jax.ShapeDtypeStruct((count, 2), jnp.int32), values, values
  specs = P(), P(), *[P("data")] * 3
  mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
  lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(
    placed(P(), params),
    placed(P(), jax.eval_shape(tx.init, params)),
    *placed(P("data"), batch),
  )
  text = lowered.compile(compiler_options=options).as_text()
  assert text is not None
  return text


def beside(text, start, done):
  """Backward products between each start and its done, by their lines."""
  parts = hlo.computations(text)
  product = re.compile(r" (convolution|dot)\(.*transpose\(jvp\(")
  backward = {k for k, body in parts.items() if any(map(product.search, body))}
  called = re.compile(r"calls=%([\w.\-]+)")
  found = []
  for i, line in enumerate(parts[""]):
    call = called.search(line)
    if call and call[1] in backward:
      found.append(i)
  starts, dones = hlo.lines(parts[""], start), hlo.lines(parts[""], done)
  assert len(starts) == len(dones)
  return [[i for i in found if a < i < b] for a, b in zip(starts, dones)]


def _compiled(*args):
  try:
    return compiled(*args)
  except ImportError as error:
    pytest.skip(str(error))


@pytest.mark.parametrize(
  "rows",
  [
    pytest.param(False, id="arrays"),
    pytest.param(True, id="rows", marks=pytest.mark.every_target),
  ],
)
def test_each_table_is_pushed_beside_backward_work_on_gpus(rows):
  text = _compiled("gpu-h200", rows, {})
  pushes = beside(
    text,
    r" all-to-all-start\(.*zen/push/\S*all_to_all",
    r" all-to-all-done\(.*zen/push/\S*all_to_all",
  )
  # With rows ids go ahead, in collectives of their own.
  assert len(pushes) == len(TABLES) * (2 if rows else 1)
  # JAX 0.10 finishes the products first that only need ids to have been sent.
  least = 1 if rows and jax.__version_info__ < (0, 11) else len(TABLES)
  assert sum(bool(products) for products in pushes) >= least


@pytest.mark.parametrize(
  "rows",
  [
    pytest.param(False, id="arrays"),
    pytest.param(True, id="rows", marks=pytest.mark.every_target),
  ],
)
def test_each_table_is_pushed_beside_backward_work_on_tpus(rows):
  option = {"xla_tpu_enable_async_all_to_all": "true"}
  text = _compiled("v5e:2x4", rows, option, 4 * LOOK_UPS)
  pushes = beside(
    text,
    r" all-to-all-start\(.*zen/push/\S*all_to_all",
    r" all-to-all-done\(.*zen/push/\S*all_to_all",
  )
  assert len(pushes) == len(TABLES) * (2 if rows else 1)
  # Of rows, ids go first, which gradients have nothing to do with.
  assert all(pushes[-len(TABLES) :])


@pytest.mark.every_target
def test_pulls_on_tpus():
  """The compiler runs a gather inside of a product."""
  text = _compiled("v5e:2x4", False, {})
  fused = [
    "\n".join(body)
    for name, body in hlo.computations(text).items()
    if name.startswith("async_collective_fusion")
  ]
  gather = re.compile(r" all-gather\(.*zen/pull/\S*all_gather")
  product = re.compile(r" convolution\(.*transpose\(jvp\(")
  assert [
    body for body in fused if gather.search(body) and product.search(body)
  ]
