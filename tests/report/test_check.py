"""`zenjax.check_step` accepts right steps and says what is wrong in others."""

from typing import Any

import cases
import drawn
import hypothesis
import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
import ml_dtypes
import numpy as np
import optax
import oracle
import pytest
import runners
import steps

import zenjax
from zenjax._src.report import check
from zenjax._src.sync import gradient_tree

pytestmark = pytest.mark.usefixtures("as_optax_computes")

IDS = np.arange(64, dtype=np.int32) * 7 % 100
TARGETS = np.arange(64, dtype=np.float32)
SPARSE = {"table": True, "bias": False}


def loss(params, ids, targets):
  rows = params["table"][ids] * params["bias"]
  return jnp.mean((rows.sum(-1) - targets) ** 2)


def params():
  table = jax.random.normal(jax.random.key(0), (100, 4))
  return {"table": table, "bias": jnp.ones(4)}


def step_of(tx, rows=False, loss=loss):
  """A training step, by row gradients or arrays."""
  gradients = zenjax.value_and_grad if rows else jax.value_and_grad
  apply = zenjax.apply_updates if rows else optax.apply_updates

  def step(state, ids, targets):
    params, state = state
    value, grads = gradients(loss)(params, ids, targets)
    updates, state = tx.update(grads, state, params)
    return (apply(params, updates), state), value

  return step


def checked(tx, mesh=None, step=None, axis: Any = "data", **kwargs):
  mesh = mesh or runners.mesh(2)
  state = params(), zenjax.init_state(tx, params(), mesh, axis)
  step = step or step_of(tx)
  return zenjax.check_step(
    step, state, IDS, TARGETS, mesh=mesh, axis_name=axis, **kwargs
  )


def found(result, what):
  return {c.leaf: c.found for c in result.comparisons if c.what == what}


def zen(**options):
  return zenjax.zen_sync("data", sparse=SPARSE, **options)


# --- steps that are right -----------------------------------------------------


def test_a_step_of_eight_devices():
  tx = optax.chain(zen(), optax.adam(0.1))
  result = checked(tx, runners.mesh(8))
  assert result.ok and not result.notes, str(result)
  for what in ("exchange", "gradient", "step", "replicas"):
    assert set(found(result, what)) == {"table", "bias"}
  text = str(result).splitlines()
  assert text[0].split()[:3] == ["leaf", "by", "exchange"]
  assert text[-1] == "verdict: ok, 8 comparisons"


def test_row_gradients_on_an_explicit_mesh():
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  assert mesh.axis_types == (AxisType.Explicit,)
  tx = optax.chain(zen(), zenjax.lazy_rows(optax.adam(0.1)))
  result = checked(tx, mesh, step_of(tx, rows=True))
  assert result.ok and not result.notes, str(result)
  assert len(result.comparisons) == 8


def test_what_travels_whole_does_so_in_float64():
  """A table of 9,600 elements is as small in all dtypes."""
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  table, mesh = jnp.ones((600, 16)), runners.mesh(2)

  def step(state, ids):
    table, state = state
    grads = jax.grad(lambda t: jnp.square(t[ids]).sum())(table)
    updates, state = tx.update(grads, state, table)
    return (optax.apply_updates(table, updates), state), 0.0

  ids, state = (
    jnp.arange(8),
    (table, zenjax.init_state(tx, table, mesh, "data")),
  )
  result = zenjax.check_step(step, state, ids, mesh=mesh, axis_name="data")
  assert result.ok and not result.notes, str(result)


def test_a_state_of_any_kind():
  """Functions and numbers in it pass; what holds no such leaf is told."""
  tx = optax.chain(zen(scheme="dense"), optax.adam(0.1))

  def step(state, ids, targets):
    kept = {"bias": state["bias"], "table": state["lying"].T}
    assert state["act"] is jnp.tanh and state["rate"] == 0.5
    grads = jax.grad(loss)(kept, ids, targets)
    updates, opt_state = tx.update(grads, state["opt"], kept)
    after: Any = optax.apply_updates(kept, updates)
    after = {"bias": after["bias"], "lying": after["table"].T}
    return state | after | {"opt": opt_state}, ()

  mesh = runners.mesh(2)
  given: Any = {"act": jnp.tanh, "rate": 0.5, "bias": params()["bias"]}
  given |= {"opt": zenjax.init_state(tx, params(), mesh, "data")}
  lying = given | {"lying": params()["table"].T}
  result = zenjax.check_step(
    step, lying, IDS, TARGETS, mesh=mesh, axis_name="data"
  )
  # Its momenta lie as it does, and are compared.
  assert result.ok and not result.notes, str(result)
  assert set(found(result, "step")) == {"table", "bias"}
  tx = optax.chain(zen(scheme="dense"), optax.sgd(0.1))
  lying |= {"opt": zenjax.init_state(tx, params(), mesh, "data")}
  result = zenjax.check_step(
    step, lying, IDS, TARGETS, mesh=mesh, axis_name="data"
  )
  assert result.ok and set(found(result, "step")) == {"bias"}
  assert "the step of table, for no leaf of the state" in str(result)


