"""The timeline of a step: what overlaps, what is exposed, what is refused."""

import itertools
import math

import hypothesis
from hypothesis import strategies as st
from planning import each_by
from planning import Exchange
from planning import Option
from planning import Tensor
import pytest

from benchmarks.library import iteration_seconds
from benchmarks.planner import baselines
from benchmarks.planner import search as search_lib

_ZEN = Option("zen", 1.0, 3.0, 2.0, 100.0)
_PMEAN = Option("pmean", 0.0, 5.0, 0.0, 800.0)
_TWO = (
  Tensor("head", 400.0, 4.0, (_PMEAN, _ZEN)),
  Tensor("table", 900.0, 2.0, (_PMEAN, _ZEN)),
)


def test_a_step_that_overlaps():
  chosen = each_by(_TWO, ["zen", "zen"])
  # Backward ends at 4 and, with a mask in between, at 7; the link is busy from
  # 5 to 8 and from 8 to 11. What comes after waits for the link.
  assert iteration_seconds(_TWO, chosen) == 13.0
  assert list(baselines.bubbles(_TWO, chosen)) == []


def test_a_group_leaves_when_its_last_tensor_is_ready():
  assert iteration_seconds(_TWO, [Exchange(0, 2, _PMEAN)]) == 6.0 + 5.0


def test_bubbles():
  tensors = [Tensor(n, 1.0, 2.0, (Option("pmean", 0, 1.0),)) for n in "abc"]
  chosen = baselines.uncompressed(tensors)
  assert list(baselines.bubbles(tensors, chosen)) == [1, 2]


def _orders(chains, done=()):
  """Every order of pieces, of each chain the first first."""
  if not any(chains):
    yield done
  for k, chain in enumerate(chains):
    if chain:
      rest = [*chains[:k], chain[1:], *chains[k + 1 :]]
      yield from _orders(rest, (*done, chain[0]))


def test_no_order_of_compute_is_shorter():
  """As the timeline says of its rule: all orders of three exchanges' pieces."""
  orders = list(_orders(list(_chains())))
  orders = [order for order in orders if _feasible(order)]
  assert len(orders) > 50
  for seed in range(12):
    tensors, _ = search_lib.draw_small(seed, 3, 2)
    for names in itertools.product(range(2), repeat=3):
      if any(k >= len(t.options) for k, t in zip(names, tensors)):
        continue
      chosen = [t.options[k] for k, t in zip(names, tensors)]
      best = min(_run(order, tensors, chosen) for order in orders)
      assignment = [Exchange(j, j + 1, o) for j, o in enumerate(chosen)]
      assert iteration_seconds(tensors, assignment) == best


def _chains():
  yield [("backward", j) for j in range(3)]
  yield [("before", j) for j in range(3)]  # In order, as the link is.
  yield from ([("after", j)] for j in range(3))


def _feasible(order):
  at = {piece: k for k, piece in enumerate(order)}
  return all(
    at["backward", j] < at["before", j] < at["after", j] for j in range(3)
  )


def _run(order, tensors, chosen):
  """Compute in this order, no gap but for what is waited for."""
  compute = link = 0.0
  arrived = {}
  for kind, j in order:
    if kind == "backward":
      compute += tensors[j].backward_s
    elif kind == "before":
      compute += chosen[j].before_s
      link = arrived[j] = max(link, compute) + chosen[j].link_s
    else:
      compute = max(compute, arrived[j]) + chosen[j].after_s
  return compute


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.integers(0, 10_000))
def test_bounds_of_an_iteration(seed):
  tensors, groups = search_lib.draw_small(seed, 5, 2)
  for choices in baselines.groupings(groups):
    assignment = [options[-1] for options in choices]
    found_s = iteration_seconds(tensors, assignment)
    each = [exchange.option for exchange in assignment]
    compute_s = sum(t.backward_s for t in tensors) + sum(o.work_s for o in each)
    link_s = sum(option.link_s for option in each)
    first = tensors[: assignment[0].stop]
    ready_s = sum(t.backward_s for t in first) + each[0].before_s
    assert found_s >= max(compute_s, ready_s + link_s)
    assert found_s <= compute_s + link_s


def test_every_assignment_as_simulated():
  """The oracle runs all options at once, and finds what one at a time gives."""
  tensors, groups = search_lib.draw_small(7, 4, 3)
  best = min(
    iteration_seconds(tensors, assignment)
    for choices in baselines.groupings(groups)
    for assignment in itertools.product(*choices)
  )
  assignment, found = baselines.exhaustive(groups)
  assert found == best
  assert iteration_seconds(tensors, assignment) == best


def test_impossible_figures_are_refused():
  for value in (-1e-9, math.nan, math.inf):
    with pytest.raises(ValueError, match="`link_s` of option 'zen' must be"):
      Option("zen", 0.0, value)
    with pytest.raises(ValueError, match="`backward_s` of tensor 'x' must be"):
      Tensor("x", 4.0, value, (_ZEN,))
  for options in ((), (_ZEN, _ZEN)):
    with pytest.raises(ValueError, match="`options` of tensor 'x' must be one"):
      Tensor("x", 4.0, 0.0, options)


@pytest.mark.parametrize("ranges", [[], [(0, 1)], [(1, 2)], [(0, 2), (1, 2)]])
def test_assignments_hold_every_tensor_once(ranges):
  assignment = [Exchange(i, j, _ZEN) for i, j in ranges]
  with pytest.raises(ValueError, match="must hold each of 2 tensors once"):
    iteration_seconds(_TWO, assignment)
