"""`compress.all_reduce` in a user's program."""

from typing import Any

import compressor_models as models
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import refusals
import runners
from stablehlo import collectives
from stablehlo import unordered

import zenjax
from zenjax import compress
from zenjax._src.compress import registry
from zenjax._src.schemes.base import Context

INT4 = compress.LowBit(4, block=64)
N = 4
SHAPE = (50, 60)


def gradients(n=N, seed=0):
  rng = np.random.default_rng(seed)
  return {
    "w": rng.standard_normal((n, *SHAPE)).astype(np.float32),
    "b": rng.standard_normal((n, 60)).astype(np.float32),
  }


def by_name(name, leaf):
  del leaf
  return name == "w"


def int4(axis, **options):
  return compress.all_reduce(INT4, axis, leaves=by_name, **options)


def once(tree, axis) -> Any:
  tx = int4(axis)
  return tx.update(tree, tx.init(tree))[0]


def want():
  """The update of one step by the model."""
  g = gradients()
  flat = g["w"].reshape(N, -1)
  size = -(-flat.shape[1] // 64) * 64
  blocks = np.stack([np.resize(x, size) for x in flat]).reshape(N, -1, 64)
  blocks = np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % N), (0, 0)))
  mean, _ = models.step(models.low_bit(4), blocks, (N,))
  return mean.reshape(-1)[: flat.shape[1]].reshape(SHAPE)


@pytest.mark.parametrize("runner", runners.RUNNERS)
def test_every_mapping_gives_the_same(runner):
  out = runners.RUNNERS[runner](once, N)(gradients())
  for device in range(N):
    np.testing.assert_allclose(out["w"][device], want(), atol=1e-6)
    mean = gradients()["b"].mean(axis=0)
    np.testing.assert_allclose(out["b"][device], mean, atol=1e-6)


def test_plain_jit_sums_what_is_unreduced():
  mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
  tx = int4("data")
  x = jax.random.normal(jax.random.key(0), (8, SHAPE[0]))

  def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

  with jax.set_mesh(mesh):
    params = {"w": jnp.ones(SHAPE) / 7, "b": jnp.zeros(60)}
    params = jax.device_put(params, P())
    state = zenjax.init_state(tx, params, mesh, "data")
    x = jax.device_put(x, P("data"))

    @jax.jit
    def step(params, state, x):
      grads = jax.grad(loss)(zenjax.unreduced(params, "data"), x)
      return tx.update(grads, state, params)

    update, state = step(params, state, x)
    exact = jax.jit(jax.grad(loss))(params, x)
  np.testing.assert_allclose(update["b"], exact["b"], rtol=1e-5, atol=1e-6)
  rest = np.asarray(state.residuals["w"].value).sum(axis=0)
  np.testing.assert_allclose(update["w"] + rest, exact["w"], atol=1e-5)
  assert not bool(state.mean)


def trained(tx, mesh, state=None, steps=range(6)):
  n = mesh.devices.size

  def step(state, g):
    update, state = tx.update(jax.tree.map(lambda x: x[0], g), state)
    return state, update

  run = jax.jit(
    zenjax.data_parallel(step, mesh, "data", aux_specs="same"), donate_argnums=0
  )
  params = {"w": jnp.zeros(SHAPE), "b": jnp.zeros(60)}
  state = state or zenjax.init_state(tx, params, mesh, "data")
  total = np.zeros(SHAPE)
  for i in steps:
    state, update = run(state, gradients(n, seed=i))
    total += np.asarray(update["w"])
  return state, total


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("old, new", [(4, 2), (2, 4)])
def test_nothing_is_lost_on_other_devices(op, old, new):
  tx = int4("data", op=op)
  state, first = trained(tx, runners.mesh(old))
  saved = zenjax.to_checkpoint(state)
  waiting = np.asarray(saved.residuals["w"].value)
  combine = np.mean if op == "mean" else np.sum
  state = zenjax.from_checkpoint(saved, runners.mesh(new), "data")
  moved = np.asarray(state.residuals["w"].value)
  assert moved.shape == (new, *SHAPE)
  np.testing.assert_allclose(
    combine(moved, axis=0), combine(waiting, axis=0), atol=1e-5
  )
  given = [combine(gradients(old, i)["w"], axis=0) for i in range(6)]
  given += [combine(gradients(new, i)["w"], axis=0) for i in range(6, 9)]
  state, second = trained(tx, runners.mesh(new), state, range(6, 9))
  rest = combine(np.asarray(state.residuals["w"].value), axis=0)
  np.testing.assert_allclose(first + second + rest, sum(given), atol=1e-4)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("compressor", [INT4, compress.PowerSGD(2)])
