"""Bad input: the type of the error, and what its message must name.

Every message names the argument, what it was given, and a way out.
"""

from typing import Any

import cases
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
import runners

import zenjax

N = 2
TABLE = jax.ShapeDtypeStruct((N, 40, 4), jnp.float32)

LINK = zenjax.Link(bandwidth=1e9, latency_s=1e-6)
PROFILE = zenjax.Profile(rows=1.0, fullest=1.0, union=1.0, devices=2)


def trace(f, *stacks):
  """Traces `f` on one of `N` devices; nothing is compiled or allocated."""
  return jax.eval_shape(
    jax.vmap(f, axis_name="data", axis_size=N), *(stacks or (TABLE,))
  )


def trace_pmean(*stacks, **options):
  return trace(lambda x: zenjax.sparse_pmean(x, "data", **options), *stacks)


def names(error, *words):
  """The message holds every word."""
  message = str(error.value)
  missing = [word for word in words if word not in message]
  assert not missing, f"{missing} not in: {message}"


# --- raised when the transformation is built --------------------------------


@pytest.mark.parametrize(
  ("option", "value", "remedies"),
  [
    ("scheme", "star", ["dense", "all_gather", "zen"]),
    ("op", "max", ["mean", "sum"]),
    ("on_overflow", "drop", ["exact", "carry"]),
    ("output", "sparse", ["dense", "rows"]),
    ("partition", "rows", ["auto", "hash", "columns"]),
  ],
)
def test_unknown_choice(option, value, remedies):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", **{option: value})
  names(error, f"`{option}`", repr(value), *remedies)
  if option != "op":  # the name of `sparse_pmean` says it
    with pytest.raises(ValueError) as error:
      trace_pmean(**{option: value})
    names(error, f"`{option}`", repr(value), *remedies)


@pytest.mark.parametrize(
  ("option", "value", "error"),
  [
    ("link", 12.5e9, TypeError),
    ("profile", {"t": (1, 2)}, TypeError),
    ("profile", {"other": PROFILE}, ValueError),
  ],
)
def test_what_auto_chooses_by(option, value, error):
  with pytest.raises(error, match=f"`{option}` must"):
    trace_pmean(scheme="auto", **{option: value})


@pytest.mark.parametrize("option", ["link", "profile"])
def test_what_only_auto_needs(option):
  value: Any = LINK if option == "link" else {"t": PROFILE}
  with pytest.raises(ValueError, match=f"`{option}` is for `scheme='auto'`"):
    zenjax.zen_sync("data", **{option: value})


@pytest.mark.parametrize("name", ["bandwidth", "latency_s"])
def test_link_that_cannot_be(name):
  numbers: Any = {"bandwidth": 1e9, "latency_s": 1e-6, name: -1.0}
  with pytest.raises(ValueError, match=f"`{name}` of a Link must be"):
    zenjax.Link(**numbers)


@pytest.mark.parametrize("partition", [0, -2])
def test_partition_not_positive(partition):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", partition=partition)
  names(error, "`partition`", str(partition))


@pytest.mark.parametrize("unit", [0, -4, "column"])
def test_bad_unit(unit):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", unit=unit)
  names(error, "`unit`", repr(unit), "row", "element")


@pytest.mark.parametrize(
  "capacities", [(0, 4), (-1, 4), (8, 4), (4,), (1, 2, 3)]
)
def test_bad_capacities(capacities):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", capacities=capacities)
  names(error, "`capacities`", str(capacities))


@pytest.mark.parametrize("capacities", [(1.5, 4), "4", ("1", "2")])
def test_capacities_of_wrong_type(capacities):
  with pytest.raises((TypeError, ValueError)) as error:
    zenjax.zen_sync("data", capacities=capacities)
  names(error, "`capacities`")


@pytest.mark.parametrize(
  "axis_name", [("data", "data"), ("host", "device", "host")]
)
def test_axis_given_twice(axis_name):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync(axis_name)
  names(error, "`axis_name`", axis_name[0])


def test_no_axis():
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync(())
  names(error, "`axis_name`")


@pytest.mark.parametrize("wire_dtype", [jnp.int8, jnp.complex64])
def test_wire_dtype_not_floating(wire_dtype):
  with pytest.raises((TypeError, ValueError)) as error:
    zenjax.zen_sync("data", wire_dtype=wire_dtype)
  names(error, "`wire_dtype`", jnp.dtype(wire_dtype).name)


# --- raised when it is traced ------------------------------------------------


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
  names(error, "data", "as_varying", "emb")


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
  names(error, "data", "as_varying", "kernel")


def test_capacities_larger_than_the_table():
  with pytest.raises(ValueError) as error:
    trace_pmean(capacities=(4, 41))
  names(error, "`capacities`", "41", "40")


def test_capacities_of_an_unknown_leaf():
  params = {"t": jnp.zeros((40, 4))}
  tx = zenjax.zen_sync("data", sparse=True, capacities={"nowhere": (2, 4)})
  with pytest.raises(ValueError) as error:
    state = tx.init(params)
    trace(lambda x: tx.update({"t": x}, state)[0])
  names(error, "`capacities`", "nowhere", "t")


def test_partition_that_does_not_divide_the_devices():
  with pytest.raises(ValueError) as error:
    trace_pmean(partition=3)
  names(error, "`partition`", "3", "2")


@pytest.mark.parametrize(
  "sparse", [{"a": True}, {"a": True, "c": False}, [True, False]]
)
def test_sparse_prefix_that_does_not_match(sparse):
  params = {"a": jnp.zeros((40, 4)), "b": {"w": jnp.zeros((4, 4))}}
  tx = zenjax.zen_sync("data", sparse=sparse)
  with pytest.raises(ValueError) as error:
    tx.init(params)
  names(error, "`sparse`", "callable (name, leaf) -> bool")


