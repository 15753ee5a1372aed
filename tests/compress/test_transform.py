"""`compress.all_reduce` in a user's program."""

import re
from typing import Any

import compressing
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import refusals
import runners
from stablehlo import unordered

import zenjax
from zenjax import compress
from zenjax._src.compress import registry

INT4, TOP_K = compress.LowBit(4, block=64), compress.TopK(0.05)
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


MAPPED: dict[str, Any] = {
  "int4": (INT4, {}),
  "micro": (compress.MiCRO(0.05), {}),
  "top_k": (TOP_K, {"momentum": 0.5}),
}


REPLICATED = "shard_map_replicated", "shard_map_vma_replicated"


def _mapped_cases():
  for i, kind in enumerate(MAPPED):
    for j, runner in enumerate(("pmap", *REPLICATED)):
      marks = () if i == j % 3 else pytest.mark.more
      yield pytest.param(kind, runner, marks=marks)


@pytest.mark.parametrize(("kind", "runner"), [*_mapped_cases()])
def test_every_mapping_gives_the_same(kind, runner):
  compressor, options = MAPPED[kind]

  def steps(tree, axis):
    tx: Any = compress.all_reduce(compressor, axis, leaves=by_name, **options)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), tree)
    first, state = tx.update(tree, tx.init(params))
    return first, tx.update(tree, state)[0]

  both = [runners.RUNNERS[x](steps, N)(gradients()) for x in ("vmap", runner)]
  for want, got in zip(*map(jax.tree.leaves, both)):
    for device in range(N):
      np.testing.assert_allclose(got[device], want[0], atol=1e-6)
  # Also leaves that are not compressed have the momentum.
  mean = gradients()["b"].mean(axis=0) * (1 + options.get("momentum", 0))
  np.testing.assert_allclose(both[1][1]["b"][0], mean, atol=1e-6)


def trained(tx, devices, state=None, steps=1):
  """The state after some steps."""
  mesh = runners.mesh(devices)
  run = compressing.in_data_parallel(tx, mesh, donate_argnums=0)
  params = {"w": jnp.zeros(SHAPE), "b": jnp.zeros(60)}
  state = state or zenjax.init_state(tx, params, mesh, "data")
  for i in range(steps):
    state, _ = run(state, gradients(devices, seed=i))
  return state


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


def _any(x) -> Any:
  return x


def reduce(compressor: Any = INT4, **options):
  return lambda: compress.all_reduce(compressor, "data", **options)


def init(compressor, size, devices=2):
  """Traces the first state of a leaf of this size."""

  def call():
    tx = compress.all_reduce(compressor, "data", leaves=True)
    x = jax.ShapeDtypeStruct((devices, size), jnp.float32)
    jax.eval_shape(jax.vmap(tx.init, axis_name="data"), x)

  return call


def init_outside(**options):
  """Makes the first state where no axis has a name."""
  return lambda: reduce(TOP_K, **options)().init(jnp.zeros((200, 200)))


def update(grads, params=None, **options):
  """Traces a step whose state was made for `params`."""

  def call():
    tx = compress.all_reduce(INT4, "data", **options)
    step = lambda _: tx.update(grads, tx.init(params or grads))[0]
    refusals.trace(step)

  return call


def summed():
  """A gradient that JAX has summed."""
  mesh = runners.mesh(2)
  step = lambda w: once({"w": w}, "data")
  mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
  jax.eval_shape(mapped, jnp.zeros((8, 8)))


def sent_as(dtype):
  return lambda: compress.TopK(0.1, wire_dtype=dtype)


def without_compressors(**options):
  """Makes a transformation of a plan that compresses nothing."""

  def call():
    plan = planned("lossless")
    assert not any(leaf.compressor for leaf in plan.leaves)
    compress.all_reduce(plan, "data", **options)

  return call


def from_state_of(compressor, other):
  """Traces a step from the first state of another transformation."""
  tx = compress.all_reduce(compressor, "data", leaves=True)
  step = lambda g: tx.update(g, other.init(g))
  return lambda: refusals.trace(step, jnp.ones((2, 40_000)))


