"""`push` and `pull` by remote copies, compiled for TPUs with none attached."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from benchmarks import targets
from zenjax.kernels.operations import EXCHANGES

AS_THEY_ARE = [(1024, 128, "float32"), (1024, 256, "bfloat16")]
LAID_ANEW = [(200, 7, "bfloat16")]


def devices(topology: str) -> np.ndarray:
  try:
    return np.array(targets.tpu(topology))
  except ImportError as error:
    return pytest.skip(str(error))


def compiled(name: str, on: Mesh, tables: Any) -> Any:
  """Among all devices, for rows that each of them holds."""
  n, spread = on.size, P(on.axis_names)
  parts = (n,) if name == "push" else ()

  def struct(*shape, dtype):
    whole = (n * shape[0], *shape[1:])
    on_all = NamedSharding(on, spread)
    return jax.ShapeDtypeStruct(whole, dtype, sharding=on_all)

  run = functools.partial(EXCHANGES[name], axes=on.axis_names, kernels="pallas")
  # What was pulled is the same on all, and types say so.
  out = spread if name == "push" else P()
  rows = [struct(*parts, c, d, dtype=dtype) for c, d, dtype in tables]
  counts = struct(*parts, len(tables), dtype=jnp.int32)
  mapped = jax.shard_map(run, mesh=on, in_specs=spread, out_specs=out)
  return jax.jit(mapped).lower(rows, counts).compile()


@pytest.mark.parametrize("topology", targets.TPUS)
@pytest.mark.parametrize("name", EXCHANGES)
def test_compiles_for_every_tpu_with_no_other_collective(name, topology):
  on = Mesh(devices(topology), ("x",))
  text = compiled(name, on, AS_THEY_ARE + LAID_ANEW).as_text()
  assert f"zenjax_{name}" in text and "tpu_custom_call" in text
  for collective in ("all-to-all", "all-gather", "all-reduce", "permute"):
    assert collective not in text


@pytest.mark.parametrize("name", EXCHANGES)
def test_nothing_is_copied_before_it_is_sent(name):
  """Nor to faster memory, where XLA would bring buffers with their padding."""
  n = 8
  on = Mesh(devices("v5e:2x4").reshape(2, 4), ("slow", "fast"))
  program = compiled(name, on, AS_THEY_ARE)
  lines = program.as_text().splitlines()
  (call,) = [x for x in lines if f"zenjax_{name}" in x and "custom-call(" in x]
  assert "S(1)" not in call.split("custom-call(")[0]
  # What arrives; it is cleared past the counts into the result.
  sizes = (c * d * jnp.dtype(dtype).itemsize for c, d, dtype in AS_THEY_ARE)
  temporary = program.memory_analysis().temp_size_in_bytes
  assert temporary < 1.05 * n * math.fsum(sizes)


def test_compiles_for_256_devices():
  on = Mesh(devices("v5e:16x16"), ("x",))
  assert "zenjax_push" in compiled("push", on, AS_THEY_ARE[:1]).as_text()
