"""Figures of the documentation: each comes from a committed result.

`docs/figures.toml` names the source of each figure of a page. Figures of
results are computed again here, from the raw samples.
"""

from collections.abc import Callable, Iterable
import json
import pathlib
import re
import statistics
import tomllib

import pytest

from benchmarks import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
  "README.md",
  *sorted(
    x.relative_to(ROOT).as_posix()
    for x in ROOT.glob("docs/**/*.md")
    if not {"_build", "notes"} & set(x.parts)
  ),
]
SOURCES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text("utf-8"))
# A number with a unit of measurement; in a cell of a table also one alone.
UNIT = r"(?:×|times|ms|s|us|[kMG]i?B|%|[kMG]bit/s|minutes?|hours?|seconds)"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
  rf"(?<![\w.,])({NUMBER})(?: (?:to|and|or) ({NUMBER}))? ?({UNIT})(?![\w/])"
)
ALONE = re.compile(rf"^\W*({NUMBER})(?: \(({NUMBER})\))?\W*$")


def figures(page: str) -> set[str]:
  """The figures of a page, as "value unit" or "value"."""
  text = (ROOT / page).read_text("utf-8")
  text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
  text = re.sub(r"^ {4}.*$", "", text, flags=re.M)
  text = re.sub(r"`[^`]*`", "`", text)
  found = set()
  for line in text.splitlines():
    for cell in line.split("|")[2:-1]:
      if alone := ALONE.match(cell):
        found |= {x for x in alone.groups() if x}
  for *values, unit in FIGURE.findall(" ".join(text.split())):
    found |= {f"{value} {unit}" for value in values if value}
  return found


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_has_a_source(page):
  sources = SOURCES.get(page, {}).values()
  assert figures(page) == {figure for said in sources for figure in said}


def test_sources_are_there():
  commands = {command.name for command in run.COMMANDS}
  for page, sources in SOURCES.items():
    assert page in PAGES
    for source in sources:
      words = source.split()
      if source == "set":
        continue
      if words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        assert module.is_dir() or module.with_suffix(".py").exists(), source
        assert words[2] != "benchmarks.run" or words[3] in commands, source
        continue
      assert (ROOT / source).is_file(), source
      if source.endswith(".json"):
        found = json.loads((ROOT / source).read_text("utf-8"))
        # A run that was stopped has fewer rounds.
        assert found["complete"] or all(
          len(x["times_s"]) >= 2 for x in found["results"]
        ), source
        assert found["environment"]["git_dirty"] is False, source


# What a result shows, computed from its samples, by the name of its file.


def median(result: dict) -> float:
  assert result["wrong"] == 0
  return statistics.median(result["times_s"])


def by_group(found: dict) -> dict[str, dict[str, dict]]:
  """Results by the first word of their group, and form."""
  groups: dict[str, dict[str, dict]] = {}
  for result in found["results"]:
    group = groups.setdefault(result["group"].split()[0], {})
    group[result["name"]] = result
  return groups


def ratios(values: Iterable[float]) -> list[float]:
  values = list(values)
  return [x / y for x in values for y in values]


def of_tables(found: dict) -> set[str]:
  """Milliseconds and MB of a step; times as fast, and as few bytes."""
  of = {x["name"]: x for x in found["results"] if x["times_s"]}
  ms = {name: median(x) * 1e3 / 8 for name, x in of.items()}  # Of 8 steps.
  mb = {name: x["facts"]["received_bytes"] / 1e6 for name, x in of.items()}
  shown = {f"{x:,.0f}" for x in ms.values()} | {f"{x:.2f}" for x in mb.values()}
  shown |= {f"{x:,.0f} ms" for x in ms.values()}
  shown |= {f"{x:.1f} MB" for x in mb.values()}
  for x in [*ratios(ms.values()), *ratios(mb.values())]:
    shown |= {f"{x:.0f} times", f"{x:.1f} times", f"{x:.0f} ×", f"{x:.1f} ×"}
  return shown


def of_network(found: dict) -> set[str]:
  """Times as fast as `psum`, and how much slower a form is."""
  cells: dict[tuple, dict[str, float]] = {}
  for x in found["cells"]:
    run = x["hosts"], x["rate"], x["workload"]
    cells.setdefault(run, {})[x["variant"]] = median(x)
  shown = {f"{x['compile_s']:.1f} s" for x in found["cells"]}
  for of in cells.values():
    for x in ratios(of.values()):
      shown |= {f"{x:.2f}", f"{x:.2f} times", f"{x:.1f} times"}
  return shown


