"""`tables`: steps of a model with tables between hosts, in plain `jit`.

Whole steps of training, nothing pinned: the gradient is made inside the step,
and steps follow each other as in a run. Models stand in `models.py`. Every host
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
from benchmarks.campaigns import ddp
from benchmarks.campaigns import models
from benchmarks.campaigns.models import Model
from benchmarks.testbed import served
from benchmarks.testbed.served import AXIS
import zenjax

# Steps behind each other in a sample, those before, those that are checked.
STEPS, _WARM_UP, _CHECKED = 8, 12, 4
_RELATIVE = 1e-4
_RATE, _START, _EPS = models.RATE, models.START, models.EPS


class Form:
  """A way to train, in plain `jit` on automatic axes."""

  split = P()  # How tables lie.
  tuned = False  # Whether `zenjax.tune` plans it after some steps.

  def __init__(self, mesh: Any, model: Model):
    self.mesh, self.model = mesh, model
    self.loss, self.tx = model.loss, self.transformation(model.tx)
    self.params = jax.tree.map(
      lambda x, is_table: self._place(x, self.split if is_table else P()),
      model.params,
      model.tables,
    )

  def _place(self, x: np.ndarray, spec: P) -> jax.Array:
    split = NamedSharding(self.mesh, spec)
    return jax.make_array_from_callback(x.shape, split, lambda at: x[at])

  def transformation(self, tx: Any) -> Any:
    return tx

  def gradient(self, loss: Any) -> Any:
    return jax.value_and_grad(loss)

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    value, grads = self.gradient(self.loss)(params, *batch)
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows of `bags` that this host has, and these."""
    shard = params["table"].addressable_shards[0]
    ids = np.arange(params["table"].shape[0])[shard.index[0]]
    return ids, np.asarray(shard.data)


class Mapped(Form):
  """The same inside `shard_map`."""

  def transformation(self, tx: Any) -> Any:
    mean = optax.stateless(lambda grads, _: lax.pmean(grads, AXIS))
    return optax.chain(mean, tx)

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    return _mapped(self, super().step, params, state, *batch)


class RowSharded(Form):
  """XLA's own: each host has a range of rows."""

  split = P(AXIS)


class Rows(Form):
  """zenjax's row gradients of tables that every host has."""

  def transformation(self, tx: Any) -> Any:
    return optax.chain(zenjax.zen_sync(AXIS), zenjax.lazy_rows(tx))

  def gradient(self, loss: Any) -> Any:
    return zenjax.value_and_grad(loss, tables=self.model.tables)


class RowsTuned(Rows):
  """The same after `zenjax.tune`."""

  tuned = True


class RowsMapped(Rows):
  """The same inside `shard_map`."""

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    return _mapped(self, super().step, params, state, *batch)


def _mapped(form, step, params, state, *batch):
  """A step inside `shard_map`."""

  def local(*args):
    params, state, value = step(*args)
    return params, state, lax.pmean(value, AXIS)

  specs = zenjax.state_specs((params, state), AXIS)
  return jax.shard_map(
    local,
    mesh=form.mesh,
    in_specs=(*specs, *[P(AXIS) for _ in batch]),
    out_specs=(*specs, P()),
    check_vma=False,
  )(params, state, *batch)


class Sharded(Form):
  """zenjax's tables of which every host has the rows that it owns."""

  def __init__(self, mesh: Any, model: Model):
    self.mesh, self.model, self.loss = mesh, model, model.loss
    self.tx = zenjax.sharded_optimizer(model.tx, AXIS)
    chosen = model.tables
    self.params = zenjax.tables.shard(model.params, mesh, AXIS, tables=chosen)

  def gradient(self, loss: Any) -> Any:
    return zenjax.value_and_grad(loss, tables=self.model.tables)

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    found = zenjax.to_checkpoint(params)["table"]  # Ranges of rows.
    ids, rows = Form.rows_here(self, {"table": found.value})
    real = ids < found.num_rows
    return ids[real], rows[real]


class ShardedTuned(Sharded):
  """The same after `zenjax.tune`."""

  tuned = True


class ShardedMapped(Sharded):
  """The same inside `shard_map`."""

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    return _mapped(self, super().step, params, state, *batch)


