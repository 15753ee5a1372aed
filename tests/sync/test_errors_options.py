"""Options out of range, or that the leaves they are for do not fit.

Messages name the option, what it was given, and a way out.
"""

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import optax
import pytest
from refusals import N
from refusals import names
from refusals import TABLE
from refusals import trace
from refusals import trace_pmean

import zenjax

LINK = zenjax.planner.Link(bandwidth=1e9, latency_s=1e-6)
PROFILE = zenjax.planner.Profile(rows=1.0, fullest=1.0, union=1.0, devices=2)
PALLAS = zenjax.Tuning(kernels="pallas")
TUNED = {field.name for field in dataclasses.fields(zenjax.Tuning)}


def options(**given: Any) -> dict[str, Any]:
  """Arguments of `zen_sync`, of which some are those of its tuning."""
  tuned = {name: given.pop(name) for name in TUNED & set(given)}
  return given | ({"tuning": zenjax.Tuning(**tuned)} if tuned else {})


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_seeds_are_integers_of_32_bits(seed):
  with pytest.raises(ValueError) as error:
    zenjax.Tuning(hash_seed=seed)
  names(error, "`hash_seed`", repr(seed), "2**32")


@pytest.mark.parametrize(
  ("option", "value", "remedies"),
  [
    ("scheme", "star", ["dense", "all_gather", "zen"]),
    ("op", "max", ["mean", "sum"]),
    ("op", "", ["mean", "sum"]),
    ("output", "sparse", ["dense", "rows"]),
    ("partition", "rows", ["auto", "hash", "columns"]),
    ("kernels", "triton", ["auto", "xla", "pallas"]),
    ("kernels", None, ["auto", "xla", "pallas"]),
  ],
)
def test_unknown_choice(option, value, remedies):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", **options(**{option: value}))
  names(error, f"`{option}`", repr(value), *remedies)
  if option != "op":  # the name of `sparse_pmean` says it
    with pytest.raises(ValueError) as error:
      trace_pmean(**options(**{option: value}))
    names(error, f"`{option}`", repr(value), *remedies)


@pytest.mark.parametrize(
  "make",
  [
    lambda: zenjax.zen_sync("data", sparse=True, tuning=PALLAS),
    lambda: zenjax.zen_sync(
      "data", sparse=True, scheme="all_gather", tuning=PALLAS
    ),
    lambda: zenjax.sharded_optimizer(
      optax.sgd(0.1), "data", sparse=True, tuning=PALLAS
    ),
  ],
  ids=["zen", "all_gather", "owners"],
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
  with pytest.raises(NotImplementedError) as error:
    mapped.lower(jnp.zeros(TABLE.shape))
  first = {"array": "`mask_pack`", "rows": "`merge`"}[form]
  names(error, "`kernels='pallas'`", first, "on cpu", "kernels='auto'")


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
    trace_pmean(scheme="auto", **options(**{option: value}))


@pytest.mark.parametrize("option", ["link", "profile"])
def test_what_only_auto_needs(option):
  value: Any = LINK if option == "link" else {"t": PROFILE}
  with pytest.raises(ValueError, match=f"`{option}` is for `scheme='auto'`"):
    zenjax.zen_sync("data", **options(**{option: value}))


@pytest.mark.parametrize("partition", ["hash", "columns", 2])
def test_auto_chooses_the_partition(partition):
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", scheme="auto", partition=partition)
  given = f"partition={partition!r}"
  names(error, "`partition`", "scheme='auto'", given, "scheme='zen'")
  with pytest.raises(ValueError, match="`partition` is chosen"):
    trace_pmean(scheme="auto", partition=partition)


@pytest.mark.parametrize("name", ["bandwidth", "latency_s"])
def test_link_that_cannot_be(name):
  numbers: Any = {"bandwidth": 1e9, "latency_s": 1e-6, name: -1.0}
  with pytest.raises(ValueError, match=f"`{name}` of a Link must be"):
    zenjax.planner.Link(**numbers)


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


def test_unknown_option():
  with pytest.raises(TypeError) as error:
    trace_pmean(capacity=(2, 4))
  names(error, "capacity")


def test_capacities_larger_than_the_table():
  with pytest.raises(ValueError) as error:
    trace_pmean(capacities={"leaf": (4, 41)})
  names(error, "`capacities`", "41", "40")


def test_capacities_of_all_tables_are_cut_to_each():
  """Of a table whose rows they all hold they pay in no step."""
  owned: Any = {"capacities": (4, 41), "partition": "hash"}
  with pytest.warns(UserWarning, match=r"\(4, 40\).*Give `capacities` by leaf"):
    assert trace_pmean(**owned).shape == TABLE.shape
  many = jax.ShapeDtypeStruct((N, 10_000, 4), jnp.float32)
  assert trace_pmean(many, **owned).shape == many.shape


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
  "wire_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str
)
@pytest.mark.parametrize(
  "make", [zenjax.zen_sync, lambda a, **k: zenjax.sparsify.exdyna(a, 0.1, **k)]
)
def test_wire_dtype_of_8_bits(make, wire_dtype):
  with pytest.raises(ValueError) as error:
    make("data", wire_dtype=wire_dtype)
  names(error, "`wire_dtype`", jnp.dtype(wire_dtype).name, "jnp.bfloat16")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_wire_dtype_without_the_range_of_the_leaf(dtype):
  """70,000 would come out as Inf, 1e-9 as zero."""
  stack = jax.ShapeDtypeStruct((N, 40, 4), dtype)
  with pytest.raises(ValueError) as error:
    trace_pmean(stack, wire_dtype=jnp.float16)
  names(error, "`wire_dtype`", "float16", "65504", "6e-08", "jnp.bfloat16")