MOMENTUM = compress.all_reduce(INT4, "data", leaves=True, momentum=0.9)
NO_FEEDBACK = compress.all_reduce(
  INT4, "data", leaves=True, error_feedback=False
)
EXDYNA = compress.all_reduce(compress.ExDyna(0.01), "data", leaves=True)


def no_leaf(name, leaf):
  del name, leaf
  return False


VOTE, ONE = compress.SignVote(), jnp.zeros(1)
ROWS = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), 4)
REFUSED = [
  # Arguments of compressors.
  (lambda: compress.LowBit(3), ValueError, "`bits` 8, 4 or 2"),
  (lambda: compress.LowBit(_any(8.0)), ValueError, "`bits` 8.0"),
  (lambda: compress.Sign(100), ValueError, "`block` 32"),
  (lambda: compress.Cast(jnp.float32), ValueError, "'bfloat16'"),
  (lambda: compress.Cast("float8_e8m0fnu"), ValueError, "float8_e4m3fn"),
  (lambda: compress.PowerSGD(0), ValueError, "`rank`"),
  (lambda: compress.PowerSGD(2, seed=-1), ValueError, "`seed`"),
  (lambda: compress.TopK(0), ValueError, "`density` (0, 1] 0.01"),
  (lambda: compress.MiCRO(1.5), ValueError, "`density` (0, 1] 1.5"),
  (lambda: compress.RandomK(float("nan")), ValueError, "`density` nan"),
  (lambda: compress.Threshold(1, _any("1%")), TypeError, "`density` '1%'"),
  (lambda: compress.ExDyna(0.5), UserWarning, "`density` 0.005"),
  (lambda: compress.TopK(1), UserWarning, "`density` 1 % 0.01"),
  (lambda: compress.TopK(0.1, _any("sort")), ValueError, "`method` 'sampled'"),
  (lambda: compress.MiCRO(0.1, _any("pid")), ValueError, "`controller` 'pid'"),
  (lambda: compress.ExDyna(0.1, capacity=0), ValueError, "`capacity` 0"),
  (lambda: compress.Threshold(-1), ValueError, "`value` -1 compress.TopK"),
  (lambda: compress.Threshold(np.inf), ValueError, "`value` finite inf"),
  (sent_as(jnp.int8), TypeError, "`wire_dtype` floating int8"),
  (sent_as(jnp.float8_e5m2), ValueError, "`wire_dtype` bfloat16 float8_e5m2"),
  # Arguments of all_reduce.
  (reduce(_any("int8")), TypeError, "`compressor` LowBit"),
  (lambda: compress.all_reduce(INT4, ()), ValueError, "`axis_name`"),
  (reduce(op="max"), ValueError, "`op` 'mean' 'max'"),
  (reduce(dense_steps=-1), ValueError, "`dense_steps` -1"),
  (reduce(VOTE, error_feedback=True), ValueError, "`error_feedback` SignVote"),
  (reduce(VOTE, dense_steps=5), ValueError, "`dense_steps` SignVote(256)"),
  (reduce(error_feedback=_any("no")), TypeError, "`error_feedback` a bool"),
  (reduce(momentum=1.0), ValueError, "`momentum` [0, 1) 1.0"),
  (reduce(nesterov=True), ValueError, "`nesterov` `momentum`"),
  # Also if a plan compresses nothing.
  (without_compressors(momentum=7), ValueError, "`momentum` 7"),
  (without_compressors(dense_steps=-3), ValueError, "`dense_steps` -3"),
  (without_compressors(seed=-1), ValueError, "`seed` -1"),
  # Models that do not fit.
  (init(compress.MiCRO(1e-4), 9_999), ValueError, "`density` 0.0001 9999"),
  (
    init(compress.MiCRO(1.0), 3, devices=4),
    ValueError,
    "`params` 3 4 zen_sync",
  ),
  (init(compress.ExDyna(0.1), 32_767), ValueError, "`params` 32768 MiCRO"),
  (
    init(compress.ExDyna(0.1), 40_000, devices=1_025),
    ValueError,
    "`axis_name` 1024 1025 MiCRO",
  ),
  (init(compress.TopK(0.1), 2**31), ValueError, "`params` 2**31 `leaves=`"),
  # States and gradients.
  (init_outside(), ValueError, "zenjax.init_state"),
  (init_outside(error_feedback=False), ValueError, "zenjax.init_state"),
  (update({"w": ONE}, leaves=no_leaf), UserWarning, "`leaves` choose a leaf"),
  (update({"t": ROWS}, leaves=True), TypeError, "'t' SparseRows"),
  (
    update({"t": ROWS}, leaves=False, momentum=0.9),
    TypeError,
    "`momentum` 't' SparseRows optax.partition",
  ),
  (update({"i": jnp.arange(3)}, leaves=True), TypeError, "i int32 `leaves`"),
  (
    update({"w": jnp.zeros(9)}, {"w": jnp.zeros(8)}, leaves=True),
    ValueError,
    "`state` (1, 8) (1, 9) zenjax.init_state",
  ),
  (summed, ValueError, "`updates` zenjax.unreduced"),
  (from_state_of(INT4, MOMENTUM), ValueError, "`state` made for"),
  (from_state_of(INT4, NO_FEEDBACK), ValueError, "`state` made for"),
  (from_state_of(compress.MiCRO(0.01), EXDYNA), ValueError, "`state` made for"),
  (from_state_of(TOP_K, EXDYNA), ValueError, "`state` made for"),
  (from_state_of(INT4, zenjax.zen_sync("data")), TypeError, "a CompressState"),
  # Names.
  (lambda: registry.named("LowBit(3)"), ValueError, "'LowBit(3)' MiCRO"),
  (lambda: registry.named("open('x')"), ValueError, "open LowBit"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_refusals(call, kind, words):
  with pytest.raises(kind) as error:
    call()
  refusals.names(error, *words.split())


def test_a_state_of_other_devices_is_refused():
  tx = int4("data")
  with pytest.raises(ValueError, match="made for"):
    trained(tx, 4, trained(tx, 2))


def test_it_cannot_be_differentiated():
  with pytest.raises(NotImplementedError, match="compress.all_reduce"):
    refusals.trace(jax.grad(lambda x: once({"w": x}, "data")["w"].sum()))


@pytest.mark.parametrize("name", ["small", "large"])
def test_trees_of_which_all_or_nothing_is_compressed(name):
  shape = {"small": (8, 8), "large": (256, 128)}[name]
  g = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
  tx, mesh = compress.all_reduce(INT4, "data"), runners.mesh(2)
  state = zenjax.init_state(tx, jnp.zeros(shape), mesh, "data")
  state, update = compressing.in_data_parallel(tx, mesh)(state, g)
  near = 1e-6 if name == "small" else 0.6
  np.testing.assert_allclose(update, g.mean(axis=0), atol=near)
  words = "it compresses no parameter" if name == "small" else "1 parameter,"
  assert words in zenjax.report(state)


LAYERS = {"w0": (512, 512), "w1": (512, 512), "b": (512,)}


def layers_loss(params, x):
  for name in ("w0", "w1"):
    x = jnp.tanh(x @ params[name] + params["b"][None])
  return jnp.mean(x**2)


def planned(allow, link="1 Gbit/s", hosts=4):
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  return zenjax.planner.plan(
    jax.value_and_grad(layers_loss),
    {name: struct(shape) for name, shape in LAYERS.items()},
    struct((16, 512)),
    topology=zenjax.planner.Topology.network(link, hosts),
    allow=allow,
  )


def test_a_plan_compresses_dense_layers_only_if_allowed():
  assert not planned(()).pays
  both = [compress.LowBit(8), compress.PowerSGD(4)]
  plan = planned(both)
  assert plan.better == "plan" and plan.gain > 10
  chosen = {x.name: x.choice for x in plan.leaves}
  assert chosen == {"w0": "PowerSGD(4)", "w1": "PowerSGD(4)", "b": "pmean"}
  assert zenjax.planner.Plan.from_json(plan.to_json()) == plan
  assert planned("int8") == planned(both[:1])
  assert {x.choice for x in planned(["int8", "PowerSGD(4)"]).leaves} == {
    *chosen.values()
  }
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
  told = plan.compare(zenjax.stats(state))
  assert re.fullmatch("2 compressed gradients: .* seen, ratio 1.00", told)
  with pytest.raises(ValueError, match="lacks the compressed leaves"):
    plan.compare({})
  with pytest.raises(ValueError, match="compress.all_reduce"):
    zenjax.zen_sync("data", plan=plan)


def in_parts(compressor, parts, mesh):
  """Returns a plan for leaves "a", "b" and so on, in these parts."""
  leaves = [
    zenjax.planner.LeafPlan(
      name=name,
      shape=(128, 128),
      dtype="float32",
      scheme="dense",
      compressor=compressor,
      group=part,
    )
    for name, part in zip("abc", parts)
  ]
  return zenjax.planner.Plan(leaves=tuple(leaves), mesh=mesh)


def test_parts_give_the_same_sums():
  """As one exchange, if no errors are kept: other devices would keep them."""
  axes, sizes = ("host", "device"), (2, 2)
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(sizes), axes)
  drawn = np.random.default_rng(0).normal(size=(3, 4, 128, 128))
  grads = dict(zip("abc", drawn.astype(np.float32)))

  def run(parts):
    plan = in_parts("LowBit(4)", parts, tuple(zip(axes, sizes)))
    tx = compress.all_reduce(plan, axes, error_feedback=False)
    params = {name: jnp.zeros((128, 128)) for name in grads}
    state = zenjax.init_state(tx, params, mesh, axes)
    step, sums = compressing.in_shard_map(tx, state, mesh), []
    for _ in range(3):
      out, state = step(grads, state)
      sums.append(jax.tree.map(np.asarray, out))
    return sums, zenjax.stats(state)

  want, _ = run((0, 0, 0))
  got, stats = run((2, 0, 2))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert stats["compressed"]["leaves"] + stats["compressed 2"]["leaves"] == 3


def test_equal_leaves_in_two_parts_are_not_rounded_alike():
  random = "LowBit(2, rounding='stochastic')"
  plan = in_parts(random, (0, 1), (("data", 2),))
  tx = compress.all_reduce(plan, "data", error_feedback=False)
  x = jax.random.normal(jax.random.key(0), (2, 128, 128))
  out = compressing.once(tx, {"a": x, "b": x})
  assert np.mean(np.asarray(out["a"] != out["b"])) > 0.1


def test_a_plan_of_another_model_or_mesh_is_refused():
  plan = planned("int8")
  tx = compress.all_reduce(plan, "data")
  with pytest.raises(ValueError, match="made for other gradients"):
    jax.vmap(tx.init, axis_name="data")({"w0": jnp.ones((4, 128, 128))})
  grads = {name: jnp.ones((2, *shape)) for name, shape in LAYERS.items()}
  with pytest.raises(ValueError, match="made for {'data': 4}"):
    compressing.once(tx, grads)
  # A part of the gradients, as `optax.masked` gives them.
  some = {name: grads[name][0] for name in list(LAYERS)[:1]}
  with pytest.raises(ValueError, match="must not leave some of them out"):
    jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=4)(some)


