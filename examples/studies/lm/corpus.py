"""Real text as word ids: the Python standard library, or a file of your own.

>>> corpus = load_tokens(max_tokens=1000)
>>> len(corpus.ids), corpus.ids.min()
(1000, np.int32(0))
"""

from collections import defaultdict
from collections.abc import Iterator
import dataclasses
import itertools
from pathlib import Path
import re
import sysconfig

import numpy as np

# A word is an identifier, a keyword or a number; any other visible character
# is a token of its own. White space is dropped, upper case is kept.
_TOKEN = re.compile(r"\w+|[^\w\s]")

# What other people installed beside the standard library is not part of it.
_NOT_STDLIB = {"site-packages", "dist-packages"}

_READ_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
  """A text as numbers.

  Attributes:
    ids: [T] int32, the text; 0 is the most frequent word, ties in the order of
      first appearance.
    vocab: the words, `vocab[i]` spells id `i`.
  """

  ids: np.ndarray
  vocab: list[str]


def load_tokens(
  path: str | Path | None = None, max_tokens: int | None = None
) -> Corpus:
  """Reads a text and numbers its words by frequency.

  Args:
    path: A UTF-8 text file. By default all `.py` files of the standard library
      in the order of their paths: about 7 million tokens, 120,000 distinct.
    max_tokens: Keep only so many tokens, from the start.

  Returns:
    The corpus: the same one on every call with the same files.

  Raises:
    OSError: `path` cannot be read.
    ValueError: `path` is not UTF-8, there is no token, or `max_tokens` < 1.
  """
  if max_tokens is not None and max_tokens < 1:
    raise ValueError(
      f"`max_tokens` must be positive or None, got {max_tokens=}."
    )
  ids, words = _number(_stdlib() if path is None else _lines(path), max_tokens)
  if not words:
    source = "the standard library" if path is None else f"{str(path)!r}"
    raise ValueError(
      f"`path` must hold text, but {source} has no token. Give another file."
    )
  return _by_frequency(ids, words)


def _stdlib() -> Iterator[str]:
  root = Path(sysconfig.get_path("stdlib"))
  for file in sorted(root.rglob("*.py")):
    if _NOT_STDLIB.isdisjoint(file.relative_to(root).parts):
      try:
        yield file.read_text(encoding="utf-8")
      except UnicodeDecodeError:
        continue  # A few tests of the parser are in other encodings on purpose.


def _lines(path: str | Path) -> Iterator[str]:
  with open(path, encoding="utf-8") as file:
    try:
      while lines := file.readlines(_READ_BYTES):
        yield "".join(lines)
    except UnicodeDecodeError as error:
      raise ValueError(
        f"`path` must be a UTF-8 text file, got {str(path)!r}: {error}."
      ) from error


def _number(
  texts: Iterator[str], max_tokens: int | None
) -> tuple[np.ndarray, list[str]]:
  """Numbers words in the order of their first appearance."""
  number: defaultdict[str, int] = defaultdict(itertools.count().__next__)
  parts, total = [np.empty(0, np.int32)], 0
  for text in texts:
    words = _TOKEN.findall(text)
    if max_tokens is not None:
      words = words[: max_tokens - total]
    parts.append(
      np.fromiter(map(number.__getitem__, words), np.int32, len(words))
    )
    total += len(words)
    if total == max_tokens:
      break
  return np.concatenate(parts), list(number)


def _by_frequency(ids: np.ndarray, words: list[str]) -> Corpus:
  order = np.argsort(-np.bincount(ids, minlength=len(words)), kind="stable")
  rank = np.empty(len(words), np.int32)
  rank[order] = np.arange(len(words), dtype=np.int32)
  return Corpus(rank[ids], [words[i] for i in order])
