"""When gradients are complete, as a traced program tells."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from planning import gradient_trace
import pytest

import zenjax

pytestmark = pytest.mark.each_jax

LAYERS, WIDTH, BATCH = 4, 64, 256


def shape(*dims, dtype: Any = jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


PARAMS = {"layers": [shape(WIDTH, WIDTH)] * LAYERS, "table": shape(1000, WIDTH)}
ARGS = (PARAMS, shape(BATCH, dtype=jnp.int32), shape(BATCH, WIDTH))


def loss(params, ids, target):
  x = params["table"][ids]
  for layer in params["layers"]:
    x = jax.nn.relu(x @ layer)
  return jnp.mean((x - target) ** 2)


WAYS = {
  "plain": jax.value_and_grad(loss),
  "jit": jax.jit(jax.value_and_grad(jax.jit(loss))),
  "remat": jax.value_and_grad(jax.checkpoint(loss)),
  "rows": zenjax.value_and_grad(loss),
}


@pytest.mark.parametrize("way", WAYS)
def test_from_the_loss_to_the_inputs(way):
  found = gradient_trace.gradients(WAYS[way], *ARGS)
  order = [f"layers.{i}" for i in reversed(range(LAYERS))]
  assert [g.name for g in found] == [*order, "table"]
  ready = [g.ready for g in found]
  assert ready == sorted(set(ready)) and ready[-1] == pytest.approx(1.0)
  # The forward pass is a third of the products, the first gradient's another
  # eighth of the rest; what a checkpoint computes once more comes before it.
  low = (1 / 3, 1 / 2)[way == "remat"]
  assert low < ready[0] < low + 0.3
  table = found[-1]
  assert table.shape == (1000, WIDTH) and table.dtype == np.float32
  assert table.look_ups == (BATCH if way == "rows" else None)


def test_a_scan_completes_its_gradients_at_its_end():
  def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
    return jnp.sum(x @ params["last"])

  params = {"w": shape(8, WIDTH, WIDTH), "last": shape(WIDTH, WIDTH)}
  args = params, shape(BATCH, WIDTH)
  last, first = gradient_trace.gradients(jax.value_and_grad(scanned), *args)
  assert (last.name, first.name) == ("last", "w")
  assert last.ready < 0.6 and first.ready == pytest.approx(1.0)


def test_products_are_counted_as_the_compiler_counts_them():
  compiled = jax.jit(WAYS["plain"]).lower(*ARGS).compile()
  analysis = compiled.cost_analysis()
  assert analysis is not None
  jaxpr = jax.make_jaxpr(WAYS["plain"])(*ARGS).jaxpr
  products = sum(gradient_trace._flops(eqn) for eqn in jaxpr.eqns)
  # One layer forward, two products backward.
  assert products == 3 * LAYERS * 2 * BATCH * WIDTH * WIDTH
  assert products == pytest.approx(analysis["flops"], rel=0.05)


def test_convolutions_are_counted():
  def convolved(kernel, x):
    return jnp.sum(
      jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
      )
    )

  jaxpr = jax.make_jaxpr(convolved)(shape(3, 3, 4, 8), shape(2, 6, 6, 4)).jaxpr
  products = sum(gradient_trace._flops(eqn) for eqn in jaxpr.eqns)
  assert products == 2 * (3 * 3 * 4) * (2 * 6 * 6 * 8)


def test_rows_that_are_looked_up_cost_no_table():
  small, large = (
    gradient_trace.gradients(
      zenjax.value_and_grad(lambda t, ids: jnp.sum(t[ids])),
      shape(rows, WIDTH),
      shape(BATCH, dtype=jnp.int32),
    )
    for rows in (1000, 1_000_000)
  )
  assert small[0].ready == large[0].ready


def test_no_pair():
  with pytest.raises(TypeError, match="`value_and_grad` must return a pair"):
    gradient_trace.gradients(jax.grad(loss), *ARGS)