def of_devices(found: dict) -> set[str]:
  """Densities of `sync`, bytes saved, and the part that a step adds."""
  shown = set()
  for of in by_group(found).values():
    none = median(of["none"])
    for name in ("zen", "zen-tuned"):
      facts = of[name]["facts"]
      adds = (median(of[name]) - none) / (median(of["pmean"]) - none)
      fewer = of["pmean"]["facts"]["wire_bytes"] / facts["wire_bytes"]
      shown |= {f"{adds:.2f}", f"{fewer:.0f} times"}
      shown |= {f"{100 * facts[x]:.1f} %" for x in ("density", "union_density")}
  return shown


def of_steps(found: dict) -> set[str]:
  """Milliseconds of `step`, times as fast, and times as little added."""
  shown = set()
  for group in by_group(found).values():
    of = {form.split(" (")[0]: median(x) for form, x in group.items()}
    of = {form.split()[0]: x for form, x in of.items()}
    shown |= {f"{x * 1e3:.0f}" for x in of.values()}
    shown |= {f"{of['dense'] / x:.0f} times" for x in of.values()}
    if "none" in of:
      for form, x in of.items():
        none = of["none-rows" if form.startswith("rows") else "none"]
        if x > none:
          shown.add(f"{(of['dense'] - of['none']) / (x - none):.1f}")
  return shown


def of_compiling(found: dict) -> set[str]:
  """Seconds of `compile`, times as long as with `pmean`, and steps in ms."""
  shown = set()
  for of in by_group(found).values():
    for x in of.values():
      longer = median(x) / median(of["pmean"])
      shown |= {f"{median(x):.1f}", f"{longer:.1f}"}
      shown |= {f"{x['facts']['core_s']:.0f} s", f"{median(x):.0f} s"}
      if step_s := x["facts"].get("step_s"):
        shown.add(f"{1e3 * step_s:.1f}")
  return shown


def of_one_gpu(found: dict) -> set[str]:
  """Time over that of one read of all gradients, and kernels over XLA."""
  assert found["environment"]["device_kind"] == "NVIDIA H200"
  times = {
    x["name"]: median(x)
    for x in found["results"]
    if "all of zen_sync" in x["group"]
  }
  shown = set()
  for form in ("hash", "columns", "rows", "rows, first", "rows, no pins"):
    xla, kernels = [times.get(f"zen {form} {x}") for x in ("xla", "pallas")]
    if not xla or not kernels:
      continue  # The last name is that of an older run.
    shown |= {f"{kernels / (4 * times['copy']):.2f}", f"{xla / kernels:.2f}"}
  return shown


def of_steps_on_one_gpu(found: dict) -> set[str]:
  """Milliseconds, and megabytes beside parameters and state."""
  assert found["environment"]["device_kind"] == "NVIDIA H200"
  mb = {f"{x['facts']['temporary'] / 1e6:,.0f}" for x in found["results"]}
  return mb | {f"{median(x) * 1e3:.1f}" for x in found["results"]}


def of_compressed(found: dict) -> set[str]:
  """Milliseconds of `sparsified`."""
  return {f"{median(x) * 1e3:,.0f}" for x in found["results"]}


COMPUTED: dict[str, Callable[[dict], set[str]]] = {
  "tables-": of_tables,
  "models-": of_tables,
  "network-": of_network,
  "sync": of_devices,
  "step-": of_steps,
  "adds-": of_steps,
  "compile": of_compiling,
  "compressed-": of_compressed,
  "gpu-h200": of_one_gpu,
  "gpu-step-": of_steps_on_one_gpu,
  "gpu-tables-": of_tables,
  "gpu-compressed-": of_compressed,
  "cores-": of_tables,
}
SHOWN = [
  (page, source)
  for page, sources in SOURCES.items()
  for source in sources
  if source.endswith(".json")
]


@pytest.mark.parametrize(("page", "source"), SHOWN)
def test_pages_say_what_results_hold(page, source):
  name = pathlib.Path(source).name
  (compute,) = (f for start, f in COMPUTED.items() if name.startswith(start))
  shown = compute(json.loads((ROOT / source).read_text("utf-8")))
  assert set(SOURCES[page][source]) <= shown
