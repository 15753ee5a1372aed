"""A whole training step, compiled for chips that are not there.

A click model: rows of one table times what a network makes of dense inputs,
and another network on top. Its first round has work to run beside: gradients
of weights are left when the table's is complete.

Letters: `R` rows, `D` width, `T` look-ups a device.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import declaring
from hlo import Found
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import targets
import zenjax
from zenjax.kernels._dispatch import Kernels

# The table is 205 MB: smaller ones XLA may move to a TPU's fast memory.
ROWS, WIDTH, LOOK_UPS = 400_000, 128, 4096
LAYERS = 3
TABLE = ROWS * WIDTH * 4  # bytes

Grads = Literal["array", "rows"]
Exchange = Literal["collectives", "remote_copies"]

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


class Step(NamedTuple):
  """What a compiler made of a step, in bytes of one device."""

  text: str
  devices: int
  temporary: int
  aliased: int  # outputs that lie where arguments did


def compile(
  target: str,
  grads: Grads,
  kernels: Kernels,
  exchange: Exchange = "collectives",
) -> Step:
  """The step for all devices of a target.

  Raises:
    ImportError: Its compiler is not installed.
    NotImplementedError: A kernel that is asked for cannot serve.
    jax.errors.JaxRuntimeError: Registers of a GPU spill.
  """
  lowered = lower(
    target, grads, zenjax.Tuning(kernels=kernels, exchange=exchange)
  )
  options = {}
  if target == "gpu-h200" and grads == "array":
    # Of look-ups XLA's own sort spills.
    options = NO_SPILLS
  compiled = lowered.compile(compiler_options=options)
  text, memory = compiled.as_text(), compiled.memory_analysis()
  assert text is not None and memory is not None
  return Step(
    text=text,
    devices=len(devices(target)),
    temporary=memory.temp_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
  )


def lower(target: str, grads: Grads, tuning: zenjax.Tuning) -> Any:
  """The same, not compiled."""
  mesh = Mesh(np.array(devices(target)), ("data",))
  with jax.numpy_dtype_promotion("standard"):
    return _lowered(mesh, grads, tuning)


def platform(target: str) -> str:
  """As `Operation.kernels` calls it."""
  return "cuda" if target == "gpu-h200" else "tpu"


def devices(target: str) -> list[Any]:
  """Of a TPU slice or of `targets.TARGETS`."""
  if target in targets.TPUS:
    return targets.tpu(target)
  return targets.TARGETS[target]()


# Between them both layouts of rows; those of look-ups are split by columns.
_PARTITION: dict[Grads, Any] = {"array": "hash", "rows": "auto"}


def _lowered(mesh, grads, tuning):
  rows = grads == "rows"
  sync = zenjax.zen_sync("data", partition=_PARTITION[grads], tuning=tuning)
  inner = optax.sgd(0.5)
  tx = optax.chain(sync, zenjax.lazy_rows(inner) if rows else inner)

  def gradients(params, *batch):
    if rows:
      return zenjax.value_and_grad(_loss)(params, *batch)
    return jax.value_and_grad(_loss)(zenjax.unreduced(params, "data"), *batch)

  def step(params, state, *batch):
    value, grads = gradients(params, *batch)
    updates, state = tx.update(grads, state, params)
    params = zenjax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  def placed(spec, tree):
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  count = mesh.size * LOOK_UPS
  values = jax.ShapeDtypeStruct((count, WIDTH), jnp.float32)
  batch = jax.ShapeDtypeStruct((count,), jnp.int32), values, values
  params = _params()
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), *[P("data")] * 3),
    out_specs=P(),
  )
  return jax.jit(mapped, donate_argnums=(0, 1)).lower(
    placed(P(), params),
    placed(P(), jax.eval_shape(tx.init, params)),
    *placed(P("data"), batch),
  )


def _params():
  layer = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
  return {
    "table": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "bottom": [layer] * LAYERS,
    "top": [layer] * LAYERS,
  }


def _loss(params, ids, dense, target):
  for layer in params["bottom"]:
    dense = jax.nn.relu(dense @ layer)
  x = params["table"][ids] * dense
  for layer in params["top"]:
    x = jax.nn.relu(x @ layer)
  return jnp.mean((x - target) ** 2)


class Declared(NamedTuple):
  """The collectives of a step."""

  exchange: list[Found]
  plain: int  # elements of all sums of layers and of the loss


@functools.cache
def declared(
  grads: Grads, devices: int, exchange: Exchange = "collectives"
) -> Declared:
  """What the step must send, and nothing else."""
  leaf: Any = _params()["table"]
  if grads == "rows":
    leaf = jax.eval_shape(
      lambda: zenjax.SparseRows(
        jnp.zeros(LOOK_UPS, jnp.int32), jnp.zeros((LOOK_UPS, WIDTH)), ROWS
      )
    )
  found = declaring.declare(
    {"table": leaf},
    ("data",),
    (devices,),
    platform="default",
    partition=_PARTITION[grads],
    tuning=zenjax.Tuning(exchange=exchange),
  )
  sent = [_result(m, devices, ()) for m in found.first]
  loops = [m for turn in found.loops for m in turn]
  # One loop has no other around it.
  inside = ("while",) * min(2, len(found.loops))
  sent += [_result(m, devices, inside) for m in loops]
  if grads == "array":
    (sums,) = found.dense
    sent += [_result(m, devices, ("while",)) for m in sums]
  layers = _params()["bottom"] + _params()["top"]
  plain = sum(math.prod(layer.shape) for layer in layers) + 1
  return Declared(sent, plain)


def _result(
  message: declaring.Message, devices: int, inside: tuple[str, ...]
) -> Found:
  gathered = devices if message.op == "all_gather" else 1
  return Found(message.op.replace("_", "-"), message.words * gathered, inside)
