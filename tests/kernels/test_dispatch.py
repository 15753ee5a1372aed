"""Which implementation runs: one contract for all operations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import kernel_cases
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels import _dispatch
from zenjax.kernels import operations
from zenjax.kernels._dispatch import Operation
from zenjax.kernels.operations import OPERATIONS

pytestmark = pytest.mark.each_jax

SHAPE = Shape(1000, 8, 4)


@functools.cache
def arguments(name):
  """What the operation `name` is given: everything but arrays is static."""
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  layout = SHAPE.layout
  words = operations.mask_pack.reference(table, layout).words
  bitmap = indexing.index(words)
  first = jnp.zeros(SHAPE.groups, jnp.int32)
  slots, rows = operations.compact.reference(table, bitmap, layout, first, 16)
  limit = jnp.int32(layout.slots)
  rest = layout.slots, 32, jnp.float32
  return {
    "mask_pack": (table, layout),
    "compact": (table, bitmap, layout, first, 16),
    "merge": (slots, rows, limit, *rest),
    "expand": (table, jnp.array([3, 1000], jnp.int32), table[:2]),
  }[name]


each_operation = pytest.mark.parametrize(
  "operation", OPERATIONS.values(), ids=OPERATIONS.keys()
)


@each_operation
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_reference_runs_where_no_kernel_was_measured(operation, implementation):
  assert "cpu" not in operation.kernels and "cpu" not in operation.measured
  args = arguments(operation.name)
  got = operation(*args, implementation=implementation)
  kernel_cases.assert_same_bits(got, operation.reference(*args))


@each_operation
def test_kernel_asked_for_is_never_replaced(operation):
  args = arguments(operation.name)
  with pytest.raises(NotImplementedError, match=operation.name) as error:
    operation(*args, implementation="pallas")
  served = operation.kernels or ["nowhere yet"]
  assert all(platform in str(error.value) for platform in served)


@each_operation
def test_other_implementations_are_errors(operation):
  with pytest.raises(ValueError, match="None, 'xla' or 'pallas', got 'cuda'"):
    operation(*arguments(operation.name), implementation="cuda")


@each_operation
def test_only_what_was_measured_is_taken_unasked(operation):
  assert set(operation.measured) <= set(operation.kernels)


def _lowered(function, platform):
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  traced = jax.jit(function).trace(table)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_platform_decides_when_it_is_lowered():
  run = functools.partial(
    operations.mask_pack, layout=SHAPE.layout, implementation="pallas"
  )
  assert "tpu_custom_call" in _lowered(run, "tpu")
  # Under vmap as well.
  batched = lambda table: jax.vmap(run)(table[None])
  assert "tpu_custom_call" in _lowered(batched, "tpu")
  for function in (run, batched):
    with pytest.raises(NotImplementedError, match="on tpu: yes"):
      _lowered(function, "cpu")


def test_measured_kernel_is_taken_on_its_platform_alone():
  measured = Operation(
    name="mask_pack",
    reference=operations.mask_pack.reference,
    kernels=operations.mask_pack.kernels,
    measured={"tpu": "a.json"},
  )
  run = functools.partial(measured, layout=SHAPE.layout)
  assert "tpu_custom_call" in _lowered(run, "tpu")
  assert "tpu_custom_call" not in _lowered(run, "cpu")
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  want = operations.mask_pack.reference(table, SHAPE.layout)
  kernel_cases.assert_same_bits(run(table), want)


def test_reference_runs_where_xla_splits_the_program():
  """It cannot split a kernel: an axis of the mesh is not manual."""
  measured = dataclasses.replace(
    operations.mask_pack, measured={"tpu": "a.json"}
  )
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

  def lowered(manual, implementation=None):
    def run(table):
      return measured(table, SHAPE.layout, implementation=implementation).words

    mapped = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=P(),
      out_specs=P(),
      axis_names=manual,
      check_vma=False,
    )
    return _lowered(mapped, "tpu")

  assert "tpu_custom_call" in lowered({"data", "model"})
  assert "tpu_custom_call" not in lowered({"data"})
  with pytest.raises(NotImplementedError, match=r"\['model'\] are left to XLA"):
    lowered({"data"}, "pallas")


def test_explicit_choice_is_obeyed_where_kernels_are_forced():
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  run = functools.partial(operations.mask_pack, layout=SHAPE.layout)
  with _dispatch.forced("cuda", interpret=True):
    with _dispatch.recording() as calls:
      jax.eval_shape(run, table)
      jax.eval_shape(functools.partial(run, implementation="xla"), table)
  assert [bool(call.kernels) for call in calls] == [True, False]