def test_one_device_receives_nothing():
  state = trained(int4("data"), 1)
  assert "nothing received, because" in zenjax.report(state)


def test_two_compressors_of_one_tree_are_both_told():
  inner = compress.all_reduce(
    compress.LowBit(8), "data", leaves=lambda name, _: name == "b"
  )
  tx = int4("data", others=inner)
  state = trained(tx, 2, steps=2)
  found = zenjax.stats(state)
  assert found["compressed"]["wire_bytes"] > found["compressed 2"]["wire_bytes"]
  assert zenjax.report(state).count("compress.all_reduce after 2 steps") == 2


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
  update = compressing.once(tx, gradients()["w"])
  mean = gradients()["w"].mean(axis=0)
  np.testing.assert_allclose(update[0], mean, atol=0.02)


@pytest.mark.parametrize(
  "compressor",
  [INT4, compress.PowerSGD(2), compress.TopK(0.01), compress.ExDyna(0.01)],
  ids=str,
)
def test_collectives_over_several_axes_run_in_one_order(compressor):
  """Also the collectives of leaves that are not compressed."""
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), axes)
  shapes = {"w": (256, 128), "b": (128,), "table": (4096, 8)}
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = {name: struct(shape) for name, shape in shapes.items()}
  lowered = compressing.lowered(
    compress.all_reduce(compressor, axes), params, mesh
  )
  assert unordered(lowered) == []