class ByHand(Form):
  """`Sharded` as one would write it for this model: row `r` is with `r % n`.

  There are no rounds: `C` is what these batches need, and 5 % more, where it
  would not be known.
  """

  split = P(AXIS)

  def __init__(self, mesh: Any, model: Model):
    n, whole = mesh.size, model.params["table"]
    whole = np.pad(whole, ((0, -len(whole) % n), (0, 0)))
    table = whole.reshape(-1, n, whole.shape[1]).swapaxes(0, 1)
    given = model.params | {"table": table.reshape(whole.shape)}
    super().__init__(mesh, dataclasses.replace(model, params=given))
    each = [
      np.unique(x) for ids, _ in model.batches for x in ids.reshape(n, -1)
    ]
    most = max(np.bincount(x % n, minlength=n).max() for x in each)
    self.room, self.tx = int(1.05 * most), None

  def rows_here(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
    shard = params["table"].addressable_shards[0]
    slots = len(shard.data)
    ids = np.arange(slots) * self.mesh.size + shard.index[0].start // slots
    return ids, np.asarray(shard.data)

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    lies = ({"table": P(AXIS), "w": P()},) * 2
    return jax.shard_map(
      self._local,
      mesh=self.mesh,
      in_specs=(*lies, P(AXIS), P(AXIS)),
      out_specs=(*lies, P()),
      check_vma=False,
    )(params, state, *batch)

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
      return self.loss({"table": rows, "w": w}, where, y) / n

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
  "rows, tuned": RowsTuned,
  "rows, shard_map": RowsMapped,
  "sharded": Sharded,
  "sharded, tuned": ShardedTuned,
  "sharded, shard_map": ShardedMapped,
}
# Forms of some models alone; `BARE` is of `Model.bare`, `DDP` another program.
BARE, DDP = ("no tables", "no tables, shard_map"), "torch DDP"
_BARE = dict(zip(BARE, (Form, Mapped)))
ALONE = {"bags": {"by hand": ByHand}, "ngram": _BARE}


def after_a_step(params: Any, ids: Any, y: Any) -> tuple[Any, Any]:
  """The touched rows of `bags` and their values after a step, in float64."""
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


def _count_far(got: Any, want: Any, scale: Any) -> int:
  """Returns how many numbers are not near those wanted; NaN never is."""
  return int(np.sum(~(np.abs(got - want) <= _RELATIVE * scale)))


def _wrong_rows(form: Form, params: Any) -> int:
  """Numbers of `bags` that are not those of the first step in float64."""
  given = form.model.params["table"]
  if isinstance(form, ByHand):  # As they lie with their owners.
    given = given.reshape(form.mesh.size, -1, given.shape[1])
    given = given.swapaxes(0, 1).reshape(-1, given.shape[2])
  first = form.model.params | {"table": given}
  touched, want = after_a_step(first, *form.model.batches[0])
  here, rows = form.rows_here(params)
  at = np.searchsorted(touched, here)
  is_touched = touched[np.minimum(at, len(touched) - 1)] == here
  near = want[at[is_touched]], given[here[~is_touched]]
  far = _count_far(rows[is_touched], near[0], np.abs(want).max())
  return far + int((rows[~is_touched] != near[1]).sum())


