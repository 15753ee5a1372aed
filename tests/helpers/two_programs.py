"""One of two processes of two CPU devices: what it compiles is asked for.

It is `train` for steps, `jit` for steps in plain `jit` beside a plain program,
`lower` to compile a step and not run it, or `idle`. Further arguments,
KEY=VALUE, are those of `zen_sync`, in JSON.
"""

import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import zenjax
from zenjax._src.core import compat

ROWS, EXAMPLES = 100, 8


def ids_of(process: int, number: int) -> np.ndarray:
  """Returns the ids that the devices of a process look up in a step."""
  return np.arange(2 * EXAMPLES).astype(np.int32) * (number + 1) % 7 + process


def trained(tx: Any, value_and_grad: Any, table: jax.Array, batches: Any):
  """Trains on whole batches in plain `jit`; the loss is that of all devices."""

  @jax.jit
  def step(table, state, ids):
    grads = value_and_grad(lambda t: (t[ids] ** 2).mean())(table)[1]
    updates, state = tx.update(grads, state, table)
    return optax.apply_updates(table, updates), state

  state = jax.jit(tx.init)(table)
  for ids in batches:
    table, state = step(table, state, ids)
  return np.asarray(table.addressable_data(0))


def _run(coordinator: str, process: int, what: str, *given: str) -> None:
  jax.config.update("jax_num_cpu_devices", 2)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(coordinator, 2, process)
  options: dict[str, Any] = {"scheme": "all_gather"} if what != "jit" else {}
  for pair in given:
    name, _, value = pair.partition("=")
    options[name] = json.loads(value)
  sync = zenjax.zen_sync("data", sparse=True, **options)
  tx = optax.chain(sync, optax.sgd(1.0))

  def step(state, ids):
    table, state = state
    loss, grads = jax.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(table)
    updates, state = tx.update(grads, state, table)
    return (optax.apply_updates(table, updates), state), loss

  mesh = Mesh(np.asarray(jax.devices()), ("data",))
  ones = np.ones((ROWS, 3), np.float32)
  table = jax.device_put(ones, NamedSharding(mesh, P()))
  split = NamedSharding(mesh, P("data"))

  def batch(number):
    ids = ids_of(process, number)
    return jax.make_array_from_process_local_data(split, ids)

  if what == "jit":
    of_rows = optax.chain(sync, zenjax.lazy_rows(optax.adagrad(0.5)))
    batches = [batch(number) for number in range(2)]
    rows = trained(of_rows, zenjax.value_and_grad, table, batches)
    # On one device, which sees what all of them see.
    batches = [np.concatenate([ids_of(p, i) for p in (0, 1)]) for i in (0, 1)]
    alone = jnp.asarray(ones)
    plain = trained(optax.adagrad(0.5), jax.value_and_grad, alone, batches)
    print("differ", float(np.abs(rows - plain).max()), flush=True)
    print("moved", float(np.abs(rows - 1).max()), flush=True)
    return
  state = table, zenjax.init_state(tx, table, mesh, "data")
  ids = batch(0)
  train = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  jax.block_until_ready((state, ids))
  print("begins", flush=True)
  begun = time.monotonic()
  if what == "idle":
    time.sleep(75)
  elif what == "lower":
    train.lower(state, ids)
    print(f"lowered after {time.monotonic() - begun:.1f} s", flush=True)
    time.sleep(4)
  else:
    for number in range(2):
      state, _ = train(state, batch(number))
    table, _ = state
    print("trained", float(jnp.sum(table.addressable_data(0))), flush=True)


def main(coordinator: str, process: int, what: str, *given: str) -> None:
  """Runs one of the two, and ends the process with 3 if it was refused."""
  code = 0
  try:
    _run(coordinator, process, what, *given)
  except ValueError as error:
    print("refused:", error, flush=True)
    code = 3
  # Without a barrier, but the coordinator last: others abort with it.
  store = compat.key_value_store()
  assert store is not None
  if jax.process_index():
    store.set("done", "done")
  else:
    store.get("done", 30)
    time.sleep(1)
  os._exit(code)
