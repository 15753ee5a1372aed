"""The planner's search: as good as trying all, and never worse than others."""

from itertools import combinations
import json
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from benchmarks import relaxed
from benchmarks import run
from benchmarks import search as search_benchmark
from benchmarks import steps_drawn
from benchmarks.planner import baselines
from benchmarks.planner import exhaustive
from zenjax._src.planner import groups
from zenjax._src.planner import plan_search
from zenjax._src.planner.plan_search import search
from zenjax._src.planner.timeline import each_by
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import simulate
from zenjax._src.planner.timeline import Tensor


@pytest.mark.parametrize("part", range(4))
def test_equals_exhaustive_tensor_by_tensor(part):
  for seed in range(25 * part, 25 * part + 25):
    tensors, _ = steps_drawn.small(seed, 1 + seed % 6, 1 + seed % 4)
    found = search(tensors, width=None)
    best, best_s = exhaustive.exhaustive(tensors)
    assert found.timeline.iteration_s == best_s
    assert simulate(tensors, best).iteration_s == best_s
    assert simulate(tensors, found.assignment) == found.timeline
    assert found.exact and found.bound_s == best_s
    greedy = simulate(tensors, baselines.espresso(tensors))
    assert best_s <= greedy.iteration_s


@pytest.mark.parametrize("part", range(4))
def test_equals_exhaustive_with_groups(part):
  for seed in range(25 * part, 25 * part + 25):
    tensors, merged = steps_drawn.small(seed, 1 + seed % 6, 1 + seed % 3)
    found = search(tensors, merged, width=None)
    best, best_s = exhaustive.exhaustive(tensors, merged)
    assert found.timeline.iteration_s == best_s
    assert simulate(tensors, best).iteration_s == best_s
    assert simulate(tensors, found.assignment) == found.timeline
    assert found.exact
    cut = baselines.mergecomp(tensors, merged)
    assert cut is None or best_s <= simulate(tensors, cut).iteration_s
    assert best_s <= search(tensors, width=None).timeline.iteration_s


def test_equals_exhaustive_where_nothing_overlaps():
  for seed in range(30):
    tensors, merged = steps_drawn.small(seed, 1 + seed % 5, 3)
    for cost in (None, merged):
      found = search(tensors, cost, overlap="none", width=None)
      _, best_s = exhaustive.exhaustive(tensors, cost, overlap="none")
      assert found.timeline.iteration_s == best_s and found.exact


def test_few_states_are_a_bound_and_an_answer():
  inexact = 0
  for seed in range(20):
    tensors, merged = steps_drawn.small(seed, 12, 4)
    for cost in (None, merged):
      best_s = search(tensors, cost, width=None).timeline.iteration_s
      for width in (1, 3):
        found = search(tensors, cost, width=width)
        assert found.bound_s <= best_s <= found.timeline.iteration_s
        assert found.exact <= (found.timeline.iteration_s == best_s)
        inexact += not found.exact
  assert inexact  # Else nothing was shown.


def test_hundreds_of_tensors_are_near_a_bound_from_elsewhere():
  for seed, sparse in ((0, 9), (1, 150), (2, 150)):
    tensors, merged = steps_drawn.model(seed, 150, sparse)
    found = search(tensors)
    relaxed_s = relaxed.relaxed_s(tensors)
    assert relaxed_s * (1 - 1e-9) <= found.timeline.iteration_s
    assert found.timeline.iteration_s <= 1.005 * relaxed_s
    assert found.bound_s <= found.timeline.iteration_s
    grouped = search(tensors, merged).timeline.iteration_s
    assert grouped <= found.timeline.iteration_s
    greedy = simulate(tensors, baselines.espresso(tensors)).iteration_s
    assert found.timeline.iteration_s <= greedy


def test_no_assignment_is_under_the_relaxed_one():
  for seed in range(10):
    tensors, _ = steps_drawn.small(seed, 5, 3)
    _, best_s = exhaustive.exhaustive(tensors)
    assert relaxed.relaxed_s(tensors) <= best_s * (1 + 1e-9)


