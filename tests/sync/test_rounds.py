"""Loops that send the rest: nothing is lost between pushes and pulls.

Densities reach from one that the first round holds to one where the table is
summed dense.
"""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scheme_names

import zenjax
from zenjax._src.core import wire

N, ROWS, WIDTH = 4, 6000, 2
DENSITIES = (0.0002, 0.004, 0.02, 0.05, 0.08, 0.12, 0.2, 0.6)


@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_every_density_comes_back_whole(partition):
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))
  rng = np.random.default_rng(0)
  rounds, dense = [], []
  for density in DENSITIES:
    stack = rng.standard_normal((N, ROWS, WIDTH)).astype(np.float32)
    ids = [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
    stack = cases.keep(stack, ids)
    got, state = step(stack)
    oracle.check(got, stack, label=f"density {density}")
    seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]
    rounds.append(seen["rounds"])
    dense.append(bool(seen["went_dense"]))
    if not dense[-1]:
      union = len(np.unique(np.concatenate(ids))) / ROWS
      assert seen["union_density"] == pytest.approx(union, abs=1e-6)
  # All in the first, several turns, dense.
  assert rounds[0] == 1
  assert max(rounds) >= 4
  assert dense[-1] and not any(dense[:4])


@pytest.mark.each_jax
@pytest.mark.parametrize("scheme", scheme_names.SPARSE_NAMES)
def test_under_vmap_loops_turn_on_what_devices_agree_on(scheme):
  """On flags of each device every turn would select between whole tables."""
  tx = zenjax.zen_sync("data", sparse=True, scheme=scheme)
  stack = jnp.zeros((N, ROWS, WIDTH))
  state = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(stack[0]))
  step = jax.jit(jax.vmap(tx.update, axis_name="data"))
  text = step.lower(stack, state).as_text(debug_info=True)
  named = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.M))
  wide = rf"stablehlo.select .*tensor<{N}x{ROWS}x{WIDTH}xf32> loc\((.*?)\)"
  found = [named[at] for at in re.findall(wide, text)]
  # By its own flags a device clears signs of zeros, and reads no full table.
  assert found or scheme_names.in_blocks(scheme)
  assert not [name for name in found if "rounds" in name or "dense" in name]


def test_sums_of_counts_stop_at_the_largest_int32():
  most = np.iinfo(np.int32).max
  for counts in ([3, 4], [2**30, 2**29 + 1], [2**30, 2**30], [most] * 5):
    total = wire.sum_counts(jnp.array(counts, jnp.int32))
    assert int(total) == min(sum(counts), most)