@pytest.mark.parametrize("sparse", [{"a": 1.5}, {"a": "yes"}])
def test_sparse_prefix_of_something_else(sparse):
  tx = zenjax.zen_sync("data", sparse=sparse)
  with pytest.raises((TypeError, ValueError)) as error:
    tx.init({"a": jnp.zeros((40, 4))})
  names(error, "`sparse`", repr(sparse["a"]))


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


@pytest.mark.parametrize("dtype", cases.DTYPES[1:], ids=str)
def test_wire_dtype_wider_than_the_leaf(dtype):
  stack = jax.ShapeDtypeStruct((N, 40, 4), dtype)
  with pytest.raises(ValueError) as error:
    trace_pmean(stack, wire_dtype=jnp.float32)
  names(error, "`wire_dtype`", "float32", dtype.name)


def test_unknown_option():
  with pytest.raises(TypeError) as error:
    trace_pmean(capacity=(2, 4))
  names(error, "capacity")


def test_unit_that_does_not_divide_the_leaf():
  """Either blocks of 7 are refused for 160 elements, or they are padded."""
  try:
    got = trace_pmean(unit=7)
  except ValueError as error:
    assert "`unit`" in str(error) and "7" in str(error)
  else:
    assert got.shape == TABLE.shape


# --- residuals --------------------------------------------------------------


def test_residuals_that_were_not_made_by_init():
  """State of one device's shape, given as if it were everyone's."""
  tx = optax.chain(
    zenjax.zen_sync("data", sparse=True, on_overflow="carry"), optax.sgd(0.1)
  )
  params = {"t": jnp.zeros((41, 4))}
  specs = zenjax.state_specs(
    zenjax.init(tx, params, runners.mesh(N), "data"), "data"
  )
  assert P("data") in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
  with pytest.raises(ValueError):
    state = tx.init(params)
    mapped = jax.shard_map(
      lambda s, x: tx.update({"t": x[0]}, s, params)[0],
      mesh=runners.mesh(N),
      in_specs=(specs, P("data")),
      out_specs=P(),
    )
    jax.eval_shape(mapped, state, jnp.zeros((N, 41, 4)))


@pytest.mark.parametrize("on_overflow", ["exact", "carry"])
def test_init_over_an_axis_that_the_mesh_lacks(on_overflow):
  tx = zenjax.zen_sync("data", sparse=True, on_overflow=on_overflow)
  params = {"t": jnp.zeros((41, 4))}
  with pytest.raises(ValueError) as error:
    zenjax.init(tx, params, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


def test_init_over_another_axis_than_that_of_the_residuals():
  tx = zenjax.zen_sync("data", sparse=True, on_overflow="carry")
  mesh = jax.make_mesh((N, N), ("data", "batch"))
  params = {"t": jnp.zeros((41, 4))}
  with pytest.raises(ValueError) as error:
    zenjax.init(tx, params, mesh, "batch")
  names(error, "`axis_name`", "'data'", "zenjax.init")
  (residual,) = (
    leaf.residual
    for leaf in zenjax.init(tx, params, mesh, "data").leaves.values()
  )
  assert residual.shape == (N, 41, 4)


def test_reshard_to_a_mesh_without_the_axis():
  state = zenjax.zen_sync("data").init({"t": jnp.zeros((41, 4))})
  with pytest.raises(ValueError) as error:
    zenjax.reshard(state, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


def test_multisteps_of_a_scalar():
  """Gradients accumulated per device need a dimension to be split along."""
  tx = optax.MultiSteps(optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1)), 2)
  with pytest.raises(ValueError) as error:
    zenjax.init(tx, {"scale": jnp.zeros(())}, runners.mesh(N), "data")
  names(error, "`state`", "MultiSteps", "(1,)")


def test_multisteps_that_were_not_made_by_init():
  """The raw error is of shapes that do not broadcast, deep in optax."""
  tx = optax.MultiSteps(optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1)), 2)
  params = {"t": jnp.zeros((40, 4)), "other": jnp.zeros(6)}
  step = zenjax.data_parallel(
    lambda params, state, x: (params, state, x), runners.mesh(N), "data"
  )
  with pytest.raises(ValueError) as error:
    step(params, tx.init(params), jnp.zeros(N))
  names(error, "`opt_state`", "MultiSteps", "zenjax.init", "(6,)", "other")
  made = zenjax.init(tx, params, runners.mesh(N), "data")
  step(params, made, jnp.zeros(N))


# --- batches ----------------------------------------------------------------


def test_axis_of_data_parallel_that_the_mesh_lacks():
  with pytest.raises(ValueError) as error:
    zenjax.data_parallel(lambda *a: a, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


@pytest.mark.parametrize(
  ("argument", "remedy", "remedied"),
  [
    (
      jax.random.key(0),
      "`jax.random.split(key, 2)`, and use `key[0]`",
      jax.random.split(jax.random.key(0), 2),
    ),
    (jnp.float32(0.5), "`jnp.full(2, x)`, and use `x[0]`", jnp.full(2, 0.5)),
    (jnp.zeros((3, 2)), "pad or trim", jnp.zeros((4, 2))),
  ],
  ids=["key", "scalar", "odd"],
)
def test_batch_that_cannot_be_split(argument, remedy, remedied):
  """What the message offers works."""

  def step(params, state, x):
    one = x[0]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      one = jax.random.uniform(one)
    return params, state, one

  mapped = zenjax.data_parallel(step, runners.mesh(N), "data")
  with pytest.raises(ValueError) as error:
    mapped({}, (), argument)
  names(error, "`batch` argument 0", "2 devices", str(argument.shape), remedy)
  assert jnp.isfinite(mapped({}, (), remedied)[2]).all()


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