def test_groups_are_asked_for_one_by_one():
  """Any function will do; what it leaves out is not done."""
  for seed in range(10):
    tensors, merged = steps_drawn.small(seed, 6, 3)

    def pairs(i, j, name, merged=merged):
      assert 0 <= i < j - 1 < 6
      return merged(i, j, name) if j - i == 2 and name != "s1" else None

    found = search(tensors, pairs, width=None)
    _, best_s = exhaustive.exhaustive(tensors, pairs)
    assert found.timeline.iteration_s == best_s
    for first, stop, option in found.assignment:
      assert stop - first == 1 or (stop - first == 2 and option.name != "s1")
    whole = search(tensors, lambda i, j, name, m=merged: m(i, j, name))
    table = search(tensors, merged)
    assert whole.assignment == table.assignment


def test_merged_pays_once_what_is_paid_once():
  once = {"a": Option("a", 1.0, 2.0, 3.0, 4.0)}
  two = Option("a", 2.0, 3.0, 4.0, 10.0)
  other = Option("b", 1.0)
  tensors = [
    Tensor("x", 8.0, 0.0, (two, other)),
    Tensor("y", 8.0, 0.0, (two,)),
    Tensor("z", 8.0, 0.0, (other,)),
  ]
  merged = groups.Merged(tensors, once)
  assert merged(0, 2, "a") == Option("a", 3.0, 4.0, 5.0, 16.0)
  assert merged(1, 3, "a") is None  # z cannot
  assert merged(0, 2, "b") is None  # b cannot merge
  table = merged.ending_at(3, "a")
  assert (table == groups.NEVER).all()
  assert merged.ending_at(2, "a").tolist() == [[3.0, 4.0, 5.0], [2.0, 3.0, 4.0]]
  with pytest.raises(ValueError, match="`once` of 'a' must be no more .* 'x'"):
    groups.Merged(tensors, {"a": Option("a", 2.5)})


def test_splits_numbers_evenly():
  """Why no algorithm is fast everywhere: to plan can be to do this."""
  numbers = [31, 27, 22, 18, 17, 13, 9, 7]
  sums = {sum(part) for k in range(9) for part in combinations(numbers, k)}
  even = min(max(x, sum(numbers) - x) for x in sums)
  tensors = [
    Tensor("long", 0.0, 0.0, (Option("link", 0.0, 200.0),)),
    *(
      Tensor(str(x), x, 0.0, (Option("link", 0, x), Option("work", x)))
      for x in numbers
    ),
    Tensor("last", 0.0, 200.0, (Option("none"),)),
  ]
  found = search(tensors, width=None)
  assert found.timeline.iteration_s == 200.0 + even and found.exact


def test_no_tensors():
  found = search([])
  assert found.assignment == () and found.timeline.iteration_s == 0.0
  assert found.exact


def test_width_and_overlap_are_checked():
  tensors, _ = steps_drawn.small(0, 2, 2)
  with pytest.raises(ValueError, match="`width` must be positive.*got 0"):
    search(tensors, width=0)
  with pytest.raises(ValueError, match="`overlap` must be.*got 'some'"):
    search(tensors, overlap="some")  # type: ignore[arg-type]


def test_too_many_to_try_are_refused():
  tensors, _ = steps_drawn.small(0, 40, 3)
  with pytest.raises(ValueError, match="use `search`"):
    exhaustive.exhaustive(tensors)


def test_espresso_leaves_what_is_sent_before_a_bubble():
  """Its first property, and the order of its second."""
  dense, sparse = Option("pmean", 0, 1.0), Option("zen", 0.25, 0.25)
  early = Tensor("early", 9.0, 0.0, (dense, Option("zen", 0.0, 0.5)))
  last = Tensor("last", 5.0, 4.0, (dense, sparse))
  names = [e.option.name for e in baselines.espresso([early, last])]
  assert names == ["pmean", "zen"]
  # Of equal size: the one that is ready last is taken first, and the other then
  # has nothing to gain.
  pair = [Tensor(n, 4.0, 1.0, (dense, sparse)) for n in "ab"]
  assert [e.option.name for e in baselines.espresso(pair)] == ["pmean", "zen"]


