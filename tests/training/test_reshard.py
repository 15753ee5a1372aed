"""States that are saved, and go on with another number of devices."""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax
from zenjax._src.sparsify.sparsifier_state import FeedbackLeaf

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH = 37, 4
SHARES = 12  # of a batch: 4 and 3 devices take as many each

PARAMS: dict[str, Any] = {
  "big": jnp.zeros(32_768),
  "bias": jnp.zeros(3),
  "heavy": jnp.zeros(200),
  "kernel": jnp.zeros(400),
  "passed": jnp.zeros(300),
  "small": jnp.zeros(100),
  "table": jnp.zeros((ROWS, WIDTH)),
}


# By leaf, the kind of state that is kept for it.
LABELS = dict(
  big="exdyna",
  bias="sharded_optimizer",
  heavy="momentum",
  kernel="top_k",
  passed="threshold",
  small="micro",
  table="sharded_optimizer",
)


def everything(names):
  """Each kind of state that differs between devices, for leaves of its own."""
  table: Any = dict(sparse=lambda name, _: name == "table")
  sent = zenjax.zen_sync("data", sparse=True, unit="element")
  top_k = zenjax.sparsify.top_k(0.05, sparse=True)
  drawn = zenjax.sparsify.random_k(0.05, sparse=True)
  large = zenjax.sparsify.threshold(1.0, sparse=True)
  moved = zenjax.sparsify.error_feedback(drawn, "data", momentum=0.5)
  kinds: Any = {
    "exdyna": zenjax.sparsify.exdyna("data", 0.01),
    "micro": zenjax.sparsify.micro("data", 0.05),
    "sharded_optimizer": zenjax.sharded_optimizer(
      optax.adam(0.1), "data", **table
    ),
    "top_k": optax.chain(zenjax.sparsify.error_feedback(top_k, "data"), sent),
    "threshold": optax.chain(
      zenjax.sparsify.error_feedback(large, "data"), sent
    ),
    "momentum": optax.chain(moved, sent),
  }
  labels = {name: LABELS[name] for name in names}
  kinds = {kind: kinds[kind] for kind in labels.values()}
  return optax.multi_transform(kinds, labels)


def draw(steps: int, seed: int, names: Any) -> dict[str, np.ndarray]:
  """Gradients of each share of each batch, few rows of tables among them."""
  rng = np.random.default_rng(seed)
  out = {}
  for name in names:
    leaf = PARAMS[name]
    x = rng.laplace(size=(steps, SHARES, *leaf.shape)).astype(np.float32)
    if leaf.ndim == 2:
      x *= rng.random((steps, SHARES, len(leaf), 1)) < 0.1
    out[name] = x
  return out


# What is sent and what waits of these are all gradients.
LOSSLESS = ("big", "kernel", "passed", "small")


class Run:
  """Steps of leaves of these names on any number of devices."""

  def __init__(self, names):
    self.tx = everything(names)
    self.params = {name: PARAMS[name] for name in names}
    self._steps = {}

  def init(self, n):
    return zenjax.init_state(self.tx, self.params, runners.mesh(n), "data")

  def step(self, n):
    def step(state, gradients):
      _, state = state
      local = jax.tree.map(lambda g: g.mean(axis=0), gradients)
      return self.tx.update(local, state, self.params), ()

    if n not in self._steps:
      mapped = zenjax.data_parallel(step, runners.mesh(n), "data")
      self._steps[n] = jax.jit(mapped)
    return self._steps[n]

  def take(self, n, state, gradients):
    """Updates of each step, `[t, ..]` a leaf, and the state."""
    found = []
    for t in range(len(next(iter(gradients.values())))):
      now = {name: x[t] for name, x in gradients.items()}
      (updates, state), _ = self.step(n)((self.params, state), now)
      found.append(jax.tree.map(np.asarray, updates))
    stack = lambda *x: np.stack(x).astype(np.float64)
    return jax.tree.map(stack, *found), state


def inner_of(state, kind):
  return state.inner_states[kind].inner_state


