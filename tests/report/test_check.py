"""`zenjax.check_step` accepts right programs and finds planted errors."""

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
import pytest
from refusals import names
import runners
import steps
from usual import usual

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

N, R, D, B = 2, 600, 8, 64
_rng = np.random.default_rng(0)
# Example lengths of a device differ: 0 is padding.
IDS = _rng.integers(1, R, (B, 3)) * (_rng.random((B, 3)) < 0.7)
IDS[: B // N, 1:] = 0
TARGETS = _rng.normal(size=B).astype(np.float32)
BATCH = IDS.astype(np.int32), TARGETS
TABLE = {"table": True, "w": False}


def initial():
  table = np.random.default_rng(1).normal(size=(R, D)).astype(np.float32)
  return {"table": table, "w": np.ones(D, np.float32)}


def loss(params, ids, targets):
  return jnp.mean((params["table"][ids].sum(1) @ params["w"] - targets) ** 2)


def sync(**options):
  return zenjax.zen_sync("data", sparse=TABLE, **options)


def replicated(mesh, tx):
  params = jax.device_put(initial(), NamedSharding(mesh, P()))
  return params, zenjax.init_state(tx, params, mesh, "data")


def of_tx(
  *parts,
  loss=loss,
  gradients=lambda value, grads: grads,
  apply=optax.apply_updates,
):
  """A program of `data_parallel` with a chain of transformations.

  Args:
    *parts: The transformations.
    loss: The loss of a device.
    gradients: What a user makes of a device's loss and gradients.
    apply: What a user makes of parameters and updates.
  """
  tx = optax.chain(*parts)

  def build(mesh):
    def step(state, *batch):
      params, opt_state = state
      value, grads = jax.value_and_grad(loss)(params, *batch)
      grads = gradients(value, grads)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (apply(params, updates), opt_state), value

    return in_data_parallel(step, mesh), *replicated(mesh, tx)

  return build


def in_data_parallel(step, mesh):
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))

  def flat(params, opt_state, *batch):
    (params, opt_state), value = run((params, opt_state), *batch)
    return params, opt_state, value

  return flat


# --- right programs -----------------------------------------------------------


def by_plain_jit(mesh, shard=False):
  if shard:
    tx: Any = zenjax.sharded_optimizer(
      optax.adagrad(0.1), "data", mesh=mesh, clip_norm=0.1
    )
    params = zenjax.tables.shard(initial(), mesh, "data", tables=TABLE)
    opt_state = tx.init(params)
  else:
    rows = zenjax.lazy_rows(optax.adagrad(0.1))
    tx = optax.chain(zenjax.zen_sync("data", mesh=mesh), rows)
    params, opt_state = replicated(mesh, tx)

  @jax.jit
  def step(params, opt_state, ids, targets):
    value, grads = zenjax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return zenjax.apply_updates(params, updates), opt_state, value

  return step, params, opt_state


def by_shard_map(mesh, local_loss=False):
  tx = optax.chain(sync(), optax.sgd(0.1, 0.9))

  def step(params, opt_state, *batch):
    local = zenjax.unreduced(params, "data")
    value, grads = jax.value_and_grad(loss)(local, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    value = value if local_loss else lax.pmean(value, "data")
    return params, opt_state, value

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), P("data"), P("data")),
    out_specs=P(),
    check_vma=not local_loss,
  )
  return jax.jit(mapped), *replicated(mesh, tx)


def by_train_state(mesh):
  tx = optax.chain(sync(), optax.adam(0.1))
  params, opt_state = replicated(mesh, tx)
  state = TrainState(0, loss, params, tx, opt_state)

  def step(states, *batch):
    state, _ = states
    value, grads = jax.value_and_grad(loss)(state.params, *batch)
    return (state.apply_gradients(grads=grads), ()), value

  return in_data_parallel(step, mesh), state, ()