def test_espresso_is_not_exact():
  """A greedy that always were would be no baseline."""
  worse = 0
  for seed in range(30):
    tensors, _ = steps_drawn.small(seed, 6, 4)
    greedy = simulate(tensors, baselines.espresso(tensors)).iteration_s
    thrice = baselines.espresso(tensors, passes=3)
    assert simulate(tensors, thrice).iteration_s <= greedy
    worse += greedy > 1.01 * search(tensors, width=None).timeline.iteration_s
  assert worse


def test_one_state_is_never_worse_than_espresso():
  """The search sets out from what the greedy finds, found in another way."""
  for seed in range(15):
    for tensors, _ in (
      steps_drawn.small(seed, 10, 4),
      steps_drawn.model(seed, 30, 15),
    ):
      edges = groups.edges(tensors)
      chosen = plan_search.by_size(edges, tensors)
      names = [edges.names[o] for o in chosen]
      start = simulate(tensors, each_by(tensors, names)).iteration_s
      greedy = simulate(tensors, baselines.espresso(tensors)).iteration_s
      assert start == greedy
      assert search(tensors, width=1).timeline.iteration_s <= greedy


def test_mergecomp_halves():
  """With one scheme of affine cost, its halving finds the best cut."""
  for seed in range(20):
    tensors, merged = steps_drawn.small(seed, 20, 1)
    cuts = [baselines.cut_at(tensors, merged, cut) for cut in range(2, 19)]
    cuts.append(baselines.cut_at(tensors, merged, 20))
    seconds = [simulate(tensors, cut).iteration_s for cut in cuts if cut]
    found = baselines.mergecomp(tensors, merged)
    assert found is not None and len(found) <= 2
    assert simulate(tensors, found).iteration_s <= 1.02 * min(seconds)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.integers(0, 10_000), st.sampled_from([0.25, 0.5, 2.0]))
def test_a_faster_link_is_never_worse(seed, scale):
  tensors, _ = steps_drawn.small(seed, 6, 3)
  times = []
  for factor in sorted((1.0, scale)):
    scaled = [
      Tensor(
        t.name,
        t.bytes,
        t.backward_s,
        tuple(
          Option(o.name, o.before_s, o.link_s * factor, o.after_s)
          for o in t.options
        ),
      )
      for t in tensors
    ]
    times.append(search(scaled, width=None).timeline.iteration_s)
  assert times[0] <= times[1]
  assert times[1] <= times[0] * max(scale, 1 / scale)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.integers(0, 10_000), st.data())
def test_no_assignment_is_better(seed, data):
  tensors, merged = steps_drawn.small(seed, 9, 3)
  drawn = np.random.default_rng(data.draw(st.integers(0, 10_000)))
  assignment = []
  while (at := assignment[-1].stop if assignment else 0) < len(tensors):
    stop = int(drawn.integers(at + 1, len(tensors) + 1))
    name = f"s{drawn.integers(3)}"
    exchange = groups.exchange(tensors, merged, at, stop, name)
    if exchange is not None:
      assignment.append(exchange)
  iteration = simulate(tensors, assignment).iteration_s
  found = search(tensors, merged, width=None)
  assert found.timeline.iteration_s <= iteration
  assert math.isfinite(iteration)


def test_benchmark_keeps_samples_and_tells_a_miss(tmp_path, monkeypatch):
  path = tmp_path / "search.json"
  command = ["search", "--instances", "4", "--tensors", "12", "--repeats", "2"]
  assert run.main([*command, "--json", str(path)]) == 0
  saved = json.loads(path.read_text())
  assert len(saved["small"]) == 8 and "numpy" in saved["environment"]
  assert all(
    one["found_s"]["search"] == one["best_s"] for one in saved["small"]
  )
  assert all(len(one["wall_s"]) == 2 for one in saved["large"])

  def one_by_one(tensors, cost=None, *, width=16):
    del cost
    return search(tensors, overlap="none", width=width)

  monkeypatch.setattr(search_benchmark, "search", one_by_one)
  assert run.main(command) == 1