def test_the_first_steps_are_dense(compressor, check_vma):
  mesh = runners.mesh(N)
  tx = compress.all_reduce(compressor, "data", leaves=by_name, dense_steps=1)
  params = {"w": jnp.zeros(SHAPE), "b": jnp.zeros(60)}
  state = zenjax.init_state(tx, params, mesh, "data")
  specs = zenjax.state_specs(state, "data")

  def step(g, state):
    return tx.update(jax.tree.map(lambda x: x[0], g), state)

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
    check_vma=check_vma,
  )
  run = jax.jit(mapped)
  update, state = run(gradients(), state)
  mean = gradients()["w"].mean(axis=0)
  np.testing.assert_allclose(update["w"], mean, atol=1e-6)
  assert not np.asarray(state.residuals["w"].value).any()
  update, state = run(gradients(), state)
  assert np.abs(update["w"] - mean).max() > 0.01
  assert np.asarray(state.residuals["w"].value).any()


@pytest.mark.parametrize("name", [*models.ROWS, "power_sgd"])
def test_nan_and_inf_are_told_and_leave_no_trace(name):
  bad = gradients()
  bad["w"][1, 0, 3], bad["w"][2, 20, 0] = np.nan, -np.inf
  row = models.ROWS.get(name)
  tx = compress.all_reduce(
    row.compressor if row else compress.PowerSGD(2), "data", leaves=by_name
  )

  def device(first, second):
    told, state = tx.update(first, tx.init(first))
    return told, tx.update(second, state)

  run = jax.jit(jax.vmap(device, axis_name="data"))
  told, (update, state) = run(bad, gradients(seed=1))
  told = told["w"][0].reshape(-1)
  assert not np.isfinite(told[3])
  # The majority of four votes may be against one that is infinite.
  assert name == "vote" or not np.isfinite(told[20 * 60])
  assert name == "power_sgd" or np.isfinite(told).mean() > 0.9
  for x in jax.tree.leaves((update, state.residuals, state.memory)):
    assert np.isfinite(x).all()


def test_tables_go_to_zen_sync_by_rows():
  params = {"table": jnp.zeros((4096, 8)), "w": jnp.zeros((128, 256))}
  loss = lambda p, ids: jnp.sum(
    jnp.tanh(p["table"][ids].reshape(-1, 128) @ p["w"])
  )
  mesh = runners.mesh(N)
  tx = optax.chain(
    compress.all_reduce(compress.LowBit(8), "data"),
    zenjax.lazy_rows(optax.sgd(0.1)),
  )

  def step(state, ids):
    params, opt_state = state
    value, grads = zenjax.value_and_grad(loss)(params, ids)
    update, opt_state = tx.update(grads, opt_state, params)
    return (zenjax.apply_updates(params, update), opt_state), value

  state = params, zenjax.init_state(tx, params, mesh, "data")
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  state, _ = run(state, jnp.arange(256, dtype=jnp.int32))
  found = zenjax.stats(state)
  assert found["table"]["num_rows"] == 4096
  assert found["compressed"]["leaves"] == 1
  fewer = found["compressed"]["dense_bytes"] / found["compressed"]["wire_bytes"]
  assert 3.8 < fewer < 4
  assert "3.9x less than by a dense all-reduce" in zenjax.report(state)


@pytest.mark.parametrize("sizes", [(2,), (4,), (4, 2)])
@pytest.mark.parametrize(
  "compressor", [INT4, compress.Cast(jnp.bfloat16), compress.PowerSGD(2)]
)
def test_it_sends_what_it_declares(compressor, sizes):
  axes = ("data",) if len(sizes) == 1 else ("host", "device")
  mesh = jax.sharding.Mesh(
    np.reshape(jax.devices()[: np.prod(sizes)], sizes), axes
  )
  name = axes if len(axes) > 1 else "data"
  tx = compress.all_reduce(compressor, name, leaves=True)
  params = jax.ShapeDtypeStruct((8 * 64, 16), jnp.float32)
  state = jax.eval_shape(lambda p: zenjax.init_state(tx, p, mesh, name), params)
  specs = zenjax.state_specs(state, name)
  mapped = jax.shard_map(
    lambda g, s: tx.update(g, s),
    mesh=mesh,
    in_specs=(P(), specs),
    out_specs=(P(), specs),
    check_vma=False,
  )
  found = collectives(jax.jit(mapped).lower(params, state))
  context = Context(axes=axes, sizes=sizes, mean=True)
  declared = compressor.messages([params.shape], context)
  assert {x.dtype for x in found} <= {"f32", "ui32"}
  # Tuples of axes are gathered along one axis at a time, the last one first.
  later = [x for x in found if x.op == "all_gather"][1:]
  got = [(x.op, x.words) for x in found if x not in later]
  assert got == [(x.op, x.words) for x in declared]


def _any(x) -> Any:
  return x