def kept(state) -> dict[str, np.ndarray]:
  """What waits, in the weight of a mean over devices."""
  waits = {}
  for name, kind in LABELS.items():
    if kind == "sharded_optimizer" or kind not in state.inner_states:
      continue
    inner = inner_of(state, kind)
    if kind in ("exdyna", "micro"):
      waits[name] = inner.residual
    else:
      leaf = inner[0].leaves[name]
      waits[name] = leaf.residual
      if leaf.momentum is not None:
        waits["momentum"] = leaf.momentum
  return {
    name: np.asarray(x, np.float64).mean(axis=0) for name, x in waits.items()
  }


def test_a_run_that_moves_goes_on_as_one_that_never_did():
  """From four devices to three and four again, by way of the host.

  What is owned is that of the run that never moved. Of what waits nothing is
  lost or weighs more: all updates, and the mean of what waits, are the sum of
  mean gradients, over each part of the run and over all of it.
  """
  names = ["big", "bias", "kernel", "table"]
  run = Run(names)
  first, later = draw(4, 0, names), draw(20, 1, names)
  lossless = [name for name in LOSSLESS if name in names]
  _, state = run.take(4, run.init(4), first)
  stayed, _ = run.take(4, state, later)
  begun, at = kept(state), 0
  assert all(np.abs(x).max() > 0 for x in begun.values())
  whole = {name: begun[name].copy() for name in lossless}
  for n, steps in ((3, 10), (4, 10)):
    before = kept(state)
    saved = zenjax.to_checkpoint(state)
    state = zenjax.from_checkpoint(saved, runners.mesh(n), "data")
    same = zenjax.from_checkpoint(state, runners.mesh(n), "data")
    jax.tree.map(np.testing.assert_array_equal, same, state)
    after = kept(state)
    for name in before:
      np.testing.assert_allclose(
        after[name], before[name], rtol=1e-5, atol=1e-6
      )
    now = {name: x[at : at + steps] for name, x in later.items()}
    sent, state = run.take(n, state, now)
    for name in {"table", "bias"} & set(names):
      np.testing.assert_allclose(
        sent[name], stayed[name][at : at + steps], rtol=2e-4, atol=2e-6
      )
    for name in lossless:
      given = now[name].mean(axis=1, dtype=np.float64).sum(axis=0)
      total = sent[name].sum(axis=0) + kept(state)[name]
      np.testing.assert_allclose(
        total, before[name] + given, rtol=1e-5, atol=1e-5
      )
      whole[name] += given - sent[name].sum(axis=0)
    at += steps
  assert at == len(later[names[0]])
  for name in lossless:
    np.testing.assert_allclose(
      kept(state)[name], whole[name], rtol=1e-5, atol=5e-5
    )


def of_op(op: str) -> dict[str, Any]:
  """Transformations before whose sums gradients wait."""
  feedback = zenjax.sparsify.error_feedback(
    zenjax.sparsify.top_k(0.01, sparse=lambda name, _: name.endswith("w")),
    "data",
    momentum=0.5,
  )
  sparse: Any = dict(op=op, unit="element", sparse=lambda name, _: name == "w")
  return {
    "exdyna": zenjax.sparsify.exdyna("data", 0.01, op=op),
    "micro": zenjax.sparsify.micro("data", 0.01, op=op),
    "rows": optax.chain(feedback, zenjax.zen_sync("data", **sparse)),
    "dense": optax.chain(
      feedback, zenjax.zen_sync("data", op=op, scheme="dense", unit="element")
    ),
  }


def filled(state: Any, values: np.ndarray) -> Any:
  """The state with `values: [n]` for each element that waits on a device."""
  given = lambda x: np.broadcast_to(
    values.reshape(-1, *[1] * (x.ndim - 1)), x.shape
  ).astype(x.dtype)

  def fill(node: Any) -> Any:
    fields = [k for k in ("residual", "momentum") if hasattr(node, k)]
    old = {k: getattr(node, k) for k in fields}
    return node._replace(
      **{k: given(x) for k, x in old.items() if x is not None}
    )

  kept = zenjax.sparsify.SparsifierState | FeedbackLeaf
  is_leaf = lambda node: isinstance(node, kept)
  return jax.tree.map(
    lambda node: fill(node) if is_leaf(node) else node, state, is_leaf=is_leaf
  )


