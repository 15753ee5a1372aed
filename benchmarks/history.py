"""`history`: ratios that results had at earlier commits, and what got worse.

Results are kept in git, and so their history is there already: each version of
a file holds the commit that was measured, and samples of all forms of one run.
Times of two runs are of two machines, or of two hours of one; ratios to a form
of XLA's own in the same run compare.
"""

import argparse
from collections.abc import Iterator
import json
import pathlib
import subprocess
from typing import Any, NamedTuple

import numpy as np

from benchmarks import table

RESULTS = pathlib.Path(__file__).parent / "results"
# What others are divided by, the first of them that a run has.
REFERENCES = ("pmean", "psum", "replicated", "row-sharded", "dense", "none")
# It is worse if three quarters of the new ratios exceed by so much what three
# quarters of the old ones stayed below.
_WORSE = 1.05


class Ratio(NamedTuple):
  """A form's time over that of the reference in the same round."""

  low: float  # first quartile
  median: float
  high: float  # third quartile


class Version(NamedTuple):
  """What one run has measured."""

  commit: str  # of the code that ran
  ratios: dict[tuple[str, str], Ratio]  # by group and form


class Worse(NamedTuple):
  """A ratio that grew."""

  file: str
  group: str
  form: str
  before: Ratio
  now: Ratio


def read(document: dict[str, Any]) -> Version | None:
  """Returns the ratios of a result; None where it holds no forms in groups."""
  found = document.get("results") or document.get("cells")
  if not isinstance(found, list) or "environment" not in document:
    return None
  groups: dict[str, dict[str, list[float]]] = {}
  for one in found:
    if "times_s" not in one:
      return None
    if "variant" in one:
      group = f"{one['workload']}, {one['hosts']} hosts, {one['rate']}"
    else:
      group = one["group"]
    form = one.get("variant") or one["name"]
    groups.setdefault(group, {})[form] = one["times_s"]
  ratios = {}
  for group, forms in groups.items():
    reference = next((x for x in REFERENCES if x in forms), None)
    for form, times in forms.items():
      if reference is None or form == reference:
        continue
      ratios[group, form] = _ratio(times, forms[reference])
  return Version(document["environment"]["git"] or "", ratios)


def _ratio(times: list[float], reference: list[float]) -> Ratio:
  # Samples of one round were taken one after another, as far as there are any.
  rounds = min(len(times), len(reference))
  each = np.divide(times[:rounds], reference[:rounds])
  return Ratio(*np.quantile(each, [0.25, 0.5, 0.75]).tolist())


def versions(file: pathlib.Path) -> list[Version]:
  """Returns all that git holds of a result, the oldest first, and the file."""
  texts = []
  for commit in _git(file, "log", "--reverse", "--format=%H", "--", file.name):
    shown = _git(file, "show", f"{commit}:./{file.name}")
    texts.append("\n".join(shown))
  now = file.read_text(encoding="utf-8")
  if not texts or texts[-1].strip() != now.strip():
    texts.append(now)
  # A commit that removed the file shows nothing.
  found = [read(json.loads(text)) for text in texts if text.strip()]
  return [version for version in found if version is not None]


def _git(file: pathlib.Path, *command: str) -> list[str]:
  """Returns the lines that git prints; none outside of a repository."""
  shown = subprocess.run(
    ["git", *command], cwd=file.parent, capture_output=True, text=True
  )
  return shown.stdout.splitlines() if shown.returncode == 0 else []


def changes_since(version: Version, file: pathlib.Path) -> int | None:
  """Counts commits to zenjax since a result; None where git cannot tell."""
  where = pathlib.Path(__file__).parents[1] / "zenjax"
  counted = _git(
    file, "rev-list", "--count", f"{version.commit}..HEAD", "--", str(where)
  )
  return int(counted[0]) if counted else None


def worse(name: str, found: list[Version]) -> Iterator[Worse]:
  """Yields what the last version does worse than the best one before it."""
  *earlier, last = found
  for (group, form), now in last.ratios.items():
    before = [x.ratios[group, form] for x in earlier if (group, form) in x[1]]
    if not before:
      continue
    best = min(before, key=lambda ratio: ratio.median)
    if now.low > best.high * _WORSE:
      yield Worse(name, group, form, best, now)


def run(options: argparse.Namespace) -> int:
  """Prints every ratio by commit; returns 1 where one got worse."""
  files = options.files or sorted(RESULTS.glob("*.json"))
  found: list[Worse] = []
  for file in files:
    if not file.is_file():
      raise ValueError(f"`{file}` must be a result that --json wrote; is none.")
    held = versions(file)
    if not held:
      continue
    found += worse(file.name, held)
    last = held[-1]
    behind = changes_since(last, file)
    age = "of a commit that git does not know"
    if behind is not None:
      age = f"{behind} commits to zenjax since" if behind else "of today's code"
    headers = ["over the reference", *[x.commit[:9] or "-" for x in held]]
    rows = [
      [f"{group}: {form}", *[_said(x.ratios.get((group, form))) for x in held]]
      for group, form in last.ratios
    ]
    table.show_rows(f"{file.name}, {age}", headers, rows)
  for one in found:
    print(
      f"WORSE {one.file}, {one.group}, {one.form}: {one.now.median:.3f}, and"
      f" {one.before.median:.3f} before"
    )
  return int(bool(found))


def _said(ratio: Ratio | None) -> str:
  if ratio is None:
    return "-"
  return f"{ratio.median:.3f} [dim]({ratio.low:.3f}..{ratio.high:.3f})[/dim]"
