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


def grid_mesh(shape, names) -> Mesh:
  devices = np.asarray(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), names)


def hierarchical(f, shape, check_vma):
  """`f(x, AXES)` on a mesh of `shape`; stack [n, ...] -> every shard."""
  mesh = grid_mesh(shape, AXES)
  mapped = jax.jit(
    jax.shard_map(
      lambda x: f(x[0], AXES),
      mesh=mesh,
      in_specs=P(AXES),
      out_specs=P(),
      check_vma=check_vma,
    )
  )
  split = NamedSharding(mesh, P(AXES))
  return lambda stack: runners.shards(mapped(jax.device_put(stack, split)))


def nested_vmap(f, shape):
  """The same on one device: an axis of `vmap` for each axis of the mesh."""
  mapped = jax.jit(
    jax.vmap(
      jax.vmap(lambda x: f(x, AXES), axis_name=AXES[1]), axis_name=AXES[0]
    )
  )

  def run(stack):
    result = mapped(stack.reshape(*shape, *stack.shape[1:]))
    return np.asarray(result).reshape(stack.shape)

  return run


@pytest.mark.parametrize(
  ("scheme", "shape", "check_vma"),
  [
    ("zen", (3, 2), False),
    ("zen", (3, 1), True),
    *((name, (3, 2), True) for name in ALONG_AXES),
    ("dense", (4, 2), True),
  ],
)
def test_hierarchy(scheme, shape, check_vma):
  """No 16-bit partial sum: float16 overflows in them where the mean fits."""
  dtype = cases.FLOAT16 if shape in ((4, 2), (3, 2)) else F32
  run = hierarchical(
    lambda x, axes: zenjax.sparse_pmean(x, axes, scheme=scheme),
    shape,
    check_vma,
  )
  for name, stack in cases.every_case(int(np.prod(shape)), 67, 5, dtype):
    oracle.check(run(stack), stack, label=name)


@pytest.mark.parametrize(
  ("partition", "capacities"),
  [
    ("columns", (4, 12)),
    pytest.param("hash", (1, 2), marks=pytest.mark.more),
  ],
)
def test_hierarchy_with_rounds_under_nested_vmap(partition, capacities):
  run = nested_vmap(
    lambda x, axes: zenjax.sparse_pmean(
      x, axes, partition=partition, capacities=capacities
    ),
    (2, 2),
  )
  for name, stack in cases.every_case(4, 90, 12, cases.BFLOAT16):
    oracle.check(run(stack), stack, label=name)


def test_slow_links_carry_each_row_once():
  """A gather along the fast axis first would send it for each device there."""
  mapped = jax.shard_map(
    lambda x: zenjax.sparse_pmean(x[0], AXES, scheme="all_gather"),
    mesh=grid_mesh((4, 2), AXES),
    in_specs=P(AXES),
    out_specs=P(),
  )
  lowered = jax.jit(mapped).lower(jnp.zeros((8, 300, 4)))
  found = stablehlo.collectives(lowered)
  words = [x.words for x in found if x.op == "all_gather" and not x.inside]
  assert words == [words[0], 4 * words[0]]


def test_only_the_named_axis_is_averaged():
  """Groups along the other axis stay apart, whatever each has to send."""
  mesh = grid_mesh((2, 2), AXES)
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


def test_state_and_multisteps_on_two_axes():
  tx = steps.lenient(
    optax.MultiSteps(
      optax.chain(zenjax.zen_sync(AXES, sparse=True), optax.sgd(1.0)), 2
    ).gradient_transformation()
  )
  trainer = steps.Trainer(
    tx,
    {"t": jnp.zeros((70, 3))},
    grid_mesh((2, 2), AXES),
    axis=AXES,
  )
  rng = np.random.default_rng(0)
  a, b = (cases.half(rng, 4, 70, 3, F32) for _ in range(2))
  assert (trainer({"t": a})["t"] == 0).all()
  got = trainer({"t": b})["t"]
  oracle.check_replicas(got)
  want = -(a.astype(np.float64) + b).mean(axis=0) / 2
  np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
  trainer.check_replicas()


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
  trainer = steps.Trainer(tx, params, grid_mesh((2, 2), AXES), axis=AXES)
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
  mesh = grid_mesh((2, 2), AXES)
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
    mesh=grid_mesh((2, 4), AXES),
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


