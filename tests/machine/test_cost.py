"""Predicted times, and what `scheme="auto"` makes of them."""

from typing import Any

import cases
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax
from zenjax._src.machine import cost
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_options

SLOW = zenjax.planner.Link(bandwidth=25e6, latency_s=1e-4)
# The five workloads of the Zen paper, at 8 devices: rows, width, density in per
# cent, growth.
PAPER = {
  "lm1b-lstm": (793_470, 512, 1.13, 4.5),
  "criteo-deepfm": (13_375_000, 16, 2.80, 4.6),
  "iwslt-nmt": (218_750, 512, 2.47, 4.7),
  "squad-bert": (30_522, 768, 1.06, 5.5),
  "criteo1tb-dlrm": (4_194_304, 128, 3.3, 4.4),
}


def table(rows: int, width: int) -> buffer_sizes.Table:
  dtype = jnp.dtype(jnp.float32)
  return buffer_sizes.Table(
    name="t", num_rows=rows, width=width, dtype=dtype, wire_dtype=dtype
  )


def context(n: int) -> Context:
  return Context(axes=("data",), sizes=(n,), mean=True)


def profile(rows: float, growth: float, n: int = 8) -> zenjax.planner.Profile:
  return zenjax.planner.Profile(
    rows=rows, fullest=rows, union=rows * growth, devices=n
  )


def seconds(
  scheme: str, n: int, link: zenjax.planner.Link, **kwargs: Any
) -> float:
  found = cost.predict(
    scheme, table(1000, 8), profile(10, 4), context(n), link, **kwargs
  )
  return found.seconds


def test_dense_is_a_ring():
  n, size = 8, 1000 * 8 * 4
  want = 2 * (n - 1) * 1e-4 + 2 * (n - 1) / n * size / 25e6
  assert seconds("dense", n, SLOW) == pytest.approx(want)
  assert seconds("ring", n, SLOW) == pytest.approx(want)


def test_all_gather_grows_with_the_devices():
  n, row = 8, 8 * 4 + 4
  want = (n - 1) * (1e-4 + 10 * row / 25e6)
  assert seconds("all_gather", n, SLOW) == pytest.approx(want)


def test_recursive_doubling_sends_the_unions():
  row = 8 * 4 + 4
  rows = 10 * (1 + 4 ** (1 / 3) + 4 ** (2 / 3))
  want = 3 * 1e-4 + rows * row / 25e6
  assert seconds("recursive_doubling", 8, SLOW) == pytest.approx(want, rel=1e-5)


def test_columns_are_balanced_and_ranges_are_not():
  t, c = table(100_000, 128), context(8)
  skewed = zenjax.planner.Profile(
    rows=1130, fullest=1130, union=5000, devices=8, skew=(6.0, 6.0)
  )
  columns = cost.predict("zen", t, skewed, c, SLOW, column_groups=8)
  ranges = cost.predict("split_all_gather", t, skewed, c, SLOW)
  ideal = 7 / 8 * (1130 + 5000) * 512
  assert columns.received == pytest.approx(ideal, rel=0.02)
  assert ranges.received == pytest.approx(6 * ideal, rel=0.03)


def test_ranges_need_a_skew():
  with pytest.raises(ValueError, match=r"profile\.skew.*split_all_gather"):
    seconds("split_all_gather", 8, SLOW)


def test_measured_collectives_replace_the_formula():
  curve = ((1e3, 1e-3), (1e6, 5e-3))
  link = zenjax.planner.Link(
    bandwidth=1.0, latency_s=1.0, curves={("all_gather", 8): curve}
  )
  assert link.seconds("all_gather", 8, 10) == 1e-3
  assert link.seconds("all_gather", 8, 500_500) == pytest.approx(3e-3)
  beyond = 5e-3 + 4e-3 / (1e6 - 1e3) * 1e6
  assert link.seconds("all_gather", 8, 2e6) == pytest.approx(beyond)
  assert link.seconds("all_gather", 4, 10) == 3 + 10


