"""No owner has more rows than an independent hash would give it.

`K` ids thrown on `n` owners one by one, each anywhere: by Bernstein's
inequality an owner gets more than `K / n + t` with probability at most
`exp(-t^2 / (2 (K / n + t / 3)))`, and any of them with `n` times that. `t` is
where this is 1e-6, so that of the few hundred sets here none should exceed it.
"""

import math

import jax.numpy as jnp
from kernel_cases import Layout
import numpy as np
import pytest

ROWS = 1 << 24
IDS = 4096  # of every set, or `place` would be compiled for each
SEEDS = range(12)
OWNERS = pytest.mark.parametrize("n", [2, 8, 16, 64])


def most(n: int, ids: int = IDS, chance: float = 1e-6) -> float:
  """Rows of the fullest owner, at most."""
  odds, mean = math.log(n / chance), ids / n
  return mean + odds / 3 + math.sqrt((odds / 3) ** 2 + 2 * odds * mean)


def id_sets(n: int) -> dict[str, np.ndarray]:
  """Distinct ids as batches, samplers and other hashes make them."""
  rng = np.random.default_rng(n)
  step = np.arange(IDS)
  zipf = np.unique(np.minimum(rng.zipf(1.05, 60 * IDS) - 1, ROWS - 1))
  sets = {"zipf": zipf[:IDS], "any": rng.choice(ROWS, IDS, replace=False)}
  for start in (0, 12_345):
    sets[f"contiguous from {start}"] = start + step
  for stride in (3, 32, 1000, 4095, n, 32 * n):
    sets[f"every {stride}th"] = 7 + stride * step
  for residue in (0, 1, n - 1):
    many = rng.choice(ROWS // n, IDS, replace=False)
    sets[f"{residue} mod {n}"] = n * many + residue
  return sets


def loads(layout: Layout, ids: np.ndarray) -> np.ndarray:
  """Rows of each owner, `[n]`."""
  group, _ = layout.place(jnp.asarray(ids, jnp.int32))
  return np.bincount(np.asarray(group), minlength=layout.groups)


def exceeding(n: int) -> list[str]:
  """Sets, by name and seed, of which an owner has more than `most`."""
  found = []
  for name, ids in id_sets(n).items():
    assert len(np.unique(ids)) == IDS and 0 <= ids.min() <= ids.max() < ROWS
    for seed in SEEDS:
      layout = Layout(num_rows=ROWS, groups=n, seed=seed)
      if loads(layout, ids).max() > most(n):
        found.append(f"{name}, seed {seed}")
  return found


def aimed(n: int, lanes: int) -> np.ndarray:
  """Ids that the hash of seed 0 gives to one owner, `lanes` of each word."""
  slots = 32 * np.arange(IDS // lanes)[:, None] + np.arange(lanes)
  group, slot = jnp.zeros(IDS, jnp.int32), jnp.asarray(slots.reshape(-1))
  layout = Layout(num_rows=32 * IDS * n, groups=n)
  return np.asarray(layout.row(group, slot.astype(jnp.int32)))


def fullest_of_aimed(n: int, lanes: int = 1) -> int:
  """The fullest owner of any other seed, of ids aimed at one of seed 0."""
  ids = aimed(n, lanes)
  layouts = [Layout(num_rows=ROWS, groups=n, seed=s) for s in (1, 2, 77)]
  return max(int(loads(layout, ids).max()) for layout in layouts)


def fullest_of_first_rows(n: int) -> int:
  """Of one row of each of many tables of 40 rows, exchanged together."""
  words, total = 0, np.zeros(n, int)
  for _ in range(IDS // 16):
    layout = Layout(num_rows=40, groups=n, hash_offset=words)
    total += loads(layout, np.arange(1))
    words += layout.words
  return int(total.max())


@OWNERS
def test_no_set_of_ids_is_worse_balanced_than_by_an_independent_hash(n):
  assert not exceeding(n)


@OWNERS
def test_contiguous_ids_are_balanced_to_a_block_at_each_end(n):
  for start in (0, 5, 12_345):
    layout = Layout(num_rows=ROWS, groups=n)
    counts = loads(layout, start + np.arange(IDS))
    assert counts.max() <= IDS // n + 2 and counts.min() >= IDS // n - 2


@OWNERS
def test_a_seed_draws_another_hash(n):
  assert fullest_of_aimed(n) <= most(n)
  # The shifts within a word are no secret: ids made of them move together.
  assert most(n) < fullest_of_aimed(n, lanes=32) <= 32 * most(n, IDS // 32)


@OWNERS
def test_first_rows_of_tables_do_not_meet(n):
  assert fullest_of_first_rows(n) <= most(n, IDS // 16)
