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
from refusals import names
import runners
import steps

import zenjax

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def lookup_loss(params, batch):
  ids, targets = batch
  rows = params["embedding"][ids]
  return jnp.mean((rows @ params["kernel"] - targets) ** 2)


def lookup_problem(n, rows=300, width=8):
  rng = np.random.default_rng(0)
  params = {
    "embedding": jnp.asarray(rng.standard_normal((rows, width)), jnp.float32),
    "kernel": jnp.asarray(rng.standard_normal((width, 3)), jnp.float32),
  }
  ids = rng.integers(0, rows, (6, n * 16))
  targets = rng.standard_normal((6, n * 16, 3)).astype(np.float32)
  return params, ids, targets


def train(sync, n, check_vma):
  """Losses and parameters of six steps over `n` devices."""
  params, ids, targets = lookup_problem(n)
  mesh = runners.mesh(n)
  tx = optax.chain(sync, optax.sgd(0.3))

  def step(params, state, batch):
    varying = zenjax.unreduced(zenjax.unreduced(params, "data"), "data")
    loss, grads = jax.value_and_grad(lookup_loss)(varying, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss[None]

  state = zenjax.init_state(tx, params, mesh, "data")
  specs = zenjax.state_specs(state, "data")
  params = jax.device_put(params, NamedSharding(mesh, P()))
  run = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P("data")),
      check_vma=check_vma,
    )
  )
  losses = []
  for batch in zip(ids, targets, strict=True):
    params, state, loss = run(params, state, batch)
    losses.append(float(np.mean(loss)))
  return losses, params


@CHECK_VMA
def test_training_matches_pmean_and_one_device(check_vma):
  """Gradients by autodiff, not handed in: none is summed twice or missed."""
  losses, params = train(zenjax.zen_sync("data"), 4, check_vma)
  theirs, _ = train(steps.pmean("data"), 4, check_vma)
  np.testing.assert_allclose(losses, theirs, rtol=1e-5)
  alone = _train_alone(4)
  np.testing.assert_allclose(losses, alone, rtol=1e-5)
  assert losses[-1] < losses[0]
  for leaf in jax.tree.leaves(params):
    oracle.check_replicas(runners.shards(leaf))


@functools.cache
def _train_alone(n):
  params, ids, targets = lookup_problem(n)
  both, losses = jax.jit(jax.value_and_grad(lookup_loss)), []
  for batch in zip(ids, targets, strict=True):
    loss, grads = both(params, batch)
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    losses.append(float(loss))
  return losses


def test_data_parallel_is_the_same_step_in_one_call():
  params, ids, targets = lookup_problem(4)
  mesh = runners.mesh(4)
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.3))

  def step(state, ids, targets):
    params, state = state
    loss, grads = jax.value_and_grad(lookup_loss)(params, (ids, targets))
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  state = params, zenjax.init_state(tx, params, mesh, "data")
  losses = []
  for batch in zip(ids, targets, strict=True):
    with steps.compilations() as compiled:
      state, loss = run(state, *batch)
    losses.append(float(loss))
    assert len(compiled) == (1 if len(losses) == 1 else 0)
  np.testing.assert_allclose(losses, _train_alone(4), rtol=1e-5)
  for leaf in jax.tree.leaves(state[0]):
    oracle.check_replicas(runners.shards(leaf))


def test_unsummed_does_nothing_where_gradients_are_local():
  params = {"w": jnp.arange(3.0)}
  for run in ("vmap", "pmap", "shard_map_shards"):
    same = runners.RUNNERS[run](lambda x, axis: zenjax.unreduced(x, axis), 2)
    stack = {"w": np.stack([np.asarray(params["w"])] * 2)}
    np.testing.assert_array_equal(same(stack)["w"], stack["w"])


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
  with pytest.raises(ValueError) as error:
    step(TrainState.create(**kinds), IDS)
  names(error, "`state`", "MultiSteps", "opt_state=zenjax.init_state(", "(4,)")
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
  with pytest.raises(ValueError) as error:
    mapped(train_state_step, 4)(state, IDS)
  names(error, "`state`", "each of 4 devices", "(8,)")


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


@pytest.mark.usefixtures("as_optax_computes")
def test_an_nnx_model_that_is_split_with_its_optimizer():
  """Its keys are in the state: all devices drop alike, and count alike."""
  tables = zenjax.zen_sync("data", sparse=True)

  def made(tx):
    net = Net(nnx.Rngs(0))
    return nnx.split((net, nnx.Optimizer(net, tx, wrt=nnx.Param)))

  graph, state = made(optax.chain(tables, optax.adam(0.1)))
  other, alone = made(optax.adam(0.1))

  def step(state, ids):
    net, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(net_loss)(net, ids)
    optimizer.update(net, grads)
    return nnx.state((net, optimizer)), loss

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

  run, one = jax.jit(mapped(step)), jax.jit(of_parts)
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

  def step(state, ids):
    net, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(net_loss)(net, ids)
    optimizer.update(net, grads)
    return nnx.state((net, optimizer)), loss

  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped(step), state, IDS)
  names(error, "`state`", "the parts of 2")


