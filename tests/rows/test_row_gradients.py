"""`zenjax.value_and_grad` against `jax.value_and_grad`, form by form."""

import functools
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import row_cases
from row_cases import ALSO_ELSE
from row_cases import IDS
from row_cases import OUT_OF_RANGE
from row_cases import ROWS
from row_cases import ROWS_ONLY
from row_cases import WIDTH

import zenjax
from zenjax import SparseRows


def dense(gradient):
  return gradient.to_dense() if isinstance(gradient, SparseRows) else gradient


def tolerance(name):
  # A dense gradient of a bfloat16 view is summed in bfloat16, rows in float32.
  return 2e-2 if name == "bfloat16" else 2e-6


def assert_close(got, want, tol=2e-6, err_msg=""):
  np.testing.assert_allclose(got, want, rtol=tol, atol=tol, err_msg=err_msg)


def both(f):
  """Values and dense gradients, by JAX and by zenjax, and whether rows came."""
  kinds = []

  def run(table, ids):
    value, gradient = zenjax.value_and_grad(f)(table, ids)
    kinds.append(isinstance(gradient, SparseRows))
    ours = value, dense(gradient)
    return jax.value_and_grad(f)(table, ids), ours

  return jax.jit(run), kinds


def on_two_devices(run, check_vma):
  """`run(params, ids)` on each, with ids of its own, as one program."""
  mapped = jax.shard_map(
    run,
    mesh=Mesh(np.array(jax.devices()[:2]), ("data",)),
    in_specs=(P(), P("data")),
    out_specs=P("data"),
    check_vma=check_vma,
  )
  ids = np.concatenate([IDS, OUT_OF_RANGE])
  return lambda params: jax.jit(mapped)(params, ids)


@pytest.mark.parametrize("name", ALSO_ELSE)
def test_other_uses_stay_dense(name):
  f, reason = ALSO_ELSE[name]
  run, kinds = both(f)
  want, got = run(row_cases.table(), IDS)
  assert_close(got[0], want[0])
  assert_close(got[1], want[1])
  assert kinds == [False]
  (use,) = zenjax.rows.explain_tables(f, row_cases.table(), IDS).uses
  assert reason in use.reason and not use.rows


def test_look_ups_give_local_rows():
  """All forms in one program, each device with ids of its own."""

  def run(table, ids):
    view = zenjax.unreduced(table, "data")
    found = {}
    for name, f in ROWS_ONLY.items():
      value, rows = zenjax.value_and_grad(f)(table, ids)
      assert isinstance(rows, SparseRows), name
      found[name] = jax.value_and_grad(f)(view, ids), (value, rows.to_dense())
    return jax.tree.map(lambda x: x[None], found)

  found = on_two_devices(run, check_vma=True)(row_cases.table())
  for name, ((value, gradient), got) in found.items():
    assert_close(got[0], value, err_msg=name)
    assert_close(got[1], gradient, tolerance(name), err_msg=name)


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_parameter_has_its_own_form(check_vma):
  """Rows or dense, as of `zenjax.unreduced`: zen_sync is first to sum them."""

  def run(params, ids):
    got = zenjax.rows.grad(_loss)(params, ids)
    rows = {name for name, g in got.items() if isinstance(g, SparseRows)}
    assert rows == {"items", "users"}
    view = zenjax.unreduced(params, "data")
    found = jax.grad(_loss)(view, ids), {k: dense(g) for k, g in got.items()}
    return jax.tree.map(lambda x: x[None], found)

  want, got = on_two_devices(run, check_vma)(_params())
  for name in want:
    assert_close(got[name], want[name], 1e-5, err_msg=name)


def test_gradients_are_local_under_pmap():
  """An axis without types: as `jax.grad`, of the device's own ids."""
  f = ROWS_ONLY["twice"]
  run = jax.vmap(
    lambda t, i: (jax.grad(f)(t, i), zenjax.rows.grad(f)(t, i).to_dense()),
    (None, 0),
    axis_name="data",
  )
  assert_close(*jax.jit(run)(row_cases.table(), np.stack([IDS, OUT_OF_RANGE])))