def test_one_device():
  tx = optax.chain(zen(), optax.sgd(0.1))
  assert checked(tx, runners.mesh(1)).ok


def test_rows_that_wait():
  """What came out and what waits are what went in."""
  tx = optax.chain(zen(on_overflow="carry", capacities=(1, 2)), optax.sgd(0.1))
  result = checked(tx)
  assert result.ok, str(result)
  assert len(result.notes) == 1 and "the whole step" in result.notes[0]


@pytest.mark.parametrize("name", ["micro", "sharded_optimizer"])
def test_other_transformations(name):
  if name == "micro":
    tx = optax.chain(zenjax.sparsify.micro("data", 0.05), optax.sgd(0.1))
  else:
    tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", sparse=SPARSE)
  result = checked(tx, step=step_of(tx, rows=name == "sharded_optimizer"))
  assert result.ok, str(result)
  assert set(found(result, "gradient")) == {"table", "bias"}
  assert bool(found(result, "exchange")) == (name == "micro")


def test_two_axes_of_which_one_is_averaged_over_by_itself():
  """Each axis has an exchange of its own; groups lie along either."""
  mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("host", "data"))
  tx = optax.chain(
    zen(scheme="dense"), zenjax.zen_sync("host", scheme="dense"), optax.sgd(0.1)
  )
  result = checked(tx, mesh, axis=("host", "data"))
  assert result.ok, str(result)
  with pytest.raises(ValueError, match="`axis_name` must have every axis"):
    checked(tx, mesh, axis="data")


def test_exchanges_in_a_scan_in_a_jit_and_in_a_branch():
  tx = optax.MultiSteps(
    optax.chain(zen(scheme="dense"), optax.sgd(0.1)),
    1,
  ).gradient_transformation()
  inner = jax.jit(step_of(tx))

  def step(state, ids, targets):
    halves = ids.reshape(2, -1), targets.reshape(2, -1)
    state, values = lax.scan(lambda s, part: inner(s, *part), state, halves)
    return state, values.mean()

  result = checked(tx, step=step)
  assert result.ok, str(result)
  assert set(found(result, "exchange")) == {"table", "bias"}


@pytest.mark.parametrize("rows", [False, True])
def test_plain_programs_have_no_exchange(rows):
  """That of the mesh has plain collectives alone, whatever is in a `jit`."""
  tx = optax.chain(zen(partition="hash"), zenjax.lazy_rows(optax.sgd(0.1)))
  mesh, step = runners.mesh(2), jax.jit(step_of(tx, rows))
  state = params(), zenjax.init_state(tx, params(), mesh, "data")
  arguments = state, IDS, TARGETS
  run = check._Run(step, mesh, ("data",))
  plain = jax.make_jaxpr(lambda *args: run.on_mesh(args, True, (0, 1))[1])
  own = jax.make_jaxpr(zenjax.data_parallel(step, mesh, "data"))
  found = [set(steps.collectives(f(*arguments).jaxpr)) for f in (plain, own)]
  assert "all_to_all" in found[1]
  assert found[0] == ({"psum", "all_gather"} if rows else {"psum"})


def test_arguments_stay_as_they_are():
  tx = optax.chain(zen(scheme="dense"), optax.sgd(0.1))
  mesh = runners.mesh(2)
  given = jax.device_put(params(), jax.NamedSharding(mesh, jax.P()))
  state = given, zenjax.init_state(tx, given, mesh, "data")
  before = jax.tree.map(np.array, state)
  zenjax.check_step(
    step_of(tx), state, IDS, TARGETS, mesh=mesh, axis_name="data"
  )
  jax.tree.map(np.testing.assert_array_equal, before, state)


# --- steps that are broken ----------------------------------------------------


def _dropped(table):
  return table.at[0].set(0)


def _doubled(table):
  return table.at[7].multiply(2)


def _of_another_device(table):
  return table.at[7].add(jnp.where(lax.axis_index("data") == 1, 1e-6, 0))


@pytest.mark.parametrize(
  ("broken", "what"),
  [
    (_dropped, {"exchange", "step"}),
    (_doubled, {"exchange", "step"}),
    (_of_another_device, {"exchange", "replicas"}),
  ],
)
def test_a_broken_exchange_is_found(monkeypatch, broken, what):
  right = gradient_tree.sync_tree

  def sync_tree(tree, state, options):
    synced, leaves = right(tree, state, options)
    return synced | {"table": broken(synced["table"])}, leaves

  monkeypatch.setattr(gradient_tree, "sync_tree", sync_tree)
  tx = optax.chain(zen(scheme="dense"), optax.sgd(0.1))
  result = checked(tx)
  assert not result.ok
  wrong = [c for c in result.comparisons if not c.found.ok]
  assert {c.leaf for c in wrong} == {"table"}
  assert {c.what for c in wrong} == what
  assert "verdict: WRONG" in str(result)