REFUSED = {
  "no compressor": (
    lambda: compress.all_reduce(_any("int8"), "data"),
    TypeError,
    ("`compressor`", "LowBit"),
  ),
  "bits": (lambda: compress.LowBit(3), ValueError, ("`bits`", "8, 4 or 2")),
  "block": (lambda: compress.Sign(100), ValueError, ("`block`", "32")),
  "dtype": (lambda: compress.Cast(jnp.float32), ValueError, ("'bfloat16'",)),
  "rank": (lambda: compress.PowerSGD(0), ValueError, ("`rank`",)),
  "steps": (
    lambda: compress.all_reduce(INT4, "data", dense_steps=-1),
    ValueError,
    ("`dense_steps`",),
  ),
  "feedback of votes": (
    lambda: compress.all_reduce(
      compress.SignVote(), "data", error_feedback=True
    ),
    ValueError,
    ("`error_feedback`", "SignVote(256)"),
  ),
  "dense steps of votes": (
    lambda: compress.all_reduce(compress.SignVote(), "data", dense_steps=5),
    ValueError,
    ("`dense_steps`", "SignVote(256)"),
  ),
  "feedback": (
    lambda: compress.all_reduce(INT4, "data", error_feedback=_any("no")),
    TypeError,
    ("`error_feedback` must be a bool",),
  ),
  "another dtype": (
    lambda: compress.Cast("float8_e8m0fnu"),
    ValueError,
    ("float8_e4m3fn",),
  ),
  "bits in words": (
    lambda: compress.LowBit(_any(8.0)),
    ValueError,
    ("`bits`",),
  ),
  "seed": (lambda: compress.PowerSGD(2, seed=-1), ValueError, ("`seed`",)),
  "init outside": (
    lambda: compress.all_reduce(INT4, "data").init(jnp.zeros((200, 200))),
    ValueError,
    ("zenjax.init_state",),
  ),
  "no leaf": (
    lambda: refusals.trace(
      lambda x: compress.all_reduce(
        INT4, "data", leaves=lambda name, leaf: name == "none"
      ).init({"w": x})
    ),
    UserWarning,
    ("`leaves` should choose a leaf",),
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
  call, kind, words = REFUSED[case]
  with pytest.raises(kind) as error:
    call()
  refusals.names(error, *words)


def test_a_foreign_state_is_refused():
  tx = int4("data")
  state, _ = trained(tx, runners.mesh(2), steps=range(1))
  with pytest.raises(ValueError, match="made for"):
    trained(tx, runners.mesh(4), state, range(1))


def test_it_cannot_be_differentiated():
  with pytest.raises(NotImplementedError, match="compress.all_reduce"):
    refusals.trace(jax.grad(lambda x: once({"w": x}, "data")["w"].sum()))


@pytest.mark.parametrize("name", ["small", "large"])
def test_trees_of_which_all_or_nothing_is_compressed(name):
  shape = {"small": (8, 8), "large": (256, 128)}[name]
  g = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
  tx = compress.all_reduce(INT4, "data")
  mesh = runners.mesh(2)

  def step(state, g):
    update, state = tx.update(g[0], state)
    return state, update

  run = jax.jit(zenjax.data_parallel(step, mesh, "data", aux_specs="same"))
  state = zenjax.init_state(tx, jnp.zeros(shape), mesh, "data")
  state, update = run(state, g)
  near = 1e-6 if name == "small" else 0.6
  np.testing.assert_allclose(update, g.mean(axis=0), atol=near)
  words = "it compresses no parameter" if name == "small" else "1 parameter,"
  assert words in zenjax.report(state)


LAYERS = {"w0": (512, 512), "w1": (512, 512), "b": (512,)}


def layers_loss(params, x):
  for name in ("w0", "w1"):
    x = jnp.tanh(x @ params[name] + params["b"][None])
  return jnp.mean(x**2)


def planned(compressors, link="1 Gbit/s", hosts=4):
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  return zenjax.planner.plan(
    jax.value_and_grad(layers_loss),
    {name: struct(shape) for name, shape in LAYERS.items()},
    struct((16, 512)),
    topology=zenjax.planner.Topology.network(link, hosts),
    compressors=compressors,
  )


def test_a_plan_compresses_dense_layers_only_if_allowed():
  assert not planned(()).pays
  both = [compress.LowBit(8), compress.PowerSGD(4)]
  plan = planned(both)
  assert plan.better == "plan" and plan.gain > 10
  chosen = {x.name: x.choice for x in plan.leaves}
  assert chosen == {"w0": "PowerSGD(4)", "w1": "PowerSGD(4)", "b": "pmean"}
  assert zenjax.planner.Plan.from_json(plan.to_json()) == plan
  # 8 bits send a quarter, and memory is a link on which nothing pays.
  assert 3 < planned(both[:1]).gain < 4
  assert not planned(both, "4000 Gbit/s", 2).pays


def test_a_plan_runs():
  plan = planned([compress.LowBit(4)])
  mesh = runners.mesh(4)
  tx = optax.chain(compress.all_reduce(plan, "data"), optax.sgd(0.1))
  params = {
    name: jax.random.normal(jax.random.key(0), shape) / 22
    for name, shape in LAYERS.items()
  }

  def step(state, x):
    params, opt_state = state
    value, grads = jax.value_and_grad(layers_loss)(params, x)
    update, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, update), opt_state), value

  state = params, zenjax.init_state(tx, params, mesh, "data")
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  x = jax.random.normal(jax.random.key(1), (64, 512))
  losses = []
  for _ in range(5):
    state, loss = run(state, x)
    losses.append(float(loss))
  assert losses == sorted(losses, reverse=True)
  found = zenjax.stats(state)["compressed"]
  sent = sum(x.wire_bytes for x in plan.leaves if x.compressor)
  assert found["leaves"] == 2
  assert found["wire_bytes"] == pytest.approx(sent, rel=0.01)
  with pytest.raises(ValueError, match="compress.all_reduce"):
    zenjax.zen_sync("data", plan=plan)


