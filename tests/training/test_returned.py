"""What comes out of a step of `data_parallel` in `aux`."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax

N = 4
B = 16
CLASSES = B // N  # As many as a device has examples: shapes tell nothing.

_rng = np.random.default_rng(0)
BATCH = {
  "x": _rng.normal(size=(B, 6)).astype(np.float32),
  "y": _rng.integers(0, CLASSES, B),
  "ids": _rng.integers(0, 50, (B, 3)),
  "image": _rng.normal(size=(B, 8, 8, 2)).astype(np.float32),
  "key": jax.random.split(jax.random.key(0), B),
}
PARAMS = {
  "table": _rng.normal(size=(50, 6)).astype(np.float32),
  "kernel": _rng.normal(size=(6, CLASSES)).astype(np.float32),
  "filter": _rng.normal(size=(3, 3, 2, 4)).astype(np.float32),
}
PARAMS, BATCH = jax.tree.map(jnp.asarray, (PARAMS, BATCH))


def of_batch(see, **options):
  """What a step returns that sees the batch on `N` devices."""
  step = lambda state, batch: (state, see(batch))
  mesh = runners.mesh(options.pop("devices", N))
  mapped = zenjax.data_parallel(step, mesh, "data", **options)
  return lambda batch=BATCH: mapped((), batch)[1]


def shapes_of(see, **options):
  return jax.eval_shape(of_batch(see, **options), BATCH)


def by_example(params, batch):
  """Values of which each row is that of an example, and sums over examples."""
  x, y, ids = batch["x"], batch["y"], batch["ids"]
  rows = params["table"][ids]  # [B, 3, 6]
  hidden = rows.sum(1) + x
  logits = jax.nn.relu(hidden) @ params["kernel"]
  log_p = jax.nn.log_softmax(logits)
  loss = optax.softmax_cross_entropy_with_integer_labels
  images = lax.conv_general_dilated(
    batch["image"],
    params["filter"],
    (1, 1),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  window = (1, 2, 2, 1)
  pooled = lax.reduce_window(images, -jnp.inf, lax.max, window, window, "VALID")
  attention = jax.nn.softmax(jnp.einsum("bld,bmd->blm", rows, rows))
  carried, seen = lax.scan(
    lambda c, row: (c + row, c), jnp.zeros_like(x), jnp.moveaxis(rows, 1, 0)
  )
  right = logits.argmax(-1) == y
  classes = jax.nn.one_hot(y, CLASSES, dtype=jnp.int32)
  values = {
    "logits": logits,
    "loss": loss(logits, y),
    "gradient": jax.grad(lambda z: loss(z, y).sum())(logits),
    "saliency": jax.grad(lambda x: jax.nn.gelu(x @ params["kernel"]).sum())(x),
    "picked": jnp.take_along_axis(log_p, y[:, None], axis=1)[:, 0],
    "class": logits.argmax(-1),
    "right": right,
    "words": rows.reshape(-1, 6).sum(-1),  # [3 B], three of each example
    "pooled": pooled.reshape(len(pooled), -1).mean(-1),
    "attention": attention.sum(-1),
    "alone": jax.vmap(lambda a, i: a.sum() + params["table"][i, 0].sum())(
      x, ids
    ),
    "noise": jax.vmap(lambda key: jax.random.normal(key, (2,)))(batch["key"]),
    "best": lax.top_k(logits, 2)[0],
    "sorted": jnp.sort(logits, -1),
    "sums": jnp.cumsum(logits, -1),
    "padded": jnp.pad(logits, ((0, 0), (1, 1)))[:, 1:],
    "beside": jnp.concatenate([x, logits], -1),
    "stacked": jnp.stack([x, hidden], 1)[:, 0],
    "again": jax.checkpoint(jnp.tanh)(hidden),
    "scan": carried + jnp.moveaxis(seen, 1, 0)[:, 0],
    "swapped": jnp.moveaxis(jnp.swapaxes(rows, 0, 1), 0, 1),
  }
  counts = {
    "right": right.sum(),
    "thrice": 3 * (y > 0).sum(),
    "of_class": classes.sum(0),
    "confused": jnp.einsum("bc,bd->cd", classes, classes[:, ::-1]),
    "of_bytes": (y > 0).astype(jnp.int8).sum(dtype=jnp.int8),
  }
  return values, counts


def test_what_is_made_by_example_comes_out_as_of_one_device():
  def step(params, batch):
    return params, by_example(params, batch)

  mapped = jax.jit(zenjax.data_parallel(step, runners.mesh(N), "data"))
  _, (values, counts) = mapped(PARAMS, BATCH)
  wanted, totals = by_example(PARAMS, BATCH)
  for name, want in wanted.items():
    got = values[name]
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=name)
  for name, want in totals.items():
    np.testing.assert_array_equal(counts[name], want, err_msg=name)
  assert counts["of_bytes"].dtype == jnp.int32


EQUAL = {
  "step": lambda b: jnp.int32(7),
  "number": lambda b: 7,
  "vector": lambda b: jnp.arange(3),
  "bool": lambda b: jnp.bool_(True),
  "sum": lambda b: lax.psum(b["x"], "data"),
  "total": lambda b: lax.psum((b["y"] > 0).sum(), "data") + 1,
  "longest": lambda b: lax.pmax(b["y"].max(), "data"),
  "all": lambda b: lax.all_gather(b["x"], "data", tiled=True),
  "finite": lambda b: (
    lax.pmin(jnp.isfinite(b["x"]).all().astype(int), "data") > 0
  ),
  "two": lambda b: sum(lax.psum((b["y"].max(), b["y"].min()), "data")),
}


def test_what_is_equal_comes_out_as_it_is():
  see = lambda batch: {name: f(batch) for name, f in EQUAL.items()}
  got = of_batch(see)()
  y, parts = np.asarray(BATCH["y"]), np.asarray(BATCH["x"]).reshape(N, -1, 6)
  each = y.reshape(N, -1)
  want = {
    "step": 7,
    "number": 7,
    "vector": np.arange(3),
    "bool": True,
    "sum": parts.sum(0),
    "total": (y > 0).sum() + 1,
    "longest": y.max(),
    "all": BATCH["x"],
    "finite": True,
    "two": (each.max(1) + each.min(1)).sum(),
  }
  for name in EQUAL:
    np.testing.assert_allclose(got[name], want[name], 1e-6, err_msg=name)
    assert np.shape(got[name]) == np.shape(want[name]), name


def test_what_is_equal_is_no_matter_of_devices_to_an_example():
  """Statistics of all devices leave rows what they are."""
  see = lambda b: b["x"] - lax.pmean(b["x"].mean(0, keepdims=True), "data")
  want = BATCH["x"] - BATCH["x"].mean(0, keepdims=True)
  np.testing.assert_allclose(of_batch(see)(), want, atol=1e-5)


def test_floating_scalars_are_averaged():
  see = lambda b: (b["x"].mean(), b["x"].mean().astype(jnp.bfloat16))
  single, half = of_batch(see)()
  np.testing.assert_allclose(single, BATCH["x"].mean(), rtol=1e-5)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(float), BATCH["x"].mean(), rtol=0.1)


_PAIRS = [(0, 1), (1, 0), (2, 3), (3, 2)]
AMBIGUOUS: dict[str, Any] = {
  "classes": lambda b: jnp.zeros(CLASSES).at[b["y"]].add(1.0),
  "mean_of_class": lambda b: jax.nn.one_hot(b["y"], CLASSES).mean(0),
  "sorted": lambda b: jnp.sort(b["x"], 0),
  "flipped": lambda b: b["x"][::-1],
  "order": lambda b: jnp.argsort(b["y"]),
  "ordered": lambda b: b["x"][jnp.argsort(b["y"])],
  "transposed": lambda b: b["x"][:, :CLASSES].T,
  "pairs": lambda b: b["x"] @ b["x"].T,
  "gram": lambda b: b["x"].T @ b["x"],
  "reduced": lambda b: lax.reduce(
    b["x"], np.float32(0), lambda one, other: one + other + one * other, (0,)
  ),
  "running": lambda b: jnp.cumsum(b["y"]),
  "rolled": lambda b: jnp.roll(b["x"], 1, 0),
  "centered": lambda b: b["x"] - b["x"].mean(0, keepdims=True),
  "twice": lambda b: jnp.concatenate([b["x"], b["x"]]),
  "halves": lambda b: b["x"].reshape(2, -1),
  "first": lambda b: b["x"][0],
  "some": lambda b: b["x"][:2],
  "passed_on": lambda b: lax.ppermute(b["x"], "data", _PAIRS),
  "exchanged": lambda b: lax.all_to_all(b["x"], "data", 0, 0, tiled=True),
  "scattered": lambda b: lax.psum_scatter(b["x"], "data", tiled=True),
  "largest": lambda b: b["y"].max(),
  "any": lambda b: (b["y"] > 0).any(),
  "one_more": lambda b: (b["y"] > 0).sum() + 1,
  "quotient": lambda b: b["y"].sum() // B,
  "of_some": lambda b: lax.psum(
    (b["y"] > 0).sum(), "data", axis_index_groups=[[0, 1], [2, 3]]
  ),
  "device": lambda b: lax.axis_index("data"),
  "by_device": lambda b: b["y"] + lax.axis_index("data"),
  "either": lambda b: lax.cond(b["y"][0] > 0, lambda: b["y"].sum(), lambda: 5),
  "either_count": lambda b: lax.cond(
    jnp.ones(()) > 0, lambda: b["y"].sum(), lambda: 5
  ),
  "while": lambda b: lax.while_loop(
    lambda c: c[1] < b["y"][0], lambda c: (2 * c[0], c[1] + 1), (b["x"], 0)
  )[0],
  "mapped": lambda b: lax.map(lambda y: y + 1, b["y"]),
  "own_key": lambda b: b["key"][0],
  "rows": lambda b: zenjax.SparseRows(b["y"], b["x"], 50),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_could_be_anything_is_refused(name):
  see = lambda batch: {"of": {name: AMBIGUOUS[name](batch)}, "step": 1}
  with pytest.raises(ValueError) as error:
    shapes_of(see)
  names(error, "`aux`", f"leaf 'of.{name}'", f"`aux_specs={{'of.{name}': ")
  same = shapes_of(see, aux_specs={f"of.{name}": "same"})
  alone = jax.eval_shape(of_batch(see, devices=1))
  assert jax.tree.structure(same) == jax.tree.structure(alone)


@pytest.mark.parametrize(
  ("see", "word"),
  [
    (
      lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0),
      "batch",
    ),
    (lambda x, key: jax.random.uniform(key, (3,)), "mean"),
    (lambda x, key: jax.random.randint(key, (), 0, 9), "sum"),
    (lambda x, key: jax.random.split(key, 2), "batch"),
  ],
  ids=["dropout", "noise", "integer", "keys"],
)
def test_what_is_drawn_from_an_own_key_differs(see, word):
  def step(state, x, key):
    return state, {"of": see(x, key), "mean": jax.random.uniform(key)}

  mesh, key = runners.mesh(N), jax.random.key(0)
  given = (), jnp.ones((B, 2)), key
  with pytest.raises(ValueError, match="leaf 'of'.*aux_specs"):
    jax.eval_shape(zenjax.data_parallel(step, mesh, "data"), *given)
  specs = {"of": word}
  mapped = zenjax.data_parallel(step, mesh, "data", aux_specs=specs)
  with jax.numpy_dtype_promotion("standard"):
    _, aux = jax.jit(mapped)(*given)
    keys = [jax.random.fold_in(key, i) for i in range(N)]
    own = [see(jnp.ones((B // N, 2)), key) for key in keys]
  join: Any = {"batch": jnp.concatenate, "sum": sum}
  got, want = aux["of"], join.get(word, lambda own: sum(own) / N)(own)
  if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
    got, want = jax.random.key_data(got), jax.random.key_data(want)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  mean = np.mean([jax.random.uniform(key) for key in keys])
  np.testing.assert_allclose(aux["mean"], mean, rtol=1e-5)


def test_one_device_has_nothing_to_tell_apart():
  see = lambda b: {"sorted": jnp.sort(b["y"]), "largest": b["y"].max()}
  got = of_batch(see, devices=1)()
  np.testing.assert_array_equal(got["sorted"], np.sort(BATCH["y"]))
  assert got["largest"] == BATCH["y"].max()


def test_aux_specs_say_what_is_done():
  classes = lambda b: jnp.zeros(CLASSES).at[b["y"]].add(1.0)
  see = lambda b: {
    "sum": classes(b),
    "mean": {"a": classes(b), "b": b["x"].mean(0)},
    "batch": b["x"] - b["x"].mean(0, keepdims=True),
    "same": b["x"][0, 0],
    "any": (b["y"] == b["y"][0]).all(),
    "left": b["y"],
  }
  specs = {word: word for word in ("sum", "mean", "batch", "same")}
  got = of_batch(see, aux_specs=specs | {"any": "sum", "mean.b": "sum"})()
  want = np.bincount(np.asarray(BATCH["y"]), minlength=CLASSES)
  np.testing.assert_array_equal(got["sum"], want)
  np.testing.assert_allclose(got["mean"]["a"], want / N)
  parts = np.asarray(BATCH["x"]).reshape(N, -1, 6)
  np.testing.assert_allclose(got["mean"]["b"], parts.mean(1).sum(0), rtol=1e-5)
  centered = (parts - parts.mean(1, keepdims=True)).reshape(B, 6)
  np.testing.assert_allclose(got["batch"], centered, atol=1e-6)
  assert got["same"] == BATCH["x"][0, 0]
  assert got["any"] == 0
  np.testing.assert_array_equal(got["left"], BATCH["y"])
  alone = of_batch(lambda b: b["x"].mean(0), aux_specs="sum")()
  np.testing.assert_allclose(alone, parts.mean(1).sum(0), rtol=1e-5)


@pytest.mark.parametrize(
  ("specs", "words"),
  [
    ("average", ("one of 'mean', 'sum'", "'average'")),
    ({"hist": "max"}, ("one of 'mean', 'sum'", "'max'")),
    ({"hist": None}, ("one of 'mean', 'sum'",)),
    ({"hits": "sum"}, ("'hits'", "'count', 'hist', 'key', 'step'")),
    ({"hist": "sum", "step": "sum"}, ("'step', int32[]", "equal on all")),
    ({"hist": "sum", "step": "batch"}, ("'step', int32[]", "equal on all")),
    ({"hist": "sum", "count": "batch"}, ("'count', int32[]", "no dimension")),
    ({"hist": "sum", "count": "mean"}, ("'count', int32[]", "is of integers")),
    ({"hist": "sum", "key": "sum"}, ("'key', key<", "no numbers")),
  ],
)
def test_aux_specs_that_do_not_fit(specs, words):
  see = lambda b: {
    "hist": b["x"].sum(0),
    "step": jnp.int32(1),
    "count": b["y"].sum(),
    "key": b["key"],
  }
  with pytest.raises(ValueError) as error:
    shapes_of(see, aux_specs=specs)
  names(error, "`aux_specs`", *words)


def test_batches_of_several_lengths_and_axes():
  """Each array is joined in the order of the argument that it is made of."""
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:N]).reshape(2, 2), axes)

  def step(state, words, negatives):
    count = lax.psum(words.sum(), "device")
    mean = lax.pmean(words.mean(dtype=np.float32), "host")
    return state, (2 * words, -negatives, words.sum(), count, mean)

  words, negatives = jnp.arange(8), jnp.arange(12)
  mapped = zenjax.data_parallel(step, mesh, axes)
  got = mapped((), words, negatives)[1]
  np.testing.assert_array_equal(got[0], 2 * words)
  np.testing.assert_array_equal(got[1], -negatives)
  # A sum over some axes is added up over the others alone.
  assert (int(got[2]), int(got[3]), float(got[4])) == (28, 28, 3.5)

  def mixed(state, words, negatives):
    return state, words[:, None] + negatives[None]

  with pytest.raises(ValueError, match="aux_specs"):
    jax.eval_shape(
      zenjax.data_parallel(mixed, mesh, axes), (), words, negatives
    )


def test_predictions_of_a_training_step_give_an_auc():
  """They leave through `has_aux`, beside gradients that are rows."""
  mesh, tx = runners.mesh(N), zenjax.zen_sync("data")

  def step(state, batch):
    params, state = state

    def loss(params):
      logits = params["table"][batch["ids"]].sum((1, 2))
      loss = optax.sigmoid_binary_cross_entropy(logits, batch["y"] % 2)
      return loss.mean(), logits

    taken = zenjax.value_and_grad(loss, has_aux=True)
    (value, logits), grads = taken(params)
    _, state = tx.update(grads, state)
    return (params, state), {"loss": value, "logits": logits}

  params = {"table": PARAMS["table"]}
  state = zenjax.init_state(tx, params, mesh, "data")
  mapped = zenjax.data_parallel(step, mesh, "data")
  with jax.numpy_dtype_promotion("standard"):
    _, aux = jax.jit(mapped)((params, state), BATCH)
  want = PARAMS["table"][BATCH["ids"]].sum((1, 2))
  np.testing.assert_allclose(aux["logits"], want, rtol=1e-5)
  assert aux["loss"].shape == ()


@pytest.mark.parametrize(
  ("step", "words"),
  [
    (
      lambda state, x: (*state, 0),
      ("3 values", "`params, opt_state = state`", "(params, opt_state), aux"),
    ),
    (lambda state, x: state["a"], ("got ArrayImpl", "`()` as `aux`")),
    (lambda state, x: state, ("without leaf '0'", "all of the state")),
    (lambda state, x: (state[0], state[1]), ("without leaf '0'", "in `aux`")),
    (lambda state, x: ((*state, x), 0), ("leaf '2' besides", "in `aux`")),
    (lambda state, x: ([*state], 0), ("list of other nodes",)),
  ],
  ids=["three", "one", "state", "parts", "more", "list"],
)
def test_step_that_does_not_return_a_state_and_aux(step, words):
  """Two parts of a state are no state and aux: they would train no more."""
  mapped = zenjax.data_parallel(step, runners.mesh(2), "data")
  state: Any = (jnp.zeros(3), jnp.ones(3))
  if words[0] == "got ArrayImpl":
    state = {"a": jnp.zeros(3)}
    words = (words[1],)
  with pytest.raises(TypeError) as error:
    mapped(state, jnp.zeros(2))
  names(error, "`step` must return `(state, aux)`", *words)
