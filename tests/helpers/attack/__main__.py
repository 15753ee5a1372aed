"""`python -m tests.helpers.attack`: many cases of every front, and a table."""

import argparse
import pathlib
import sys
import time

# As pytest does it: helpers on the path, and eight CPU devices.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import conftest  # noqa: E402, F401
import tqdm  # noqa: E402

from attack import front as one  # noqa: E402
from attack import fronts as all_fronts  # noqa: E402


def _shares(fronts, cases: int) -> dict[str, int]:
  """Cases of each front, by weight; one at least."""
  total = sum(front.weight for front in fronts)
  return {
    front.name: max(1, round(cases * front.weight / total)) for front in fronts
  }


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.helpers.attack")
  parser.add_argument("--cases", type=int, default=10_000, help="of all fronts")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--fronts", nargs="+", metavar="NAME", help="those whose names hold NAME"
  )
  parser.add_argument(
    "--number", type=int, help="one case alone, by its number"
  )
  options = parser.parse_args()
  fronts = [
    front
    for front in all_fronts.FRONTS
    if not options.fronts or any(part in front.name for part in options.fronts)
  ]
  if not fronts:
    names = ", ".join(front.name for front in all_fronts.FRONTS)
    parser.error(f"no front of that name; there are {names}")
  shares = _shares(fronts, options.cases)
  print(f"seed {options.seed}")
  rows: list[tuple[str, int, int, str]] = []
  bar = tqdm.tqdm(total=sum(shares.values()), unit=" cases", smoothing=0.05)
  for front in fronts:
    bar.set_description(f"{front.name:<28}")
    begun, wrong = time.monotonic(), 0
    numbers = range(shares[front.name])
    if options.number is not None:
      numbers = [options.number]
    for failure in one.attack(front, options.seed, numbers):
      bar.update()
      if failure:
        wrong += 1
        if wrong <= 3:
          bar.write(str(failure))
    front.forget()
    seconds = time.monotonic() - begun
    rows.append((front.name, len(numbers), wrong, f"{seconds:.1f}"))
  bar.close()
  total = sum(row[1] for row in rows), sum(row[2] for row in rows)
  heading = ("front", "cases", "wrong", "seconds")
  width = 2 + max(len(row[0]) for row in rows)
  for name, cases, wrong, seconds in [heading, *rows, ("all", *total, "")]:
    print(f"{name:<{width}}{cases:>8}{wrong:>8}{seconds:>10}")
  return 1 if total[1] else 0


if __name__ == "__main__":
  sys.exit(main())