def sums(state: Any) -> list[float]:
  """Of an element of each array that waits, over devices."""
  waits = [
    x
    for node in jax.tree.leaves(
      state, is_leaf=lambda x: isinstance(x, FeedbackLeaf)
    )
    if isinstance(node, FeedbackLeaf)
    for x in (node.residual, node.momentum)
    if x is not None
  ]
  waits += [state.residual] if hasattr(state, "residual") else []
  return [float(np.asarray(x).reshape(len(x), -1)[:, 0].sum()) for x in waits]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_what_waits_keeps_the_weight_that_it_has_by_op(op):
  """Also before any step, and from the form to save.

  Of leaves that go whole, whose zen_sync remembers nothing of them, and of a
  zen_sync that sums whole arrays alone.
  """
  params = {"bias": jnp.zeros(3), "w": jnp.zeros(32_768)}
  for kind, tx in of_op(op).items():
    state = zenjax.init_state(tx, params, runners.mesh(8), "data")
    state = filled(state, np.arange(1.0, 9.0))
    count = 1 if kind in ("exdyna", "micro") else 3
    for n in (3, 1, 8):
      state = zenjax.from_checkpoint(
        zenjax.to_checkpoint(state), runners.mesh(n), "data"
      )
      weight = n / 8 if op == "mean" else 1.0
      assert sums(state) == pytest.approx([36 * weight] * count), (kind, n)


def test_feedback_alone_is_averaged():
  feedback = zenjax.sparsify.error_feedback(
    zenjax.sparsify.top_k(0.25, sparse=True), "data"
  )
  state = zenjax.init_state(feedback, jnp.zeros(4), runners.mesh(8), "data")
  state = filled(state, np.arange(1.0, 9.0))
  assert sums(zenjax.from_checkpoint(state, runners.mesh(2), "data")) == [9.0]


def test_feedback_whose_zen_syncs_say_both():
  """Of a leaf that none of them remembers; of others each says its own."""
  kinds: Any = {op: of_op(op)["dense"] for op in ("mean", "sum")}
  params = {op: {"bias": jnp.zeros(3), "w": jnp.zeros(8)} for op in kinds}
  labels = {op: {"bias": op, "w": op} for op in kinds}
  tx = optax.multi_transform(kinds, labels)
  state = zenjax.init_state(tx, params, runners.mesh(8), "data")
  state = filled(state, np.arange(1.0, 9.0))
  mesh = runners.mesh(2)
  with pytest.raises(ValueError) as error:
    zenjax.from_checkpoint(state, mesh, "data")
  names(error, "`state`", "bias", "op='mean'", "op='sum'", "sync_state")
  for op, sum_now in (("mean", 9.0), ("sum", 36.0)):
    feedback, sync = state.inner_states[op].inner_state
    moved, _ = zenjax.from_checkpoint((feedback, sync), mesh, "data")
    assert sums(moved) == [sum_now] * 3


def test_a_residual_that_does_not_hold_what_waits():
  tx = zenjax.sparsify.micro("data", 0.5, residual_dtype=jnp.float16)
  state = zenjax.init_state(tx, jnp.zeros(8), runners.mesh(1), "data")
  full = filled(state, np.array([60_000.0]))
  with pytest.raises(ValueError) as error:
    zenjax.from_checkpoint(full, runners.mesh(2), "data")
  names(error, "`state`", "float16", "overflow", "residual_dtype")
  # What is no number waits as it is.
  wrong = filled(state, np.array([np.inf]))
  assert sums(zenjax.from_checkpoint(wrong, runners.mesh(2), "data")) == [
    np.inf
  ]


