"""n-gram memory: a language model that looks up its last words in a hash table.

    python examples/ngram_memory.py [--tables sharded] [--accumulate 1]

A transformer of one block learns Python's standard library, without a memory
and with one as in Engram: eight heads hash pairs and triples of words into it.
Losses are the same on any number of devices, and of micro-batches, in all of:

  sharded     tables.shard and sharded_optimizer: a device has its part of the
  table replicated  zen_sync and lazy_rows: each has all, and sends the touched
  rows dense       the plain program: XLA sums gradients of the table's size
"""

import argparse
from collections import Counter
from pathlib import Path
import re
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zenjax

V, T, D = 4096, 64, 64  # words known, words in a window, width of the model
ORDERS, HEADS, COLUMNS = (2, 3), 8, 8  # of the memory
FLAGS = dict(accumulate=1, devices=8, steps=200, batch=64, rows=60_000)


def text() -> tuple[np.ndarray, np.ndarray]:
  """Returns words as ids, and for each id that of the word in lower case."""
  files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
  files = [x for x in files if "site-packages" not in x.parts]
  np.random.default_rng(0).shuffle(files)
  source = "\n".join(x.read_text("utf-8", "ignore") for x in files[:400])
  words = re.findall(r"\w+|[^\w\s]", source)
  common = Counter(words).most_common(V - 1)
  number = {word: i for i, (word, _) in enumerate(common, 1)}  # 0: any other
  lower = [0, *(number.get(x.lower(), i) for x, i in number.items())]
  ids = [number.get(x, 0) for x in words]
  return np.array(ids, np.int32), np.array(lower, np.uint32)


def slots(words: jax.Array, sizes: np.ndarray) -> jax.Array:
  """Hashes the n-grams that end at each word: `[B, T]` -> `[B, T, heads]`."""
  factors = np.random.default_rng(1).integers(2**31, size=max(ORDERS)) * 2 + 1
  mixed, keys = jnp.zeros_like(words), []
  for back, factor in enumerate(factors.astype(np.uint32)):
    mixed ^= jnp.pad(words, ((0, 0), (back, 0)))[:, :T] * factor
    keys += [mixed] * HEADS * (back + 1 in ORDERS)
  first = np.cumsum(sizes) - sizes  # where the rows of a head begin
  return (jnp.stack(keys, -1) % sizes + first).astype(jnp.int32)


def first_params(sizes: np.ndarray, d: int = D) -> dict[str, jax.Array]:
  found = len(sizes) * COLUMNS
  shapes = dict(attend=(d, 3 * d), out=(d, d), up=(d, 4 * d), down=(4 * d, d))
  shapes |= dict(embed=(d, V), key=(found, d), value=(found, d))
  keys = jax.random.split(jax.random.key(0), len(shapes))
  normal = lambda key, shape: jax.random.normal(key, shape) / shape[0] ** 0.5
  params = dict(zip(shapes, map(normal, keys, shapes.values())))
  return params | {"memory": jnp.zeros((int(sizes.sum()), COLUMNS))}


def loss_fn(params, windows, lower, sizes):
  """Mean loss of the next word in windows `[B, T + 1]`."""
  norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
  words, targets = windows[:, :-1], windows[:, 1:]
  x = params["embed"].T[words]
  q, k, v = jnp.split(norm(x)[:, :, None] @ params["attend"], 3, -1)
  seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  x += seen[:, :, 0] @ params["out"]
  if len(sizes):
    rows = params["memory"][slots(lower[words], sizes)]
    rows = rows.reshape(*words.shape, -1)  # those of all heads
    fits = norm(x) * norm(rows @ params["key"])
    gate = jax.nn.sigmoid(fits.sum(-1, keepdims=True) / x.shape[-1] ** 0.5)
    x += gate * (rows @ params["value"])
  x += jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]
  logits = norm(x) @ params["embed"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(form: str, sizes: np.ndarray, ids, lower, mesh, args) -> None:
  print(f"{sizes.sum()} rows of memory, {form} on {mesh.size} devices")
  init = lambda: first_params(sizes)
  adagrad, adam = zenjax.rows.rowwise_adagrad(0.05), optax.adam(0.003)
  is_table = {name: name == "memory" for name in jax.eval_shape(init)}
  tx = optax.partition({True: adagrad, False: adam}, is_table)
  rows = lambda f: zenjax.value_and_grad(f, tables=is_table)  # of no other
  grad = jax.value_and_grad if form == "dense" else rows
  if form == "sharded":  # Inside jit nothing has the size of the table.
    shard = lambda: zenjax.tables.shard(init(), mesh, "data", tables=is_table)
    params, tx = (
      jax.jit(shard)(),
      zenjax.sharded_optimizer(tx, "data", mesh=mesh),
    )
  else:
    params = jax.device_put(init(), jax.NamedSharding(mesh, jax.P()))
  if form == "replicated":
    tx = optax.chain(zenjax.zen_sync("data"), zenjax.lazy_rows(tx))
  loss_of = lambda params, x: loss_fn(params, x, jnp.asarray(lower), sizes)

  def batch_loss(params, windows):  # [micro-batches, B, T + 1]
    one = loss_of if len(windows) == 1 else jax.checkpoint(loss_of)
    return jax.lax.map(lambda x: one(params, x), windows).mean()

  @jax.jit
  def step(state, windows):
    params, opt_state = state
    loss, grads = grad(batch_loss)(params, windows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (zenjax.apply_updates(params, updates), opt_state), loss

  every = np.lib.stride_tricks.sliding_window_view(ids, T + 1)
  end = len(every) - 16 * args.batch * T  # Windows of steps end before it.
  shape = -1, args.batch // args.accumulate, T + 1
  split = jax.NamedSharding(mesh, jax.P(None, "data"))
  put = lambda windows: jax.device_put(windows.reshape(shape), split)
  state = params, zenjax.init_state(tx, params, mesh, "data")
  for i in range(1, args.steps + 1):
    starts = np.random.default_rng(i).integers(end - T, size=args.batch)
    state, loss = step(state, put(every[starts]))
    if i % -(-args.steps // 4) == 0:
      print(f"  step {i:4}  loss {loss:.5f}", flush=True)
  loss = jax.jit(zenjax.tables.apply(batch_loss))(state[0], put(every[end::T]))
  own = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
  print(f"  held-out loss {loss:.5f}, {sum(own) / 1e6:.2f} MB on a device")
  print(zenjax.report(state) if form != "dense" else "")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  forms = ("sharded", "replicated", "dense")
  parser.add_argument("--tables", default="sharded", choices=forms)
  for flag, n in FLAGS.items():
    parser.add_argument(f"--{flag}", type=int, default=n, help=f"default {n}")
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.sharding.Mesh(jax.devices()[: args.devices], ("data",))
  is_prime = lambda n: all(n % k for k in range(2, int(n**0.5) + 1))
  primes = [n for n in range(args.rows, 2 * args.rows) if is_prime(n)]
  sizes = np.array(primes[: len(ORDERS) * HEADS], np.uint32)
  corpus = text()
  train("dense", sizes[:0], *corpus, mesh, args)
  train(args.tables, sizes, *corpus, mesh, args)


if __name__ == "__main__":
  main()
