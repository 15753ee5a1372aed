"""`tables`: steps of a model with one table between hosts, in plain `jit`.

Whole steps of training, nothing pinned: the gradient is made inside the step,
the optimizer is Adagrad, and steps follow each other as in a run. Every host
runs `python -m benchmarks.campaigns.tables`.

Letters: `n` hosts, `R` rows, `D` columns, `S` slots of a host, `K` look-ups of
a host, `C` room for rows that one host asks of another.
"""

import argparse
from contextlib import AbstractContextManager
import dataclasses
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import campaign
from benchmarks import harness
from benchmarks import table
from benchmarks.testbed import served
from benchmarks.testbed.served import AXIS
import zenjax

# Steps behind each other in a sample, those before, and batches that repeat.
STEPS, _WARM_UP, _BATCHES = 8, 12, 16
_RATE, _START, _EPS = 0.05, 0.1, 1e-7  # Of Adagrad.
_RELATIVE = 1e-4
# Look-ups of an example of each look-up of the table.
_BAG = 10
_ZIPF = 1.145


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """The sizes that all forms share."""

  rows: int  # R
  width: int  # D
  tokens: int  # K, over all look-ups.
  look_ups: int  # How often the model looks up rows of the table.


def loss(params: Any, ids: Any, y: Any) -> Any:
  """Bags of rows, each through a vector of its own."""
  bags = jnp.split(ids, len(params["w"]), axis=1)
  found = [params["table"][x].mean(1) @ w for x, w in zip(bags, params["w"])]
  return optax.l2_loss(sum(found), y).mean()


_adagrad = optax.adagrad(_RATE, initial_accumulator_value=_START, eps=_EPS)


class Form:
  """A way to train, in plain `jit` on automatic axes."""

  tx: Any = _adagrad
  split = P()  # How the table lies.
  gradient = staticmethod(jax.value_and_grad)

  def __init__(self, mesh: Any, params: Any):
    self.mesh = mesh
    place = lambda x, spec: jax.make_array_from_callback(
      x.shape, NamedSharding(mesh, spec), lambda at: x[at]
    )
    table = place(params["table"], self.split)
    self.params = {"table": table, "w": place(params["w"], P())}

  def step(self, params: Any, state: Any, ids: Any, y: Any) -> Any:
    value, grads = self.gradient(loss)(params, ids, y)
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows that this host has, and these."""
    shard = params["table"].addressable_shards[0]
    ids = np.arange(params["table"].shape[0])[shard.index[0]]
    return ids, np.asarray(shard.data)


class RowSharded(Form):
  """XLA's own: each host has a range of rows."""

  split = P(AXIS)


class Rows(Form):
  """zenjax's row gradients of a table that every host has."""

  tx = optax.chain(zenjax.zen_sync(AXIS), zenjax.lazy_rows(_adagrad))
  gradient = staticmethod(zenjax.value_and_grad)


class RowsMapped(Rows):
  """The same inside `shard_map`."""

  def step(self, params: Any, state: Any, ids: Any, y: Any) -> Any:
    def local(*args):
      params, state, value = Rows.step(self, *args)
      return params, state, lax.pmean(value, AXIS)

    specs = (P(), zenjax.state_specs(state, AXIS), P(AXIS), P(AXIS))
    mapped = jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=specs,
      out_specs=(*specs[:2], P()),
      check_vma=False,
    )
    return mapped(params, state, ids, y)


class Sharded(Form):
  """zenjax's table of which every host has the rows that it owns."""

  tx = zenjax.owner_update(_adagrad, AXIS)
  gradient = staticmethod(zenjax.value_and_grad)

  def __init__(self, mesh: Any, params: Any):
    self.mesh = mesh
    chosen = {"table": True, "w": False}
    self.params = zenjax.rows.shard(params, mesh, AXIS, tables=chosen)

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    found = zenjax.reshard(params)["table"]  # Ranges of rows.
    ids, rows = Form.rows_here(self, {"table": found.value})
    real = ids < found.num_rows
    return ids[real], rows[real]


class Ahead(Sharded):
  """The same, with ids of the next batch sent beside the step."""

  def step(self, params: Any, state: Any, ids: Any, y: Any, *coming: Any):
    state, ahead = state
    both = zenjax.value_and_grad(loss, prefetched=ahead)
    value, grads = both(params, ids, y)
    ahead = zenjax.rows.prefetch(loss)(params, *coming)
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), (state, ahead), value