def test_local_work_is_added():
  work = zenjax.planner.Work(mask_byte=1e-9, mask_row=1e-6, move_row=1e-5)
  link = zenjax.planner.Link(bandwidth=1e18, latency_s=0.0, work=work)
  row = 8 * 4
  moved = 7 * 10 * (row + 4) / row * 1e-5
  want = 32_000e-9 + 1000e-6 + moved
  assert seconds("all_gather", 8, link) == pytest.approx(want)
  assert seconds("dense", 8, link) < 1e-9


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("n", [16, 64, 128])
def test_zen_leads_by_volume_from_sixteen_devices(name, n):
  """Theorem 1: Balanced Parallelism beats Hierarchical Centralization."""
  rows, width, density, growth = PAPER[name]
  measured = profile(rows * density / 100, growth)
  link = zenjax.planner.Link(bandwidth=1e9, latency_s=0.0)
  best = cost.choices(table(rows, width), measured, context(n), link)[0]
  assert best.scheme == "zen"


def test_union_growth_is_a_power_law():
  assert profile(10, 4, n=8).union_of(8) == pytest.approx(40)
  assert profile(10, 4, n=8).union_of(64) == pytest.approx(160)
  # One device shows no growth: it is not taken for none.
  assert profile(10, 1, n=1).union_of(1) == 10
  assert profile(10, 1, n=1).union_of(16) == pytest.approx(10 * 16**0.75)


# --- scheme="auto" ----------------------------------------------------------

SPARSE = {"few": True, "all": True, "bias": False}
SHAPES = {"few": (3000, 16), "all": (700, 16), "bias": (8,)}


