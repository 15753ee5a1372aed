"""The ways to average dense gradients that the study compares."""

from collections.abc import Mapping

import jax
from jax import lax
import jax.numpy as jnp
import optax

from examples.studies.common.cluster import AXIS
from zenjax import compress

DENSE, CAST = "dense", "pmean of bfloat16"
TERNARY, VOTE = "TernGrad", "SignVote"

# Deals batches to other devices, and shows how far rounding leads.
REORDERED = "dense, other order"

COMPRESSORS: Mapping[str, compress.Compressor] = {
  "bfloat16": compress.Cast(jnp.bfloat16),
  "float8 e4m3": compress.Cast(jnp.float8_e4m3fn),
  "int8": compress.LowBit(8),
  "int4": compress.LowBit(4),
  "int2": compress.LowBit(2),
  "int2, blocks of 32": compress.LowBit(2, block=32),
  "QSGD, 4 bits": compress.LowBit(4, "stochastic"),
  TERNARY: compress.LowBit(2, "stochastic"),
  "TernGrad, blocks of 32": compress.LowBit(2, "stochastic", block=32),
  "Sign": compress.Sign(),
  "OneBit": compress.OneBit(),
  VOTE: compress.SignVote(),
  "PowerSGD, rank 4": compress.PowerSGD(4),
  "ExDyna, 1 %": compress.ExDyna(0.01),
  "ExDyna, 10 %": compress.ExDyna(0.1),
  "MiCRO, 1 %": compress.MiCRO(0.01),
  "TopK, 1 %": compress.TopK(0.01),
  "TopK, 10 %": compress.TopK(0.1),
  "RandomK, 1 %": compress.RandomK(0.01),
}

WAYS = (DENSE, REORDERED, CAST, *COMPRESSORS)


def synchronization(way: str) -> optax.GradientTransformation:
  """Makes what averages the gradients of all leaves, tables included."""
  if way in COMPRESSORS:
    return compress.all_reduce(COMPRESSORS[way], AXIS, leaves=True)
  mean = _mean_of_bfloat16 if way == CAST else lambda x: lax.pmean(x, AXIS)
  return optax.stateless(lambda grads, _: jax.tree.map(mean, grads))


def _mean_of_bfloat16(x: jax.Array) -> jax.Array:
  return lax.pmean(x.astype(jnp.bfloat16), AXIS).astype(x.dtype)


def itemsize(way: str) -> int:
  """Returns the bytes of a number that `lax.pmean` sends."""
  return 2 if way == CAST else 4