class ByHand(Form):
  """`Sharded` as one would write it for this model: row `r` is with `r % n`.

  There are no rounds: `C` is what these batches need, and 5 % more, where it
  would not be known.
  """

  tx = None
  room = 0

  def __init__(self, mesh: Any, params: Any):
    n = mesh.size
    whole = np.pad(params["table"], ((0, -len(params["table"]) % n), (0, 0)))
    table = whole.reshape(-1, n, whole.shape[1]).swapaxes(0, 1)
    given = {"table": table.reshape(whole.shape), "w": params["w"]}
    self.split = P(AXIS)
    super().__init__(mesh, given)

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    shard = params["table"].addressable_shards[0]
    slots = len(shard.data)
    ids = np.arange(slots) * self.mesh.size + shard.index[0].start // slots
    return ids, np.asarray(shard.data)

  def step(self, params: Any, state: Any, ids: Any, y: Any) -> Any:
    lies = ({"table": P(AXIS), "w": P()},) * 2
    return jax.shard_map(
      self._local,
      mesh=self.mesh,
      in_specs=(*lies, P(AXIS), P(AXIS)),
      out_specs=(*lies, P()),
      check_vma=False,
    )(params, state, ids, y)

  def _local(self, params, state, ids, y):
    n, room = self.mesh.size, self.room
    table, w = params["table"], params["w"]
    slots, width = table.shape
    move = lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    # Where each look-up's row lies in what owners send: `owner * C + column`.
    place = (ids % n * slots + ids // n).reshape(-1)
    place, order = lax.sort((place, jnp.arange(place.size)), num_keys=1)
    new = jnp.append(True, place[1:] != place[:-1])
    owner = place // slots
    number = jnp.cumsum(new) - 1
    first = jnp.searchsorted(owner, jnp.arange(n))
    at = owner * room + number - number[first][owner]
    at = jnp.zeros_like(at).at[order].set(at)
    asked = jnp.full(n * room, slots)
    asked = asked.at[at].set((ids // n).reshape(-1))
    asked = move(asked.reshape(n, room)).reshape(-1)
    rows = table.at[asked].get(mode="fill", fill_value=0)
    rows = move(rows.reshape(n, room, width)).reshape(-1, width)

    def of_rows(rows, w):
      where = at.reshape(ids.shape)
      return loss({"table": rows, "w": w}, where, y) / n

    value, (rows, dense) = jax.value_and_grad(of_rows, (0, 1))(rows, w)
    value, dense = lax.psum((value, dense), AXIS)
    rows = move(rows.reshape(n, room, width)).reshape(-1, width)
    asked, order = lax.sort((asked, jnp.arange(asked.size)), num_keys=1)
    new = jnp.append(True, asked[1:] != asked[:-1])
    number = jnp.cumsum(new) - 1
    sums = jnp.zeros_like(rows).at[number].add(rows[order])
    own = jnp.full(asked.shape, slots).at[number].set(asked)
    squares = state["table"].at[own].get(mode="fill", fill_value=1) + sums**2
    update = -_RATE * sums * lax.rsqrt(squares + _EPS)
    state = {
      "table": state["table"].at[own].set(squares, mode="drop"),
      "w": state["w"] + dense**2,
    }
    w = w - _RATE * dense * lax.rsqrt(state["w"] + _EPS)
    table = table.at[own].add(update, mode="drop")
    return {"table": table, "w": w}, state, value


FORMS: dict[str, type[Form]] = {
  "replicated": Form,
  "row-sharded": RowSharded,
  "rows": Rows,
  "rows, shard_map": RowsMapped,
  "sharded": Sharded,
  "sharded, ids ahead": Ahead,
  "by hand": ByHand,
}


def after_a_step(params: Any, ids: Any, y: Any) -> tuple[Any, Any]:
  """The touched rows and their values after a step, in float64."""
  table, w = (params[k].astype(np.float64) for k in ("table", "w"))
  bags = np.split(ids, len(w), axis=1)
  miss = sum(table[x].mean(1) @ v for x, v in zip(bags, w)) - y
  touched, number = np.unique(ids, return_inverse=True)
  number = np.split(number.reshape(ids.shape), len(w), axis=1)
  sums = np.zeros((len(touched), table.shape[1]))
  for at, v in zip(number, w):
    share = np.repeat(miss / len(y) / at.shape[1], at.shape[1])
    np.add.at(sums, at.reshape(-1), share[:, None] * v)
  update = _RATE * sums / np.sqrt(_START + sums**2 + _EPS)
  return touched, table[touched] - update


class _Worker(served.Worker):
  """This host's share of the steps."""

  def build(self, form: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a form, checks its first step, warms up, counts bytes."""
    made = Setting(**setting)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((made.look_ups, made.width), np.float32)
    draw = rng.standard_normal((made.rows, made.width), np.float32)
    params = {"table": 0.05 * draw, "w": w}
    n, bag = self.mesh.size, _BAG * made.look_ups
    shape = _BATCHES, n * (made.tokens // bag), bag
    ids = rng.permutation(made.rows)[rng.zipf(_ZIPF, shape) % made.rows]
    y = np.sin(ids[:, :, 0]).astype(np.float32)
    batches = list(zip(ids.astype(np.int32), y))
    known = FORMS[form](self.mesh, params)
    own = np.unique(ids[0].reshape(n, -1)[0])
    if isinstance(known, ByHand):
      each = [np.unique(x) for b in ids for x in b.reshape(n, -1)]
      most = max(np.bincount(x % n, minlength=n).max() for x in each)
      known.room = int(1.05 * most)
    with jax.set_mesh(self.mesh):
      program = _Program(known, batches, self.compiler)
      program()
      touched, want = after_a_step(params, *batches[0])
      here, rows = known.rows_here(program.params)
      at = np.searchsorted(touched, here)
      is_touched = touched[np.minimum(at, len(touched) - 1)] == here
      near = want[at[is_touched]], params["table"][here[~is_touched]]
      far = np.abs(rows[is_touched] - near[0]) > _RELATIVE * np.abs(want).max()
      wrong = int(far.sum() + (rows[~is_touched] != near[1]).sum())
    program.run(_WARM_UP)
    before = _received()
    program.run()
    facts = dict(
      received_bytes=(_received() - before) / STEPS,
      distinct=float(len(own)),
      union=float(len(np.unique(ids[0]))),
    )
    self.cases.append(program.run)
    return {"wrong": wrong, "compile_s": program.compile_s, "facts": facts}


class _Program:
  """Steps of a form, one after the other."""

  def __init__(self, form: Form, batches: Any, compiler: Any):
    split = NamedSharding(form.mesh, P(AXIS))
    place = lambda x: jax.make_array_from_callback(
      x.shape, split, lambda at: x[at]
    )
    self._batches = [tuple(map(place, batch)) for batch in batches]
    self._turn, self.params = 0, form.params
    if form.tx is None:
      self._state = jax.tree.map(lambda x: x * 0 + _START, form.params)
    elif isinstance(form, Sharded):
      self._state = form.tx.init(form.params)
      if isinstance(form, Ahead):
        ahead = jax.jit(zenjax.rows.prefetch(loss))
        self._state = self._state, ahead(form.params, *self._batches[0])
        following = self._batches[1:] + self._batches[:1]
        self._batches = [x + y for x, y in zip(self._batches, following)]
    else:
      lies = {x.shape: x.sharding for x in form.params.values()}
      everywhere = NamedSharding(form.mesh, P())
      state = jax.eval_shape(form.tx.init, form.params)
      lies = jax.tree.map(lambda x: lies.get(x.shape, everywhere), state)
      self._state = jax.jit(form.tx.init, out_shardings=lies)(form.params)
    given = self.params, self._state
    lies = jax.tree.map(lambda x: x.sharding, given)
    self._step, self.compile_s = harness.compiled(
      form.step,
      *given,
      *self._batches[0],
      compile=compiler.compile,
      donate_argnums=(0, 1),
      out_shardings=(*lies, NamedSharding(form.mesh, P())),
    )

  def __call__(self) -> Any:
    batch = self._batches[self._turn % _BATCHES]
    self._turn += 1
    self.params, self._state, value = self._step(
      self.params, self._state, *batch
    )
    return value

  def run(self, steps: int = STEPS) -> Any:
    """Takes steps behind each other, and waits for the last."""
    return jax.block_until_ready([self() for _ in range(steps)])


def _received() -> float:
  """Bytes that came to this host's cards, but for that of hosts on one."""
  lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()[2:]
  cards = [line.split(":") for line in lines]
  counts = [float(x.split()[0]) for name, x in cards if name.strip() != "lo"]
  return sum(counts)


COLUMNS = (
  table.fact("received\nMB", "received_bytes", ".2f", unit=1e6),
  table.WRONG,
  table.COMPILE,
  table.Column("a step\nms", lambda r, _: r.median_s * 1e3 / STEPS),
  table.Column("±\nms", lambda r, _: r.spread_s * 1e3 / STEPS),
  table.faster_than("row-sharded", "times\nrow-sharded"),
  table.faster_than("replicated", "times\nreplicated"),
)


def cases(
  options: argparse.Namespace,
) -> AbstractContextManager[list[harness.Case]]:
  """Returns a context that yields every form on hosts."""
  names = harness.named("--variants", options.variants, FORMS)
  names_of = [field.name for field in dataclasses.fields(Setting)]
  setting = {name: getattr(options, name) for name in names_of}
  return campaign.cases(
    "campaigns.tables",
    options,
    "unlimited" if options.loopback else options.rate,
    f"{options.rows:,} x {options.width}, {options.look_ups} look-ups",
    {name: {"form": name, "setting": setting} for name in names},
    keep_memory=False,
  )


if __name__ == "__main__":
  served.main(_Worker)
