"""`error_feedback` alone takes the same steps however it is mapped."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import runners

import zenjax

SIZE = 2_000
INNER: dict[str, Any] = {
  "sampled": lambda: zenjax.sparsify.top_k(0.01, method="sampled", sparse=True),
  "random_k": lambda: zenjax.sparsify.random_k(0.01, sparse=True, apart="data"),
}


def transform(kind: str):
  return zenjax.sparsify.error_feedback(
    INNER[kind](), "data", momentum=0.5, clip_norm=1e3, wire_dtype=jnp.bfloat16
  )


@pytest.mark.parametrize("kind", INNER)
def test_pmap_and_shard_map_take_the_same_steps(kind):
  tx, devices = transform(kind), jax.devices()[:2]
  rng = np.random.default_rng(0)
  gradients = rng.laplace(size=(3, 2, SIZE)).astype(np.float32)
  state = zenjax.init_state(tx, jnp.zeros(SIZE), runners.mesh(2), "data")
  other = jax.pmap(tx.init, "data", devices=devices)(gradients[0])
  step = jax.pmap(tx.update, "data", devices=devices)

  def all_of(gradients, state):
    sent: Any
    sent, state = tx.update(gradients[0], state)
    return sent[None], state

  specs = zenjax.state_specs(state, "data")
  mapped = jax.shard_map(
    all_of,
    mesh=runners.mesh(2),
    in_specs=(P("data"), specs),
    out_specs=(P("data"), specs),
  )
  mapped = jax.jit(mapped)
  for local in gradients:
    sent, state = mapped(local, state)
    by_pmap, other = step(jnp.asarray(local), other)
    np.testing.assert_array_equal(sent, by_pmap)
  for name in ("residual", "momentum", "threshold", "selected"):
    pair = (getattr(x.leaves["leaf"], name) for x in (state, other))
    one, two = map(np.asarray, pair)
    np.testing.assert_array_equal(one, two.reshape(one.shape))
