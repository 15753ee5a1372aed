"""Which implementation `kernels=` chooses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import kernel_cases
from kernel_cases import Shape
import numpy as np
import pytest
from refusals import refused

from zenjax.kernels._dispatch import interpreted
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.operations import OPERATIONS

SHAPE = Shape(1000, 8, 4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_choice(name):
  """On CPUs there are no kernels; interpreted, there are."""
  operation: Any = OPERATIONS[name]
  shape = (4, 16, 8, 256, 32, "float32") if name == "merge" else SHAPE
  args = kernel_cases.arguments(name, shape)
  want = operation.reference(*args)
  kernel_cases.assert_same_bits(operation(*args), want)
  kernel_cases.assert_same_bits(operation(*args, kernels="xla"), want)
  call = lambda: operation(*args, kernels="pallas")
  words = f"kernels='pallas' ... {name} ... on cpu ... kernels='xla'"
  with refused(NotImplementedError, words):
    call()
  with interpreted("cuda"):
    assert f"zenjax_{name}" in str(jax.make_jaxpr(call)())


def test_a_kernel_needs_all_axes_of_a_mesh():
  """XLA cannot split a kernel."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
  run = lambda table: mask_pack(table, SHAPE.layout, kernels="pallas").words
  mapped = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
    axis_names={"data"},
    check_vma=False,
  )
  with (
    interpreted("cuda"),
    pytest.raises(NotImplementedError, match=r"\['model'\] are left to XLA"),
  ):
    jax.eval_shape(mapped, jnp.zeros((SHAPE.rows, SHAPE.width)))
