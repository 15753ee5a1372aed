"""Local gradients of replicated parameters, taken by autodiff."""

import functools
from typing import Any

from flax import nnx
from flax.training.train_state import TrainState
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from refusals import refused
import runners
import steps

import zenjax

LOOK_UPS = 64  # of a batch


def lookup_loss(params, ids, targets):
  rows = params["embedding"][ids]
  return jnp.mean((rows @ params["kernel"] - targets) ** 2)


def lookup_problem(rows=300, width=8):
  """Parameters, and six batches."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"embedding": normal(rows, width), "kernel": normal(width, 3)}
  ids = rng.integers(0, rows, (6, LOOK_UPS))
  return params, [*zip(ids, normal(6, LOOK_UPS, 3), strict=True)]


@functools.cache
def trained_alone():
  """Losses of one device."""
  params, batches = lookup_problem()
  both, losses = jax.jit(jax.value_and_grad(lookup_loss)), []
  for batch in batches:
    loss, grads = both(params, *batch)
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    losses.append(float(loss))
  return losses


@pytest.mark.parametrize("way", ["check_vma", "shard_map", "data_parallel"])
def test_training_matches_one_device(way):
  """Gradients by autodiff, not handed in: none is summed twice or missed."""
  params, batches = lookup_problem()
  mesh, mapped = runners.mesh(4), way != "data_parallel"
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.3))

  def step(state, *batch):
    params, opt_state = state
    local = params
    if mapped:  # Twice is the same as once.
      local = zenjax.unreduced(zenjax.unreduced(params, "data"), "data")
    loss, grads = jax.value_and_grad(lookup_loss)(local, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    loss = lax.pmean(loss, "data") if mapped else loss
    return (optax.apply_updates(params, updates), opt_state), loss

  params = jax.device_put(params, NamedSharding(mesh, P()))
  state = params, zenjax.init_state(tx, params, mesh, "data")
  if mapped:
    specs = zenjax.state_specs(state, "data")
    run = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(specs, P("data"), P("data")),
      out_specs=(specs, P()),
      check_vma=way == "check_vma",
    )
  else:
    run = zenjax.data_parallel(step, mesh, "data")
  run = jax.jit(run, donate_argnums=0)
  losses, programs = [], []
  for batch in batches:
    with steps.compilations() as compiled:
      state, loss = run(state, *batch)
    losses.append(float(loss))
    programs.append(len(compiled))
  assert programs == [1, 0, 0, 0, 0, 0]
  np.testing.assert_allclose(losses, trained_alone(), rtol=1e-5)
  assert losses[-1] < losses[0]
  for leaf in jax.tree.leaves(state[0]):
    oracle.check_replicas(runners.shards(leaf))


# --- states of all kinds ------------------------------------------------------

N, ROWS, WIDTH = 2, 40, 4
IDS = jnp.arange(8) ** 2 % ROWS
PARAMS = {
  "scale": jnp.linspace(0.5, 1, WIDTH),
  "table": jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH),
}


def loss_of(params, ids):
  scores = jnp.tanh(params["table"][ids] * params["scale"][None]).sum(-1)
  return jnp.mean((scores - 1) ** 2)


def zen():
  return zenjax.zen_sync("data", sparse={"scale": False, "table": True})


def mapped(step, n=N, **options):
  return zenjax.data_parallel(step, runners.mesh(n), "data", **options)


def close(got, want, **tolerance):
  tolerance = dict(rtol=1e-5, atol=1e-6) | tolerance
  jax.tree.map(
    lambda *x: np.testing.assert_allclose(*x, **tolerance), got, want
  )


def train_state_step(state, ids):
  loss, grads = jax.value_and_grad(state.apply_fn)(state.params, ids)
  return state.apply_gradients(grads=grads), loss


@pytest.mark.usefixtures("as_optax_computes")
def test_a_train_state_is_saved_restored_and_trained_on(tmp_path):
  """With `MultiSteps`, whose state `zenjax.init_state` makes, not `create`.

  It trains as one device does in plain `jit`, and checkpoints hold it as it is.
  """
  tx: Any = optax.MultiSteps(optax.chain(zen(), optax.adam(0.1)), 2)
  step = mapped(train_state_step)
  kinds: Any = dict(apply_fn=loss_of, params=PARAMS, tx=tx)
  words = "`state`", "MultiSteps", "opt_state=zenjax.init_state(", "(4,)"
  with refused(ValueError, *words):
    step(TrainState.create(**kinds), IDS)
  opt_state = zenjax.init_state(tx, PARAMS, runners.mesh(N), "data")
  state: Any = TrainState(step=0, opt_state=opt_state, **kinds)
  plain: Any = kinds | dict(tx=optax.MultiSteps(optax.adam(0.1), 2))
  alone: Any = TrainState.create(**plain)
  step, one = jax.jit(step), jax.jit(train_state_step)
  for turn in range(3):  # The last one is only accumulated.
    state, loss = step(state, IDS + turn)
    alone, want = one(alone, IDS + turn)
    close(loss, want)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", state)
  assert type(restored) is TrainState and restored.tx is state.tx
  moved = zenjax.from_checkpoint(
    zenjax.to_checkpoint(state), runners.mesh(N), "data"
  )
  for same in (restored, moved):
    assert jax.tree.structure(same) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, same, state)
  (state, _), (restored, _) = step(state, IDS), step(restored, IDS)
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  alone, _ = one(alone, IDS)
  close(state.params, alone.params)
  assert int(state.step) == int(alone.step) == 4
  oracle.check_replicas(runners.shards(state.params["table"]))
  assert zenjax.stats(state)["table"]["rounds"] == 1
  with refused(ValueError, "`state`", "each of 4 devices", "(8,)"):
    mapped(train_state_step, 4)(state, IDS)


def test_two_models_that_accumulate():
  """Leaves of one name; each may have as many rows as the other accumulates."""
  tx: Any = optax.MultiSteps(zenjax.zen_sync("data"), 2)
  init = lambda params: zenjax.init_state(tx, params, runners.mesh(N), "data")
  small, large = ({"w": jnp.ones((k, 4))} for k in (8, 16))
  same = mapped(lambda state, x: (state, x.sum()), aux_specs="sum")
  state = (small, large, init(small), init(large))
  jax.eval_shape(same, state, IDS)
  with pytest.raises(ValueError, match=r"leaf 'w' of shape \(8, 4\)"):
    jax.eval_shape(same, (*state[:2], tx.init(small), state[3]), IDS)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.table = nnx.Embed(ROWS, WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, ids):
    return self.dropout(self.table(ids)).sum(-1)


def net_loss(net, ids):
  return jnp.mean((net(ids) - 1) ** 2)


@pytest.mark.parametrize("by_owners", [False, True])
def test_nnx_modules_as_the_state_of_a_step_are_tuned(by_owners):
  """What `nnx.split` returns would keep the old sizes, in its graph."""
  mesh, inner = runners.mesh(N), optax.adagrad(0.1)
  tables = zenjax.zen_sync("data", sparse=True)
  tx = optax.chain(tables, zenjax.lazy_rows(inner))
  if by_owners:
    tx = zenjax.sharded_optimizer(inner, "data", mesh=mesh, sparse=True)

  def step(state, ids):
    net, optimizer = state
    loss_fn = lambda net: jnp.mean((net(ids) - 1) ** 2)
    loss, grads = zenjax.value_and_grad(loss_fn)(net)
    optimizer.update(net, grads)
    return (net, optimizer), loss

  run, sent = jax.jit(mapped(step)), []
  net = nnx.Embed(4096, WIDTH, rngs=nnx.Rngs(0))
  state = net, nnx.Optimizer(net, tx, wrt=nnx.Param)
  for _ in range(2):
    for seed in range(3):
      few = np.random.default_rng(seed).permutation(4096)[:8]
      state, _ = run(state, np.tile(few, 64 * N))
    (table,) = zenjax.stats(state[1].opt_state).values()
    sent.append(table["wire_bytes"])
    state[1].opt_state = zenjax.tune(state[1].opt_state)
  assert sent[1] < sent[0] / 2


def split_step(graph):
  """A step of a model and an optimizer that `nnx.split` took apart."""

  def step(state, ids):
    net, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(net_loss)(net, ids)
    optimizer.update(net, grads)
    return nnx.state((net, optimizer)), loss

  return step


@pytest.mark.usefixtures("as_optax_computes")
def test_an_nnx_model_that_is_split_with_its_optimizer():
  """Its keys are in the state: all devices drop alike, and count alike."""
  tables = zenjax.zen_sync("data", sparse=True)

  def made(tx):
    net = Net(nnx.Rngs(0))
    return nnx.split((net, nnx.Optimizer(net, tx, wrt=nnx.Param)))

  graph, state = made(optax.chain(tables, optax.adam(0.1)))
  other, alone = made(optax.adam(0.1))

  def of_parts(state, ids):
    """One device that does what each would do, one after the other."""
    net, optimizer = nnx.merge(other, state)
    found = []
    for part in ids.reshape(N, -1):
      copy, _ = nnx.merge(other, jax.tree.map(jnp.copy, state))
      found.append(nnx.value_and_grad(net_loss)(copy, part))
    net(ids[:1])  # counts
    loss, grads = jax.tree.map(lambda *x: sum(x) / N, *found)
    optimizer.update(net, grads)
    return nnx.state((net, optimizer)), loss

  run, one = jax.jit(mapped(split_step(graph))), jax.jit(of_parts)
  for turn in range(2):
    state, loss = run(state, IDS + turn)
    alone, want = one(alone, IDS + turn)
    close(loss, want)
  net, _ = nnx.merge(graph, state)
  want, _ = nnx.merge(other, alone)
  close(net.table.embedding[...], want.table.embedding[...])
  assert int(net.dropout.rngs.count[...]) == 2  # type: ignore[union-attr]
  oracle.check_replicas(runners.shards(net.table.embedding[...]))


def test_an_nnx_module_and_its_optimizer_are_a_state_as_they_are():
  tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(0.1))
  net = Net(nnx.Rngs(0))

  def step(state, ids, key):
    net, optimizer = state

    def loss(net):
      rows = net.table(ids)
      return net.dropout(rows, rngs=nnx.Rngs(key)).mean()

    loss, grads = nnx.value_and_grad(loss)(net)
    optimizer.update(net, grads)
    return (net, optimizer), loss

  state = net, nnx.Optimizer(net, tx, wrt=nnx.Param)
  after, _ = jax.jit(mapped(step))(state, IDS, jax.random.key(0))
  before = net.table.embedding[...]
  assert type(after[0]) is Net and int(after[1].step[...]) == 1
  assert not np.array_equal(after[0].table.embedding[...], before)
  oracle.check_replicas(runners.shards(after[0].table.embedding[...]))


@pytest.mark.usefixtures("as_optax_computes")
def test_nnx_splits_states_that_differ_between_devices_from_their_types():
  """They would be taken to be equal on all devices."""
  tx = zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=True)
  net = Net(nnx.Rngs(0))
  with pytest.raises(ValueError, match="zenjax.init_state"):
    nnx.Optimizer(net, tx, wrt=nnx.Param)
  optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
  optimizer.tx = tx
  params = nnx.state(net, nnx.Param)
  made = zenjax.init_state(tx, params, runners.mesh(N), "data")
  optimizer.opt_state = nnx.data(made)
  graph, state = nnx.split((net, optimizer))
  with refused(ValueError, "`state`", "the parts of 2"):
    jax.eval_shape(mapped(split_step(graph)), state, IDS)


def test_leaves_of_a_module_that_are_no_arrays():
  """Numbers come out as they are made, or as arrays; functions as they came."""
  first = (PARAMS["table"], jnp.tanh, 0.5, True), 0

  def after(change):
    def step(state, x):
      module, count = state
      return (change(*module), count), x.sum()

    run = mapped(step, aux_specs="sum")
    return run(first, jnp.arange(4))[0][0]

  def numbers(table, act, rate, train):
    return table, act, rate / 2, not train

  def arrays(table, act, rate, train):
    return 0, act, lax.psum(rate, "data") * jnp.ones(()), None or train

  assert after(numbers)[1:] == (jnp.tanh, 0.25, False)
  table, _, rate, _ = after(arrays)
  assert table.shape == () and float(rate) == 1.0
  still = lambda s, x: ((s[0], jnp.float32(x[0])), 0.0)
  with pytest.raises(ValueError, match="synchronizes nothing"):
    mapped(still)(first, IDS)


@pytest.mark.usefixtures("as_optax_computes")
def test_a_module_of_equinox_is_a_state():
  """Three lines change: the optimizer, the gradients and their updates."""
  eqx = pytest.importorskip("equinox")

  class Model(eqx.Module):
    table: Any
    dropout: Any
    layers: Any
    scale: float = 0.5

    def __call__(self, ids):
      return self.layers(self.dropout(self.table(ids))) * self.scale

  keys = jax.random.split(jax.random.key(0))
  model: Any = Model(
    eqx.nn.Embedding(ROWS, WIDTH, key=keys[0]),
    eqx.nn.Dropout(0.5, inference=True),
    eqx.nn.MLP(WIDTH, 2, 4, 1, key=keys[1]),
  )
  arrays = lambda model: eqx.filter(model, eqx.is_inexact_array)

  def step_of(tx, value_and_grad, apply_updates):
    def step(state, ids):
      model, opt_state = state
      loss = lambda model, ids: jnp.square(jax.vmap(model)(ids) - 1).mean()
      value, grads = value_and_grad(loss)(model, ids)
      updates, opt_state = tx.update(grads, opt_state, arrays(model))
      return (apply_updates(model, updates), opt_state), value

    return step

  plain = optax.adagrad(0.1)
  is_table = lambda name, leaf: leaf.shape == (ROWS, WIDTH)
  sync = zenjax.zen_sync("data", sparse=is_table)
  tx = optax.chain(sync, zenjax.lazy_rows(plain))
  mesh, both = runners.mesh(N), zenjax.rows.filter_value_and_grad
  got: Any = model, zenjax.init_state(tx, arrays(model), mesh, "data")
  want: Any = model, plain.init(arrays(model))
  ours = eqx.filter_jit(mapped(step_of(tx, both, zenjax.apply_updates)))
  alone = eqx.filter_jit(
    step_of(plain, eqx.filter_value_and_grad, eqx.apply_updates)
  )
  for turn in range(2):
    got, loss = ours(got, IDS + turn)
    want, value = alone(want, IDS + turn)
    close(loss, value)
  close(arrays(got[0]), arrays(want[0]))
  assert got[0].scale == 0.5 and got[0].dropout.inference is True
  assert jax.tree.structure(got[0]) == jax.tree.structure(model)
  assert [*zenjax.stats(got[1])] == ["table.weight"]


# --- random numbers -----------------------------------------------------------


def noise_step(state, ids, rng):
  key = rng["key"] if isinstance(rng, dict) else rng
  return state, jax.random.normal(key, ids.shape)


@pytest.mark.parametrize(
  ("mesh", "within"),
  [
    (runners.mesh(1), True),
    (runners.mesh(2), False),
    (runners.mesh(2), True),
    # Of explicit axes.
    (jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4]), False),
  ],
  ids=["1 device", "2 devices", "2 devices, within", "2 x 2 devices"],
)
def test_each_device_draws_its_own_numbers(mesh, within):
  """And the same in each run."""
  key, n, axes = jax.random.key(3), mesh.size, mesh.axis_names
  run = zenjax.data_parallel(noise_step, mesh, axes, aux_specs="batch")
  given = {"key": key, "x": IDS} if within else key
  _, got = run((), IDS, given)
  _, again = jax.jit(run)((), IDS, given)
  keys = [jax.random.fold_in(key, i) for i in range(n)]
  want = [jax.random.normal(key, (len(IDS) // n,)) for key in keys]
  np.testing.assert_array_equal(got, np.concatenate(want))
  np.testing.assert_array_equal(got, again)
  assert len({*np.asarray(got).tolist()}) == len(IDS)


def test_keys_of_examples_are_split_and_those_of_a_state_are_not():
  def step(key, keys):
    mine = jax.vmap(jax.random.uniform)(keys)
    key, sub = jax.random.split(key)
    return key, (mine, jax.random.uniform(sub, (3,)))

  keys = jax.random.split(jax.random.key(1), 4)
  run = jax.jit(mapped(step, aux_specs={"0": "batch", "1": "same"}))
  after, (each, shared) = run(jax.random.key(0), keys)
  np.testing.assert_array_equal(each, jax.vmap(jax.random.uniform)(keys))
  key, sub = jax.random.split(jax.random.key(0))
  assert after == key
  np.testing.assert_array_equal(shared, jax.random.uniform(sub, (3,)))
