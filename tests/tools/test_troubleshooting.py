"""The headings of docs/guides/troubleshooting.md are words of messages."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs/guides/troubleshooting.md"

pytestmark = pytest.mark.skipif(not _PAGE.is_file(), reason="no checkout")


def _texts():
  """Strings of the code, with "{}" where an f-string puts a value."""
  files = [*_ROOT.glob("zenjax/**/*.py"), *_ROOT.glob("kernels/**/*.py")]
  for path in files:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
      elif isinstance(node, ast.JoinedStr):
        parts = node.values
        yield "".join(
          str(x.value) if isinstance(x, ast.Constant) else "{}" for x in parts
        )


def test_headings_are_words_of_messages():
  headings = re.findall(r"^### (.*)$", _PAGE.read_text(), re.MULTILINE)
  assert headings
  missing = []
  texts = list(_texts())
  for heading in headings:
    words = ".*".join(map(re.escape, heading.split(" ... ")))
    # A message may have a value where the heading has a name.
    words = re.sub("`([^`]+)`", r"`(?:\1|(?:optax\\.)?{})`", words)
    if not any(re.search(words, text, re.DOTALL) for text in texts):
      missing.append(heading)
  assert not missing
