"""What comes out of a step of `data_parallel` in `aux`."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import refused
import runners

import zenjax

N, B = 4, 16
INT8 = zenjax.compress.LowBit(bits=8)
_rng = np.random.default_rng(0)
BATCH = jax.tree.map(
  jnp.asarray,
  {
    "x": _rng.normal(size=(B, 6)).astype(np.float32),
    "y": _rng.integers(0, 4, B),
    "key": jax.random.split(jax.random.key(0), B),
  },
)


def of_batch(see, devices=N, **options):
  """The `aux` of a step that sees the batch on `devices` devices."""
  step = lambda state, batch: (state, see(batch))
  mesh = runners.mesh(devices)
  mapped = zenjax.data_parallel(step, mesh, "data", **options)
  return jax.jit(mapped)((), BATCH)[1]


def test_floating_scalars_are_averaged():
  see = lambda b: {
    "mean": b["x"].mean(),
    "half": b["x"].mean().astype(jnp.bfloat16),
    "equal": lax.pmax(b["x"].max(), "data"),
  }
  got, want = of_batch(see), BATCH["x"].mean()
  np.testing.assert_allclose(got["mean"], want, rtol=1e-5)
  assert got["half"].dtype == jnp.bfloat16
  np.testing.assert_allclose(got["half"].astype(float), want, rtol=0.1)
  np.testing.assert_allclose(got["equal"], BATCH["x"].max(), rtol=1e-6)


@pytest.mark.parametrize("devices", [1, N])
@pytest.mark.parametrize(
  ("see", "word"),
  [
    (lambda b: b["y"].sum(), "'sum'"),
    (lambda b: b["x"].sum(-1), "'batch'"),
    (lambda b: jnp.int32(7), "'sum'"),
    (lambda b: b["key"][0], "'same'"),
    (lambda b: zenjax.SparseRows(b["y"], b["x"], 50), "'same'"),
  ],
)
def test_anything_else_must_be_declared(devices, see, word):
  words = "`aux_specs={'of.it': " + word + "}` ... 'batch' joins"
  with refused(ValueError, words) as error:
    of_batch(lambda b: {"of": {"it": see(b)}, "loss": 1.0}, devices)
  assert "loss" not in str(error.value)
  same = of_batch(lambda b: {"of": see(b)}, devices, aux_specs={"of": "same"})
  assert set(same) == {"of"}


def test_aux_specs_say_what_is_done():
  classes = lambda b: jnp.zeros(4).at[b["y"]].add(1.0)
  see = lambda b: {
    "sum": classes(b),
    "mean": {"a": classes(b), "b": b["x"].mean(0)},
    "batch": b["x"] - b["x"].mean(0, keepdims=True),
    "same": b["x"][0, 0],
    "any": (b["y"] == b["y"][0]).all(),
    "bytes": (b["y"] > 0).astype(jnp.int8).sum(dtype=jnp.int8),
    "keys": b["key"],
  }
  specs = {word: word for word in ("sum", "mean", "batch", "same")}
  specs |= {"any": "sum", "mean.b": "sum", "bytes": "sum", "keys": "batch"}
  got = of_batch(see, aux_specs=specs)
  want = np.bincount(np.asarray(BATCH["y"]), minlength=4)
  np.testing.assert_array_equal(got["sum"], want)
  np.testing.assert_allclose(got["mean"]["a"], want / N)
  parts = np.asarray(BATCH["x"]).reshape(N, -1, 6)
  np.testing.assert_allclose(got["mean"]["b"], parts.mean(1).sum(0), rtol=1e-5)
  centered = (parts - parts.mean(1, keepdims=True)).reshape(B, 6)
  np.testing.assert_allclose(got["batch"], centered, atol=1e-6)
  assert got["same"] == BATCH["x"][0, 0] and got["any"] == 0
  assert got["bytes"] == B - want[0] and got["bytes"].dtype == jnp.int32
  assert (got["keys"] == BATCH["key"]).all()
  alone = of_batch(lambda b: b["x"].mean(0), aux_specs="sum")
  np.testing.assert_allclose(alone, parts.mean(1).sum(0), rtol=1e-5)


def test_arrays_are_joined_in_the_order_of_two_axes():
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:N]).reshape(2, 2), axes)
  step = lambda state, words, others: (state, (2 * words, -others))
  words, others = jnp.arange(8), jnp.arange(12)
  mapped = zenjax.data_parallel(step, mesh, axes, aux_specs="batch")
  got = mapped((), words, others)[1]
  np.testing.assert_array_equal(got[0], 2 * words)
  np.testing.assert_array_equal(got[1], -others)


REFUSED = [
  ("average", ("one of 'mean', 'sum'", "'average'")),
  ({"hist": "max"}, ("one of 'mean', 'sum'", "'max'")),
  ({"hist": None}, ("one of 'mean', 'sum'",)),
  ({"hits": "sum"}, ("'hits'", "'count', 'hist', 'key', 'rows'")),
  ({"count": "batch"}, ("'count'", "int32[]", "only be 'sum' or 'same'")),
  ({"count": "mean"}, ("'count'", "int32[]", "only be 'sum' or 'same'")),
  ({"key": "sum"}, ("'key'", "key<", "only be 'same' or 'batch'")),
  ({"rows": "mean"}, ("'rows'", "SparseRows", "zenjax.sparse_pmean")),
]


@pytest.mark.parametrize(("specs", "words"), REFUSED)
def test_aux_specs_that_do_not_fit(specs, words):
  see = lambda b: {
    "hist": b["x"].sum(0),
    "count": b["y"].sum(),
    "key": b["key"],
    "rows": zenjax.SparseRows(b["y"], b["x"], 50),
  }
  usual = {"hist": "sum", "count": "sum", "key": "same", "rows": "same"}
  if isinstance(specs, dict):
    specs = usual | specs
  with refused(ValueError, "`aux_specs`", *words):
    of_batch(see, aux_specs=specs)


NO_STEPS: dict[str, Any] = {
  "three": (
    lambda state, x: (*state, 0),
    ("3 values", "`(params, opt_state)`", "as `aux`"),
  ),
  "one": (lambda state, x: state[0], ("no tuple", "`()` if there is nothing")),
  "state": (lambda state, x: state, ("without leaf '0'", "all of the state")),
  "parts": (
    lambda state, x: (state[0], state[1]),
    ("without leaf '0'", "in `aux`"),
  ),
  "more": (lambda state, x: ((*state, x), 0), ("leaf '2' besides",)),
  "list": (lambda state, x: ([*state], 0), ("other nodes",)),
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_step_that_does_not_return_a_state_and_aux(name):
  """Two parts of a state are not a state and aux: they would train no more."""
  step, words = NO_STEPS[name]
  mapped = zenjax.data_parallel(step, runners.mesh(2), "data")
  with refused(TypeError, "`step` must return `(state, aux)`", *words):
    mapped((jnp.zeros(3), jnp.ones(3)), jnp.zeros(2))


def grad_of_mean(w, x):
  """A gradient of each device, because autodiff does not average it."""
  return jax.grad(lambda w: lax.pmean(jnp.sum(x * w), "data"))(w)


def if_finite(total, x):
  """A sum that all devices take, or none."""
  take = lambda: lax.psum(x.sum(), "data")
  return lax.cond(jnp.all(jnp.isfinite(total)), take, lambda: 0 * x.sum())


UNSYNCHRONIZED: dict[str, Any] = {
  "gradient": lambda w, x: (w - jax.grad(lambda w: (x * w).sum())(w), ()),
  "loss averaged": lambda w, x: (w + x.sum(), lax.pmean(x.sum(), "data")),
  "loss averaged inside": lambda w, x: (w - grad_of_mean(w, x), ()),
  "loss averaged inside a jit": lambda w, x: (
    w - jax.jit(grad_of_mean)(w, x),
    (),
  ),
  "drawn": lambda w, x: (w + jax.random.normal(jax.random.key(x[0]), ()), ()),
  "in a jit": lambda w, x: (jax.jit(lambda w, x: w + x.sum())(w, x), ()),
}
SYNCHRONIZED: dict[str, Any] = {
  "by hand": lambda w, x: (w + lax.pmean(x.sum(), "data"), ()),
  "in a jit": lambda w, x: (
    jax.jit(lambda w, x: w + lax.psum(x.sum(), "data"))(w, x),
    (),
  ),
  "in a scan": lambda w, x: (
    lax.scan(lambda w, x: (w + lax.pmean(x, "data"), ()), w, x)[0],
    (),
  ),
  "if the sum says so": lambda w, x: (
    w + if_finite(zenjax.sparse_pmean(x * w, "data", unit="element"), x),
    (),
  ),
  "of no batch": lambda w, x: (0.9 * w, x.mean(dtype=np.float32)),
  "evaluation": lambda w, x: (w, (w * x).mean()),
}


@pytest.mark.parametrize("name", UNSYNCHRONIZED)
def test_a_step_that_synchronizes_nothing_is_refused(name):
  step = UNSYNCHRONIZED[name]
  given = jnp.float32(1), jnp.arange(N)
  with jax.numpy_dtype_promotion("standard"):
    words = "`step` ... synchronizes nothing ... zenjax.zen_sync('data')"
    with refused(ValueError, words):
      zenjax.data_parallel(step, runners.mesh(N), "data")(*given)
    zenjax.data_parallel(step, runners.mesh(1), "data", aux_specs="same")(
      *given
    )


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_a_step_that_synchronizes_is_not(name):
  step = zenjax.data_parallel(SYNCHRONIZED[name], runners.mesh(N), "data")
  with jax.numpy_dtype_promotion("standard"):
    step(jnp.float32(1), jnp.arange(N))


def trace_step(tx) -> None:
  """Traces a step of an optimizer that synchronizes arrays."""

  def step(state, x):
    w, opt_state = state
    grads = jax.grad(lambda w: (x[0] * w).sum())(w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return (w + updates, opt_state), ()

  mesh, w = runners.mesh(N), jnp.ones((64, 512))
  state = w, zenjax.init_state(tx, w, mesh, "data")
  jax.eval_shape(zenjax.data_parallel(step, mesh, "data"), state, jnp.ones(N))


@pytest.mark.parametrize(
  "sync",
  [zenjax.zen_sync("data"), zenjax.compress.all_reduce(INT8, "data")],
  ids=["zen_sync", "all_reduce"],
)
def test_no_exchange_may_depend_on_what_one_device_has(sync):
  """Devices would wait for each other forever."""
  with jax.numpy_dtype_promotion("standard"):
    finite = lambda tx: optax.apply_if_finite(tx, 3)
    trace_step(optax.chain(sync, finite(optax.sgd(0.1))))
    with pytest.raises(ValueError, match="wait for each other forever"):
      trace_step(finite(optax.chain(sync, optax.sgd(0.1))))


def test_lookups_ahead_are_a_state():
  """What `prefetch` returns is split over devices as the batch is."""
  mesh = runners.mesh(N)
  table = _rng.normal(size=(3_000, 8)).astype(np.float32)
  params = zenjax.tables.shard({"t": table}, mesh, "data")
  ids = jax.device_put(
    np.arange(B, dtype=np.int32) * 7, jax.NamedSharding(mesh, P("data"))
  )
  loss = lambda params, ids: jnp.square(params["t"][ids]).mean()
  ahead = zenjax.tables.prefetch(loss)

  def step(state, ids):
    params, now = state
    value = zenjax.value_and_grad(loss, prefetched=now)(params, ids)[0]
    return (params, ahead(params, ids)), value

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  state = params, jax.jit(ahead)(params, ids)
  for _ in range(2):
    state, value = run(state, ids)
    want = np.square(table[np.asarray(ids)]).mean()
    np.testing.assert_allclose(value, want, rtol=1e-5)
