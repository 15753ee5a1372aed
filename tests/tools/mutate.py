"""Breaks the library in one place at a time: does a test fail?

    python tests/tools/mutate.py [--only WORD ...] [-- ARGUMENT OF PYTEST ...]

Each break replaces a text of a copy of the checkout and runs the tests of that
place, up to the first that fails. A text that no longer stands there exactly
once is an error: mend the table with the code. Exits with the number of breaks
that no test noticed and of texts that are gone.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_COPIED = (
  *("benchmarks", "docs", "examples", "kernels", "tests", "zenjax"),
  *("pyproject.toml", "README.md"),
)


class Break(NamedTuple):
  """One wrong line.

  Attributes:
    name: What goes wrong.
    file: Where, from the root.
    old: Stands there once.
    new: Stands there instead.
    tests: Below `tests`, separated by spaces.
  """

  name: str
  file: str
  old: str
  new: str
  tests: str


_CORE = "zenjax/_src/core/"
_SCHEMES = "zenjax/_src/schemes/"
_SYNC = "zenjax/_src/sync/"
_ROWS = "zenjax/_src/rows/"
_SPARSIFY = "zenjax/_src/sparsify/"
_TRAINING = "zenjax/_src/training/"
_PLANNER = "zenjax/_src/planner/"

BREAKS = (
  Break(
    "a row's owner is not where its slot says",
    _CORE + "partition.py",
    "j = group - shift + 2 * self.groups",
    "j = group - shift + 2 * self.groups + 1",
    "core",
  ),
  Break(
    "owners are not hashed",
    _CORE + "partition.py",
    "mixed = fmix32(key)",
    "mixed = key",
    "core",
  ),
  Break(
    "an id that stands twice counts once",
    _ROWS + "sparse_rows.py",
    'return zeros.at[self.indices].add(self.values, mode="drop")',
    'return zeros.at[self.indices].set(self.values, mode="drop")',
    "core",
  ),
  Break(
    "ids beyond the table name its last row",
    _ROWS + "sparse_rows.py",
    "for bound in (low, num_rows))",
    "for bound in (low, num_rows - 1))",
    "core",
  ),
  Break(
    "a union keeps rows beyond its room in part",
    "kernels/reference.py",
    "limit = jnp.minimum(limit, found[capacity])",
    "limit = jnp.minimum(limit, found[capacity] + 1)",
    "kernels schemes sync/test_rounds.py sync/test_overflow.py",
  ),
  Break(
    "a sorted union holds a row twice",
    "kernels/reference.py",
    "new = (ordered != before) & (ordered < num_slots)",
    "new = ordered < num_slots",
    "kernels schemes",
  ),
  Break(
    "written rows are added to those that were there",
    "kernels/reference.py",
    "return indexing.put(table, row, values)",
    "return indexing.add(table, row, values)",
    "kernels schemes",
  ),
  Break(
    "a push that overflowed counts as complete too far",
    _SCHEMES + "zen.py",
    "jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)",
    "jnp.where(remaining > capacity, slots[:, -1] + 2, num_slots)",
    "sync/test_overflow.py sync/test_rounds.py schemes",
  ),
  Break(
    "means are sums",
    _SCHEMES + "zen.py",
    "values = context.scaled(part.rows).astype(plan.table.dtype)",
    "values = part.rows.astype(plan.table.dtype)",
    "schemes",
  ),
  Break(
    "both ends of a pair add in their own order",
    _SCHEMES + "recursive_doubling.py",
    "jax.tree.map(lambda a, b: jnp.where(upper, b, a), own, came),",
    "own,",
    "schemes",
  ),
  Break(
    "sums of counts wrap around",
    _CORE + "wire.py",
    "return jnp.where(about > most * (1 - 2.0**-20), most, total)",
    "return total",
    "sync/test_rounds.py",
  ),
  Break(
    "a few rows of a table look full too soon",
    _SCHEMES + "dense_sum.py",
    "return count >= int(rows.shape[0] * _NEARLY_ALL)",
    "return count >= int(rows.shape[0] * 0.0)",
    "schemes/test_dense.py",
  ),
  Break(
    "what is left to push is not seen",
    _SYNC + "exchange.py",
    "left=jnp.maximum(jnp.max(tally.fullest) - progress.sent, 0),",
    "left=jnp.zeros_like(progress.left),",
    "sync/test_rounds.py sync/test_overflow.py schemes/test_properties.py",
  ),
  Break(
    "a table that travels dense returns at break-even",
    _SYNC + "exchange.py",
    "stay = _above(push, pull, plan, scheme, context, _RETURN)",
    "stay = enter",
    "sync/test_rounds.py",
  ),
  Break(
    "carried rows are forgotten",
    _SYNC + "gradient_tree.py",
    "waits = jnp.where(_done(first, plan), zero, late + table)",
    "waits = jnp.where(_done(first, plan), zero, table)",
    "sync/test_overflow.py core/test_names.py sync/test_options.py",
  ),
  Break(
    "a leaf may be synchronized twice",
    _SYNC + "chains.py",
    "if not axes or not both:",
    "if True:",
    "sync/test_once.py",
  ),
  Break(
    "any hash_seed will do",
    _SYNC + "sync_options.py",
    "if not isinstance(seed, int) or not 0 <= seed < 2**32:",
    "if not isinstance(seed, int):",
    "sync/test_errors_options.py",
  ),
  Break(
    "a norm counts an id that stands twice as two rows",
    _ROWS + "norm.py",
    "leaves = jax.tree.leaves(trees.values(trees.combined(updates)))",
    "leaves = jax.tree.leaves(trees.values(updates))",
    "rows/test_lazy_rows.py training/test_of_all.py",
  ),
  Break(
    "rows of two chunks step twice",
    _ROWS + "lazy.py",
    "ids = jnp.where(self._fresh, ids, rows.num_rows)",
    "ids = jnp.where(self._fresh | True, ids, rows.num_rows)",
    "rows/test_in_chunks.py",
  ),
  Break(
    "each device clips to the norm of all",
    _SPARSIFY + "feedback.py",
    "bound = jnp.float32(norm / math.sqrt(devices))",
    "bound = jnp.float32(norm)",
    "sparsify",
  ),
  Break(
    "what was sent stays in the residual",
    _SPARSIFY + "feedback.py",
    "kept=jnp.where(large, _error(acc, sent), acc),",
    "kept=acc,",
    "sparsify",
  ),
  Break(
    "blocks move to the neighbour that has more",
    _SPARSIFY + "partitions.py",
    "step = to_right.astype(jnp.int32) - to_left.astype(jnp.int32)",
    "step = to_left.astype(jnp.int32) - to_right.astype(jnp.int32)",
    "sparsify/test_sparsifiers.py",
  ),
  Break(
    "random selection leaves longer runs out",
    _SPARSIFY + "selectors.py",
    "start = run * jnp.int32(length) + jnp.minimum(run, longer)",
    "start = run * jnp.int32(length)",
    "sparsify",
  ),
  Break(
    "sums in `aux` are means",
    _TRAINING + "returned.py",
    "return collectives.psum(_wide(x), self.differs)",
    "return collectives.pmean(_wide(x), self.differs)",
    "training/test_returned.py",
  ),
  Break(
    "moved residuals keep the sum where means are taken",
    _SPARSIFY + "sparsifier_state.py",
    "scale = devices / len(x) if averages else 1.0",
    "scale = 1.0",
    "training/test_reshard.py",
  ),
  Break(
    "a weighted mean divides by what one device counted",
    _TRAINING + "global_values.py",
    "return devices * weighted / total",
    "return weighted / total",
    "training/test_of_all.py",
  ),
  Break(
    "an exchange leaves before its gradient is ready",
    _PLANNER + "timeline.py",
    "link = max(link, compute) + option.link_s",
    "link = link + option.link_s",
    "planner/test_timeline.py",
  ),
  Break(
    "plans of another version are read",
    _CORE + "checked_json.py",
    "if found != wanted:",
    "if found is None:",
    "sync/test_plan.py planner",
  ),
  Break(
    "the densities of a report are those of the sum",
    "zenjax/_src/report/stats.py",
    '"density": last.local_rows / sizes.num_rows,',
    '"density": last.union_rows / sizes.num_rows,',
    "report sync/test_overflow.py sync/test_transform.py",
  ),
)


def tried(one: Break, copy: pathlib.Path, arguments: list[str]) -> str:
  """Returns the test that failed; "" where none did."""
  file = copy / one.file
  right = file.read_text()
  file.write_text(right.replace(one.old, one.new))
  command = [sys.executable, "-m", "pytest", "-q", "-x", *arguments]
  command += [f"tests/{path}" for path in one.tests.split()]
  try:
    done = subprocess.run(
      command,
      cwd=copy,
      env=os.environ | {"PYTHONPATH": str(copy)},
      capture_output=True,
      text=True,
    )
  finally:
    file.write_text(right)
  if done.returncode == 0:
    return ""
  failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
  if failed is None:
    raise RuntimeError(f"pytest ran no test:\n{done.stdout[-2000:]}")
  return failed[1]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", nargs="+", metavar="WORD", help="in its name")
  parser.add_argument("pytest", nargs="*", help="arguments of pytest")
  args = parser.parse_args()
  words = args.only or [""]
  chosen = [b for b in BREAKS if any(word in b.name for word in words)]
  bad = 0
  with tempfile.TemporaryDirectory(prefix="zenjax-mutate-") as directory:
    copy = pathlib.Path(directory)
    for name in _COPIED:
      if (_ROOT / name).is_dir():
        shutil.copytree(
          _ROOT / name,
          copy / name,
          symlinks=True,
          ignore=shutil.ignore_patterns("__pycache__"),
        )
      else:
        shutil.copy(_ROOT / name, copy / name)
    for number, one in enumerate(chosen, 1):
      times = (copy / one.file).read_text().count(one.old)
      start = time.monotonic()
      if times != 1:
        found = f"TEXT STANDS {times} TIMES in {one.file}"
      else:
        found = tried(one, copy, args.pytest) or "SURVIVED"
      bad += found.startswith(("TEXT", "SURVIVED"))
      seconds = time.monotonic() - start
      print(f"{number:2} {one.name}: {found} ({seconds:.0f} s)", flush=True)
  return bad


if __name__ == "__main__":
  sys.exit(main())