def remembers() -> optax.GradientTransformation:
  """Keeps of each row what the parameters were as the state was made."""
  return optax.GradientTransformation(
    lambda params: optax.TraceState(params),
    lambda updates, state, params=None: (updates, state),
  )


# Every element says where it belongs, and no row is one of padding.
PLACED = {
  "bf16": jnp.arange(1, 101, dtype=jnp.bfloat16).reshape(50, 2),
  "deep": 1.0 + jnp.arange(600.0).reshape(5, 30, 4),
  "dense": 1.0 + jnp.arange(6.0),
  "long": 1.0 + jnp.arange(128.0 * 3).reshape(128, 3),
  "table": 1.0 + jnp.arange(37.0 * 9).reshape(37, 9),
}
INNER = {
  "by label": optax.multi_transform(
    {
      "a": optax.chain(remembers(), optax.adam(0.1)),
      "b": optax.sgd(0.1),
      "c": optax.masked(remembers(), lambda p: jax.tree.map(jnp.ndim, p)),
    },
    dict(bf16="b", deep="a", dense="a", long="c", table="a"),
  ),
  "remembers": remembers(),
}


def owners(inner, **options):
  return zenjax.sharded_optimizer(
    inner, "data", sparse=lambda name, _: name != "dense", **options
  )


def equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
  ("inner", "options", "devices"),
  [
    ("remembers", dict(hash_seed=5), (4, 3, 1)),
    ("by label", {}, (2, 4)),
  ],
)
def test_what_moves_is_what_is_made_there(inner, options, devices):
  """Of every row, from owners to owners and by the form to save."""
  tx = owners(INNER[inner], **options)
  made = {
    n: zenjax.init_state(tx, PLACED, runners.mesh(n), "data") for n in devices
  }
  rows = zenjax.tables.unshard
  first, *others = devices
  saved, state = zenjax.to_checkpoint(made[first]), made[first]
  for n in others:
    want = rows(made[n])
    for form in (saved, state):
      moved = zenjax.from_checkpoint(form, runners.mesh(n), "data")
      assert jax.tree.structure(moved) == jax.tree.structure(made[n])
      equal(rows(moved), want)
      jax.tree.map(
        lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim) or 1 / 0,
        moved,
        made[n],
      )
    state = moved
    again = zenjax.to_checkpoint(state)
    assert jax.tree.structure(again) == jax.tree.structure(saved)
  if inner == "remembers":
    equal(rows(made[first]).trace, PLACED)


def accumulating(tx, n, mini_step, values):
  """A state on `n` devices that has accumulated `values: [n, ..]`."""
  tx = optax.MultiSteps(tx, 4)
  params = {"table": jnp.zeros((5, 2)), "w": jnp.zeros(3)}
  state = zenjax.init_state(tx, params, runners.mesh(n), "data")
  accumulated = {k: v.reshape(-1, *v.shape[2:]) for k, v in values.items()}
  return state._replace(
    mini_step=jnp.asarray(mini_step, jnp.int32), acc_grads=accumulated
  )


def local(n):
  rng = np.random.default_rng(n)
  draw = lambda *shape: rng.laplace(size=(n, *shape)).astype(np.float32)
  return {"table": draw(5, 2), "w": draw(3)}