class _Worker(served.Worker):
  """This host's share of the steps."""

  _models: dict[models.Setting, Model] = {}
  _losses: dict[tuple[models.Setting, bool], list[float]] = {}

  def build(self, form: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a form, checks its first steps, warms up, counts bytes."""
    made = models.Setting(**setting)
    if made not in self._models:
      self._models[made] = models.make(made, self.mesh.size)
    model, is_bare = self._models[made], form in BARE
    if is_bare:
      assert model.bare is not None
      model = model.bare
    if form == DDP:
      program = ddp.Program(model, self.mesh.size, jax.process_index())
      losses, wrong = [program()], 0
    else:
      of = (FORMS | ALONE.get(made.model, {}))[form](self.mesh, model)
      with jax.set_mesh(self.mesh):
        program = Program(of, self.compiler)
      losses = [program()]
      wrong = _wrong_rows(of, program.params) if made.model == "bags" else 0
    losses += [program() for _ in range(_CHECKED - 1)]
    if (made, is_bare) not in self._losses:
      self._losses[made, is_bare] = model.losses(_CHECKED)
    want = np.array(self._losses[made, is_bare])
    wrong += _count_far(np.array(losses, float), want, np.abs(want))
    program.run(_WARM_UP)
    if isinstance(program, Program) and program.form.tuned:
      with jax.set_mesh(self.mesh):
        program.tune()
      program.run()
    before = _received()
    program.run()
    facts = dict(
      received_bytes=(_received() - before) / STEPS,
      ideal_bytes=model.ideal_bytes(self.mesh.size),
    )
    if made.model == "bags":
      ids = model.batches[0][0]
      own = np.split(ids, self.mesh.size)[0]
      facts |= dict(
        distinct=float(len(np.unique(own))), union=float(len(np.unique(ids)))
      )
    self.cases.append(program.run)
    return {"wrong": wrong, "compile_s": program.compile_s, "facts": facts}


class Program:
  """Steps of a form, one after the other."""

  def __init__(self, form: Form, compiler: Any):
    split = NamedSharding(form.mesh, P(AXIS))
    place = lambda x: jax.make_array_from_callback(
      x.shape, split, lambda at: x[at]
    )
    batches = form.model.batches
    self._batches = [tuple(map(place, batch)) for batch in batches]
    self._turn, self.params = 0, form.params
    if form.tx is None:
      self._state = jax.tree.map(lambda x: x * 0 + _START, form.params)
    elif isinstance(form, Sharded):
      self._state = form.tx.init(form.params)
    else:
      lies = {x.shape: x.sharding for x in jax.tree.leaves(form.params)}
      everywhere = NamedSharding(form.mesh, P())
      state = jax.eval_shape(form.tx.init, form.params)
      # Row-wise state lies as the rows do.
      by_rows = {x[0]: lies[x] for x in lies if lies[x].spec == P(AXIS)}
      place_of = lambda x: lies.get(
        x.shape, by_rows.get(x.shape[:1] and x.shape[0], everywhere)
      )
      lies = jax.tree.map(place_of, state)
      self._state = jax.jit(form.tx.init, out_shardings=lies)(form.params)
    self.form, self._compiler = form, compiler
    self._compile()

  def _compile(self) -> None:
    given = self.params, self._state
    lies = jax.tree.map(lambda x: x.sharding, given)
    self._step, self.compile_s = harness.compiled(
      self.form.step,
      *given,
      *self._batches[0],
      compile=self._compiler.compile,
      donate_argnums=(0, 1),
      out_shardings=(*lies, NamedSharding(self.form.mesh, P())),
    )

  def tune(self) -> None:
    """Plans the next steps with what steps have counted, and compiles them."""
    self.params, self._state = zenjax.tune((self.params, self._state))
    self._compile()

  def __call__(self) -> Any:
    batch = self._batches[self._turn % len(self._batches)]
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


def _over_ideal(result: Any, peers: Any) -> float:
  del peers
  return result.facts["received_bytes"] / result.facts["ideal_bytes"]


COLUMNS = (
  table.fact("received\nMB", "received_bytes", ".2f", unit=1e6),
  table.Column("over\nideal", _over_ideal, ".2f"),
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
  model = options.model
  known = [*FORMS, *ALONE.get(model, {}), *[DDP] * (model == "dlrm")]
  names = harness.named("--variants", options.variants, known)
  fields = [field.name for field in dataclasses.fields(models.Setting)]
  setting = {name: getattr(options, name) for name in fields}
  options.rows = options.rows or models.MODELS[model][1]
  setting["rows"] = options.rows  # Which is saved, too.
  if DDP in names:
    ddp.require()
  what = f"{model}, {setting['rows']:,} rows"
  if model == "bags":
    what = "{rows:,} x {width}, {look_ups} look-ups".format(**setting)
  return campaign.cases(
    "campaigns.tables",
    options,
    "unlimited" if options.loopback else options.rate,
    what,
    {name: {"form": name, "setting": setting} for name in names},
    keep_memory=False,
  )


if __name__ == "__main__":
  served.main(_Worker)
