"""Scripts in plain `jit`: few lines change, and no number but by rounding.

Each trains forty steps on a table of 2048 rows of 8, beside itself without
zenjax. Losses are means over unevenly padded batches; `nnx` has in-batch
negatives, and two log the norm of the whole gradient.
"""

from collections.abc import Callable
import difflib
import inspect
from typing import Any, NamedTuple

import hlo
import jax
from jax.sharding import AxisType
import numpy as np
from one_exchange import moves
from one_exchange import of_table
from one_exchange import summed
import pytest
import scripts
from scripts import ROWS
from scripts import WIDTH

pytestmark = pytest.mark.usefixtures("as_optax_computes")

STEPS, BATCH, LOOK_UPS = 40, 32, 3

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
  """Lines that were changed or added, except for imports."""
  plain, ours = (inspect.getsource(x).splitlines()[1:] for x in (plain, ours))
  new = [x[2:] for x in difflib.ndiff(plain, ours) if x.startswith("+ ")]
  return sum(not x.strip().startswith(("import ", "from ")) for x in new)


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
