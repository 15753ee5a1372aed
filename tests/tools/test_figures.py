"""Figures of the documentation, computed again from what was measured."""

import json
import pathlib
import re
import statistics

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 8  # Of a sample, as `benchmarks.campaigns.tables` has it.
FORMS = ("replicated", "row-sharded", "rows", "sharded", "by hand")
WORDS = {"1": "one look-up", "3": "three"}
RATES = {"1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
ROW = re.compile(r"^\| (\d) hosts, (.+), (one look-up|three) \|(.+)\|$", re.M)


def measured(hosts: str, rate: str, look_ups: str) -> dict[str, dict]:
  """The results of one run, by form."""
  name = f"tables-{hosts}-{RATES[rate]}"
  name += "" if look_ups == "one look-up" else "-3"
  path = ROOT / "benchmarks" / "results" / f"{name}.json"
  found = json.loads(path.read_text(encoding="utf-8"))
  assert found["complete"] and found["environment"]["git_dirty"] is False
  options = found["options"]
  assert (str(options["hosts"]), options["rate"]) == (hosts, RATES[rate])
  assert WORDS[str(options["look_ups"])] == look_ups
  return {result["name"]: result for result in found["results"]}


def ms(result: dict) -> float:
  assert result["wrong"] == 0
  return statistics.median(result["times_s"]) * 1e3 / STEPS


def rows() -> list[tuple[str, ...]]:
  text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  return ROW.findall(text)


@pytest.mark.parametrize("row", rows(), ids=lambda row: ", ".join(row[:3]))
def test_milliseconds_of_a_step(row):
  *run, cells = row
  found = measured(*run)
  for form, cell in zip(FORMS, cells.split("|"), strict=True):
    if form not in found:
      assert cell.strip() == "-"
    else:
      assert cell.strip() == f"{ms(found[form]):,.0f}", form


def test_all_runs_are_in_the_table():
  files = (ROOT / "benchmarks" / "results").glob("tables-*.json")
  assert len(rows()) == len(list(files)) > 0


def test_ids_ahead():
  text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  times = []
  for look_ups in ("", "-3"):
    path = ROOT / "benchmarks" / "results" / f"ahead-4-1gbit{look_ups}.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    found = {result["name"]: ms(result) for result in results}
    times += [found["sharded, ids ahead"], found["sharded"]]
  said = (
    "took {:.1f} ms for {:.1f} with one look-up, and {:.1f} for {:.1f} with"
  )
  assert said.format(*times) in " ".join(text.split())


def test_what_the_front_page_says():
  """Times as fast as XLA's forms, and bytes, between 4 hosts."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  pattern = (
    r"\| 4 hosts, (1 Gbit/s|200 Mbit/s), a table of 100,000 x 128: whole steps,"
    r" (rows|sharded) \| (\d+) times fewer \| (\d+) times faster than psum,"
    r" ([\d.]+) times than `P\(\"data\"\)` \|"
  )
  said = re.findall(pattern, text)
  assert len(said) == 4
  for rate, form, fewer, than_psum, than_split in said:
    found = measured("4", rate, "one look-up")
    wire = lambda name, found=found: found[name]["facts"]["received_bytes"]
    assert fewer == f"{wire('replicated') / wire(form):.0f}"
    assert than_psum == f"{ms(found['replicated']) / ms(found[form]):.0f}"
    assert than_split == f"{ms(found['row-sharded']) / ms(found[form]):.1f}"


def test_network_rows_are_what_the_page_says():
  """One exchange of a finished gradient, pinned and not, beside psum."""
  path = ROOT / "benchmarks" / "results" / "network-rows.json"
  cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
  of = {(cell["rate"], cell["variant"]): cell for cell in cells}

  def times(rate: str, variant: str, number: str = "median_s") -> str:
    return f"{of[rate, 'psum'][number] / of[rate, variant][number]:.0f}"

  slow, fast = "200mbit", "1gbit"
  fewer = [times(fast, form, "wire_bytes") for form in ("zen", "rows")]
  said = (
    f"{times(slow, 'zen-pinned')} times faster than `psum` at 200 Mbit/s,"
    f" {times(fast, 'zen-pinned')} at 1 Gbit/s; row gradients"
    f" {times(slow, 'rows-pinned')} and {times(fast, 'rows-pinned')}."
    f" With nothing pinned {times(slow, 'zen')} and {times(fast, 'zen')}, row"
    f" gradients {times(slow, 'rows')} and {times(fast, 'rows')}, for"
    f" {fewer[0]} and {fewer[1]} times fewer bytes"
  )
  text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  assert said in " ".join(text.split())


def test_front_page_repeats_what_adds_to_a_step():
  """Of the devices that share memory, which a row of the page holds."""
  row = r"^\| `lm1b-lstm` \|.*?\| (\d+ times fewer) \| ([\d.]+) \|.*\|$"
  page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  found = re.search(row, page, re.M)
  assert found is not None
  bytes_, adds = found.groups()
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  assert f"arrays: whole steps | {bytes_} | {adds} of what" in text


MODELS = re.compile(r"^\| `(ngram|dlrm)`, (ms|MB) \|(.+)\|$", re.M)
MODEL_FORMS = (
  "replicated",
  "torch DDP",
  "row-sharded",
  "rows",
  "rows, shard_map",
  "sharded",
  "sharded, ids ahead",
  "sharded, shard_map",
  "no tables",
)


@pytest.mark.parametrize("name", ["ngram"])
def test_models_between_hosts(name):
  path = ROOT / "benchmarks" / "results" / f"models-{name}-4-1gbit.json"
  found = json.loads(path.read_text(encoding="utf-8"))
  assert found["complete"] and found["environment"]["git_dirty"] is False
  assert found["options"]["model"] == name
  results = {result["name"]: result for result in found["results"]}
  text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  lines = {
    unit: cells for of, unit, cells in MODELS.findall(text) if of == name
  }
  for unit, form_of in (
    ("ms", lambda r: f"{ms(r):,.0f}"),
    ("MB", lambda r: f"{r['facts']['received_bytes'] / 1e6:.2f}"),
  ):
    cells = [cell.strip() for cell in lines[unit].split("|")]
    assert len(cells) == len(MODEL_FORMS)
    for form, cell in zip(MODEL_FORMS, cells):
      result = results.get(form)
      assert cell == (form_of(result) if result else "-"), form
