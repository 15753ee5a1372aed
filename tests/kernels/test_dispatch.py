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
@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_reference_runs_where_no_kernel_was_measured(operation, kernels):
  assert "cpu" not in operation.kernels and "cpu" not in operation.measured
  args = arguments(operation.name)
  got = operation(*args, kernels=kernels)
  kernel_cases.assert_same_bits(got, operation.reference(*args))


@each_operation
def test_kernel_asked_for_is_never_replaced(operation):
  args = arguments(operation.name)
  with pytest.raises(NotImplementedError, match=operation.name) as error:
    operation(*args, kernels="pallas")
  said = ["`kernels='pallas'`", "a program for cpu", "kernels='auto'"]
  said += [f"on {platform}: " for platform in operation.kernels]
  assert all(words in str(error.value) for words in said)


@each_operation
def test_other_kernels_are_errors(operation):
  said = "`kernels` must be one of 'auto', 'xla', 'pallas', got 'cuda'"
  with pytest.raises(ValueError, match=said):
    operation(*arguments(operation.name), kernels="cuda")


@each_operation
def test_only_what_was_measured_is_taken_unasked(operation):
  assert set(operation.measured) <= set(operation.kernels)


def _lowered(function, platform):
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  traced = jax.jit(function).trace(table)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_platform_decides_when_it_is_lowered():
  run = functools.partial(
    operations.mask_pack, layout=SHAPE.layout, kernels="pallas"
  )
  assert "tpu_custom_call" in _lowered(run, "tpu")
  # Under vmap as well.
  batched = lambda table: jax.vmap(run)(table[None])
  assert "tpu_custom_call" in _lowered(batched, "tpu")
  for function in (run, batched):
    for platform in ("cpu", "rocm"):
      with pytest.raises(NotImplementedError, match="on tpu: yes") as error:
        _lowered(function, platform)
      assert f"a program for {platform}" in str(error.value)


def test_measured_kernel_is_taken_on_its_platform_alone():
  measured = Operation(
    name="mask_pack",
    reference=operations.mask_pack.reference,
    kernels=operations.mask_pack.kernels,
    measured={"tpu": {"cpu": "a.json"}},
  )
  run = functools.partial(measured, layout=SHAPE.layout)
  assert "tpu_custom_call" in _lowered(run, "tpu")
  assert "tpu_custom_call" not in _lowered(run, "cpu")
  table = kernel_cases.table(SHAPE, 1, 0.1, 0.1)
  want = operations.mask_pack.reference(table, SHAPE.layout)
  kernel_cases.assert_same_bits(run(table), want)


def test_reference_runs_where_jax_has_lost_what_a_kernel_needs():
  lost = dataclasses.replace(
    operations.mask_pack,
    kernels={"tpu": "zenjax.kernels.of_a_later_jax"},
    measured={"tpu": {"cpu": "a.json"}},
  )
  args = arguments("mask_pack")
  kernel_cases.assert_same_bits(lost(*args), lost.reference(*args))
  with pytest.raises(NotImplementedError, match="of_a_later_jax"):
    lost(*args, kernels="pallas")


def test_reference_runs_where_xla_splits_the_program():
  """It cannot split a kernel: an axis of the mesh is not manual."""
  measured = dataclasses.replace(
    operations.mask_pack, measured={"tpu": {"cpu": "a.json"}}
  )
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

  def lowered(manual, kernels: _dispatch.Kernels = "auto"):
    def run(table):
      return measured(table, SHAPE.layout, kernels=kernels).words

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
      jax.eval_shape(functools.partial(run, kernels="xla"), table)
      jax.eval_shape(functools.partial(run, kernels="pallas"), table)
  assert [bool(call.kernels) for call in calls] == [True, False, True]


def test_kernel_that_is_forced_and_asked_for_is_never_replaced():
  """Rows of 8 columns cannot be moved one by one on a TPU."""
  args = arguments("expand")
  with _dispatch.forced("tpu", interpret=True):
    want = operations.expand(*args)
    kernel_cases.assert_same_bits(want, operations.expand.reference(*args))
    with pytest.raises(NotImplementedError, match="on tpu: .* of width 8"):
      operations.expand(*args, kernels="pallas")