def test_rows_that_are_lost_while_they_wait_are_found(monkeypatch):
  right = gradient_tree.keep

  def keep(*args):
    leaf = right(*args)
    assert leaf.residual is not None
    return leaf._replace(residual=leaf.residual.at[:, 90:].set(0))

  monkeypatch.setattr(gradient_tree, "keep", keep)
  tx = optax.chain(zen(on_overflow="carry", capacities=(1, 2)), optax.sgd(0.1))
  result = checked(tx)
  assert not found(result, "exchange")["table"].ok
  assert found(result, "exchange")["bias"].ok


# As a compiler that errs on the mesh: what is mapped by vmap is right.
_errs_p = jex_core.Primitive("errs_on_the_mesh")
_errs_p.def_impl(lambda x: x)
_errs_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[_errs_p] = lambda args, dims: (args[0], dims[0])
mlir.register_lowering(
  _errs_p, mlir.lower_fun(lambda x: x.at[3].set(x[4]), multiple_results=False)
)


def test_a_gradient_that_the_compiler_gets_wrong_is_found():
  """One row reads the gradient of another; the exchange is right."""
  tx = optax.chain(zen(scheme="dense"), optax.sgd(0.1))

  def step(state, ids, targets):
    params, state = state
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    grads["table"] = _errs_p.bind(grads["table"])
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), value

  result = checked(tx, step=step)
  assert all(v.ok for v in found(result, "exchange").values())
  assert not found(result, "gradient")["table"].ok
  assert found(result, "gradient")["bias"].ok
  assert "WRONG: gradient of table: " in str(result)


def test_what_cannot_be_compared_is_told():
  tx = optax.chain(zen(scheme="dense"), optax.sgd(0.1))
  result = checked(tx, memory=1)
  assert result.ok and not found(result, "gradient")
  assert "give more `memory`" in str(result)

  def drops(params, ids, targets):
    keep = jax.random.bernoulli(jax.random.key(ids[0]), 0.5, targets.shape)
    return loss(params, ids, targets * keep)

  result = checked(tx, step=step_of(tx, loss=drops))
  assert result.ok and set(found(result, "gradient")) == {"table", "bias"}
  assert "gradients in float64 on one CPU: others are drawn" in str(result)


def test_a_step_that_synchronizes_nothing_is_refused():
  def step(state, ids, targets):
    params, state = state
    grads = jax.grad(loss)(params, ids, targets)
    params = jax.tree.map(lambda p, g: p - lax.pmean(g, "data"), params, grads)
    return (params, state), 0.0

  with pytest.raises(ValueError, match="none of them ran"):
    checked(optax.sgd(1.0), step=step)


def test_a_while_loop_is_refused():
  tx = zen(scheme="dense")

  def step(state, ids, targets):
    params, state = state

    def body(carry):
      count, grads = carry
      return count + 1, tx.update(grads, state)[0]

    grads = jax.grad(loss)(params, ids, targets)
    _, grads = lax.while_loop(lambda c: c[0] < ids[0] * 0 + 1, body, (0, grads))
    return (grads, state), 0.0

  with pytest.raises(NotImplementedError, match="inside a `while`"):
    checked(tx, step=step)


# --- the judge ----------------------------------------------------------------


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize(
  "dtype", [cases.FLOAT32, cases.FLOAT16, cases.BFLOAT16], ids=str
)
def test_bounds_hold_those_of_the_oracle_and_little_more(dtype, op):
  shape = drawn.Shape(5, 9, 3, dtype)

  @hypothesis.settings(max_examples=60)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    n = shape.n
    scale = n if op == "mean" else 1
    total = check.Total.zeros(stack.shape[1:])
    for x in stack:
      total.add(x)
    allowed, free = check.roundings(total, n, dtype, op == "mean")
    low, high = (x.astype(np.float64) * scale for x in oracle.bounds(stack, op))
    for end in (low, high):
      overflows = np.isinf(end) & np.isfinite(total.value)
      found = check.judged(
        np.where(overflows, total.value, end), total.value, allowed, free
      )
      assert found.ok, found
    # Four times as far is wrong, wherever anything is.
    far = np.where(free, 0, 4 * allowed + 1e-30)
    moved = check.judged(total.value + far, total.value, allowed, free)
    known = np.isfinite(total.value) & ~free
    big = known & (far > 1e-15 * np.abs(total.value))
    assert moved.wrong >= big.sum()
    half = float(ml_dtypes.finfo(dtype).eps) / 2
    units = np.abs(high - low) / 2 + half * np.abs(total.value)
    tiny = 40 * n * n * float(ml_dtypes.finfo(dtype).tiny)
    narrow = allowed <= 6 * units + tiny + 8e-7 * total.size
    # Where an end overflows, or both do, there is no width to compare with.
    assert (narrow | ~known | ~np.isfinite(units)).all()

  with np.errstate(invalid="ignore", over="ignore"):
    holds()
