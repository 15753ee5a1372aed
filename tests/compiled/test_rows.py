"""What XLA makes of a whole step on row gradients: no table but the tables.

The step is compiled for eight devices of each target, as `test_compiled.py`
does. Letters: `T` look-ups a device, `R` rows, `D` width.
"""

import functools
from typing import Any, NamedTuple

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from benchmarks import targets
import zenjax
from zenjax import packed

# A table is 26 MB at least, packed 205: smaller ones XLA may move to a TPU's
# fast memory and back.
ROWS, LOOK_UPS = 400_000, 256

# XLA:CPU of JAX 0.10 does not keep gradients from overtaking look-ups.
_WAITS = jax.__version_info__ >= (0, 12)


class Compiled(NamedTuple):
  """What is known of a compiled step, in bytes of one device."""

  passes: list[str]  # instructions that write another table
  temporary: int
  arguments: int
  aliased: int  # outputs that lie where arguments did


@functools.cache
def compiled(
  target: str,
  width: int,
  packing: bool = False,
  donate: bool = True,
  whole_pass: bool = False,
) -> Compiled:
  """A step of Adam on a table stored as `[ROWS, width]`, as users write it.

  With `packing` it is stored as `[ROWS, 128]`.
  """
  try:
    devices = targets.TARGETS[target]()
  except ImportError as error:
    pytest.skip(str(error))
  mesh = Mesh(np.array(devices), ("data",))
  shape = (ROWS, width)
  look_up = lambda table, ids: jnp.take(table, ids, axis=0)
  if packing:
    plain = (ROWS * 128 // width, width)
    shape = packed.packed_shape(plain)
    look_up = functools.partial(packed.take, shape=plain)

  def after(params):
    return params * 1.5 if whole_pass else params

  with jax.numpy_dtype_promotion("standard"):
    program = _lowered(look_up, shape, width, mesh, donate, after).compile()
  text, memory = program.as_text(), program.memory_analysis()
  assert text is not None and memory is not None
  return Compiled(
    passes=hlo.passes(text, shape),
    temporary=memory.temp_size_in_bytes,
    arguments=memory.argument_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
  )


def _lowered(look_up, shape, width, mesh, donate, after):
  """The step on a table of `shape` whose look-ups are `[T, width]`."""
  tx = optax.chain(
    zenjax.zen_sync("data", sparse=True), zenjax.lazy_rows(optax.adam(0.1))
  )

  def loss(params, ids, values):
    rows = look_up(params["table"], ids)
    if not _WAITS:
      rows = rows**2
    # Linear: gradients need no look-up, and must wait for it all the same, or
    # the old table would be kept for it.
    return jnp.mean(rows * values)

  def step(params, state, ids, values):
    value, grads = zenjax.value_and_grad(loss)(params, ids[0], values[0])
    updates, state = tx.update(grads, state, params)
    params = after(zenjax.apply_updates(params, updates)["table"])
    return {"table": params}, state, jax.lax.pmean(value, "data")

  def placed(spec):
    sharding = NamedSharding(mesh, spec)
    return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  params = {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}
  batch: Any = (
    jax.ShapeDtypeStruct((mesh.size, LOOK_UPS), jnp.int32),
    jax.ShapeDtypeStruct((mesh.size, LOOK_UPS, width), jnp.float32),
  )
  replicated = (params, jax.eval_shape(tx.init, params))
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), P("data"), P("data")),
    out_specs=(P(), P(), P()),
  )
  return jax.jit(mapped, donate_argnums=(0, 1) if donate else ()).lower(
    *jax.tree.map(placed(P()), replicated),
    *jax.tree.map(placed(P("data")), batch),
  )


def check(found: Compiled, shape: tuple[int, int]) -> None:
  """Table and both moments are updated in place, and nothing is as large."""
  table = shape[0] * shape[1] * 4
  assert not found.passes, found.passes
  assert found.temporary < table // 10
  assert found.aliased >= 3 * table
  # Nor does a layout pad them.
  assert found.arguments < 3.1 * table


# On TPU 128 divides the width, or the table is packed. Wide ones are in the
# whole steps of `test_ahead_of_time.py` too.
WIDTHS = [
  ("cpu", 128),
  ("cpu", 16),
  ("gpu-h200", 16),
  *(
    pytest.param(target, 128, marks=pytest.mark.every_target)
    for target in ("gpu-h200", "tpu-v5e")
  ),
]


@pytest.mark.parametrize("target, width", WIDTHS)
def test_step_holds_no_table_but_parameters_and_state(target, width):
  check(compiled(target, width), (ROWS, width))


def test_step_on_a_packed_table_holds_no_other_on_tpu():
  check(compiled("tpu-v5e", 16, packing=True), (ROWS, 128))


@pytest.mark.usually("donate")
@pytest.mark.parametrize("broken", ["donate", "whole_pass"])
def test_check_finds_a_table_too_many(broken):
  kwargs = {"donate": {"donate": False}, "whole_pass": {"whole_pass": True}}
  found = compiled("cpu", 16, **kwargs[broken])
  assert found.passes
  with pytest.raises(AssertionError):
    check(found, (ROWS, 16))
