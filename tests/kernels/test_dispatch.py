"""Which implementation `kernels=` chooses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import kernel_cases
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels._dispatch import interpreted
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.operations import OPERATIONS

SHAPE = Shape(1000, 8, 4)


def arguments(name):
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  layout = SHAPE.layout
  words = mask_pack.reference(table, layout).words
  first = jnp.zeros(SHAPE.groups, jnp.int32)
  compact = table, indexing.index(words), layout, first, 16
  slots, rows = OPERATIONS["compact"].reference(*compact)
  rest = jnp.int32(layout.slots), layout.slots, 32, jnp.float32
  return {
    "mask_pack": (table, layout),
    "compact": compact,
    "merge": (slots, rows, *rest),
    "expand": (table, jnp.array([3, 1000], jnp.int32), table[:2]),
  }[name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_choice(name):
  """On CPUs there are no kernels; interpreted, there are."""
  operation: Any = OPERATIONS[name]
  args = arguments(name)
  want = operation.reference(*args)
  kernel_cases.assert_same_bits(operation(*args), want)
  kernel_cases.assert_same_bits(operation(*args, kernels="xla"), want)
  with pytest.raises(NotImplementedError) as error:
    operation(*args, kernels="pallas")
  for words in ("kernels='pallas'", name, "on cpu", "kernels='xla'"):
    assert words in str(error.value)
  with interpreted("cuda"):
    arrays = [x for x in args if isinstance(x, jax.Array)]
    program = str(jax.make_jaxpr(lambda: operation(*args, kernels="pallas"))())
    assert arrays and f"zenjax_{name}" in program


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
