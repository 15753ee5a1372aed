"""More than one mesh axis: hierarchies, and axes that stay automatic."""

from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import oracle
import pytest
import runners
import scheme_names
import stablehlo
import steps

import zenjax

F32 = np.dtype(np.float32)
AXES = ("host", "device")
# "block_sparse" is "split_all_gather" with blocks for rows.
ALONG_AXES = ("flat", *(x for x in scheme_names.PEERS if x != "block_sparse"))


def grid_mesh(*shape) -> Mesh:
  devices = np.asarray(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), AXES)


@pytest.mark.parametrize(
  ("scheme", "shape"),
  [
    *((name, (3, 2)) for name in ("zen", *ALONG_AXES)),
    ("zen", (3, 1)),
    ("dense", (4, 2)),
  ],
)
def test_hierarchy(scheme, shape):
  """No 16-bit partial sum: float16 overflows in them where the mean fits."""
  mesh = grid_mesh(*shape)
  mapped = jax.jit(
    jax.shard_map(
      lambda x: zenjax.sparse_pmean(x[0], AXES, scheme=scheme),
      mesh=mesh,
      in_specs=P(AXES),
      out_specs=P(),
    )
  )
  split = NamedSharding(mesh, P(AXES))
  for name, stack in cases.every_case(mesh.size, 67, 5, cases.FLOAT16):
    got = runners.shards(mapped(jax.device_put(stack, split)))
    oracle.check(got, stack, label=name)


@pytest.mark.parametrize(
  ("partition", "capacities"),
  [
    ("columns", (4, 12)),
    pytest.param("hash", (1, 2), marks=pytest.mark.more),
  ],
)
def test_hierarchy_with_rounds_under_nested_vmap(partition, capacities):
  run = lambda x: zenjax.sparse_pmean(
    x, AXES, partition=partition, capacities=capacities
  )
  for axis in reversed(AXES):
    run = jax.vmap(run, axis_name=axis)
  run = jax.jit(run)
  for name, stack in cases.every_case(4, 90, 12, cases.BFLOAT16):
    got = run(stack.reshape(2, 2, 90, 12))
    oracle.check(np.asarray(got).reshape(stack.shape), stack, label=name)


def test_slow_links_carry_each_row_once():
  """A gather along the fast axis first would send it for each device there."""
  mapped = jax.shard_map(
    lambda x: zenjax.sparse_pmean(x[0], AXES, scheme="all_gather"),
    mesh=grid_mesh(4, 2),
    in_specs=P(AXES),
    out_specs=P(),
  )
  lowered = jax.jit(mapped).lower(jnp.zeros((8, 300, 4)))
  found = stablehlo.collectives(lowered)
  words = [x.words for x in found if x.op == "all_gather" and not x.inside]
  assert words == [words[0], 4 * words[0]]


def test_only_the_named_axis_is_averaged():
  """Groups along the other axis stay apart, whatever each has to send."""
  mesh = grid_mesh(2, 2)
  mapped = jax.jit(
    jax.shard_map(
      lambda x: zenjax.sparse_pmean(x[0], "host")[None],
      mesh=mesh,
      in_specs=P(AXES),
      out_specs=P("device"),
    )
  )
  for name, stack in cases.every_case(4, 41, 6, F32):
    placed = jax.device_put(stack, NamedSharding(mesh, P(AXES)))
    on_devices = runners.shards(mapped(placed)).reshape(2, 2, 41, 6)
    groups = stack.reshape(2, 2, 41, 6).swapaxes(0, 1)
    for members, result in zip(groups, on_devices.swapaxes(0, 1), strict=True):
      oracle.check(result, members, label=name)


class Pair(NamedTuple):
  """Parameters whose fields are not in alphabetical order."""

  weights: Any
  biases: Any


def test_gradients_of_one_shape_keep_their_places():
  """A list of eleven, `10` before `2` by name, and fields of a NamedTuple."""
  rng = np.random.default_rng(0)
  stacks = [cases.half(rng, 4, 70, 3, F32) for _ in range(13)]
  grads = {"z": stacks[:11], "a": Pair(*stacks[11:])}
  params = jax.tree.map(lambda x: x[0], grads)
  tables = ("z.1", "z.2", "z.10", "a.weights")
  tx = zenjax.zen_sync(AXES, sparse=lambda name, _: name in tables)
  trainer = steps.Trainer(tx, params, grid_mesh(2, 2), axis=AXES)
  for got, stack in zip(
    jax.tree.leaves(trainer(grads)), jax.tree.leaves(grads)
  ):
    oracle.check(got, stack)
  assert set(zenjax.stats(trainer.state)) == set(tables)


