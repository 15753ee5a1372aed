"""zen_sync across processes that `jax.distributed` joins.

On one machine this starts N processes of K CPU devices each, which talk over
loopback, and checks that they train as one process would:

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
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

ROWS, WIDTH = 20_000, 32
BATCH = 256  # ids a device, a step
LEARNING_RATE = 0.1


def make_batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
  """What device `rank` sees in a step: ids and targets, both [BATCH]."""
  rng = np.random.default_rng((step, rank))
  ids = (rng.zipf(1.3, BATCH) % ROWS).astype(np.int32)
  return ids, np.sin(ids).astype(np.float32)


def make_params() -> dict[str, np.ndarray]:
  table = np.random.default_rng(0).normal(0, 0.1, (ROWS, WIDTH))
  params = {"table": table, "scale": np.ones(WIDTH)}
  return {name: x.astype(np.float32) for name, x in params.items()}


def loss_fn(params, ids, targets):
  return optax.l2_loss(params["table"][ids] @ params["scale"], targets).mean()


def train(mesh: Mesh, steps: int) -> tuple[dict, optax.OptState]:
  """Trains over every device of the mesh, of whichever process."""
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(LEARNING_RATE))

  def step(params, opt_state, ids, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  data = NamedSharding(mesh, PartitionSpec("data"))
  params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
  opt_state = zenjax.init(tx, params, mesh, "data")
  train_step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  mine = [r for r, d in enumerate(mesh.devices.flat) if d in mesh.local_devices]
  for i in range(steps):
    # Every process loads the examples of its own devices and nothing else.
    batch = zip(*(make_batch(i, rank) for rank in mine))
    batch = [np.concatenate(x) for x in batch]
    batch = [jax.make_array_from_process_local_data(data, x) for x in batch]
    params, opt_state, loss = train_step(params, opt_state, *batch)
    if i % 5 == 0:
      # On every process, so that none runs far ahead of the others: CPU clients
      # of few threads deadlock with 32 steps of two devices in flight.
      loss = float(loss)
      if jax.process_index() == 0:
        print(f"step {i:4}  loss {loss:.5f}", flush=True)
  return params, opt_state


def train_alone(devices: int, steps: int) -> dict[str, Any]:
  """The same training on one device: the mean over all devices' gradients."""

  @jax.jit
  def step(params, ids, targets):
    grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, ids, targets)
    return jax.tree.map(
      lambda p, g: p - LEARNING_RATE * g.mean(0), params, grads
    )

  params: dict[str, Any] = make_params()
  for i in range(steps):
    batch = zip(*(make_batch(i, rank) for rank in range(devices)))
    params = step(params, *map(np.stack, batch))
  return params


def run_process(args: argparse.Namespace) -> None:
  """Joins the others, trains, compares and says what this process saw."""
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
  mesh = Mesh(np.array(jax.devices()), ("data",))
  start = time.perf_counter()
  params, opt_state = train(mesh, args.steps)
  params = {name: np.asarray(x) for name, x in params.items()}
  seconds = time.perf_counter() - start

  expected = train_alone(mesh.size, args.steps)
  error = max(float(abs(params[k] - expected[k]).max()) for k in params)
  numbers = zenjax.stats(opt_state)
  wire = sum(leaf["wire_bytes"] for leaf in numbers.values())
  dense = sum(leaf["dense_bytes"] for leaf in numbers.values())
  print(
    f"process {jax.process_index()} of {jax.process_count()}, "
    f"{len(mesh.local_devices)} of {mesh.size} devices: "
    f"{args.steps} steps in {seconds:.1f} s, {wire:,.0f} bytes a step "
    f"(dense {dense:,.0f}), error {error:.1e}",
    flush=True,
  )
  if args.save:
    path = args.save.format(jax.process_index())
    np.savez(path, allow_pickle=False, **params)
  if not error < 1e-5:
    raise SystemExit(f"The parameters differ from one process's by {error}.")


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def spawn(args: argparse.Namespace, argv: list[str]) -> int:
  """Runs every process on this machine; the first to fail ends the others."""
  coordinator = f"127.0.0.1:{free_port()}"
  command = [sys.executable, os.path.abspath(__file__), *argv]
  command += [
    f"--coordinator={coordinator}",
    f"--num-processes={args.processes}",
  ]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` runs too
  children = []
  try:
    for i in range(args.processes):
      # A session of its own: Ctrl-C reaches this process only, which then ends
      # the children in one place, whatever they are waiting for.
      child = subprocess.Popen(
        [*command, f"--process-id={i}"], env=environment, start_new_session=True
      )
      children.append(child)
      print(f"process {i} has pid {child.pid}", flush=True)
    while True:
      codes = [child.poll() for child in children]
      failed = [(i, code) for i, code in enumerate(codes) if code]
      if failed:
        i, code = failed[0]
        print(
          f"Process {i} failed ({code}); ending the others.", file=sys.stderr
        )
        return 1
      if all(code == 0 for code in codes):
        return 0
      time.sleep(0.1)
  finally:
    for child in children:
      if child.poll() is None:
        child.kill()
    for child in children:
      child.wait()


def parse(argv: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  local = parser.add_argument_group("on one machine")
  local.add_argument("--processes", type=int, default=2)
  cluster = parser.add_argument_group("on a cluster: all three, on every host")
  cluster.add_argument("--coordinator", help="host:port of process 0")
  cluster.add_argument("--num-processes", type=int)
  cluster.add_argument("--process-id", type=int)
  parser.add_argument(
    "--devices", type=int, default=2, help="a process, if they are CPUs"
  )
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument(
    "--save", help="where parameters go (.npz); {} becomes the process id"
  )
  args = parser.parse_args(argv)
  given = [args.coordinator, args.num_processes, args.process_id]
  if any(x is not None for x in given) and None in given:
    parser.error(
      "`--coordinator`, `--num-processes` and `--process-id` go together."
    )
  return args


def main(argv: list[str]) -> int:
  args = parse(argv)
  if args.coordinator is None:
    return spawn(args, argv)
  run_process(args)
  return 0


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
