"""What zen_sync refuses: options, and gradients, where a step is traced.

Messages name the argument, what it was given, and a way out.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import N
from refusals import refused
from refusals import TABLE
from refusals import trace
from refusals import trace_pmean
import runners

import zenjax
from zenjax import compress

zen: Any = zenjax.zen_sync


def made(**options: Any):
  """A call that makes `zen_sync` with these options."""
  return lambda: zen("data", **options)


def given(**options: Any):
  """A call with these options, refused where it is made or traced."""
  return lambda: trace_pmean(**options)


def shaped(shape, dtype="float32", **options: Any):
  stack = jax.ShapeDtypeStruct((N, *shape), jnp.dtype(dtype))
  return lambda: trace_pmean(stack, **options)


def init(params, **options: Any):
  return lambda: zen("data", **options).init(params)


def update(params, grads=None, **options: Any):
  """The update of a state that was made for `params`."""

  def call():
    tx = zen("data", **options)
    state = tx.init(params)
    trace(lambda _: tx.update(grads or params, state)[0])

  return call


def outside(call):
  """`call()` where the mesh has an axis over which nothing is mapped."""
  with jax.set_mesh(runners.mesh(N)):
    return call()


T = {"t": jnp.zeros((40, 4))}
OPTIMIZER: Any = optax.adagrad
TWO = {"a": jnp.zeros((40, 4)), "b": {"w": jnp.zeros((4, 4))}}
ALL: Any = TypeError, ValueError
REFUSED: dict[Any, dict[str, tuple[Any, str]]] = {
  ValueError: {
    # Values out of range.
    "scheme": (given(scheme="star"), "`scheme` 'star' zen all_gather"),
    "no op": (made(op=""), "`op` '' mean sum"),
    "output": (given(output="sparse"), "`output` 'sparse' dense rows"),
    "partition": (given(partition="rows"), "`partition` 'rows' hash"),
    "no groups": (given(partition=0), "`partition` 0"),
    "groups": (given(partition=3), "`partition` 3 2"),
    "kernels": (given(kernels="triton"), "`kernels` 'triton' pallas"),
    "seed": (given(hash_seed=2**32), "`hash_seed` 2**32"),
    "half seed": (given(hash_seed=1.5), "`hash_seed` 1.5"),
    "unit": (given(unit=-4), "`unit` -4 row element"),
    "column": (given(unit="column"), "`unit` 'column' row element"),
    "same axes": (lambda: zen(("a", "b", "a")), "`axis_name` a"),
    "no axis": (lambda: zen(()), "`axis_name`"),
    # Buffer sizes.
    "no rows": (given(capacities=(0, 4)), "`capacities` (0, 4)"),
    "less pulled": (given(capacities=(8, 4)), "`capacities` (8, 4)"),
    "large": (given(capacities={"leaf": (4, 41)}), "`capacities` 41 40"),
    "a leaf": (
      update(T, sparse=True, capacities={"nowhere": (2, 4)}),
      "`capacities` nowhere t",
    ),
    # Dtypes on the wire.
    "4 bits": (
      made(wire_dtype="float4_e2m1fn"),
      "`wire_dtype` 8 bits float4_e2m1fn jnp.int4",
    ),
    "no sign": (
      made(wire_dtype=jnp.float8_e8m0fnu),
      "`wire_dtype` a sign float8_e8m0fnu jnp.int4",
    ),
    "rounded arrays": (
      made(scheme="dense", wire_dtype=jnp.bfloat16),
      "`wire_dtype` bfloat16 scheme='dense'",
    ),
    # The scale of a row is as long as what it saves.
    "short rows": (
      shaped((40, 2), wire_dtype=jnp.int8),
      "`wire_dtype` int8 2 columns float32",
    ),
    "no scale": (
      shaped((160, 1), wire_dtype=jnp.float16),
      "`wire_dtype` float16 1 columns float32",
    ),
    "scales of elements": (
      shaped((40, 4), wire_dtype=jnp.int8, unit="element"),
      "`wire_dtype` int8 1 columns",
    ),
    "short column groups": (
      shaped((40, 4), wire_dtype=jnp.int8, partition="columns"),
      "`wire_dtype` int8 2 groups of 2 columns partition='hash'",
    ),
    "wider": (
      shaped((40, 4), "bfloat16", wire_dtype=jnp.float32),
      "`wire_dtype` float32 bfloat16",
    ),
    # Leaves.
    "prefix": (init(TWO, sparse={"a": True, "c": False}), "`sparse`"),
    "list": (init(TWO, sparse=[True, False]), "lambda name, leaf:"),
    "rows": (shaped((2**31, 1)), f"{2**31} 2**30"),
    "elements": (shaped((2**16, 2**16), unit="element"), "2**30 unit="),
    "leaves": (update(T, TWO, sparse=True), "`state` init"),
  },
  TypeError: {
    # Functions that make optimizers, instead of optimizers.
    "adagrad in lazy_rows": (
      lambda: zenjax.lazy_rows(OPTIMIZER),
      "`inner` optax.adagrad(0.1)",
    ),
    "adagrad in sharded_optimizer": (
      lambda: zenjax.sharded_optimizer(OPTIMIZER, "data"),
      "`tx` optax.adagrad(0.1)",
    ),
    "swapped": (
      lambda: zenjax.delayed(cast(Any, "data"), cast(Any, zen("data"))),
      "`tx` 'data'",
    ),
    # Other arguments.
    "one array, mesh": (given(mesh=None), "`mesh` sparse_pmean Leave it out"),
    "one array, op": (given(op="sum"), "`op` sparse_pmean Leave it out"),
    "one array, number": (
      lambda: zenjax.sparse_pmean(1.0, "data"),
      "`x` SparseRows float",
    ),
    "no loss": (
      lambda: zenjax.value_and_grad(cast(Any, T)),
      "`fun` function dict",
    ),
    "a state of optax": (
      lambda: zen("data").update(T, optax.adagrad(0.1).init(T)),
      "`state` ZenSyncState tx.init(params)",
    ),
    "op": (given(op="max"), "op"),
    "option": (given(capacity=(2, 4)), "capacity"),
    "a mesh": (made(mesh="data"), "`mesh`"),
    "no plan": (made(plan="{}"), "`plan` Plan.from_json"),
    "int16": (made(wire_dtype=jnp.int16), "`wire_dtype` jnp.int8 int16"),
    # Leaves.
    "integers": (shaped((40, 4), "int32"), "`x` int32 psum"),
    "complex": (shaped((40, 4), "complex64"), "complex64"),
    "chosen": (
      update({"ids": jnp.zeros((40, 4), bool)}, sparse=True),
      "ids bool sparse",
    ),
  },
  ALL: {
    "one size": (given(capacities=(4,)), "`capacities` (4,)"),
    "half rows": (given(capacities=(1.5, 4)), "`capacities`"),
    "text": (given(capacities=("1", "2")), "`capacities`"),
    "number": (init({"a": T["t"]}, sparse={"a": 1.5}), "`sparse` 1.5"),
  },
  NameError: {
    "unbound": (
      lambda: zenjax.sparse_pmean(jnp.zeros((40, 4)), "data"),
      "data shard_map",
    ),
    "half bound": (
      lambda: trace(lambda x: zenjax.sparse_pmean(x, ("host", "data"))),
      "host",
    ),
    "not mapped": (
      lambda: outside(lambda: zenjax.sparse_pmean(jnp.zeros((40, 4)), "data")),
      "'data' nothing is mapped over it shard_map",
    ),
  },
}


@pytest.mark.parametrize(
  ("exception", "name"),
  [(kind, name) for kind in REFUSED for name in REFUSED[kind]],
)
def test_refused(exception, name):
  call, words = REFUSED[exception][name]
  with refused(exception, *words.split()):
    call()


@pytest.mark.parametrize(
  "make",
  [
    lambda: zen("data", sparse=True, kernels="pallas"),
    lambda: zenjax.sharded_optimizer(
      optax.sgd(0.1), "data", sparse=True, kernels="pallas"
    ),
  ],
  ids=["zen", "owners"],
)
@pytest.mark.parametrize("form", ["array", "rows"])
def test_kernels_are_never_replaced(make, form):
  """On CPUs there are none: the first operation that has one is named."""

  def step(table):
    grads = table
    if form == "rows":
      grads = zenjax.SparseRows.from_dense(table, 4)
    tx = make()
    return tx.update(grads, tx.init(table), table)[0]

  mapped = jax.jit(jax.vmap(step, axis_name="data"))
  first = {"array": "`mask_pack`", "rows": "`merge`"}[form]
  words = f"`kernels='pallas'` ... {first} ... on cpu ... kernels='xla'"
  with refused(NotImplementedError, words):
    mapped.lower(jnp.zeros(TABLE.shape))


def test_sizes_and_dtypes_that_fit():
  """Sizes for all tables are cut to each; a dtype of the range is taken."""
  assert trace_pmean(capacities=(4, 41)).shape == TABLE.shape
  for wire in ("float16", "bfloat16"):
    assert shaped((40, 4), "float16", wire_dtype=wire)().dtype == "float16"
  assert trace_pmean(unit=7).shape == TABLE.shape  # 160 elements, padded


EMB = lambda name, _: name == "emb"


@pytest.mark.parametrize(
  ("use", "argument"),
  [
    (lambda p: zen("data", sparse=EMB).init(p), "`sparse`"),
    (
      lambda p: zenjax.rows.grad(lambda p: jnp.sum(p["t"]), tables=EMB)(p),
      "`tables`",
    ),
  ],
)
def test_a_choice_of_no_leaf_is_told(use, argument):
  params = T | {f"b{i}": jnp.zeros(2) for i in range(13)}
  with pytest.warns(UserWarning, match="should choose a leaf") as warned:
    use(params)
  text = str(warned[0].message)
  assert argument in text and "'b0', 'b1'" in text and "and 2 more" in text
  # Meant: no leaf at all, and the other part of a tree.
  zen("data", sparse=False).init(params)
  some = T | {"emb": jnp.zeros((40, 4))}
  optax.masked(zen("data", sparse=EMB), {"emb": False, "t": True}).init(some)


def in_shard_map(step, specs, *args):
  mapped = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=specs, out_specs=P()
  )
  return jax.eval_shape(mapped, *args)


@pytest.mark.parametrize("scheme", ["zen", "dense"])
def test_gradients_that_autodiff_has_summed(scheme):
  """Those of replicated parameters under check_vma=True, sparse or not."""
  tx = zen("data", sparse={"emb": {"w": True}, "k": False}, scheme=scheme)
  params = {"emb": {"w": jnp.ones((40, 4))}, "k": jnp.ones((4, 4))}
  state = tx.init(params)

  def step(params, x):
    loss = lambda p: jnp.sum((p["emb"]["w"] @ p["k"]) * x[0])
    return tx.update(jax.grad(loss)(params), state, params)[0]

  with refused(ValueError, "data ... unreduced ... emb"):
    in_shard_map(step, (P(), P("data")), params, jnp.ones((N, 40, 4)))


@pytest.mark.parametrize(
  "make",
  [
    lambda: zen("data"),
    lambda: zenjax.sharded_optimizer(optax.sgd(0.1), "data"),
    lambda: compress.all_reduce(compress.TopK(0.1), "data"),
  ],
)
def test_gradients_by_integers(make):
  params = {"ids": jnp.arange(3), "w": jnp.ones(3)}
  loss = lambda params: jnp.sum(params["w"] * params["w"])
  grads = jax.grad(loss, allow_int=True)(params)
  tx = make()
  with refused(
    TypeError, "`updates` ... 'ids' ... float0 ... `optax.partition`"
  ):
    trace(lambda _: tx.update(grads, tx.init(params), params)[0])
  labels = {"ids": "off", "w": "on"}
  tx = optax.partition({"on": make(), "off": optax.set_to_zero()}, labels)

  def step(_):
    updates, _ = tx.update(grads, tx.init(params), params)
    return zenjax.apply_updates(params, updates)

  out = jax.vmap(step, axis_name="data")(jnp.zeros(N))
  assert out["ids"][0].tolist() == [0, 1, 2]
  assert np.shape(out["w"]) == (N, 3)


CHAINED = {
  "norm before": lambda sync: optax.chain(optax.clip_by_global_norm(1.0), sync),
  "no lazy_rows": lambda sync: optax.chain(sync, optax.adam(0.1)),
  "MultiSteps": lambda sync: optax.MultiSteps(
    optax.chain(sync, zenjax.lazy_rows(optax.adam(0.1))), 2
  ),
  "pmean": lambda sync: optax.chain(
    optax.stateless(lambda g, p: jax.lax.pmean(g, "data")), sync
  ),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("name", CHAINED)
def test_rows_where_only_arrays_go(name):
  tx = CHAINED[name](zen("data", sparse=True))
  table = jnp.ones((40, 4))

  def step(ids):
    rows = zenjax.SparseRows(ids, jnp.ones((2, 4)) * ids[:, None], 40)
    # What MultiSteps accumulates varies, as `zenjax.init_state` places it.
    state = zenjax.unreduced(tx.init(table), "data")
    return tx.update(rows, state, table)[0]

  with refused(ALL, "optax ... inside ... lazy_rows"):
    in_shard_map(step, P("data"), jnp.zeros(2 * N, jnp.int32))
