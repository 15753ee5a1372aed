"""Rows that do not fit: further rounds, and statistics."""

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