SYNCS: dict[str, Any] = {
  "mean": zenjax.zen_sync("data", sparse=True),
  "sum": zenjax.zen_sync("data", sparse=True, op="sum"),
  "owners": zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=True),
  "micro": zenjax.sparsify.micro("data", 0.5),
  "micro sum": zenjax.sparsify.micro("data", 0.5, op="sum"),
  "feedback sum": optax.chain(
    zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(0.5, sparse=True), "data"
    ),
    zenjax.zen_sync("data", op="sum", scheme="dense", unit="element"),
  ),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_gradients_that_multi_steps_accumulates(sync):
  """What an update would be of them is kept."""
  tx = optax.chain(SYNCS[sync], optax.sgd(0.1))
  values = local(4)
  state = accumulating(tx, 4, 3, values)
  like = accumulating(tx, 2, 0, local(2))
  for n in (2, 3, 8, 4):
    # `zen_sync` says so after its first update.
    given = like if n == 2 else None
    if sync in ("mean", "sum") and n != 2:
      sync_state, *rest = state.inner_opt_state
      leaves = {
        name: dataclasses.replace(leaf, sizes=leaf.sizes.at[2].set(4))
        for name, leaf in sync_state.leaves.items()
      }
      inner = (sync_state.replace(leaves=leaves), *rest)
      state = state._replace(inner_opt_state=inner)
    moved = zenjax.from_checkpoint(state, runners.mesh(n), "data", like=given)
    assert int(moved.mini_step) == 3
    for name, old in values.items():
      new = np.asarray(moved.acc_grads[name]).reshape(n, *old.shape[1:])
      scale = 1.0 if "sum" in sync else n / 4
      np.testing.assert_allclose(
        new.sum(axis=0), old.sum(axis=0) * scale, rtol=1e-5, atol=1e-6
      )


def test_gradients_that_were_averaged_before_they_are_accumulated():
  """They are equal on all devices, and stay as they are."""
  tx = zenjax.zen_sync("data", sparse=True)
  params = {"w": jnp.zeros(3)}
  tx = optax.chain(
    tx, optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
  )
  state = zenjax.init_state(tx, params, runners.mesh(4), "data")
  mean = np.array([1.0, 2.0, 4.0], np.float32)
  steps = state[1]._replace(acc_grads={"w": mean}, mini_step=jnp.int32(2))
  moved = zenjax.from_checkpoint((state[0], steps), runners.mesh(3), "data")
  assert moved[1].acc_grads["w"].tolist() == mean.tolist()


def test_accumulated_gradients_of_which_nothing_is_known():
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  host = accumulating(tx, 4, 3, local(4))
  mesh = runners.mesh(2)
  with pytest.raises(ValueError) as error:
    zenjax.from_checkpoint(host, mesh, "data")
  names(error, "`like`", "zenjax.init_state", "MultiSteps")
  like = accumulating(tx, 2, 0, local(2))
  nothing = jax.tree.map(np.zeros_like, local(4))
  state = accumulating(tx, 4, 0, nothing)
  moved = zenjax.from_checkpoint(state, mesh, "data", like=like)
  assert moved.acc_grads["table"].shape == (10, 2)
  assert not np.any(moved.acc_grads["table"])


def test_placed_gradients_tell_of_how_many_devices_they_are():
  tx: Any = optax.MultiSteps(optax.chain(zenjax.zen_sync("data")), 2)
  params = {"w": jnp.zeros((8, 2))}
  state = zenjax.init_state(tx, params, runners.mesh(4), "data")
  moved = zenjax.from_checkpoint(state, runners.mesh(2), "data")
  assert moved.acc_grads["w"].shape == (16, 2)


def test_like_of_other_transformations():
  tx = optax.chain(zenjax.sparsify.micro("data", 0.5), optax.sgd(0.1))
  state = zenjax.init_state(tx, {"w": jnp.zeros(30)}, runners.mesh(4), "data")
  with pytest.raises(ValueError) as error:
    zenjax.from_checkpoint(state, runners.mesh(2), "data", like=())
  names(error, "`like`", "for the same `tx`")


def test_the_state_of_an_nnx_optimizer_moves():
  """There each array of a state is inside of a variable."""
  net = nnx.Embed(4096, 8, rngs=nnx.Rngs(0))
  tx = optax.chain(zenjax.zen_sync("data"), optax.adagrad(0.1))
  optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
  saved = zenjax.to_checkpoint(optimizer.opt_state)
  optimizer.opt_state = zenjax.from_checkpoint(saved, runners.mesh(2), "data")
  _, state = nnx.split(optimizer)
  nnx.update(optimizer, state)
  assert zenjax.stats(optimizer.opt_state) == {}
