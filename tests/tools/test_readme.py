"""The README and the pages of docs/: their code, names and links."""

import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import zenjax

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_README = _ROOT / "README.md"

pytestmark = pytest.mark.skipif(not _README.is_file(), reason="no checkout")


def test_quickstart_prints_what_stands_below_it():
  text = _README.read_text()
  found = re.search(r"```python\n(.*?)```\n\n    (.*?)\n", text, re.DOTALL)
  assert found is not None
  code, printed = found.groups()
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == printed


def _pages():
  found = (_ROOT / "docs").rglob("*.md")
  return sorted(x for x in found if "_build" not in x.parts)


def test_every_public_name_has_an_entry():
  text = (_ROOT / "docs/reference/api.md").read_text()
  entries = set(re.findall(r"^.. auto\w+:: (\S+)$", text, re.MULTILINE))

  def names_of(space, prefix):
    for name in space.__all__:
      if inspect.ismodule(value := getattr(space, name)):
        yield from names_of(value, f"{prefix}.{name}")
      elif name[0] != "_":
        yield f"{prefix}.{name}"

  names = set(names_of(zenjax, "zenjax"))
  assert entries == names
  summaries = re.findall(r"^   (zenjax\.\S+)$", text, re.MULTILINE)
  assert set(summaries) == names


def _listed(page):
  """The pages that the tables of contents of a page name, and their own."""
  yield page
  for toc in re.findall(
    r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
  ):
    for entry in re.findall(r"^(?:.*<)?([\w/.-]+)>?$", toc, re.MULTILINE):
      yield from _listed((page.parent / f"{entry}.md").resolve())


def test_every_page_is_in_the_table_of_contents():
  listed = list(_listed((_ROOT / "docs/index.md").resolve()))
  notes = _ROOT / "docs/notes"  # Reports on experiments are not on the site.
  pages = {x.resolve() for x in _pages() if not x.is_relative_to(notes)}
  assert set(listed) == pages
  assert len(listed) == len(pages)


def test_links_between_pages_lead_somewhere():
  labels = {
    label
    for page in _pages()
    for label in re.findall(r"^\(([\w-]+)\)=$", page.read_text(), re.MULTILINE)
  }
  for page in (_README, _ROOT / "CONTRIBUTING.md", *_pages()):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^):#\s]+)\)", text):
      found = target in labels or (page.parent / target).exists()
      assert found, (page.name, target)


def test_internals_name_files_that_exist():
  text = (_ROOT / "docs/internals.md").read_text()
  for name in set(re.findall(r"`([\w/]+\.py)`", text)):
    places = (_ROOT / "zenjax/_src" / name, _ROOT / name)
    assert any(place.is_file() for place in places), name
