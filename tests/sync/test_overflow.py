"""Rows that do not fit: further rounds, later steps, statistics of both."""

from typing import Any

from four_devices import N
from four_devices import table
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax


def test_capacities_by_the_names_of_the_report():
  """Each table's own change its rounds, not its values."""
  params = {"a": {"embedding": jnp.zeros((500, 3))}, "b": jnp.zeros((400, 5))}
  rng = np.random.default_rng(0)
  stack = {
    "a": {"embedding": table(rng, 500, 3, 0.05)},
    "b": table(rng, 400, 5, 0.05),
  }
  state: Any = zenjax.zen_sync("data", sparse=True).init(params)
  small, large = sorted(state.leaves)
  capacities = {small: (1, 2), large: (12, 50)}
  tx = zenjax.zen_sync("data", sparse=True, capacities=capacities)
  trainer = steps.Trainer(tx, params, runners.mesh(N))
  got = trainer(stack)
  oracle.check(got["a"]["embedding"], stack["a"]["embedding"])
  oracle.check(got["b"], stack["b"])
  numbers = zenjax.stats(trainer.state)
  assert numbers[large]["rounds"] == 1 < numbers[small]["rounds"]
  assert numbers[large]["overflow_rows"] == 0


@pytest.mark.usually("hash-True", "columns-True")
@pytest.mark.parametrize(
  ("partition", "check_vma"),
  [("hash", True), ("hash", False), ("columns", True)],
)
def test_carry_delays_rows_and_loses_none(partition, check_vma):
  """n * averaged updates + residuals = all gradients so far; then it drains."""
  rows, width = 64, 4
  tx = zenjax.zen_sync(
    "data",
    sparse=True,
    on_overflow="carry",
    partition=partition,
    capacities=(2, 6),
  )
  params = {"t": jnp.zeros((rows, width))}
  trainer = steps.Trainer(tx, params, runners.mesh(N), check_vma=check_vma)
  rng = np.random.default_rng(0)
  given = np.zeros((rows, width))
  updated = np.zeros((rows, width))
  carried = []
  for step in range(80):
    stack = table(rng, rows, width, 0.5)
    stack = stack if step < 4 else np.zeros_like(stack)
    given += stack.astype(np.float64).sum(axis=0)
    got = trainer({"t": stack})["t"]
    # No table travels dense under carry, so none is remembered as dense.
    assert "t" in zenjax.advise(trainer.state)
    oracle.check_replicas(got)
    updated += N * got[0].astype(np.float64)
    (residual,) = trainer.per_device()
    residual = residual.astype(np.float64).reshape(N, rows, width)
    np.testing.assert_allclose(
      updated + residual.sum(axis=0), given, rtol=1e-5, atol=1e-5
    )
    carried.append(float(np.abs(residual).sum()))
  trainer.check_replicas()
  assert max(carried) > 0, "nothing overflowed, so nothing was tested"
  assert carried[-1] == 0.0


def test_carry_without_overflow_is_exact():
  tx = zenjax.zen_sync(
    "data", sparse=True, on_overflow="carry", capacities=(64, 64)
  )
  trainer = steps.Trainer(tx, {"t": jnp.zeros((64, 4))}, runners.mesh(N))
  for seed in range(3):
    stack = table(np.random.default_rng(seed), 64, 4, 0.3)
    oracle.check(trainer({"t": stack})["t"], stack)


@pytest.mark.usually("hash")
@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_statistics_are_what_numpy_counts(partition):
  rows, width = 200, 16
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  trainer = steps.Trainer(tx, {"t": jnp.zeros((rows, width))}, runners.mesh(N))
  for seed, density in enumerate((0.02, 0.1)):
    stack = table(np.random.default_rng(seed), rows, width, density)
    trainer({"t": stack})
    mask = oracle.nonzero_rows(stack)
    (numbers,) = zenjax.stats(trainer.state).values()
    local, union = mask.mean(), mask.any(axis=0).mean()
    assert numbers["num_rows"] == rows
    assert numbers["width"] == width
    np.testing.assert_allclose(numbers["density"], local, rtol=1e-5)
    np.testing.assert_allclose(numbers["union_density"], union, rtol=1e-5)
    np.testing.assert_allclose(numbers["growth"], union / local, rtol=1e-5)
    assert 1.0 <= numbers["push_imbalance"] <= N + 1e-5
    assert 1.0 <= numbers["pull_imbalance"] <= N + 1e-5
    dense = 2 * (N - 1) / N * rows * width * 4
    np.testing.assert_allclose(numbers["dense_bytes"], dense, rtol=1e-5)
    ideal = (N - 1) / N * (local + union) * rows * width * 4
    assert numbers["wire_bytes"] >= ideal * (1 - 1e-5)
  assert "t" in zenjax.report(trainer.state)


@pytest.mark.usually("pull")
@pytest.mark.parametrize(
  ("capacities", "withheld"),
  [((1, 20), True), ((20, 24), True), ((40, 40), False)],
  ids=["push", "pull", "fits"],
)
def test_report_claims_no_saving_where_rows_wait(capacities, withheld):
  """Bytes that were not sent yet are not saved."""
  tx = zenjax.zen_sync(
    "data",
    sparse=True,
    on_overflow="carry",
    partition="columns",
    capacities=capacities,
  )
  trainer = steps.Trainer(tx, {"t": jnp.zeros((200, 16))}, runners.mesh(N))
  trainer({"t": table(np.random.default_rng(0), 200, 16, 0.05)})
  (residual,) = trainer.per_device()
  assert residual.any() == withheld
  (numbers,) = zenjax.stats(trainer.state).values()
  assert numbers["withheld"] == withheld
  assert np.isnan(numbers["growth"]) == withheld
  shown = zenjax.report(trainer.state)
  assert ("rows wait" in shown) == withheld
  assert ("x fewer" in shown) == (not withheld)
