"""Figures of the documentation, computed again from what was measured."""

import json
import pathlib
import re
import statistics
import tomllib

import pytest

from benchmarks import campaign
from benchmarks import run
from zenjax.kernels import operations

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{x.name}" for x in ROOT.glob("docs/*.md"))]
SOURCES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text("utf-8"))
# A number with a unit of measurement, or alone in a cell of a table.
FIGURE = re.compile(
  r"(?<![\w.,])\d[\d,.]*(?: (?:to|and|or) \d[\d,.]*)? ?"
  r"(?:times|ms|s|us|[kMG]i?B|%|[kMG]bit/s|minutes?|hours?|seconds)(?![\w/])"
  r"|(?<=\|) *\*{0,2}\d[\d,.]*\*{0,2} *(?=\|)"
)


def prose(text: str) -> str:
  """A page in one line, without its programs and the words in backquotes."""
  text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
  text = re.sub(r"^ {4}.*$", "", text, flags=re.M)
  text = re.sub(r"`[^`]+`", lambda x: "`" + "x" * (len(x[0]) - 2) + "`", text)
  return " ".join(text.split())


def unknown(page: str, text: str) -> list[str]:
  """Figures of a page that stand in no text with a source."""
  text, known = prose(text), set()
  for said in SOURCES.get(page, {}).values():
    for one in said:
      found = [x.start() for x in re.finditer(re.escape(one), text)]
      assert found, f"{page} does not say {one!r}, as docs/figures.toml has it"
      known |= {i for start in found for i in range(start, start + len(one))}
  return [x[0] for x in FIGURE.finditer(text) if x.start() not in known]


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_has_a_source(page):
  text = prose((ROOT / page).read_text("utf-8"))
  assert not unknown(page, text)
  for figure in FIGURE.finditer(text):
    digit = re.search(r"\d", figure[0])
    assert digit is not None
    at = figure.start() + digit.start()
    changed = f"{text[:at]}{(int(digit[0]) + 1) % 10}{text[at + 1 :]}"
    # By hand: it now has no source, or a text that had one is gone.
    with pytest.raises(AssertionError):
      assert not unknown(page, changed)


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
        assert found["complete"], source
        assert found["environment"]["git_dirty"] is False, source


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


def test_front_page_repeats_what_adds_to_a_step():
  """Of the devices that share memory, which a row of the page holds."""
  row = r"^\| `lm1b-lstm` \|.*?\| (\d+ times fewer) \| ([\d.]+) \|$"
  page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
  found = re.search(row, page, re.M)
  assert found is not None
  bytes_, adds = found.groups()
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  assert f"arrays: whole steps | {bytes_} | {adds} of what" in text


# What pages say of other results, made from these.


def results(name: str) -> dict:
  path = ROOT / "benchmarks" / "results" / f"{name}.json"
  return json.loads(path.read_text(encoding="utf-8"))


def by_group(name: str) -> dict[str, dict[str, dict]]:
  """Results of a file by the first word of their group, and form."""
  found: dict[str, dict[str, dict]] = {}
  for result in results(name)["results"]:
    assert result["wrong"] == 0
    form = result["name"].split()[0] if "wide" in name else result["name"]
    found.setdefault(result["group"].split()[0], {})[form] = result
  return found


def median(result: dict) -> float:
  return statistics.median(result["times_s"])


def of_devices() -> list[str]:
  said = []
  for name, found in by_group("sync").items():
    facts = found["zen"]["facts"]
    fewer = found["pmean"]["facts"]["wire_bytes"] / facts["wire_bytes"]
    none = median(found["none"])
    adds = (median(found["zen"]) - none) / (median(found["pmean"]) - none)
    said.append(
      f"| `{name}` | {facts['density']:.1%} | {facts['union_density']:.1%} |"
      f" {fewer:.0f} times fewer | {adds:.2f} |".replace("%", " %")
    )
  return said


def of_rows() -> list[str]:
  (found,) = by_group("step-wide").values()
  rows, owners = [
    median(found["dense"]) / median(found[x]) for x in ("rows", "owners")
  ]
  return [
    f"a step is {rows:.0f} times faster than `pmean` with dense Adam, with"
    f" `sharded_optimizer` {owners:.0f} times"
  ]


def of_compiling() -> list[str]:
  found = by_group("compile")
  core_s = lambda result: f"{result['facts']['core_s']:.1f}"
  said = []
  for tables, of in found.items():
    longer = [median(of[x]) / median(of["pmean"]) for x in ("zen", "rows")]
    said.append(
      f"| {tables} | {core_s(of['zen'])} ({longer[0]:.1f}) |"
      f" {core_s(of['rows'])} ({longer[1]:.1f}) | {core_s(of['pmean'])} |"
    )
  return said


def of_compiling_ahead() -> list[str]:
  targets = [by_group(f"compile-{x}") for x in ("tpu-v5e", "gpu-h200")]
  said = []
  for tables in targets[0]:
    longer = [
      median(found[tables][form]) / median(found[tables]["pmean"])
      for found in targets
      for form in ("zen", "rows")
    ]
    said.append(f"| {tables} | {' | '.join(f'{x:.1f}' for x in longer)} |")
  slowest = median(targets[0]["26"]["zen"])
  return [*said, f"26 arrays took {slowest:.0f} s for v5e"]


def of_compiling_between_hosts() -> list[str]:
  found = measured("4", "1 Gbit/s", "one look-up")
  rows, sharded = [found[x]["compile_s"] for x in ("rows", "sharded")]
  (arrays,) = {
    cell["compile_s"]
    for cell in results("network-8")["cells"]
    if (cell["workload"], cell["variant"]) == ("lm1b-lstm", "zen")
  }
  return [
    f"took {rows:.1f} s to compile, that with `tables.shard` {sharded:.1f} s",
    "The exchange of an array of `lm1b-lstm` alone took"
    f" {arrays:.1f} s between 8 hosts",
  ]


def many_rows() -> dict[tuple[int, str, str, str], float]:
  """Seconds of rows of half of a table and of all of it."""
  return {
    (x["hosts"], x["rate"], x["workload"], x["variant"]): median(x)
    for x in results("network-many-rows")["cells"]
  }


def of_many_rows() -> list[str]:
  times = many_rows()

  def faster(*cell):
    given, filled = [
      times[*cell, form] / times[*cell, "rows"]
      for form in ("psum", "psum-filled")
    ]
    return f"{given:.2f} ({filled:.2f})"

  said = [
    f"| {hosts} hosts | "
    + " | ".join(
      faster(hosts, rate, f"sweep-{share}")
      for rate in ("200mbit", "1gbit")
      for share in (50, 100)
    )
    + " |"
    for hosts in (2, 4, 8)
  ]
  slower = [
    seconds / times[hosts, rate, name, "psum"]
    for (hosts, rate, name, variant), seconds in times.items()
    if variant == "zen"
  ]
  return [
    *said,
    f"There arrays took at most {max(slower):.2f} times as long as `psum`",
  ]


PEERS = ("psum", "all_gather", "recursive_doubling")


def of_one_exchange() -> list[str]:
  cells = {
    (x["workload"], x["rate"], x["variant"]): median(x)
    for x in results("network-grid")["cells"]
  }
  said, runs = [], sorted({key[:2] for key in cells}, key=str)
  for name in dict.fromkeys(key[0] for key in cells):
    row = []
    for rate in ("200mbit", "1gbit"):
      best = min(cells[name, rate, x] for x in PEERS)
      times = cells[name, rate, "zen"], cells[name, rate, "rows"], best
      row += [f"{cells[name, rate, 'psum'] / x:.2f}" for x in times]
    share = name.removeprefix("sweep-")
    share = "`lm1b-lstm`, 1.1" if share == "lm1b-lstm" else share
    said.append(f"| {share} % | {' | '.join(row)} |")
  over = lambda form, other: max(
    cells[*run, form] / cells[*run, other] for run in runs
  )
  return [
    *said,
    "Rows of `lm1b-lstm` were {:.2f} and {:.2f} times as fast with".format(
      *(
        cells["lm1b-lstm", rate, "psum"]
        / cells["lm1b-lstm", rate, "rows-pinned"]
        for rate in ("200mbit", "1gbit")
      )
    ),
    f"In the grid arrays took at most {over('zen', 'psum'):.2f} times as long",
    f"took up to {over('auto', 'zen'):.1f} times as long as `zen`",
  ]


def of_two_and_eight_hosts() -> list[str]:
  """Times as fast as psum, and where the default is behind."""
  rows: dict[str, list[str]] = {}
  behind = []
  for name in ("network-2", "network-grid", "network-8"):
    cells = {
      (x["rate"], x["workload"], x["variant"]): median(x)
      for x in results(name)["cells"]
      if x["wrong"] == 0
    }
    for rate in ("200mbit", "1gbit"):
      for share in dict.fromkeys(key[1] for key in cells):
        best = min(cells[rate, share, peer] for peer in PEERS)
        zen, psum = [cells[rate, share, x] for x in ("zen", "psum")]
        behind.append(zen / best)
        if name != "network-grid":
          rows.setdefault(share, []).append(f"{psum / zen:.2f}")
          rows[share].append(f"{psum / best:.2f}")
  said = []
  for share, cells in rows.items():
    share = share.removeprefix("sweep-").replace(
      "lm1b-lstm", "`lm1b-lstm`, 1.1"
    )
    said.append(f"| {share} % | {' | '.join(cells)} |")
  near = sum(x <= 1.05 for x in behind)
  return [
    *said,
    f"In {near} of {len(behind)} cells, those of 4 hosts included, `zen` took"
    f" at most 1.05 times as long as the best peer: {max(behind):.2f} times in"
    " the worst",
  ]


def of_full_tables() -> list[str]:
  """Steps that know of a full table, first ones, and what holds 95 %."""
  times = {
    (x["hosts"], x["variant"]): campaign.times_s(x["host_times_s"])
    for x in results("network-full")["cells"]
  }
  said = []
  for hosts in (4, 8):
    cells = []
    for form in ("zen", "zen-first"):
      found = campaign.ratio(times[hosts, form], times[hosts, "psum"])
      assert found.interval is not None
      low, high = found.interval
      cells.append(f"{found.median:.2f} ({low:.2f} to {high:.2f})")
    said.append(f"| {hosts} hosts | {' | '.join(cells)} |")
  return said


def of_what_steps_add() -> list[str]:
  said = []
  for hosts, name, rate in (
    (4, "200mbit", "200 Mbit/s"),
    (4, "1gbit", "1 Gbit/s"),
    (8, "200mbit", "200 Mbit/s"),
  ):
    (found,) = by_group(f"adds-{hosts}-{name}").values()
    of = {form.split()[0]: median(x) for form, x in found.items()}
    dense = of["dense"] - of["none"]
    arrays = dense / (of["zen"] - of["none"])
    rows, pinned = [
      dense / (of[form] - of["none-rows"]) for form in ("rows", "rows-pinned")
    ]
    cells = f"{arrays:.1f} | {rows:.1f} | {pinned:.1f} |"
    said.append(f"| {hosts} hosts, {rate} | {cells}")
  return said


def of_a_vocabulary() -> list[str]:
  """Whole steps in which a host looks up nearly as many rows as there are."""
  said = []
  for hosts in (4, 8):
    (found,) = by_group(f"adds-{hosts}-vocabulary").values()
    of = {form.split()[0]: median(x) * 1e3 for form, x in found.items()}
    cells = [f"{of[form]:.0f}" for form in ("dense", "zen", "rows")]
    said.append(f"| {hosts} hosts | {' | '.join(cells)} |")
  return said


GPU = ("gpu-h200", "gpu-h200-100k", "gpu-h200-narrow")


def of_one_gpu() -> list[str]:
  said = []
  for name in GPU:
    found = results(name)
    assert found["measured_on_gpu"], name
    assert found["environment"]["device_kind"] == "NVIDIA H200", name
    whole = [x for x in found["results"] if "all of zen_sync" in x["group"]]
    times = {x["name"]: median(x) for x in whole if x["wrong"] == 0}
    cells = []
    for form in ("hash", "columns", "rows", "rows, no pins"):
      xla, kernels = [times[f"zen {form} {x}"] for x in ("xla", "pallas")]
      reads = 8 * times["copy"] / 2
      cells.append(f"{kernels / reads:.2f} ({xla / kernels:.2f})")
    rows, width = (found["options"][x] for x in ("rows", "width"))
    said.append(f"| {rows:,} x {width} | {' | '.join(cells)} |")
  return said


@pytest.mark.parametrize("name", GPU)
def test_kernels_taken_unasked_are_no_slower(name):
  """On the kind of device that the result is of, to the noise of a launch."""
  found = results(name)
  kind = found["environment"]["device_kind"]
  times = {
    (x["group"], x["name"]): median(x) for x in found["results"] if x["times_s"]
  }
  for (group, form), seconds in times.items():
    if not form.endswith(" pallas"):
      continue
    operation = operations.OPERATIONS.get(form.split()[0])
    if operation:
      result = operation.measured["cuda"][kind]
      assert (ROOT / "benchmarks" / "results" / result).is_file()
    xla = times[group, form.removesuffix("pallas") + "xla"]
    assert seconds < xla * 1.05, (group, form)


def of_sparsifiers() -> list[str]:
  (found,) = by_group("sparsified").values()
  part = median(found["pmean"]) / median(found["exdyna"])
  return [f"`exdyna` takes a {part:.0f}th of `pmean`'s time"]


def of_memory() -> list[str]:
  peaks = results("memory")["peaks"]
  return [f"| {peak:.2f} |" for peak in peaks.values()]


@pytest.mark.parametrize(
  ("page", "said"),
  [
    *(
      ("docs/benchmarks.md", of)
      for of in (
        of_devices,
        of_rows,
        of_compiling,
        of_compiling_ahead,
        of_compiling_between_hosts,
        of_one_exchange,
        of_many_rows,
        of_two_and_eight_hosts,
        of_full_tables,
        of_what_steps_add,
        of_a_vocabulary,
        of_one_gpu,
      )
    ),
    ("docs/benchmarks.md", of_sparsifiers),
    ("docs/sharded.md", of_memory),
  ],
  ids=lambda x: getattr(x, "__name__", None),
)
def test_pages_say_what_results_hold(page, said):
  text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
  lines = said()
  assert lines
  for line in lines:
    assert line in text, line
  if said is of_memory:  # All of them, in order.
    table = re.findall(
      r"^\| .*\| (\d\.\d\d) \|$", (ROOT / page).read_text(), re.M
    )
    assert [f"| {x} |" for x in table] == lines


MODELS = re.compile(r"^\| `(ngram|ngram-wide|dlrm)`, (ms|MB) \|(.+)\|$", re.M)
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
  "no tables, shard_map",
)


@pytest.mark.parametrize("name", ["ngram", "ngram-wide", "dlrm"])
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
    if name == "dlrm":
      best = ms(results["sharded, shard_map"])
      times = [
        ms(results[x]) / best
        for x in ("replicated", "torch DDP", "row-sharded")
      ]
      said = (
        f"DLRM is then {times[0]:.0f} times faster than with `psum`,"
        f" {times[1]:.0f} times than torch's DDP and {times[2]:.1f} times than"
      )
      assert said in " ".join(text.split())
