"""An embedding trained on every device; only its touched rows are exchanged."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator
mesh = jax.make_mesh((len(jax.devices()),), ("data",))
tx = optax.chain(zenjax.zen_sync("data"), optax.adagrad(0.02))


def loss_fn(params, ids, targets):
  return optax.l2_loss(params["table"][ids].sum(-1), targets).mean()


def step(state, ids, targets):
  params, opt_state = state
  loss, grads = jax.value_and_grad(loss_fn)(params, ids, targets)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), loss


params = {"table": np.zeros((50_000, 32), np.float32)}
params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
state = params, zenjax.init_state(tx, params, mesh, "data")
train = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)

rng = np.random.default_rng(0)
for i in range(41):  # ids as in text: a few are common, most are rare
  ids = rng.zipf(1.3, 256 * mesh.size) % 50_000
  state, loss = train(state, ids, np.sin(ids))
  if i % 20 == 0:
    print(f"step {i:3}  loss {loss:.4f}")
print(zenjax.report(state))
