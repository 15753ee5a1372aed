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


def test_every_public_name_has_an_entry():
  text = (_ROOT / "docs/api.md").read_text()
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
  assert sorted(summaries) == sorted(names)


def _pages():
  return sorted((_ROOT / "docs").glob("*.md"))


def test_every_page_is_in_the_table_of_contents():
  toc = (_ROOT / "docs/index.md").read_text()
  entries = set(re.findall(r"^(\w+)$", toc, re.MULTILINE))
  assert entries == {page.stem for page in _pages()} - {"index"}


def test_links_between_pages_lead_somewhere():
  for page in (_README, _ROOT / "CONTRIBUTING.md", *_pages()):
    for target in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
      is_label = any(f"({target})=" in x.read_text() for x in _pages())
      assert is_label or (page.parent / target).exists(), (page.name, target)
