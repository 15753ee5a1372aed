"""`zenjax.check_step` accepts right programs and finds planted errors."""

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
  table = _rng_table()
  return {"table": table, "w": np.ones(D, np.float32)}


def _rng_table():
  return np.random.default_rng(1).normal(size=(R, D)).astype(np.float32)


def loss(params, ids, targets):
  return jnp.mean((params["table"][ids].sum(1) @ params["w"] - targets) ** 2)


def sync(**options):
  return zenjax.zen_sync("data", sparse=TABLE, **options)


def mapped(mesh, tx, loss=loss, local=lambda grads: grads, apply=None):
  """A program of `data_parallel`."""
  apply = apply or optax.apply_updates

  def step(state, ids, targets):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(local(grads), opt_state, params)
    return (apply(params, updates), opt_state), value

  return of_state(jax.jit(zenjax.data_parallel(step, mesh, "data")))


def of_state(run):
  def step(params, opt_state, *batch):
    (params, opt_state), value = run((params, opt_state), *batch)
    return params, opt_state, value

  return step


def replicated(mesh, tx):
  params = jax.device_put(initial(), NamedSharding(mesh, P()))
  return params, zenjax.init_state(tx, params, mesh, "data")


def by_data_parallel(*after, **options):
  def build(mesh):
    tx = optax.chain(sync(**options), *(after or (optax.adam(0.1),)))
    return mapped(mesh, tx), *replicated(mesh, tx)

  return build


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


def by_sharded_tables(mesh):
  return by_plain_jit(mesh, shard=True)


def by_shard_map(mesh):
  tx = optax.chain(sync(), optax.sgd(0.1, 0.9))

  @jax.shard_map(
    mesh=mesh,
    in_specs=(P(), P(), P("data"), P("data")),
    out_specs=(P(), P(), P()),
  )
  def step(params, opt_state, ids, targets):
    local = zenjax.unreduced(params, "data")
    value, grads = jax.value_and_grad(loss)(local, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(value, "data")

  return jax.jit(step), *replicated(mesh, tx)


def by_sharded_optimizer(mesh):
  tx = zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=TABLE)
  step = mapped(mesh, tx, apply=zenjax.apply_updates)
  return step, *replicated(mesh, tx)


def by_train_state(mesh):
  tx = optax.chain(sync(), optax.adam(0.1))
  params, opt_state = replicated(mesh, tx)
  state = TrainState(0, loss, params, tx, opt_state)

  def step(state, ids, targets):
    value, grads = jax.value_and_grad(loss)(state.params, ids, targets)
    return state.apply_gradients(grads=grads), value

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  return lambda state, _, *batch: _with_none(run(state, *batch)), state, ()


def _with_none(out):
  return out[0], (), out[1]


class Net(nnx.Module):
  def __init__(self):
    self.table = nnx.Param(jnp.asarray(_rng_table()))
    self.w = nnx.Param(jnp.ones(D))


def by_nnx(mesh):
  net = Net()
  tx = optax.chain(zenjax.zen_sync("data"), optax.adam(0.1))
  optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
  graph, state = nnx.split((net, optimizer))

  def step(state, ids, targets):
    net, optimizer = nnx.merge(graph, state)
    of_net = lambda net: loss({"table": net.table, "w": net.w}, ids, targets)
    value, grads = nnx.value_and_grad(of_net)(net)
    optimizer.update(net, grads)
    return nnx.state((net, optimizer)), value

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  return lambda state, _, *batch: _with_none(run(state, *batch)), state, ()


def by_multi_steps(mesh):
  inner = optax.chain(sync(), optax.adam(0.1))
  tx: Any = optax.MultiSteps(inner, 2).gradient_transformation()
  return mapped(mesh, tx), *replicated(mesh, tx)


def by_weighted_mean(mesh):
  tx = optax.chain(sync(), optax.adam(0.1))

  def padded(params, ids, targets):
    scores = params["table"][ids] @ params["w"] - targets[:, None]
    return zenjax.weighted_mean(scores**2, ids > 0, "data")

  return mapped(mesh, tx, padded), *replicated(mesh, tx)


