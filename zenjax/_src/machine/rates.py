"""Reads line rates of networks in the notations that people use."""

import math
import re

_FORMS = (
  "'25 Gbit/s', '25gbit', '25 Gb/s', '25Gbps', '3.1 GB/s', '3.1 GBytes/s',"
  " '200 Mbit/s', or 25e9 for bits per second"
)
_RATE = re.compile(
  r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"
  r"(?:([mgt]?)(bits?|bytes?|b)\s*(/\s*s(?:ec)?|ps)?)?\s*",
  re.IGNORECASE,
)
_PREFIXES = {"": 1.0, "m": 1e6, "g": 1e9, "t": 1e12}
# A smaller number without a unit is probably a rate in another unit, because
# networks are faster than 1 Mbit/s.
_LEAST_BARE = 1e6


def bits_a_second(rate: str | float) -> float:
  """Reads a line rate.

  Args:
    rate: A number with a unit, such as "25 Gbit/s" or "3.1 GB/s", or a number
      of bits per second.

  Returns:
    Bits per second.

  Raises:
    ValueError: The rate is not positive, cannot be read, or may be in bits or
      in bytes.
  """
  match = None if isinstance(rate, bool) else _RATE.fullmatch(str(rate))
  if match is None:
    raise _refused(rate)
  number, (prefix, unit, per) = float(match[1]), match.groups()[1:]
  if unit is None:
    if 0 < number < _LEAST_BARE:
      raise _refused(rate, "A number without a unit is in bits per second.")
    bits = number
  else:
    bits = number * _PREFIXES[prefix.lower()] * _bits(rate, prefix, unit, per)
  if not 0 < bits < math.inf:
    raise _refused(rate)
  return bits


def _bits(rate: str | float, prefix: str, unit: str, per: str | None) -> int:
  """Returns the bits of a unit; raises `ValueError` if it is ambiguous."""
  if unit.lower().startswith("bit"):
    return 1
  if per is None:
    raise _refused(rate, "This is an amount, not a rate. Add '/s'.")
  if unit.lower().startswith("byte"):
    return 8
  # "Gb/s" and "Gbps" are bits, "GB/s" and "GBps" are bytes. If all letters have
  # the same case, as in "gb/s" and "GBPS", people mean either.
  written = prefix + unit + per
  if unit == "b" and (prefix.isupper() or per.lower() == "ps"):
    return 1
  if unit == "B" and not written.replace("/", "").isupper():
    return 8
  raise _refused(rate, f"{written!r} may be bits or bytes.")


def _refused(rate: object, why: str = "") -> ValueError:
  return ValueError(
    f"A line rate must be written as {_FORMS}, got {rate!r}. {why}".rstrip()
  )


def in_words(bits: float) -> str:
  """Returns a rate in bits per second with three digits, say "25 Gbit/s"."""
  bits = float(f"{bits:.3g}")
  for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
    if bits >= size:
      return f"{bits / size:g} {unit}"
  return f"{bits / 1e6:g} Mbit/s"
