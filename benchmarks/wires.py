"""Bytes and losses of a sharded table whose rows are sent in fewer bits.

    python -m benchmarks.wires [--steps 300] [--seeds 2]

A model of the next word learns Python's standard library: its last four words,
and hashes of the last two, look up rows of one table. The same steps are taken
with each wire, from the same parameters, on the same batches. Bytes are what
`zenjax.stats` counts, which is what the compiled program sends.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import ngram_memory
import zenjax

WORDS, HASHED, WIDTH, BEFORE = 1024, 30_000, 64, 4
DEVICES, BATCH, RATE, HELD_OUT = 4, 512, 0.1, 8192
WIRES = (None, "bfloat16", "float8_e4m3fn", "int8", "int4")


def ids_of(words: jax.Array) -> jax.Array:
  """Returns the rows that words `[B, 4]` look up, `[B, 5]`."""
  place = jnp.arange(BEFORE) * WORDS
  last = words[:, -1].astype(jnp.uint32) * jnp.uint32(2654435761)
  pair = (last ^ words[:, -2].astype(jnp.uint32)) % jnp.uint32(HASHED)
  pair = pair.astype(jnp.int32) + BEFORE * WORDS
  return jnp.concatenate([words + place, pair[:, None]], axis=1)


def loss_fn(params, windows):
  rows = params["table"][ids_of(windows[:, :-1])]
  x = jax.nn.gelu(rows.sum(1)) @ params["out"]
  losses = optax.softmax_cross_entropy_with_integer_labels(x, windows[:, -1])
  return losses.mean()


def train(wire: str | None, windows: np.ndarray, seed: int, steps: int):
  """Returns the held-out loss and the bytes of a step for a device."""
  mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))
  one, two = jax.random.split(jax.random.key(seed))
  rows = BEFORE * WORDS + HASHED
  params = dict(
    table=jax.random.normal(one, (rows, WIDTH)) * 0.1,
    out=jax.random.normal(two, (WIDTH, WORDS)) * WIDTH**-0.5,
  )
  is_table = dict(table=True, out=False)
  params = zenjax.tables.shard(
    params, mesh, "data", tables=is_table, wire_dtype=wire
  )
  tx = zenjax.sharded_optimizer(optax.adagrad(RATE, 1e-8), "data", mesh=mesh)
  grad = zenjax.value_and_grad(loss_fn, tables=is_table)
  put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))

  @jax.jit
  def step(state, windows):
    params, opt_state = state
    _, grads = grad(params, windows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  state = params, zenjax.init_state(tx, params, mesh, "data")
  rng = np.random.default_rng(seed)
  train_on, held_out = windows[:-HELD_OUT], windows[-HELD_OUT:]
  nbytes = []
  for i in range(steps):
    if i == 20:
      state = zenjax.tune(state)
    state = step(state, put(train_on[rng.integers(len(train_on), size=BATCH)]))
    if i >= steps - 20:
      nbytes.append(zenjax.stats(state)["table"]["wire_bytes"])
  loss = jax.jit(zenjax.tables.apply(loss_fn))(state[0], put(held_out))
  return float(loss), float(np.mean(nbytes))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--seeds", type=int, default=2)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", DEVICES)
  ids, _ = ngram_memory.text()
  ids = np.where(ids < WORDS, ids, 0)  # 0: any other
  every = np.lib.stride_tricks.sliding_window_view(ids, BEFORE + 1)
  print(f"{args.steps} steps on {DEVICES} devices, {args.seeds} seeds")
  for wire in WIRES:
    runs = [train(wire, every, seed, args.steps) for seed in range(args.seeds)]
    losses, nbytes = zip(*runs)
    print(
      f"{wire or 'float32':14} {np.mean(nbytes) / 1e6:.3f} MB a step,"
      f" held-out loss {np.mean(losses):.4f}"
      f" ({min(losses):.4f} to {max(losses):.4f})",
      flush=True,
    )


if __name__ == "__main__":
  main()
