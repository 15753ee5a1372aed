"""Reads JSON into dataclasses, and checks every value by its type hint.

A hint is a scalar, `X | None`, a tuple, a dataclass, or one of these annotated
with rules: `Annotated[int, POSITIVE]`. Errors name the document, the place in
it, the rule, the value and the remedy.
"""

from collections.abc import Callable
import dataclasses
import inspect
import json
import math
import numbers
import types
import typing
from typing import Any, ClassVar, NamedTuple, Self


class Source(NamedTuple):
  """The name of a document in errors, and what to do if it is broken."""

  name: str
  remedy: str

  def broken(self, what: str, at: str = "") -> ValueError:
    """Returns the error for the document, or for the value at place `at`."""
    name = f"`{at}` of {self.name}" if at else self.name
    remedy = self.remedy[:1].upper() + self.remedy[1:]
    return ValueError(f"{name} {what}. {remedy}.")


class Rule(NamedTuple):
  """A condition on a value, and the same condition in words."""

  text: str
  holds: Callable[[Any], bool]


POSITIVE = Rule("positive", lambda x: x > 0)
NOT_NEGATIVE = Rule("0 or more", lambda x: x >= 0)
NOT_EMPTY = Rule("a list of one or more", lambda x: len(x) > 0)

_KINDS = {
  bool: "true or false",
  float: "a finite number",
  int: "a whole number",
  str: "a string",
}


class Document:
  """A dataclass that is saved as JSON.

  A subclass sets `_VERSION`, which the text begins with, and `_SOURCE`.
  """

  __slots__ = ()

  _VERSION: ClassVar[tuple[str, int]]
  _SOURCE: ClassVar[Source]

  def to_json(self) -> str:
    """Returns all fields as JSON text, which `from_json` reads."""
    record: Any = self
    document = dict([self._VERSION]) | dataclasses.asdict(record)
    return json.dumps(document, indent=2, allow_nan=False) + "\n"

  @classmethod
  def from_json(cls, text: str) -> Self:
    """Reads the text that `to_json` wrote.

    Args:
      text: JSON text.

    Raises:
      ValueError: The text is not JSON, is truncated, has another version, or
        holds impossible values. The message names the entry.
    """
    return parse(cls, fields(text, cls._VERSION, cls._SOURCE), cls._SOURCE)


def check(record: Any, source: Source) -> None:
  """Raises `ValueError` if a field of a dataclass does not match its hint."""
  hints = typing.get_type_hints(type(record), include_extras=True)
  for field in dataclasses.fields(record):
    parse(hints[field.name], getattr(record, field.name), source, field.name)


def fields(text: str, version: tuple[str, int], source: Source) -> dict:
  """Reads the fields of a JSON object, and checks its version.

  Args:
    text: JSON text.
    version: Name and value of the version's field. The result does not have it.
    source: The document, for errors.
  """
  must = (
    f"`text` must be the JSON of {source.name}, got {text!r:.60}. If it is the"
    " name of a file, give `pathlib.Path(file).read_text()`."
  )
  if not isinstance(text, str | bytes):
    raise TypeError(must)
  try:
    document = json.loads(text)
  except ValueError as error:
    if text.lstrip()[:1] not in ("{", b"{"):
      raise ValueError(must) from error
    raise source.broken(f"is truncated or not JSON ({error})") from error
  if not isinstance(document, dict):
    raise source.broken(f"must be an object, got {document!r:.60}")
  key, wanted = version
  if key not in document:
    kinds = [x for x in document if x.startswith("zenjax_")]
    also = f" (it has {kinds[0]!r})" if kinds else ""
    raise source.broken(f"lacks {key!r}, so it is another kind of file{also}")
  written = document.pop(key)
  if written != wanted:
    raise source.broken(
      f"must have version {wanted}, got {written!r}: another release of zenjax"
      " wrote it"
    )
  return document


def parse(hint: Any, value: Any, source: Source, at: str = "") -> Any:
  """Returns `value` converted to the type of its hint.

  Args:
    hint: The type. An instance of a dataclass is returned unchanged.
    value: A value from JSON. Tuples count as lists.
    source: The document, for errors.
    at: The place of the value in the document.

  Raises:
    ValueError: The value has another type, breaks a rule, or its dataclass
      refuses it.
  """
  must = lambda rule: source.broken(f"must be {rule}, got {value!r:.60}", at)
  origin, parts = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated:
    parsed = parse(parts[0], value, source, at)
    for rule in parts[1:]:
      if not rule.holds(parsed):
        raise must(rule.text)
    return parsed
  if origin in (types.UnionType, typing.Union):
    (kind,) = set(parts) - {types.NoneType}
    return None if value is None else parse(kind, value, source, at)
  if origin is tuple:
    if not isinstance(value, list | tuple):
      raise must("a list")
    if parts[-1] is Ellipsis:
      parts = parts[:1] * len(value)
    if len(value) != len(parts):
      raise must(f"a list of {len(parts)}")
    return tuple(
      parse(kind, x, source, f"{at}[{i}]")
      for i, (kind, x) in enumerate(zip(parts, value))
    )
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    is_made = isinstance(value, hint)
    return value if is_made else _record(hint, value, source, at)
  if hint is float:  # True is not a number here.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
      return float(value)
  elif type(value) is hint:
    return value
  raise must(_KINDS[hint])


def _record(kind: Any, value: Any, source: Source, at: str) -> Any:
  if not isinstance(value, dict):
    raise source.broken(f"must be an object, got {value!r:.60}", at)
  hints = typing.get_type_hints(kind, include_extras=True)
  known = inspect.signature(kind).parameters
  needed = [name for name, x in known.items() if x.default is x.empty]
  unknown = sorted(set(value) - set(known))
  lacking = [name for name in needed if name not in value]
  if unknown or lacking:
    raise source.broken(
      f"must hold {sorted(known)}, but it has unknown {unknown} and lacks"
      f" {lacking}",
      at,
    )
  prefix = f"{at}." if at else ""
  read = {
    name: parse(hints[name], x, source, prefix + name)
    for name, x in value.items()
  }
  try:
    return kind(**read)
  except ValueError as error:
    raise source.broken(f"is refused: {str(error).rstrip('.')}", at) from error