def partial_manual(f, check_vma, width_spec):
  """Manual over "data" only; columns follow `width_spec` over "model"."""
  mesh = Mesh(
    np.asarray(jax.devices()[:4]).reshape(2, 2),
    ("data", "model"),
    axis_types=(AxisType.Auto, AxisType.Auto),
  )
  mapped = jax.jit(
    jax.shard_map(
      lambda x: f(x[0], "data"),
      mesh=mesh,
      in_specs=P("data"),
      out_specs=P(),
      axis_names={"data"},
      check_vma=check_vma,
    ),
    out_shardings=NamedSharding(mesh, P(None, width_spec)),
  )
  split = NamedSharding(mesh, P("data", None, width_spec))

  def run(stack):
    result = mapped(jax.device_put(stack, split))
    return _by_data_rank(result, stack.shape[-1])

  return run


def _by_data_rank(result, width) -> np.ndarray:
  """What each device of the data axis holds, columns joined: [n, R, D]."""
  shards = runners.shards(result)
  shards = shards.reshape(2, 2, *shards.shape[1:])
  if shards.shape[-1] == width:
    np.testing.assert_array_equal(
      oracle.bits(shards[:, 0]), oracle.bits(shards[:, 1])
    )
    return shards[:, 0]
  return np.concatenate([shards[:, 0], shards[:, 1]], axis=-1)


@pytest.mark.parametrize(
  ("width_spec", "partition", "check_vma"),
  [
    (None, "hash", True),
    pytest.param("model", "hash", False, marks=pytest.mark.more),
    ("model", "columns", True),
  ],
)
def test_partial_manual(width_spec, partition, check_vma):
  run = partial_manual(
    lambda x, axis: zenjax.sparse_pmean(x, axis, partition=partition),
    check_vma,
    width_spec,
  )
  for name, stack in cases.every_case(2, 90, 8, F32):
    oracle.check(run(stack), stack, label=name)


def test_a_mesh_of_explicit_axes():
  """As `jax.make_mesh` makes them, whatever the placement of the arguments."""
  rng = np.random.default_rng(0)
  batch = rng.integers(0, 600, 8), rng.standard_normal((8, 4), np.float32)
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", sparse=True)

  def step(state, ids, scale):
    table, state = state
    loss = lambda t: (t[ids] * scale).sum()
    _, grads = zenjax.value_and_grad(loss)(table)
    updates, state = tx.update(grads, state, table)
    return (zenjax.apply_updates(table, updates), state), jnp.sum(ids)

  def after_steps(mesh, specs):
    table = jnp.ones((600, 4))
    state = table, zenjax.init_state(tx, table, mesh, "data")
    mapped = zenjax.data_parallel(step, mesh, "data", aux_specs="sum")
    train = jax.jit(mapped)
    for spec in specs:
      placed = jax.device_put(batch, spec and NamedSharding(mesh, spec))
      state, total = train(state, *placed)
      assert total == batch[0].sum()
    return np.asarray(state[0])

  explicit = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  assert explicit.axis_types == (AxisType.Explicit,)
  grads = np.zeros((600, 4), np.float32)
  np.add.at(grads, batch[0], batch[1] / 2)
  want, squares = np.ones((600, 4)), np.full((600, 4), 0.1)
  for _ in range(2):  # Adagrad.
    squares += grads**2
    want -= 0.1 * grads / np.sqrt(squares + 1e-7)
  got = after_steps(explicit, (None, P("data")))
  np.testing.assert_allclose(got, want, rtol=1e-6)