class Net(nnx.Module):
  def __init__(self):
    self.table, self.w = [nnx.Param(jnp.asarray(x)) for x in initial().values()]


def by_nnx(mesh):
  net = Net()
  tx = optax.chain(zenjax.zen_sync("data"), optax.adam(0.1))
  optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
  graph, state = nnx.split((net, optimizer))

  def step(states, *batch):
    net, optimizer = nnx.merge(graph, states[0])
    of_net = lambda net: loss({"table": net.table, "w": net.w}, *batch)
    value, grads = nnx.value_and_grad(of_net)(net)
    optimizer.update(net, grads)
    return (nnx.state((net, optimizer)), ()), value

  return in_data_parallel(step, mesh), state, ()


def losses(params, ids, targets):
  """Of each id, with those of padding."""
  return (params["table"][ids] @ params["w"] - targets[:, None]) ** 2


def weighted_mean(params, ids, targets):
  return zenjax.weighted_mean(losses(params, ids, targets), ids > 0, "data")


SGD = optax.sgd(0.1)
MULTI_STEPS: Any = optax.MultiSteps(optax.chain(sync(), optax.adam(0.1)), 2)
RIGHT: dict[str, Any] = {
  "plain jit": by_plain_jit,
  "shard_map": by_shard_map,
  "data_parallel": of_tx(sync(), optax.adam(0.1)),
  "sharded_optimizer": of_tx(
    zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=TABLE),
    apply=zenjax.apply_updates,
  ),
  "sharded tables": functools.partial(by_plain_jit, shard=True),
  "TrainState": by_train_state,
  "nnx": by_nnx,
  "MultiSteps": of_tx(MULTI_STEPS.gradient_transformation()),
  "apply_if_finite": of_tx(sync(), optax.apply_if_finite(SGD, 3)),
  "clip after": of_tx(sync(), optax.clip_by_global_norm(0.1), SGD),
  "weighted mean": of_tx(sync(), optax.adam(0.1), loss=weighted_mean),
}


def checked(build, mesh=None, batch=BATCH, **options):
  return zenjax.check_step(build, mesh or runners.mesh(N), batch, **options)


@pytest.mark.parametrize(
  "name", usual(RIGHT, "data_parallel", "sharded tables")
)
def test_right_programs_pass(name):
  found = checked(RIGHT[name])
  assert found.ok and not found.notes, str(found)
  for leaf in found.leaves:
    assert leaf.float64 is not None and leaf.float64 < 1e-11, str(found)
  assert any(leaf.change > 0 for leaf in found.leaves)


def test_an_error_in_an_earlier_program_does_not_hide_float64():
  mesh = runners.mesh(N)
  tx = optax.chain(sync(mesh=mesh), zenjax.lazy_rows(optax.sgd(0.1)))
  params, state = replicated(mesh, tx)

  @jax.jit
  def failing(params, state, *batch):
    both = zenjax.value_and_grad(loss, tables=TABLE)(params, *batch)
    tx.update(both[1], state, params)
    raise RuntimeError

  with pytest.raises(RuntimeError):
    failing(params, state, *BATCH)
  assert not checked(RIGHT["data_parallel"]).notes


def test_wire_dtypes_need_a_tolerance():
  build = of_tx(sync(wire_dtype=jnp.bfloat16), SGD)
  assert not checked(build).ok
  found = checked(build, tolerance=0.02)
  assert found.ok, str(found)


# --- planted errors -----------------------------------------------------------


def gated(value, grads):
  fine = jnp.isfinite(lax.pmean(value, "data"))
  return jax.tree.map(lambda g: jnp.where(fine, g, 0), grads)


def clipped(value, grads):
  norm = lax.pmean(zenjax.global_norm(grads), "data")
  return jax.tree.map(lambda g: g / jnp.maximum(1, norm), grads)


