"""How many elements selections by a count and by a sample take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparsifier_cases as cases

from zenjax._src.sparsify import feedback
from zenjax._src.sparsify import selectors

pytestmark = pytest.mark.each_jax


def test_densities_of_one_and_of_less_than_an_element():
  draws = jnp.asarray(cases.laplace(0, 1)[0])
  for kind in (selectors.Exact, selectors.Sampled):
    for density, count in [(1.0, cases.SIZE), (1e-6, 1)]:
      chosen = kind(density).select(draws, jnp.int32(0), 0)
      out = feedback.split(draws, None, chosen, lambda x: x)
      assert out.selected == count == np.count_nonzero(out.sent)


def test_a_sample_is_right_on_average_whatever_the_scale():
  size, density = 600_000, 0.01
  steps = jnp.arange(40, dtype=jnp.int32)
  rng = np.random.default_rng(0)
  acc = rng.standard_t(3, size).astype(np.float32)
  selector = selectors.Sampled(density)
  bars = jax.jit(
    lambda acc: jax.lax.map(lambda t: selector.select(acc, t, 0).bar, steps)
  )
  for scale in (2.0**-16, 1.0):
    found = np.asarray(bars(jnp.asarray(acc * np.float32(scale))))
    got = [(np.abs(acc) >= bar).sum() for bar in found / scale]
    ratio = np.array(got) / (density * size)
    assert ratio.mean() == pytest.approx(1, abs=0.03) and ratio.std() < 0.15
  # A quantile of the sample itself, which is another in each step.
  values = selectors.sample(jnp.abs(jnp.asarray(acc)), steps[3], 12_800)
  assert 12_800 <= values.size < 14_000
  rank = round(density * values.size)
  assert found[3] == np.sort(np.asarray(values))[-rank]
  assert len(set(found.tolist())) > 30
