"""Compressed all-reduces, compiled for chips with none attached.

As in `test_programs.py`, some of the table is compiled by default.
"""

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from benchmarks import targets
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
CHIPS = ("cpu", *targets.TPUS, "gpu-h200")
DEFAULT = {
  ("int4", "v5e:2x4"),
  ("top_k", "v5e:2x4"),
  ("power_sgd", "gpu-h200"),
  ("exdyna", "gpu-h200"),
}
SHAPE = (2048, 4096)


def _cases():
  for name in COMPRESSORS:
    for chip in CHIPS:
      marks = () if (name, chip) in DEFAULT else pytest.mark.every_target
      yield pytest.param(name, chip, marks=marks)


@pytest.mark.parametrize(("name", "chip"), [*_cases()])
def test_what_is_sent_is_small(name, chip):
  try:
    tpu = chip in targets.TPUS
    devices = targets.tpu(chip) if tpu else targets.TARGETS[chip]()
  except ImportError as error:
    pytest.skip(str(error))
  n = len(devices)
  mesh = Mesh(np.array(devices), ("data",))
  compressor = COMPRESSORS[name]
  tx = compress.all_reduce(compressor, "data")
  placed = lambda x, spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
  )
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
  program = (
    jax.jit(step, donate_argnums=1)
    .lower(placed(gradients, P("data")), jax.tree.map(placed, state, specs))
    .compile()
  )
  found = hlo.collectives(str(program.as_text()), n)
  assert found
  whole = SHAPE[0] * SHAPE[1]
  # Operands in words of 32 bits; half of what a dense sum would send at most.
  assert all(x.elements <= whole / 1.9 for x in found), found