def by_statistics(mesh):
  """A mean of one device kept as a running statistic."""
  tx = optax.chain(sync(), SGD)

  def step(state, ids, targets):
    (params, mean), opt_state = state
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    mean = 0.9 * mean + 0.1 * targets.mean()
    return ((optax.apply_updates(params, updates), mean), opt_state), value

  params, opt_state = replicated(mesh, tx)
  return in_data_parallel(step, mesh), (params, jnp.zeros(())), opt_state


def padded_mean(params, ids, targets):
  """The mean over the ids of one device."""
  every = losses(params, ids, targets)
  return jnp.sum(jnp.where(ids > 0, every, 0)) / jnp.sum(ids > 0)


def wrong_row(value, grads):
  """The last device has one row of its gradient twice."""
  del value
  times = jnp.where(lax.axis_index("data") == N - 1, 2.0, 1.0)
  row = IDS[(N - 1) * B // N, 0]
  return grads | {"table": grads["table"].at[row].multiply(times)}


def mixed_rows(params, updates):
  """Each device updates a range of rows, by the norm of that range."""
  rows = R // lax.axis_size("data")
  own = lax.dynamic_slice_in_dim(
    updates["table"], lax.axis_index("data") * rows, rows
  )
  own = own / jnp.linalg.norm(own)
  table = lax.all_gather(own, "data", tiled=True)
  return optax.apply_updates(params, updates | {"table": table})


PADDED_MEAN = of_tx(sync(), SGD, loss=padded_mean)
WRONG_ROW = of_tx(sync(), optax.sgd(0.01), gradients=wrong_row)
SUM = of_tx(sync(op="sum"), optax.sgd(0.001))
WRONG: dict[str, Any] = {
  "clip before": (
    of_tx(optax.clip_by_global_norm(0.1), sync(), SGD),
    "table",
    "Put only linear",
  ),
  # The sync is forgotten, and another collective is not.
  "forgotten, gated": (
    of_tx(SGD, gradients=gated),
    "table",
    "its copies differ",
  ),
  "forgotten, clipped": (
    of_tx(SGD, gradients=clipped),
    "w",
    "its copies differ",
  ),
  "statistics": (by_statistics, "1", "its copies differ"),
  "padded mean": (PADDED_MEAN, "loss", "`zenjax.weighted_mean`"),
  "wrong row": (WRONG_ROW, "table", f"1 of {R} rows, the first"),
  "mixed rows": (of_tx(sync(), SGD, apply=mixed_rows), "table", "rows"),
  "sum": (SUM, "table", "summed over devices and should be averaged"),
  "local loss": (
    functools.partial(by_shard_map, local_loss=True),
    "loss",
    "Return the mean over all devices",
  ),
}


@pytest.mark.parametrize(
  "name", usual(WRONG, "forgotten, gated", "padded mean", "wrong row")
)
def test_wrong_programs_are_found(name):
  build, leaf, words = WRONG[name]
  found = checked(build)
  assert not found.ok and "verdict: WRONG" in str(found)
  problems = {x.name: x.problem for x in found.leaves if x.problem}
  assert words in problems[leaf], str(found)


def test_a_wrong_row_is_found_without_float64():
  def build(mesh):
    if jax.config.jax_enable_x64:
      raise TypeError("of float32 alone")
    return WRONG_ROW(mesh)

  found = checked(build)
  assert found.notes == (
    "float64 is not compared, because the program raises TypeError: of"
    " float32 alone",
  ), str(found)
  assert [x.name for x in found.leaves if x.problem] == ["table"], str(found)


# --- what cannot be compared --------------------------------------------------


@pytest.mark.parametrize("constant", [0.0, 1e4])
def test_dropout_cannot_be_compared(constant):
  """Even where the loss hardly tells."""

  def dropped(params, ids, targets, key):
    keep = jax.random.bernoulli(key, 0.5, ids.shape)[..., None]
    rows = jnp.where(keep, params["table"][ids], 0).sum(1)
    return jnp.mean((rows @ params["w"] - targets) ** 2) + constant

  build = of_tx(steps.pmean("data"), SGD, loss=dropped)
  found = checked(build, batch=(*BATCH, jax.random.key(0)))
  assert not found.ok and not any(x.problem for x in found.leaves)
  (note,) = found.notes
  assert "cannot be compared" in note and "dropout" in note
  assert str(found).endswith("verdict: cannot be compared")


def test_of_compressors_copies_are_compared():
  cast = zenjax.compress.Cast(jnp.bfloat16)
  cast = zenjax.compress.all_reduce(cast, "data", leaves=True)
  found = checked(of_tx(cast, SGD))
  assert found.ok and "only copies are compared" in found.notes[0]


def test_a_program_that_changes_nothing_is_told():
  found = checked(of_tx(steps.pmean("data"), optax.sgd(0.0)), steps=1)
  assert any("no parameter changed" in note for note in found.notes)
  assert not found.ok


def test_a_row_of_nan_hides_no_other():
  """It becomes NaN on one device, too."""

  def build(mesh):
    run, *state = SUM(mesh)

    def step(*given):
      params, *rest = run(*given)
      table = params["table"].at[R - 1].set(jnp.nan)
      return params | {"table": table}, *rest

    return step, *state

  found = checked(build)
  (table,) = [x for x in found.leaves if x.name == "table"]
  assert not found.ok and "it changes 2 times as much" in table.problem
  assert "become NaN" in found.notes[-1]


@pytest.mark.parametrize("position", [0, -1])
def test_arrays_that_are_no_examples_stay_as_they_are(position):
  """Wherever they are, and however long."""

  def of(program):
    def build(mesh):
      run, *state = program(mesh)

      def step(params, opt_state, *batch):
        weights, batch = batch[position], list(batch)
        del batch[position]
        params, opt_state, *losses = run(params, opt_state, *batch)
        table = params["table"].at[0, 0].add(weights[0])
        return params | {"table": table}, opt_state, *losses

      return step, *state

    batch = list(BATCH)
    weights = np.linspace(0.0, 1.0, 2 * len(BATCH[0]) + 1)
    batch.insert(0 if position == 0 else len(batch), weights)
    return checked(build, batch=tuple(batch))

  assert of(of_tx(sync(), SGD)).ok
  assert "WRONG" in str(of(PADDED_MEAN))


def built_as(*returned):
  return lambda: checked(lambda mesh: returned)


def other_parameters(mesh):
  params = {"w": jnp.full(3, float(mesh.devices.size))}
  return lambda *given: given[:2], params, ()


def like_a_step(params, state, batch):
  return params, state


_WRONG: Any = "ids"
THREE, BUILD = "`build(mesh)` must return three values", "def build(mesh)"
REFUSED = [
  (lambda: checked(SUM, steps=0), ["`steps` must be a"]),
  (lambda: checked(SUM, tolerance=np.nan), ["`tolerance` must be a"]),
  (lambda: zenjax.check_step(SUM, _WRONG, BATCH), ["`mesh` must be a"]),
  (lambda: checked(SUM, batch=_WRONG), ["`batch` must hold arrays", "'ids'"]),
  (lambda: checked(SUM, batch=len), ["`batch` must hold arrays"]),
  (lambda: checked("build"), ["`build` must be a function, got 'build'"]),
  (lambda: checked(like_a_step), ["`build` must take a mesh alone", BUILD]),
  (lambda: checked(other_parameters), ["`build`", "Leaf 'w'", "same key"]),
  (
    built_as(lambda *given: given[0], jnp.ones(3), ()),
    ["`step` must return `(params, opt_state, ...)`"],
  ),
  # One state is missing, and then the step.
  (built_as(lambda *given: given, jnp.ones(3)), [THREE, BUILD]),
  (built_as(jnp.ones(3), jnp.ones(3), ()), [THREE, BUILD]),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused(call, words):
  with pytest.raises((TypeError, ValueError)) as error:
    call()
  names(error, *words)