def test_a_loss_that_is_summed_inside_stays_as_jax_has_it():
  """Its gradient is a sum over devices, which local rows are not."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

  def f(table, ids):
    return jax.lax.pmean(row_cases.loss(table[ids]), "data")

  run = jax.shard_map(
    lambda t, i: (zenjax.rows.grad(f)(t, i), jax.grad(f)(t, i)),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P(),
  )
  ids = np.concatenate([IDS, OUT_OF_RANGE])
  assert_close(*jax.jit(run)(row_cases.table(), ids))


@functools.cache
def _drawn_program():
  def f(table, ids):
    return sum(ROWS_ONLY[k](table, ids) for k in ("take clip", "index", "scan"))

  return both(f)[0]


@hypothesis.given(
  st.lists(st.integers(-2 * ROWS, 2 * ROWS), min_size=8, max_size=8)
)
@hypothesis.settings(max_examples=150)
def test_any_ids(ids):
  want, got = _drawn_program()(row_cases.table(), np.array(ids, np.int32))
  assert_close(got[0], want[0])
  assert_close(got[1], want[1], 1e-5)


# --- several parameters -------------------------------------------------------


def _params():
  rng = np.random.default_rng(1)
  normal = lambda *shape: jnp.array(rng.standard_normal(shape), jnp.float32)
  return {
    "items": normal(ROWS, WIDTH),
    "users": normal(ROWS + 7, WIDTH),
    "tied": normal(ROWS, WIDTH),
    "factor": jnp.float32(1.3),
    "padding": normal(WIDTH),
    "kernel": normal(WIDTH, WIDTH),
  }


def _loss(params, ids):
  items = (params["items"] * params["factor"])[ids]
  users = params["users"].at[3].set(params["padding"])
  hidden = jnp.tanh((items + jnp.take(users, ids, axis=0)) @ params["kernel"])
  return row_cases.loss((hidden + params["tied"][ids]) @ params["tied"].T)


def test_argnums_and_aux():
  def f(scale, params, ids):
    loss = scale * row_cases.loss(params["items"][ids])
    return loss, {"ids": ids, "table": params["items"], "note": "kept"}

  g = zenjax.value_and_grad(f, argnums=(1, 0), has_aux=True)
  (value, aux), (by_params, by_scale) = g(2.0, _params(), IDS)
  assert aux["note"] == "kept" and aux["ids"].tolist() == IDS.tolist()
  assert aux["table"].shape == (ROWS, WIDTH)
  assert_close(value, 2 * by_scale)
  assert isinstance(by_params["items"], SparseRows)
  assert not isinstance(by_params["users"], SparseRows)
  (only,), _ = zenjax.rows.grad(f, argnums=(1,), has_aux=True)(
    2.0, _params(), IDS
  )
  assert_close(only["items"].values, by_params["items"].values)


def test_tables_chooses():
  f = lambda p, i: row_cases.loss(p["items"][i]) + row_cases.loss(p["users"][i])
  by_name = lambda name, leaf: name == "items"
  for tables in (by_name, {**dict.fromkeys(_params(), False), "items": True}):
    got = jax.jit(zenjax.rows.grad(f, tables=tables))(_params(), IDS)
    rows = [name for name, g in got.items() if isinstance(g, SparseRows)]
    assert rows == ["items"]
    assert_close(got["users"], jax.jit(jax.grad(f))(_params(), IDS)["users"])


REFUSED = {
  "a softmax": (
    lambda: demanded("tied softmax"),
    ValueError,
    "`tables` demands rows of 'leaf'.*row_cases.py:",
  ),
  "a branch": (
    lambda: demanded("cond"),
    ValueError,
    "`tables` demands rows of 'leaf'.*row_cases.py:",
  ),
  "a name": (lambda: by(tables="items"), ValueError, "`tables` must"),
  "a number": (lambda: by(tables={"items": 3}), ValueError, "`tables` must"),
  "a list": (lambda: by(tables=[True]), ValueError, "`tables` must"),
  "argnums": (lambda: by(argnums=2), ValueError, "`argnums` must be positions"),
  "no aux": (
    lambda: by(has_aux=True),
    TypeError,
    r"must return a pair \(loss, aux\)",
  ),
  "ids": (
    lambda: zenjax.rows.grad(lambda t, i: t[i].sum())(
      row_cases.table(), jnp.ones(3)
    ),
    TypeError,
    "integer",
  ),
}


def by(**options):
  return jax.eval_shape(zenjax.rows.grad(_loss, **options), _params(), IDS)


def demanded(name):
  f, _ = ALSO_ELSE[name]
  f = zenjax.rows.grad(f, tables=True)
  return jax.eval_shape(f, row_cases.table(), IDS)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
  call, error, words = REFUSED[name]
  with pytest.raises(error, match=words):
    call()


@pytest.mark.usefixtures("as_optax_computes")
def test_a_table_that_a_step_does_not_use_has_no_rows():
  """Also of an empty batch, whose lookups JAX drops."""
  params = {"t": jnp.ones((3000, 8)), "u": jnp.ones((3000, 8))}
  loss = lambda p, ids: p["t"][ids].sum() + p["u"][ids[:0]].sum()
  tx: Any = zenjax.lazy_rows(optax.adam(0.1))

  @jax.jit
  def step(params, ids):
    grads = zenjax.rows.grad(loss)(params, ids)
    updates, _ = tx.update(grads, tx.init(params), params)
    return grads, zenjax.apply_updates(params, updates)

  for count in (0, 4):
    ids = jnp.arange(count)
    grads, after = step(params, ids)
    assert {k: g.capacity for k, g in grads.items()} == {"t": count, "u": 0}
    moved = np.any(after["t"] != params["t"], axis=1)
    assert np.flatnonzero(moved).tolist() == ids.tolist()
    np.testing.assert_array_equal(after["u"], params["u"])


MODES = {
  "leaks": jax.checking_leaks,
  "key reuse": lambda: jax.debug_key_reuse(True),
  "nans": lambda: jax.debug_nans(True),
  "no jit": jax.disable_jit,
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("mode", MODES)
def test_debugging_modes(mode):
  """A loss with a table gives the same in each of JAX's modes."""
  params = {"t": row_cases.table(), "w": jnp.ones(WIDTH)}
  loss = lambda p, ids: jnp.tanh(p["t"][ids] @ p["w"]).sum()
  tx: Any = zenjax.lazy_rows(optax.adagrad(0.1))

  def step(params, ids):
    value, grads = zenjax.value_and_grad(loss)(params, ids)
    updates, _ = tx.update(grads, tx.init(params), params)
    return value, zenjax.apply_updates(params, updates)

  want = jax.jit(step)(params, IDS)
  with MODES[mode]():
    got = jax.jit(step)(params, IDS)
  jax.tree.map(assert_close, got, want)


def test_explanation_reads_well():
  shapes = jax.eval_shape(_params)
  ids = jax.ShapeDtypeStruct((8,), jnp.int32)
  said = str(zenjax.rows.explain_tables(_loss, shapes, ids)).splitlines()
  assert said[0].split() == ["leaf", "shape", "gradient", "why"]
  items = next(line for line in said if line.startswith("items"))
  assert items.split(maxsplit=3)[1:] == ["40x4", "rows", "8 rows looked up"]
  tied = next(line for line in said if line.startswith("tied"))
  assert "transpose" in tied and "test_row_gradients.py:" in tied


def test_no_table_sized_array_is_made():
  """Of a table of 300,000 rows, nothing of its size but itself."""
  table = jax.ShapeDtypeStruct((300_000, 16), jnp.float32)
  f = jax.jit(zenjax.value_and_grad(ROWS_ONLY["twice"]))
  compiled = f.lower(table, jax.ShapeDtypeStruct((64,), jnp.int32)).compile()
  memory: Any = compiled.memory_analysis()
  assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 1 << 17