def test_rows_above_the_limit_of_another_machine_follow():
  """The first machine gets as far as row 12, so all of the second's wait.

  In one row the order of float32 additions shows: the fastest axis is first.
  """
  tx = zenjax.zen_sync(
    AXES, sparse=True, partition="columns", capacities=(12, 12)
  )
  mesh = grid_mesh(2, 2)
  trainer = steps.Trainer(tx, {"t": jnp.zeros((640, 8))}, mesh, axis=AXES)
  stack = np.zeros((4, 640, 8), F32)
  stack[:2, :20] = stack[2:, 30:50] = 1.0
  # The sums are 2 and 0; with the slow axis first they would be 0 and 1, and
  # with one device after another 2 and 1.
  stack[:, 40, :2] = [[1e8, 1e8], [-1e8, 0], [1, -1e8], [1, 1]]
  got = trainer({"t": stack})["t"]
  oracle.check(got, stack)
  np.testing.assert_array_equal(got[:, 40, :2], [[0.5, 0]] * 4)
  numbers = zenjax.stats(trainer.state)["t"]
  assert numbers["rounds"] > 1


@pytest.mark.parametrize("scheme", ["zen", *ALONG_AXES])
def test_collectives_over_different_groups_have_one_order(scheme):
  """Devices that run two of them in different orders wait for each other."""
  sparse = lambda name, _: name != "bias"
  tx = zenjax.zen_sync(AXES, sparse=sparse, scheme=scheme)
  grads = {"a": (700, 8), "b": (400, 4), "bias": (3,)}
  grads = {name: jnp.zeros(shape) for name, shape in grads.items()}
  mapped = jax.shard_map(
    lambda g: tx.update(zenjax.unreduced(g, AXES), tx.init(g)),
    mesh=grid_mesh(2, 4),
    in_specs=P(),
    out_specs=P(),
  )
  assert not stablehlo.unordered(jax.jit(mapped).lower(grads))


def test_copies_of_sharded_tables_have_one_order_of_collectives():
  mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), AXES, mesh=mesh)
  params = {"t": jnp.zeros((3000, 8)), "w": jnp.ones(8)}
  params = zenjax.tables.shard(params, mesh, "device", replicas="host")
  loss = lambda params, ids: (params["t"][ids] @ params["w"]).sum()

  def step(params, state, ids):
    _, grads = zenjax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  ids = jax.device_put(np.arange(64), NamedSharding(mesh, P(AXES)))
  lowered = jax.jit(step).lower(params, tx.init(params), ids)
  assert not stablehlo.unordered(lowered)


# --- an automatic axis beside the data axis ---------------------------------


@pytest.mark.parametrize(
  ("columns", "partition", "check_vma"),
  [
    (None, "hash", True),
    pytest.param("model", "hash", False, marks=pytest.mark.more),
    ("model", "columns", True),
  ],
)
def test_partial_manual(columns, partition, check_vma):
  """Manual over "data" only; columns may be sharded over "model"."""
  mesh = jax.make_mesh(
    (2, 2),
    ("data", "model"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:4],
  )
  mapped = jax.jit(
    jax.shard_map(
      lambda x: zenjax.sparse_pmean(x[0], "data", partition=partition),
      mesh=mesh,
      in_specs=P("data"),
      out_specs=P(),
      axis_names={"data"},
      check_vma=check_vma,
    ),
    out_shardings=NamedSharding(mesh, P(None, columns)),
  )
  split = NamedSharding(mesh, P("data", None, columns))
  for name, stack in cases.every_case(2, 90, 8, F32):
    result = mapped(jax.device_put(stack, split))
    got = np.asarray(result)
    oracle.check(np.stack([got, got]), stack, label=name)
    for shard in result.addressable_shards:
      oracle.check_same_bits(shard.data, got[shard.index], name)


def test_a_mesh_of_explicit_axes():
  """As `jax.make_mesh` makes them, whatever the placement of the arguments."""
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  assert mesh.axis_types == (AxisType.Explicit,)
  rng = np.random.default_rng(0)
  batch = rng.integers(0, 600, 8), rng.standard_normal((8, 4), np.float32)
  adagrad = optax.adagrad(0.1)
  tx = zenjax.sharded_optimizer(adagrad, "data", sparse=True)
  loss = lambda table, ids, scale: (table[ids] * scale).sum()

  def step(state, ids, scale):
    table, state = state
    _, grads = zenjax.value_and_grad(loss)(table, ids, scale)
    updates, state = tx.update(grads, state, table)
    return (zenjax.apply_updates(table, updates), state), jnp.sum(ids)

  train = jax.jit(zenjax.data_parallel(step, mesh, "data", aux_specs="sum"))
  table = jnp.ones((600, 4))
  want: Any = table
  state, plain = zenjax.init_state(tx, table, mesh, "data"), adagrad.init(table)
  state = table, state
  for spec in (None, P("data")):
    placed = jax.device_put(batch, spec and NamedSharding(mesh, spec))
    state, total = train(state, *placed)
    assert total == batch[0].sum()
    mean = jax.grad(loss)(want, batch[0], batch[1] / mesh.size)
    updates, plain = adagrad.update(mean, plain)
    want = optax.apply_updates(want, updates)
  np.testing.assert_allclose(state[0], want, rtol=1e-6)