def test_wire_dtypes_with_the_range_of_the_leaf():
  for leaf, wire in [("float32", "bfloat16"), ("float16", "float16")]:
    stack = jax.ShapeDtypeStruct((N, 40, 4), jnp.dtype(leaf))
    assert trace_pmean(stack, wire_dtype=wire).dtype == leaf


NAMED = lambda name, _: name == "emb"


@pytest.mark.parametrize(
  ("use", "argument"),
  [
    (lambda p: zenjax.zen_sync("data", sparse=NAMED).init(p), "`sparse`"),
    (lambda p: zenjax.sparsify.top_k(0.1, sparse=NAMED).init(p), "`sparse`"),
    (
      lambda p: zenjax.rows.grad(lambda p: jnp.sum(p["t"]), tables=NAMED)(p),
      "`tables`",
    ),
  ],
)
def test_a_choice_of_no_leaf(use, argument):
  params = {
    "t": jnp.zeros((40, 4)),
    **{f"b{i}": jnp.zeros(2) for i in range(13)},
  }
  with pytest.warns(UserWarning, match="should choose a leaf") as warned:
    use(params)
  text = str(warned[0].message)
  assert argument in text and "'b0', 'b1'" in text and "and 2 more" in text


def test_choices_that_are_meant():
  """A word for no leaf, for some, and for the other part of a tree."""
  params = {"emb": jnp.zeros((40, 4)), "t": jnp.zeros((40, 4))}
  zenjax.zen_sync("data", sparse=False).init(params)
  zenjax.zen_sync("data", sparse=NAMED).init(params)
  other = optax.masked(
    zenjax.zen_sync("data", sparse=NAMED), {"emb": False, "t": True}
  )
  other.init(params)


@pytest.mark.parametrize(
  "make",
  [
    lambda density: zenjax.sparsify.exdyna("data", density),
    lambda density: zenjax.sparsify.micro("data", density),
    lambda density: zenjax.sparsify.top_k(density),
    lambda density: zenjax.sparsify.random_k(density),
    lambda density: zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(density), "data"
    ),
  ],
  ids=["exdyna", "micro", "top_k", "random_k", "error_feedback"],
)
def test_a_density_that_is_no_small_part(make):
  init = lambda density, size: trace(
    lambda _: make(density).init(jnp.zeros(size))
  )
  with pytest.warns(UserWarning, match=r"`density`.*100%.*for 1 % give 0.01"):
    init(1, 40_000)
  init(0.2, 40_000)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:], ids=str)
def test_wire_dtype_wider_than_the_leaf(dtype):
  stack = jax.ShapeDtypeStruct((N, 40, 4), dtype)
  with pytest.raises(ValueError) as error:
    trace_pmean(stack, wire_dtype=jnp.float32)
  names(error, "`wire_dtype`", "float32", dtype.name)


def test_unit_that_does_not_divide_the_leaf():
  """Either blocks of 7 are refused for 160 elements, or they are padded."""
  try:
    got = trace_pmean(unit=7)
  except ValueError as error:
    assert "`unit`" in str(error) and "7" in str(error)
  else:
    assert got.shape == TABLE.shape
