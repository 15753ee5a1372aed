"""Row gradients of models as their libraries write them."""

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
from row_models import IDS
from row_models import loss_of
from row_models import MODELS
from row_models import VOCABULARY
from usual import usual

import zenjax
from zenjax import SparseRows


def _dense(name, grads):
  """Gradients as arrays, of which some were rows."""
  is_rows = lambda x: isinstance(x, SparseRows)
  leaves = jax.tree.leaves(grads, is_leaf=is_rows)
  assert sum(map(is_rows, leaves)) == MODELS[name][1]
  return [x.to_dense() if is_rows(x) else x for x in leaves]


def _check(name, got, want):
  """Compares row gradients, as arrays, with the gradients of `jax.grad`."""
  tol = 1e-2 if "bfloat16" in name or "mixed" in name else 1e-5
  for g, w in zip(got, jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=tol, atol=tol * 0.1)


# One of each library, and of each way to write a model in it.
OFTEN = "linen", "haiku", "nnx split", "nnx module", "equinox", "two tables"


@pytest.mark.parametrize("name", usual(MODELS, *OFTEN))
def test_gradients_of_models_on_devices(name):
  """Each has ids of its own; what is left local is what jax.grad leaves so."""
  params, apply = MODELS[name][0]()
  loss = loss_of(apply)

  def run(params, ids):
    varying = zenjax.unreduced(params, "data")
    want = jax.value_and_grad(loss)(varying, ids[0])
    value, grads = zenjax.value_and_grad(loss)(params, ids[0])
    got = value, _dense(name, grads)
    return jax.tree.map(lambda x: x[None], (want, got))

  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  mapped = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P("data"),
    # The carry of Flax's scan begins as the same on all devices.
    check_vma="scan" not in name,
  )
  rng = np.random.default_rng(0)
  ids = rng.integers(0, VOCABULARY, (2, *IDS.shape)).astype(np.int32)
  (value, want), (got_value, got) = jax.jit(mapped)(params, ids)
  np.testing.assert_allclose(got_value, value, rtol=1e-6)
  _check(name, got, want)
