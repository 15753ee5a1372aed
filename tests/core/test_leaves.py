"""Leaves of any shape, cut into any units; which of them travel sparse."""

from typing import Any

import cases
from four_devices import F32
from four_devices import N
from four_devices import run_with
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners

import zenjax


@pytest.mark.parametrize(
  ("unit", "shape", "runner", "partition"),
  [
    ("element", (240,), "vmap", "hash"),
    (3, (7, 9), "pmap", "hash"),
    (256, (9, 512), "shard_map_replicated", "columns"),
  ],
)
def test_units(unit, shape, runner, partition):
  run = run_with(runner, unit=unit, partition=partition)
  rows, width = shape[0], int(np.prod(shape[1:]))
  for name, stack in cases.every_case(N, rows, width, F32):
    stack = stack.reshape(N, *shape)
    oracle.check(run(stack), stack, label=name)


LEAVES = {
  "wide": ((200, 64), np.float32),
  "narrow": ((1000, 1), np.float16),
  "deep": ((3, 4, 5, 7), np.dtype(cases.BFLOAT16)),
  "one": ((1, 9), np.float32),
}


def test_many_leaves_in_one_exchange():
  """Widths, dtypes and ranks all differ; each leaf is right on its own.

  One of them has small buffers, given by the name that a report has for it.
  They make rounds, and change no value.
  """
  rng = np.random.default_rng(3)
  tx = zenjax.zen_sync(
    "data", sparse=True, partition=2, capacities={"net.wide": (1, 2)}
  )
  params = {k: jnp.zeros(s, d) for k, (s, d) in LEAVES.items()}
  state = tx.init({"net": params})
  run = runners.RUNNERS["shard_map_vma_replicated"](
    lambda g, _: tx.update({"net": g}, state), N
  )
  first = {k: np.zeros((N, *s), d) for k, (s, d) in LEAVES.items()}
  for x in first.values():  # Row 0 of every table.
    x.reshape(N, -1, x.shape[-1])[:, 0] = np.arange(1, N + 1)[:, None]
  stacks = {"row 0": first}
  for density in (0.0, 0.03, 0.4, 1.0):
    stack = stacks[f"density {density}"] = {}
    for key, (shape, dtype) in LEAVES.items():
      rows = int(np.prod(shape[:-1]))
      x = cases.normal(rng, N, rows, shape[-1], np.dtype(dtype))
      ids = [rng.permutation(rows)[: round(density * rows)] for _ in range(N)]
      stack[key] = cases.keep(x, ids).reshape(N, *shape)
  rounds = {}
  for name, stack in stacks.items():
    got, after = run(stack)
    for key, local in stack.items():
      oracle.check(got["net"][key], local, label=f"{key}, {name}")
    numbers = zenjax.stats(jax.tree.map(lambda x: x[0], after))
    rounds[name] = {x["rounds"] for x in numbers.values()}
  assert rounds["row 0"] == {1}
  # Six rows of a device in two groups, one a round. All leaves of an exchange
  # take as many rounds as the slowest of them.
  (most,) = rounds["density 0.03"]
  assert most >= 3


CHOSEN = {
  "kernel": ((8, 8), F32),
  "scale": ((), F32),
  "no rows": ((0, 4), F32),
  "no columns": ((4, 0), F32),
}
NOT_CHOSEN = CHOSEN | {
  "embedding": ((400, 8), F32),
  "half": ((9,), cases.BFLOAT16),
  "count": ((3,), np.dtype(np.int32)),
}


def test_choosing_leaves_never_changes_the_result():
  """Leaves without elements, and leaves that share no buffer with others."""
  rng = np.random.default_rng(0)
  draw = lambda shape, dtype: (8 * rng.standard_normal((N, *shape))).astype(
    dtype
  )
  trees = {"chosen": CHOSEN, "not chosen": NOT_CHOSEN}
  stack = {
    tree: {name: draw(*leaf) for name, leaf in leaves.items()}
    for tree, leaves in trees.items()
  }
  sparse = {"chosen": True, "not chosen": False}
  tx = zenjax.zen_sync("data", sparse=sparse)
  mean = lambda grads, _: tx.update(grads, tx.init(grads))[0]
  got = runners.RUNNERS["shard_map_replicated"](mean, N)(stack)
  count, local = (
    got["not chosen"].pop("count"),
    stack["not chosen"].pop("count"),
  )
  np.testing.assert_array_equal(count, [local.mean(axis=0, dtype=F32)] * N)
  jax.tree.map(oracle.check, got, stack)


@pytest.mark.parametrize(
  ("shape", "dtype", "sparse"),
  [
    ((520, 32), jnp.float32, True),
    ((8192, 2), jnp.float32, True),
    ((512, 128), jnp.float32, False),  # a down-projection, [4 d, d]
    ((513, 128), jnp.float32, True),
    ((511, 33), jnp.float32, False),  # too few rows
    ((512, 31), jnp.float32, False),  # under 16,384 elements
    ((512, 32), jnp.bfloat16, True),
    ((65536,), jnp.float32, False),
    ((2, 5000, 8), jnp.float32, False),
    ((5000, 8), jnp.int32, False),
  ],
)
def test_leaves_that_are_sparse_by_default(shape, dtype, sparse):
  """The rule in docs/explanation/rows.md, at its borders."""
  leaf = jax.ShapeDtypeStruct(shape, dtype)
  state: Any = jax.eval_shape(zenjax.zen_sync("data").init, {"x": leaf})
  assert list(state.leaves) == ["x"] * sparse


INTEGERS = {
  "int32": np.array([[1, 2], [2, 5]], np.int32),
  "uint8": np.array([[200, 2], [100, 255]], np.uint8),
  "bool": np.array([[True, False], [True, True]]),
  "complex64": np.array([[1 + 2j, 3], [4j, 5]], np.complex64),
  "scalar": np.array([3, 4], np.int32),
  "none": np.zeros((2, 0), np.int32),
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_leaves_that_are_no_floats_are_those_of_jax(op, x64):
  """Values and dtypes; `lax.pmean` of integers is floating."""
  stack: dict[str, Any] = dict(INTEGERS)
  if x64:
    stack["int64"] = np.array([[2**40, 1], [5, 2**41]])
  with jax.enable_x64(x64):
    tx: Any = zenjax.zen_sync("data", op=op)
    reduce = jax.lax.pmean if op == "mean" else jax.lax.psum

    def step(x):
      return tx.update(x, tx.init(x))[0], reduce(x, "data")

    got, want = jax.vmap(step, axis_name="data")(stack)
  for name in stack:
    assert got[name].dtype == want[name].dtype
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)