@jax.tree_util.register_pytree_node_class
class Module:
  """As Equinox has them: some leaves are no arrays."""

  def __init__(self, table, act=jnp.tanh, rate=0.5, train=True):
    self.parts: Any = table, act, rate, train

  def tree_flatten(self):
    return self.parts, None

  @classmethod
  def tree_unflatten(cls, _, parts):
    return cls(*parts)

  def __call__(self, ids):
    table, act, rate, train = self.parts
    return (act(table[ids]) * (rate if train else 0.0)).sum(-1)


def module_state():
  return Module(PARAMS["table"]), 0


def test_leaves_of_a_module_that_a_step_changes():
  """Numbers come out as they are made, or as arrays; functions as they came."""

  def step(change):
    def step(state, x):
      module, count = state
      return (Module(*change(*module.parts)), count), x.sum()

    run = mapped(step, aux_specs="sum")
    return lambda: run(module_state(), jnp.arange(4))[0][0].parts

  def numbers(table, act, rate, train):
    return table, act, rate / 2, not train

  def arrays(table, act, rate, train):
    return 0, act, lax.psum(rate, "data") * jnp.ones(()), None or train

  assert step(numbers)()[1:] == (jnp.tanh, 0.25, False)
  table, _, rate, _ = step(arrays)()
  assert table.shape == () and float(rate) == 1.0
  still = lambda s, x: ((s[0], jnp.float32(x[0])), 0.0)
  with pytest.raises(ValueError, match="synchronizes nothing"):
    mapped(still)(module_state(), IDS)


def test_a_module_of_equinox_is_a_state():
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

  def step_of(tx):
    def step(state, ids):
      model, opt_state = state
      loss = lambda model: jnp.square(jax.vmap(model)(ids) - 1).mean()
      value, grads = eqx.filter_value_and_grad(loss)(model)
      updates, opt_state = tx.update(grads, opt_state, arrays(model))
      return (eqx.apply_updates(model, updates), opt_state), value

    return step

  plain = optax.sgd(0.1)
  is_table = lambda name, leaf: leaf.shape == (ROWS, WIDTH)
  tx = optax.chain(zenjax.zen_sync("data", sparse=is_table), plain)
  mesh = runners.mesh(N)
  got: Any = model, zenjax.init_state(tx, arrays(model), mesh, "data")
  want: Any = model, plain.init(arrays(model))
  ours = eqx.filter_jit(mapped(step_of(tx)))
  alone = eqx.filter_jit(step_of(plain))
  for turn in range(2):
    got, loss = ours(got, IDS + turn)
    want, value = alone(want, IDS + turn)
    close(loss, value)
  close(arrays(got[0]), arrays(want[0]))
  assert got[0].scale == 0.5 and got[0].dropout.inference is True
  assert jax.tree.structure(got[0]) == jax.tree.structure(model)


# --- random numbers -----------------------------------------------------------


def noise_step(state, ids, rng):
  key = rng["key"] if isinstance(rng, dict) else rng
  return state, jax.random.normal(key, ids.shape)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("within", [False, True])
def test_each_device_draws_its_own_numbers(n, within):
  """And the same in each run."""
  key = jax.random.key(3)
  run = mapped(noise_step, n, aux_specs="batch")
  given = {"key": key, "x": IDS} if within else key
  _, got = run((), IDS, given)
  _, again = jax.jit(run)((), IDS, given)
  each = IDS.reshape(n, -1)
  want = [
    jax.random.normal(jax.random.fold_in(key, i), x.shape)
    for i, x in enumerate(each)
  ]
  np.testing.assert_array_equal(got, np.concatenate(want))
  np.testing.assert_array_equal(got, again)
  assert len(set(np.asarray(got).tolist())) == len(IDS)


def test_devices_of_two_explicit_axes_draw_their_own():
  axes = ("host", "device")
  mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4])
  run = zenjax.data_parallel(noise_step, mesh, axes, aux_specs="batch")
  _, got = jax.jit(run)((), IDS, jax.random.key(0))
  keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(4)]
  want = np.concatenate([jax.random.normal(key, (2,)) for key in keys])
  np.testing.assert_array_equal(got, want)


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
