"""What `zenjax.report` says of `error_feedback`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import runners

import zenjax

N, SIZE = 2, 2_000
_A: Any = {"a": True, "b": False}
TOP = zenjax.sparsify.top_k(0.05, sparse=_A)


def after(inner, steps: int, **options: Any):
  """The state after some steps of a chain with zen_sync."""
  tx = optax.chain(
    zenjax.sparsify.error_feedback(inner, "data", **options),
    zenjax.zen_sync("data", sparse=_A, unit="element"),
  )
  params, mesh = {"a": jnp.zeros(SIZE), "b": jnp.zeros(3)}, runners.mesh(N)
  state = params, zenjax.init_state(tx, params, mesh, "data")

  def step(state, x):
    params, state = state
    grads = {"a": x[0], "b": x[0, :3]}
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), ()

  step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  rng = np.random.default_rng(0)
  for _ in range(steps):
    draw = rng.random((N, SIZE), dtype=np.float32)
    state, _ = step(state, jnp.asarray(draw))
  return state[1]


def lines(state: Any) -> list[str]:
  text = zenjax.report(state).splitlines()
  (first,) = [i for i, x in enumerate(text) if x.startswith("error_feedback")]
  assert first > 0 and text[0].startswith("zen_sync")
  return text[first:]


def test_every_number_of_every_leaf():
  state = after(TOP, 2)
  title, headings, row, *legend = lines(state)
  assert title == "error_feedback after 2 steps on 2 devices"
  names = re.split(r"\s{2,}", headings.strip())
  cells = dict(zip(["name", *names], row.split(), strict=True))
  told = zenjax.stats(state)["a"]
  assert cells.pop("name") == "a"
  assert cells["density"] == f"{told['selected']:.3%}"
  assert cells["imbalance"] == f"{told['imbalance']:.2f}"
  assert cells["residual"] == f"{told['residual_norm']:.3g}" != "0"
  assert cells["wanted"] == "5.000%" and cells["threshold"] == "-"
  assert cells["build-up"] == f"{told['build_up']:.2f}"
  assert 1 < float(cells["build-up"]) <= 2
  assert "not yet sent" in " ".join(legend)


def test_before_the_first_step():
  (line,) = lines(after(TOP, 0))
  assert line == "error_feedback: no step was taken yet."


def test_a_chain_that_selects_from_no_leaf():
  none = zenjax.sparsify.top_k(0.05, sparse=False)
  (line,) = lines(after(none, 1, momentum=0.9))
  assert line == "error_feedback: it selects from no parameter."
