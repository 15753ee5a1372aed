"""zen_sync across processes that `jax.distributed` joins.

On one machine this starts processes of some CPU devices each, over loopback:

    python examples/multi_host.py [--processes 2] [--devices 2] [--steps 20]

On a cluster start it once a host, the same but for the process id:

    python examples/multi_host.py --coordinator HOST0:1234 \
        --num-processes 4 --process-id 0    # 1, 2, 3 on the other hosts

A process that dies ends the others: none of them waits for it for ever.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax

import zenjax

ROWS, WIDTH, BATCH = 20_000, 32, 256  # ids of a device in a step
TX = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))


def make_batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws what device `rank` sees in a step: ids and targets, both [BATCH]."""
  ids = np.random.default_rng((step, rank)).zipf(1.3, BATCH) % ROWS
  return ids.astype(np.int32), np.sin(ids).astype(np.float32)


def make_params() -> dict[str, np.ndarray]:
  table = np.random.default_rng(0).normal(0, 0.1, (ROWS, WIDTH))
  return {"table": table.astype(np.float32), "scale": np.ones(WIDTH, "float32")}


def loss_fn(params, ids, targets):
  return optax.l2_loss(params["table"][ids] @ params["scale"], targets).mean()


def step(state, ids, targets):  # what one device does
  params, opt_state = state
  loss, grads = jax.value_and_grad(loss_fn)(params, ids, targets)
  updates, opt_state = TX.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), loss


def train(mesh: jax.sharding.Mesh, steps: int) -> tuple[dict, optax.OptState]:
  """Trains over every device of the mesh, of whichever process."""
  data = jax.NamedSharding(mesh, jax.P("data"))
  params = jax.device_put(make_params(), jax.NamedSharding(mesh, jax.P()))
  state = params, zenjax.init_state(TX, params, mesh, "data")
  train_step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  mine = [r for r, d in enumerate(mesh.devices.flat) if d in mesh.local_devices]
  for i in range(steps):
    # Every process loads the examples of its own devices and nothing else.
    batch = map(np.concatenate, zip(*(make_batch(i, rank) for rank in mine)))
    batch = [jax.make_array_from_process_local_data(data, x) for x in batch]
    state, loss = train_step(state, *batch)
    if i % 5 == 0:
      # On every process: CPU clients deadlock with 32 steps in flight.
      loss = float(loss)
      if jax.process_index() == 0:
        print(f"step {i:4}  loss {loss:.5f}", flush=True)
  return state


def run_process(args: argparse.Namespace) -> None:
  """Joins the others and trains."""
  jax.config.update("jax_num_cpu_devices", args.devices)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    args.coordinator,
    args.num_processes,
    args.process_id,
    # How long a silent process is waited for, and the others at the end.
    heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=20,
  )
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  state = train(mesh, args.steps)
  if jax.process_index() == 0:
    print(zenjax.report(state), flush=True)
  if args.save:
    path = args.save.format(jax.process_index())
    np.savez(path, allow_pickle=False, **jax.device_get(state[0]))


def spawn(args: argparse.Namespace, argv: list[str]) -> int:
  """Runs every process on this machine; the first to fail ends the others."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    flags = [*argv, f"--coordinator=127.0.0.1:{s.getsockname()[1]}"]
  command = [sys.executable, __file__, *flags]
  command.append(f"--num-processes={args.processes}")
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` runs too
  children, codes = [], [None]
  try:
    for i in range(args.processes):
      # A session of its own: Ctrl-C reaches this process, which ends them all.
      child = [*command, f"--process-id={i}"]
      children.append(
        subprocess.Popen(child, env=environment, start_new_session=True)
      )
      print(f"process {i} has pid {children[i].pid}", flush=True)
    while None in codes and not any(codes):
      time.sleep(0.1)
      codes = [child.poll() for child in children]
    return int(any(codes))
  finally:
    for child in children:
      child.kill()
      child.wait()


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--processes", type=int, default=2, help="on one machine")
  add("--coordinator", help="host:port of process 0, on a cluster")
  add("--num-processes", type=int, help="on a cluster")
  add("--process-id", type=int, help="on a cluster")
  add("--devices", type=int, default=2, help="a process, if they are CPUs")
  add("--steps", type=int, default=20)
  add("--save", help="parameters go here (.npz); {} becomes the process id")
  args = parser.parse_args(argv)
  cluster = [args.coordinator, args.num_processes, args.process_id]
  if cluster == [None] * 3:
    return spawn(args, argv)
  if None in cluster:
    parser.error("--coordinator, --num-processes, --process-id go together")
  run_process(args)
  return 0


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