def stacks(seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  drawn = {k: rng.standard_normal((8, *s)) for k, s in SHAPES.items()}
  drawn = {k: x.astype(np.float32) for k, x in drawn.items()}
  ids = [rng.permutation(3000)[:30] for _ in range(8)]
  return drawn | {"few": cases.keep(drawn["few"], ids)}


def trained(**options: Any) -> steps.Trainer:
  tx = zenjax.zen_sync("data", sparse=SPARSE, **options)
  params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
  trainer = steps.Trainer(tx, params, runners.mesh(8))
  for seed in range(2):
    given = stacks(seed)
    for name, got in trainer(given).items():
      oracle.check(got, given[name], label=name)
  return trainer


def test_auto_chooses_for_every_leaf_by_what_was_measured():
  measured = zenjax.planner.profile(trained().state)
  assert measured["few"].rows == pytest.approx(30)
  assert 150 < measured["few"].union < 240
  trainer = trained(
    scheme="auto", tuning=zenjax.Tuning(link=SLOW, profile=measured)
  )
  found = zenjax.stats(trainer.state)
  assert found["all"]["wire_bytes"] == found["all"]["dense_bytes"]
  assert found["few"]["wire_bytes"] < found["few"]["dense_bytes"] / 3
  report = zenjax.report(trainer.state)
  assert "auto, predicted ms for all: dense" in report
  assert "auto, predicted ms for few: " in report
  # A leaf that nobody looks at has no density, and nothing to pin.
  assert set(zenjax.planner.profile(trainer.state)) == {"few"}
  assert set(zenjax.advise(trainer.state)) == {"few"}


def test_auto_carries_rows_whatever_is_predicted():
  """A dense sum would forget the rows that wait."""
  dense = profile(3000, 1)
  tx = zenjax.zen_sync(
    "data",
    sparse=True,
    scheme="auto",
    on_overflow="carry",
    tuning=zenjax.Tuning(profile={"t": dense}),
    capacities={"t": (400, 3000)},
  )
  trainer = steps.Trainer(tx, {"t": jnp.zeros((3000, 4))}, runners.mesh(8))
  rng = np.random.default_rng(0)
  stack = rng.standard_normal((8, 3000, 4)).astype(np.float32)
  ids = [rng.permutation(3000)[:30] for _ in range(8)]
  stack = cases.keep(stack, ids)
  oracle.check(trainer({"t": stack})["t"], stack)
  assert zenjax.stats(trainer.state)["t"]["went_dense"] == 0


@pytest.mark.parametrize(("part", "chosen"), [(0.9, "dense"), (0.7, "sparse")])
def test_small_gains_are_left_alone(part, chosen):
  """A gather that takes a part of what the sum takes, and nothing faster."""
  times = {"all_reduce": 1.0, "all_gather": part}
  times |= {"all_to_all": 5.0, "collective_permute": 5.0}
  link = zenjax.planner.Link(
    bandwidth=1.0,
    latency_s=1.0,
    curves={(op, 2): ((1.0, s),) for op, s in times.items()},
  )
  options = sync_options.check(
    "data",
    sparse=True,
    scheme="auto",
    tuning=zenjax.Tuning(link=link, profile={"t": profile(2, 2, n=2)}),
  )
  (choice,) = leaf_tables.choose([table(64, 4)], options, context(2))
  assert choice.predictions[0].scheme == "all_gather"
  assert choice.scheme == {"dense": "dense", "sparse": "all_gather"}[chosen]


@pytest.mark.parametrize(
  ("growth", "chosen"), [(3.6, "all_gather"), (2, "zen")]
)
def test_of_equals_the_fewest_collectives(growth, chosen):
  """At 4 devices zen carries (1 + growth) / 4 of what a gather does."""
  link = zenjax.planner.Link(bandwidth=1e9, latency_s=0.0)
  few = profile(1000, growth, n=4)
  options = sync_options.check(
    "data",
    sparse=True,
    scheme="auto",
    tuning=zenjax.Tuning(link=link, profile={"t": few}),
  )
  (choice,) = leaf_tables.choose([table(100_000, 256)], options, context(4))
  fastest, *_ = choice.predictions
  assert fastest.scheme in ("zen", "recursive_doubling")
  assert choice.scheme == chosen


def test_several_levels():
  """Of 4 hosts of 8 devices each link between hosts carries an eighth."""
  size = 1000 * 8 * 4.0
  both = Context(axes=("host", "device"), sizes=(4, 8), mean=True)
  network = zenjax.planner.Link(bandwidth=1e9, latency_s=1e-3)
  fabric = zenjax.planner.Link(bandwidth=1e12, latency_s=0.0)
  links = {"host": network, "device": fabric}
  found = cost.predict("dense", table(1000, 8), profile(10, 4), both, links)
  within = 2 * 7 / 8 * size / 1e12
  between = 2 * 3 / 4 * size / 8 / 1e9
  assert found.wire_s == pytest.approx(within + between + 6e-3)
  assert found.once_s == pytest.approx(6e-3)
  # A link for all is that of every axis.
  same = dict.fromkeys(both.axes, network)
  for scheme in ("dense", "zen", "all_gather"):
    one, by_axis = (
      cost.predict(scheme, table(1000, 8), profile(10, 4), both, link)
      for link in (network, same)
    )
    assert one == by_axis


def test_what_a_group_pays_once():
  link = zenjax.planner.Link(bandwidth=1e9, latency_s=1e-3)
  for scheme in cost.CANDIDATES:
    found = cost.predict(
      scheme, table(1000, 8), profile(10, 4), context(8), link
    )
    assert 0 < found.once_s < found.wire_s
    assert found.once_s == pytest.approx(
      found.wire_s - found.received / link.bandwidth
    )


_TEXT: Any = "1gbit"


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (
      lambda: zenjax.planner.Link(bandwidth=_TEXT, latency_s=0.0),
      "a number.*1gbit",
    ),
    (
      lambda: zenjax.planner.Link(bandwidth=0.0, latency_s=0.0),
      "must be positive",
    ),
    (
      lambda: zenjax.planner.Link(bandwidth=1e9, latency_s=-1.0),
      "be 0 or more",
    ),
    (lambda: zenjax.planner.Work(mask_byte=-1.0), "`mask_byte`.*be 0 or more"),
    (lambda: _with_curve("allreduce", ((0.0, 1.0),)), "`curves`.*'allreduce'"),
    (
      lambda: _with_curve("all_reduce", ((2.0, 1.0), (1.0, 2.0))),
      "ascending bytes",
    ),
  ],
)
def test_a_link_that_none_can_be_is_refused(make, said):
  with pytest.raises((TypeError, ValueError), match=said):
    make()


def _with_curve(op, curve):
  return zenjax.planner.Link(
    bandwidth=1e9, latency_s=0.0, curves={(op, 2): curve}
  )