RIGHT: dict[str, Any] = {
  "plain jit": by_plain_jit,
  "shard_map": by_shard_map,
  "data_parallel": by_data_parallel(),
  "sharded_optimizer": by_sharded_optimizer,
  "sharded tables": by_sharded_tables,
  "TrainState": by_train_state,
  "nnx": by_nnx,
  "MultiSteps": by_multi_steps,
  "apply_if_finite": by_data_parallel(optax.apply_if_finite(optax.sgd(0.1), 3)),
  "clip after": by_data_parallel(
    optax.clip_by_global_norm(0.1), optax.sgd(0.1)
  ),
  "weighted mean": by_weighted_mean,
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
  assert not checked(by_data_parallel()).notes


def test_wire_dtypes_need_a_tolerance():
  build = by_data_parallel(optax.sgd(0.1), wire_dtype=jnp.bfloat16)
  assert not checked(build).ok
  found = checked(build, tolerance=0.02)
  assert found.ok, str(found)


# --- planted errors -----------------------------------------------------------


def by_clip_before(mesh):
  clip = optax.clip_by_global_norm(0.1)
  tx = optax.chain(clip, sync(), optax.sgd(0.1))
  return mapped(mesh, tx), *replicated(mesh, tx)


def forgotten(made):
  """The sync is forgotten, and another collective is not."""

  def build(mesh):
    tx = optax.sgd(0.1)

    def step(state, ids, targets):
      params, opt_state = state
      value, grads = jax.value_and_grad(loss)(params, ids, targets)
      updates, opt_state = tx.update(made(value, grads), opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), value

    run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    return of_state(run), *replicated(mesh, tx)

  return build


def _gated(value, grads):
  fine = jnp.isfinite(lax.pmean(value, "data"))
  return jax.tree.map(lambda g: jnp.where(fine, g, 0), grads)


def _clipped(value, grads):
  norm = lax.pmean(zenjax.global_norm(grads), "data")
  return jax.tree.map(lambda g: g / jnp.maximum(1, norm), grads)


def by_statistics(mesh):
  """A mean of one device kept as a running statistic."""
  tx = optax.chain(sync(), optax.sgd(0.1))

  def step(state, ids, targets):
    (params, mean), opt_state = state
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    mean = 0.9 * mean + 0.1 * targets.mean()
    return ((optax.apply_updates(params, updates), mean), opt_state), value

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  params, opt_state = replicated(mesh, tx)
  return of_state(run), (params, jnp.zeros(())), opt_state


def by_padded_mean(mesh):
  tx = optax.chain(sync(), optax.sgd(0.1))

  def padded(params, ids, targets):
    scores = params["table"][ids] @ params["w"] - targets[:, None]
    return jnp.sum(jnp.where(ids > 0, scores**2, 0)) / jnp.sum(ids > 0)

  return mapped(mesh, tx, padded), *replicated(mesh, tx)


def by_wrong_row(mesh):
  """The last device has one row of its gradient twice."""
  tx = optax.chain(sync(), optax.sgd(0.01))

  def local(grads):
    times = jnp.where(lax.axis_index("data") == N - 1, 2.0, 1.0)
    row = IDS[(N - 1) * B // N, 0]
    table = grads["table"].at[row].multiply(times)
    return grads | {"table": table}

  return mapped(mesh, tx, local=local), *replicated(mesh, tx)


def by_mixed_rows(mesh):
  """Each device updates a range of rows, by the norm of that range."""
  n = mesh.devices.size
  tx = optax.chain(sync(), optax.sgd(0.1))

  def apply(params, updates):
    at = lax.axis_index("data") * (R // n)
    own = lax.dynamic_slice_in_dim(updates["table"], at, R // n)
    own = own / jnp.linalg.norm(own)
    table = lax.all_gather(own, "data", tiled=True)
    return optax.apply_updates(params, updates | {"table": table})

  return mapped(mesh, tx, apply=apply), *replicated(mesh, tx)


def by_sum(mesh):
  return by_data_parallel(optax.sgd(0.001), op="sum")(mesh)


def by_local_loss(mesh):
  tx = optax.chain(sync(), optax.sgd(0.1))
  specs = P(), P(), P("data"), P("data")

  @jax.shard_map(
    mesh=mesh, in_specs=specs, out_specs=(P(),) * 3, check_vma=False
  )
  def step(params, opt_state, ids, targets):
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  return jax.jit(step), *replicated(mesh, tx)


WRONG: dict[str, Any] = {
  "clip before": (by_clip_before, "table", "Put only linear"),
  "forgotten, gated": (forgotten(_gated), "table", "its copies differ"),
  "forgotten, clipped": (forgotten(_clipped), "w", "its copies differ"),
  "statistics": (by_statistics, "1", "its copies differ"),
  "padded mean": (by_padded_mean, "loss", "`zenjax.weighted_mean`"),
  "wrong row": (by_wrong_row, "table", f"1 of {R} rows, the first"),
  "mixed rows": (by_mixed_rows, "table", "rows"),
  "sum": (by_sum, "table", "summed over devices and should be averaged"),
  "local loss": (by_local_loss, "loss", "Return the mean over all devices"),
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
    return by_wrong_row(mesh)

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

  def build(mesh):
    tx = optax.chain(steps.pmean("data"), optax.sgd(0.1))

    def step(state, ids, targets, key):
      params, opt_state = state

      def dropped(params):
        keep = jax.random.bernoulli(key, 0.5, ids.shape)[..., None]
        rows = jnp.where(keep, params["table"][ids], 0).sum(1)
        return jnp.mean((rows @ params["w"] - targets) ** 2) + constant

      value, grads = jax.value_and_grad(dropped)(params)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), value

    run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    return of_state(run), *replicated(mesh, tx)

  found = checked(build, batch=(*BATCH, jax.random.key(0)))
  assert not found.ok and not any(x.problem for x in found.leaves)
  (note,) = found.notes
  assert "cannot be compared" in note and "dropout" in note
  assert str(found).endswith("verdict: cannot be compared")


def test_of_compressors_copies_are_compared():
  def build(mesh):
    cast = zenjax.compress.Cast(jnp.bfloat16)
    cast = zenjax.compress.all_reduce(cast, "data", leaves=True)
    tx = optax.chain(cast, optax.sgd(0.1))
    return mapped(mesh, tx), *replicated(mesh, tx)

  found = checked(build)
  assert found.ok and "only copies are compared" in found.notes[0]


def test_a_program_that_changes_nothing_is_told():
  tx = optax.chain(steps.pmean("data"), optax.sgd(0.0))
  build = lambda mesh: (mapped(mesh, tx), *replicated(mesh, tx))
  found = checked(build, steps=1)
  assert any("no parameter changed" in note for note in found.notes)
  assert not found.ok


def test_a_row_of_nan_hides_no_other():
  """It becomes NaN on one device, too."""

  def build(mesh):
    run, *state = by_sum(mesh)

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

  assert of(by_data_parallel(optax.sgd(0.1))).ok
  assert "WRONG" in str(of(by_padded_mean))


@pytest.mark.parametrize("options", [{"steps": 0}, {"tolerance": np.nan}])
def test_arguments_that_check_nothing_are_refused(options):
  with pytest.raises(ValueError, match="must be a"):
    checked(by_sum, **options)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"mesh": None}, "`mesh` must be a jax.sharding.Mesh"),
    ({"batch": "ids"}, "`batch` must hold arrays.*'ids'"),
    ({"batch": len}, "`batch` must hold arrays"),
  ],
)
def test_arguments_of_a_wrong_type_are_refused(options, words):
  mesh, batch = (
    options.get("mesh", runners.mesh(2)),
    options.get("batch", BATCH),
  )
  with pytest.raises(TypeError, match=words):
    zenjax.check_step(by_sum, mesh, batch)


REFUSED: dict[str, Any] = {
  "other parameters": (
    lambda mesh: (
      lambda *given: given[:2],
      {"w": jnp.full(3, float(mesh.devices.size))},
      (),
    ),
    ("`build`", "Leaf 'w'", "same key"),
  ),
  "one value": (
    lambda mesh: (lambda *given: given[0], jnp.ones(3), ()),
    ("`step` must return `(params, opt_state, ...)`",),
  ),
  "one state": (
    lambda mesh: (lambda *given: given, jnp.ones(3)),
    ("`build(mesh)` must return three values", "def build(mesh)"),
  ),
  "no step": (
    lambda mesh: (jnp.ones(3), jnp.ones(3), ()),
    ("`build(mesh)` must return three values", "def build(mesh)"),
  ),
  "a step": (
    lambda params, state, batch: (params, state),
    ("`build` must take a mesh alone", "def build(mesh)"),
  ),
  "no function": ("build", ("`build` must be a function, got 'build'",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_are_refused(name):
  build, words = REFUSED[name]
  with pytest.raises((TypeError, ValueError)) as error:
    checked(build)
  for word in words:
    assert word in str(error.value)
