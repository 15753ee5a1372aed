"""Compressed all-reduces, compiled for chips with none attached.

As in `test_programs.py`, some of the table is compiled by default.
"""

from typing import Any

import chips
import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import zenjax
from zenjax import compress

pytestmark = pytest.mark.usefixtures("as_optax_computes")

COMPRESSORS = {
  "int8": compress.LowBit(8),
  "int4": compress.LowBit(4),
  "qsgd": compress.LowBit(4, "stochastic"),
  "bfloat16": compress.Cast(jnp.bfloat16),
  "e4m3": compress.Cast(jnp.float8_e4m3fn),
  "sign": compress.Sign(),
  "one_bit": compress.OneBit(),
  "vote": compress.SignVote(),
  "power_sgd": compress.PowerSGD(4),
  "top_k": compress.TopK(0.01),
  "top_k_exact": compress.TopK(0.01, "exact", jnp.bfloat16),
  "threshold": compress.Threshold(0.1),
  "random_k": compress.RandomK(0.01),
  "exdyna": compress.ExDyna(0.01),
  "micro_paper": compress.MiCRO(0.01, "paper", wire_dtype=jnp.bfloat16),
}
DEFAULT = {
  ("bfloat16", "v5e:2x4"),
  ("int4", "v5e:2x4"),
  ("top_k", "v5e:2x4"),
  ("power_sgd", "gpu-h200"),
  ("exdyna", "gpu-h200"),
}
SHAPE = (2048, 4096)


@pytest.mark.parametrize(("name", "chip"), chips.cases(COMPRESSORS, DEFAULT))
def test_what_is_sent_is_small(name, chip):
  """And so is the memory, though TPUs pad the last dimension to 128."""
  devices = chips.devices(chip)
  n = len(devices)
  mesh = Mesh(np.array(devices), ("data",))
  tx = compress.all_reduce(COMPRESSORS[name], "data")
  params = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
  state = jax.eval_shape(
    lambda p: zenjax.init_state(tx, p, mesh, "data"), params
  )
  specs = zenjax.state_specs(state, "data")
  step = jax.shard_map(
    lambda g, state: tx.update(g[0], state),
    mesh=mesh,
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
  )
  gradients = jax.ShapeDtypeStruct((n, *SHAPE), jnp.float32)
  state = jax.tree.map(
    lambda x, spec: chips.placed(x, mesh, spec), state, specs
  )
  lowered = jax.jit(step, donate_argnums=1).lower(
    chips.placed(gradients, mesh, P("data")), state
  )
  compiled: Any = lowered.compile()
  found = hlo.collectives(str(compiled.as_text()), n)
  assert found
  whole = SHAPE[0] * SHAPE[1]
  assert compiled.memory_analysis().temp_size_in_bytes <= 7 * 4 * whole
  # Operands in words of 32 bits; half of what a dense sum would send at most.
  assert all(x.elements <= whole / 1.9 for x in found), found