@pytest.mark.parametrize("row", [*models.ROWS.values(), None])
def test_a_name_is_read_again(row):
  compressor = row.compressor if row else compress.PowerSGD(3, seed=1)
  assert registry.named(str(compressor)) == compressor
  with pytest.raises(ValueError, match="LowBit"):
    registry.named("LowBit(3)")
  with pytest.raises(ValueError, match="LowBit"):
    registry.named("open('x')")


def test_one_device_receives_nothing():
  state, _ = trained(int4("data"), runners.mesh(1), steps=range(1))
  assert "nothing received, because" in zenjax.report(state)


def test_two_compressors_of_one_tree_are_both_told():
  inner = compress.all_reduce(
    compress.LowBit(8), "data", leaves=lambda name, _: name == "b"
  )
  tx = int4("data", others=inner)
  state, _ = trained(tx, runners.mesh(2), steps=range(2))
  found = zenjax.stats(state)
  assert found["compressed"]["wire_bytes"] > found["compressed 2"]["wire_bytes"]
  assert zenjax.report(state).count("compress.all_reduce after 2 steps") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_what_16_bit_leaves_cannot_hold_waits(dtype, op):
  rng = np.random.default_rng(0)
  g = jnp.asarray(rng.standard_normal((50, 2, 300)), dtype)
  tx = compress.all_reduce(INT4, "data", leaves=True, op=op)

  def device(g):
    update: Any = lambda state, g: tx.update(g, state)[::-1]
    return jax.lax.scan(update, tx.init(g[0]), g)

  state, updates = jax.jit(jax.vmap(device, 1, axis_name="data"))(g)
  assert updates.dtype == dtype
  wide = lambda x: np.asarray(x, np.float64)
  sent = wide(updates[0]).sum(axis=0) * (2 if op == "mean" else 1)
  kept = wide(state.residuals["leaf"].value).sum(axis=(0, 1))
  np.testing.assert_allclose(sent + kept, wide(g).sum(axis=(0, 1)), atol=1e-3)


class Half(compress.Codec):
  """Not a dataclass, as a user may write one."""

  block = 32

  @property
  def words(self):
    return 16

  def encode(self, x, key):
    return jax.lax.bitcast_convert_type(
      x.astype(jnp.bfloat16).reshape(-1, 16, 2), jnp.uint32
    )

  def decode(self, words):
    narrow = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    return narrow.reshape(-1, 32).astype(jnp.float32)


def test_a_compressor_of_ones_own():
  tx = compress.all_reduce(Half(), "data", leaves=True)
  step = lambda g: tx.update(g, tx.init(g))[0]
  update = jax.jit(jax.vmap(step, axis_name="data"))(gradients()["w"])
  mean = gradients()["w"].mean(axis=0)
  np.testing.assert_allclose(update[0], mean, atol=0.02)


@pytest.mark.parametrize("compressor", [INT4, compress.PowerSGD(2)])
def test_collectives_over_several_axes_run_in_one_order(compressor):
  """Also the collectives of leaves that are not compressed."""
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), axes)
  shapes = {"w": (256, 128), "b": (128,), "table": (4096, 8)}
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = {name: struct(shape) for name, shape in shapes.items()}
  tx = compress.all_reduce(compressor, axes)
  state = jax.eval_shape(lambda p: zenjax.init_state(tx, p, mesh, axes), params)
  specs = zenjax.state_specs(state, axes)
  mapped = jax.shard_map(
    lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
    mesh=mesh,
    in_specs=(P(axes), specs),
    out_specs=(P(), specs),
  )
  local = {name: struct((8, *shape)) for name, shape in shapes.items()}
  assert unordered(jax.jit(mapped).lower(local, state)) == []
