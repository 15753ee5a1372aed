"""Scripts in plain `jit`: few lines change, and no number but by rounding.

Each trains a hundred steps on a table of 2048 rows of 8, beside itself without
zenjax. Losses are means over unevenly padded batches; `nnx` has in-batch
negatives, and two log the norm of the whole gradient.
"""

from collections.abc import Callable
import difflib
import inspect
from typing import Any, NamedTuple

import hlo
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
from one_exchange import moves
from one_exchange import of_table
from one_exchange import summed
import optax
import pytest
import scripts
from scripts import ROWS
from scripts import WIDTH

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

STEPS, BATCH, LOOK_UPS = 100, 32, 3

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",))


class Case(NamedTuple):
  """A script and what is expected of it.

  Attributes:
    plain: Without zenjax.
    ours: With it.
    lines: That may differ.
    sums: Parts of a table's size that the plain program sums.
  """

  plain: Callable[..., Any]
  ours: Callable[..., Any]
  lines: int = 3
  sums: int = ROWS * WIDTH


CASES = {
  "Flax, rows": Case(scripts.flax_rows, scripts.flax_rows_zenjax, 2),
  # Users' rows and items' are two look-ups, whose gradients XLA sums apart.
  "nnx": Case(
    scripts.nnx_dropout, scripts.nnx_dropout_zenjax, sums=2 * ROWS * WIDTH
  ),
}


def changed_lines(plain, ours) -> int:
  """Lines that were changed or added, where a script has both."""
  before, after = (
    [
      line
      for line in inspect.getsource(script).splitlines()[1:]
      if not line.strip().startswith(("import ", "from "))
    ]
    for script in (plain, ours)
  )
  matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
  return sum(
    max(i2 - i1, j2 - j1)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes()
    if tag != "equal"
  )


