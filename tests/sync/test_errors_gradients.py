"""Gradients that cannot be synchronized, found where a step is traced."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from refusals import N
from refusals import names
from refusals import trace
from refusals import trace_pmean
import runners

import zenjax


def test_unbound_axis():
  tx = zenjax.zen_sync("data", sparse=True)
  grads = {"t": jnp.zeros((40, 4))}
  with pytest.raises(NameError) as error:
    tx.update(grads, tx.init(grads))
  names(error, "data", "shard_map")
  with pytest.raises(NameError) as error:
    jax.eval_shape(tx.update, grads, tx.init(grads))
  names(error, "data")
  with pytest.raises(NameError) as error:
    zenjax.sparse_pmean(jnp.zeros((40, 4)), "data")
  names(error, "data")


def test_an_axis_of_the_mesh_over_which_nothing_is_mapped():
  with jax.set_mesh(runners.mesh(N)), pytest.raises(NameError) as error:
    jax.eval_shape(lambda x: zenjax.sparse_pmean(x, "data"), jnp.zeros((40, 4)))
  names(error, "'data'", "nothing is mapped over it", "shard_map")


def test_one_of_two_axes_unbound():
  with pytest.raises(NameError) as error:
    trace(lambda x: zenjax.sparse_pmean(x, ("host", "data")))
  names(error, "host")


@pytest.mark.parametrize("scheme", ["zen", "all_gather", "dense"])
def test_gradient_that_autodiff_has_summed(scheme):
  """Gradients of replicated parameters under check_vma=True."""
  tx = zenjax.zen_sync(
    "data", sparse={"emb": {"w": True}, "k": False}, scheme=scheme
  )
  params = {"emb": {"w": jnp.ones((40, 4))}, "k": jnp.ones((4, 4))}
  state = tx.init(params)

  def step(params, x):
    loss = lambda p: jnp.sum((p["emb"]["w"] @ p["k"]) * x[0])
    return tx.update(jax.grad(loss)(params), state, params)[0]

  mapped = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=(P(), P("data")), out_specs=P()
  )
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, params, jnp.ones((N, 40, 4)))
  names(error, "data", "unreduced", "emb")


def test_a_dense_leaf_that_autodiff_has_summed():
  tx = zenjax.zen_sync("data", sparse=False)
  params = {"kernel": jnp.ones((4, 4))}
  state = tx.init(params)

  def step(params, x):
    loss = lambda p: jnp.sum(p["kernel"] * x[0])
    return tx.update(jax.grad(loss)(params), state, params)[0]

  mapped = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=(P(), P("data")), out_specs=P()
  )
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, params, jnp.ones((N, 4, 4)))
  names(error, "data", "unreduced", "kernel")


@pytest.mark.parametrize(
  "dtype", [jnp.complex64, jnp.int32, jnp.uint8, jnp.bool_], ids=str
)
def test_leaves_that_are_not_real_floats(dtype):
  stack = jax.ShapeDtypeStruct((N, 40, 4), dtype)
  with pytest.raises(TypeError) as error:
    trace_pmean(stack)
  names(error, jnp.dtype(dtype).name)
  tx = zenjax.zen_sync("data", sparse=True)
  with pytest.raises(TypeError) as error:
    state = tx.init({"ids": jnp.zeros((40, 4), dtype)})
    trace(lambda x: tx.update({"ids": x}, state)[0], stack)
  names(error, "ids", jnp.dtype(dtype).name, "sparse")


@pytest.mark.parametrize(
  "make",
  [
    lambda: zenjax.zen_sync("data"),
    lambda: zenjax.sharded_optimizer(optax.sgd(0.1), "data"),
    lambda: zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.1), "data"),
  ],
)
def test_gradients_by_integers(make):
  params = {"ids": jnp.arange(3), "w": jnp.ones(3)}
  loss = lambda params: jnp.sum(params["w"] * params["w"])
  grads = jax.grad(loss, allow_int=True)(params)
  tx = make()
  with pytest.raises(TypeError) as error:
    trace(lambda _: tx.update(grads, tx.init(params), params)[0])
  names(error, "`updates`", "'ids'", "float0", "`optax.partition`")
  labels = {"ids": "off", "w": "on"}
  tx = optax.partition({"on": make(), "off": optax.set_to_zero()}, labels)

  def step(_):
    updates, _ = tx.update(grads, tx.init(params), params)
    return zenjax.apply_updates(params, updates)

  out = jax.vmap(step, axis_name="data")(jnp.zeros(N))
  assert out["ids"][0].tolist() == [0, 1, 2]
  assert out["w"].shape == (N, 3)


def test_more_rows_than_int32_counts():
  stack = jax.ShapeDtypeStruct((N, 2**31, 1), jnp.float32)
  with pytest.raises(ValueError) as error:
    trace_pmean(stack)
  names(error, str(2**31), "int32")


def test_more_elements_than_int32_counts():
  stack = jax.ShapeDtypeStruct((N, 2**16, 2**16), jnp.float32)
  with pytest.raises(ValueError) as error:
    trace_pmean(stack, unit="element")
  names(error, "int32", "`unit`")


def test_more_rows_of_all_tables_than_int32_counts():
  """Tables share one id space, which ends where int32 does."""
  tx = zenjax.zen_sync("data", sparse=True)
  shapes = {k: jax.ShapeDtypeStruct((2**30, 1), jnp.float32) for k in "abc"}
  stacks = {
    k: jax.ShapeDtypeStruct((N, *s.shape), s.dtype) for k, s in shapes.items()
  }

  def update(grads):
    return tx.update(grads, tx.init(grads))[0]

  try:
    got = trace(update, stacks)
  except ValueError as error:
    assert "int32" in str(error)
  else:
    assert jax.tree.structure(got) == jax.tree.structure(stacks)


CHAINED = {
  "norm before": lambda sync: optax.chain(optax.clip_by_global_norm(1.0), sync),
  "no lazy_rows": lambda sync: optax.chain(sync, optax.adam(0.1)),
  "sgd": lambda sync: optax.chain(sync, optax.sgd(0.1)),
  "MultiSteps": lambda sync: optax.MultiSteps(
    optax.chain(sync, zenjax.lazy_rows(optax.adam(0.1))), 2
  ),
  "pmean": lambda sync: optax.chain(
    optax.stateless(lambda g, p: jax.lax.pmean(g, "data")), sync
  ),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CHAINED)
def test_rows_where_only_arrays_go(name, check_vma):
  tx = CHAINED[name](zenjax.zen_sync("data", sparse=True))
  table = jnp.ones((40, 4))

  def step(ids):
    rows = zenjax.SparseRows(ids, jnp.ones((2, 4)) * ids[:, None], 40)
    # What MultiSteps accumulates varies, as `zenjax.init_state` places it.
    state = zenjax.unreduced(tx.init(table), "data")
    return tx.update(rows, state, table)[0]

  mapped = jax.shard_map(
    step,
    mesh=runners.mesh(N),
    in_specs=P("data"),
    out_specs=P(),
    check_vma=check_vma,
  )
  with pytest.raises((TypeError, ValueError)) as error:
    jax.eval_shape(mapped, jnp.zeros(2 * N, jnp.int32))
  names(error, "optax", "inside", "lazy_rows")


def test_apply_if_finite_around_zen_sync():
  """Under check_vma=True the local predicate can be seen."""
  tx = optax.apply_if_finite(
    optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(0.1)), 3
  )
  params = {"t": jnp.zeros((40, 4))}
  state = tx.init(params)

  def step(x):
    with jax.numpy_dtype_promotion("standard"):
      return tx.update({"t": x[0]}, state, params)[0]

  mapped = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=P("data"), out_specs=P()
  )
  with pytest.raises((TypeError, ValueError)):
    jax.eval_shape(mapped, jnp.zeros((N, 40, 4)))