def batches():
  """Means of a hidden number of each row, of batches padded at the end."""
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal(ROWS).astype(np.float32)
  found = []
  for _ in range(STEPS):
    ids = (rng.zipf(1.3, (BATCH, LOOK_UPS)) % ROWS).astype(np.int32)
    mask = np.arange(BATCH) < rng.integers(BATCH // 2, BATCH)
    found.append((ids, hidden[ids].mean(1), mask.astype(np.float32)))
  return found


def compiled(lowered) -> str:
  """The text of a program, of Equinox too."""
  program = lowered.compile()
  text = getattr(program, "compiled", program).as_text()
  assert text is not None
  return text


@pytest.mark.parametrize("name", CASES)
def test_a_script_changes_in_few_lines_and_in_no_number(name, tmp_path):
  case = CASES[name]
  assert 0 < changed_lines(case.plain, case.ours) <= case.lines
  given, runs = batches(), []
  for number, script in enumerate((case.plain, case.ours)):
    logs, lowered = script(AUTO, given, tmp_path / str(number))
    runs.append((np.array(jax.device_get(logs)), compiled(lowered)))
  (want, plain), (got, ours) = runs
  assert len(got) == STEPS and np.ptp(want.reshape(STEPS, -1)[:, 0]) > 0.1
  # On one device the plain program parts as far from itself on eight.
  np.testing.assert_allclose(got, want, rtol=1e-5)
  plain, ours = hlo.collectives(plain), hlo.collectives(ours)
  # Sums of a table's size are gone; all others are there.
  assert summed(plain) - summed(ours) == case.sums
  assert summed(ours) < ROWS
  # Nothing is moved but what the plain program moves, and one exchange.
  look_ups = BATCH * LOOK_UPS // 8
  exchange = moves(of_table((ROWS, WIDTH), 8, look_ups=look_ups))
  assert moves(ours) == moves(plain) + exchange


def test_lines_are_counted():
  def one(x):
    return x + 1

  def other(x):
    import math

    y = math.sin(x)
    return y + 2

  assert changed_lines(one, one) == 0
  # One is added, one is changed, and an empty one is there.
  assert changed_lines(one, other) == 3


TURNS = 8


def in_turns(x):
  """`[B, ...]` as `[8, B / 8, ...]`, of which devices share every turn."""
  split = None
  if x.aval.sharding.mesh.are_all_axes_explicit:
    split = P("data", *[None] * x.ndim)
  cut = lax.reshape(
    x, (x.shape[0] // TURNS, TURNS, *x.shape[1:]), out_sharding=split
  )
  return jnp.moveaxis(cut, 1, 0)


def of_part(params, ids, targets):
  """A part of the mean over a batch of `TURNS` parts."""
  mesh = jax.typeof(ids).sharding.mesh
  split = P("data", None, None) if mesh.are_all_axes_explicit else None
  x = params["table"].at[ids].get(out_sharding=split).mean(1)
  found = (x @ params["dense"] + params["bias"])[:, 0]
  return jnp.mean((found - targets) ** 2) / TURNS


def added_up(params, *batch):
  """Gradients of the parts, added up in a scan."""
  both = jax.value_and_grad(of_part)

  def turn(total, part):
    return jax.tree.map(jnp.add, total, both(params, *part)), None

  parts = [in_turns(x) for x in batch]
  first = jax.eval_shape(both, params, *[x[0] for x in parts])
  zeros = lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding)
  return lax.scan(turn, jax.tree.map(zeros, first), parts)[0]


def of_unsummed(params, *batch):
  return added_up(zenjax.unreduced(params, "data"), *batch)


def of_scan(params, *batch):
  """Rows of a loss that adds up the parts."""

  def loss(params):
    turn = lambda total, part: (total + of_part(params, *part), None)
    parts = [in_turns(x) for x in batch]
    return lax.scan(turn, jnp.zeros(()), parts)[0]

  return zenjax.value_and_grad(loss)(params)


def drawn(**shapes) -> Any:
  rng = np.random.default_rng(0)
  return {
    name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    for name, shape in shapes.items()
  }


def accumulate(mesh, tx, value_and_grad, steps=3):
  """Losses and the compiled step."""
  rng = np.random.default_rng(0)
  params = drawn(table=(ROWS, WIDTH), dense=(WIDTH, 1))
  params["bias"] = np.zeros(1, np.float32)
  split = NamedSharding(mesh, P("data"))
  params = jax.device_put(params, NamedSharding(mesh, P()))
  state, losses, batch = tx.init(params), [], ()

  @jax.jit
  def step(params, state, *batch):
    loss, grads = value_and_grad(params, *batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  with jax.set_mesh(mesh):
    for _ in range(steps):
      ids = rng.integers(0, ROWS, (TURNS * BATCH, LOOK_UPS), np.int32)
      batch = ids, np.sin(ids.sum(1)).astype(np.float32)
      batch = jax.device_put(batch, split)
      params, state, loss = step(params, state, *batch)
      losses.append(loss)
    return jax.device_get(losses), compiled(step.lower(params, state, *batch))


@pytest.mark.parametrize("name", ["rows", "arrays"])
def test_of_eight_parts_one_exchange(name):
  """The scan over them holds sums of layers and of the loss, as plain ones."""
  mesh, arrays = AUTO if name == "rows" else EXPLICIT, name == "arrays"
  inner = optax.adagrad(0.1)
  want, plain = accumulate(mesh, inner, added_up)
  if arrays:
    tx, way = optax.chain(zenjax.zen_sync("data"), inner), of_unsummed
  else:
    tx = optax.chain(zenjax.zen_sync("data"), zenjax.lazy_rows(inner))
    way = of_scan
  got, ours = accumulate(mesh, tx, way)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  plain, ours = hlo.collectives(plain), hlo.collectives(ours)
  look_ups = None if arrays else TURNS * BATCH * LOOK_UPS // 8
  exchange = of_table((ROWS, WIDTH), 8, look_ups=look_ups)
  assert moves(ours) == moves(exchange)
  assert not moves(plain)
  layer, rest = WIDTH, 2  # The bias, and the loss.
  in_scan = lambda found: summed([x for x in found if x.inside == ("while",)])
  assert in_scan(plain) == summed(plain) == ROWS * WIDTH + layer + rest
  # The layer's gradient is summed once for arrays too, and a loop holds the
  # dense path of the table.
  dense_path = ROWS * WIDTH if arrays else 0
  assert in_scan(ours) == rest + (dense_path if arrays else layer)
  assert summed(ours) == layer + rest + dense_path


@pytest.mark.parametrize("name", ["rows", "arrays"])
def test_sums_of_integers_are_those_of_the_plain_program(name):
  mesh = AUTO if name == "rows" else EXPLICIT
  rng = np.random.default_rng(0)
  table = rng.integers(-99, 99, (ROWS, WIDTH)).astype(np.float32)
  ids = rng.zipf(1.3, 8 * BATCH) % ROWS - ROWS // 2  # Some from the end.
  values = rng.integers(-99, 99, (8 * BATCH, WIDTH)).astype(np.float32)
  sgd = optax.sgd(1.0)

  def loss(table, ids, values):
    spread = None if name == "rows" else P("data", None)
    return jnp.sum(table.at[ids].get(out_sharding=spread) * values)

  def step(tx, gradients):
    with jax.set_mesh(mesh):
      batch = jax.device_put((ids.astype(np.int32), values), P("data"))
      params = jax.device_put(table, P())
      state = tx.init(params)
      update = lambda p, *batch: tx.update(gradients(p, *batch), state, p)[0]
      new = jax.jit(lambda p, *b: optax.apply_updates(p, update(p, *b)))
      return new(params, *batch)

  rows = optax.chain(zenjax.zen_sync("data"), zenjax.lazy_rows(sgd))
  arrays = optax.chain(zenjax.zen_sync("data"), sgd)
  got = {
    "rows": lambda: step(rows, zenjax.rows.grad(loss)),
    "arrays": lambda: step(
      arrays,
      lambda p, *b: jax.grad(loss)(zenjax.unreduced(p, "data"), *b),
    ),
  }[name]()
  want = step(sgd, jax.grad(loss))
  np.testing.assert_array_equal(got, want)
  exact = table.astype(np.int64)
  np.subtract.at(exact, ids, values.astype(np.int64))
  np.testing.assert_array_equal(got, exact)
