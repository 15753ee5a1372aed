"""Every public transformation of optax, as one may write it for a model.

Those that want no argument but a learning rate are found in optax. The others
are a row in `WITH_ARGUMENTS`.

`python tests/helpers/optax_table.py` prints what each does on row gradients.
"""

import functools
import inspect
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from optax import transforms

import zenjax

# Tables `a` and `b`, and leaves that are none.
SHAPES = {"a": (61, 3), "b": (23, 5), "bias": (4,), "kernel": (6, 4)}
TABLES = ("a", "b")

_SOME = {"a": True, "b": False, "bias": True, "kernel": True}
_LABELS = {"a": "x", "b": "y", "bias": "x", "kernel": "y"}
_clip = functools.partial(optax.clip_by_global_norm, 1.0)
_schedule = optax.piecewise_constant_schedule(0.1, {2: 0.5, 4: 0.1})


def _every_other(step, **extra):
  del extra
  return step % 2 == 0


WITH_ARGUMENTS = {
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
  "adam": lambda: optax.adam(_schedule),
  "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
  "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
  "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
  "apply_every": lambda: optax.apply_every(2),
  "apply_if_finite": lambda: optax.apply_if_finite(
    optax.chain(_clip(), optax.adam(0.1)), 5
  ),
  "chain": lambda: optax.chain(_clip(), optax.sgd(0.1, 0.9, True)),
  "clip": lambda: optax.clip(0.5),
  "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
  "clip_by_global_norm": lambda: optax.clip_by_global_norm(5.0),
  "conditionally_mask": lambda: optax.conditionally_mask(
    optax.adam(0.1), _every_other
  ),
  "conditionally_transform": lambda: optax.conditionally_transform(
    optax.adam(0.1), _every_other
  ),
  "ema": lambda: optax.ema(0.9),
  "flatten": lambda: optax.flatten(optax.adam(0.1)),
  "freeze": lambda: optax.freeze(_SOME),
  "galore": lambda: contrib.galore(0.1, rank=2),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
    learning_rate=_schedule
  ),
  "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
    optax.sgd
  )(learning_rate=0.1),
  "lbfgs": optax.lbfgs,
  "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
  "masked": lambda: optax.masked(optax.adam(0.1), _SOME),
  "measure_with_ema": lambda: optax.measure_with_ema(
    optax.tree.norm, decay=0.9
  ),
  "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
  "multi_transform": lambda: optax.multi_transform(
    {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, _LABELS
  ),
  "named_chain": lambda: optax.named_chain(
    ("clip", _clip()), ("rms", optax.rmsprop(0.1))
  ),
  "optimistic_adam": lambda: optax.optimistic_adam(0.1, 0.1),
  "partition": lambda: optax.partition(
    {"x": optax.chain(_clip(), optax.adagrad(0.1)), "y": optax.sgd(0.1)},
    _LABELS,
  ),
  "reduce_on_plateau": lambda: contrib.reduce_on_plateau(patience=1),
  "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
  "rowwise_adagrad": lambda: zenjax.rows.rowwise_adagrad(0.1),  # our own
  "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
  "scale": lambda: optax.scale(-0.5),
  "scale_by_backtracking_linesearch": lambda: (
    optax.scale_by_backtracking_linesearch(3)
  ),
  "scale_by_galore": lambda: contrib.scale_by_galore(rank=2),
  "scale_by_schedule": lambda: optax.scale_by_schedule(_schedule),
  "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(3),
  "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
  "selective_transform": lambda: optax.selective_transform(
    optax.adam(0.1), freeze_mask=_SOME
  ),
  "sgd": lambda: optax.sgd(0.1, 0.9, nesterov=True),
  "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
  "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
    optax.adam(0.1)
  ),
  "stateless": lambda: optax.stateless(
    lambda updates, params: jax.tree.map(jnp.tanh, updates)
  ),
  "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
    lambda update, param: update * jnp.abs(jnp.asarray(param))
  ),
  "trace": lambda: optax.trace(0.9),
  "with_extra_args_support": lambda: optax.with_extra_args_support(
    optax.adam(0.1)
  ),
  "MultiSteps": lambda: optax.MultiSteps(
    optax.sgd(0.1), 2
  ).gradient_transformation(),
}

# Arguments that some want beside gradients and parameters.
EXTRA = {
  "momo": ("value",),
  "momo_adam": ("value",),
  "polyak_sgd": ("value",),
  "reduce_on_plateau": ("value",),
  "scale_by_polyak": ("value",),
}

# What takes no gradients of a model's parameters.
LEFT_OUT = {
  "GradientTransformation": "a type",
  "GradientTransformationExtraArgs": "a type",
  "WrappedSchedule": "a schedule",
  "differentially_private_aggregate": "takes a gradient for every example",
  "dpsgd": "takes a gradient for every example",
}


def _public() -> dict[str, Any]:
  """What makes a transformation in optax, by what it returns, once each."""
  found = {}
  for module in (optax, contrib, transforms):
    for name, make in vars(module).items():
      if name.startswith("_") or not callable(make):
        continue
      try:
        returned = str(inspect.signature(make).return_annotation)
      except (TypeError, ValueError):
        continue
      is_class = inspect.isclass(make) and hasattr(make, "update")
      if "GradientTransformation" in returned or is_class:
        found.setdefault(make, name)
  return {name: make for make, name in found.items()}


PUBLIC = _public()


def _as_it_is(make: Any) -> Any:
  """Gives a learning rate to a maker that wants one, or None otherwise."""
  wanted = list(inspect.signature(make).parameters.values())
  if wanted and wanted[0].name == "learning_rate":
    return functools.partial(make, 0.1)
  optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  needs = lambda x: x.default is x.empty and x.kind not in optional
  return None if any(map(needs, wanted)) else make


OPTAX = WITH_ARGUMENTS | {
  name: _as_it_is(make)
  for name, make in PUBLIC.items()
  if name not in {*WITH_ARGUMENTS, *LEFT_OUT} and _as_it_is(make)
}


def parameters():
  """Of each table's rows, none like another."""
  fill = lambda shape: jnp.linspace(0.5, 2.0, jnp.zeros(shape).size)
  return {name: fill(shape).reshape(shape) for name, shape in SHAPES.items()}


def main() -> None:
  """Prints what each transformation does, tried as the contract tries it."""
  import argparse

  tests = pathlib.Path(__file__).resolve().parents[1]
  sys.path[:0] = [str(tests), str(tests / "rows")]
  import conftest  # Eight devices, and optax's promotions below.
  import test_optax_contract  # pyright: ignore[reportMissingImports]
  import tqdm

  del conftest
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("--then", nargs="+", default=["alone", "sgd", "adam"])
  parser.add_argument("--names", nargs="+", default=list(OPTAX))
  args = parser.parse_args()
  runs = {
    "lazy_rows": test_optax_contract.run_lazy,
    "sharded_optimizer": test_optax_contract.run_owners,
  }
  print("| transformation | `lazy_rows` | `sharded_optimizer` |\n|---|---|---|")
  found: dict[str, dict[str, int]] = {key: {} for key in runs}
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    for name in tqdm.tqdm(args.names, unit="transformation"):
      cells = []
      for key, run in runs.items():
        verdicts = []
        for then in args.then:
          try:
            verdicts.append(run(name, then))
          except AssertionError as error:
            verdicts.append("WRONG")
            print(name, then, key, error, file=sys.stderr)
          found[key][verdicts[-1]] = found[key].get(verdicts[-1], 0) + 1
        same = len(set(verdicts)) == 1
        cells.append(verdicts[0] if same else " / ".join(verdicts))
      print(f"| `{name}` | {' | '.join(cells)} |", flush=True)
  for key, counts in found.items():
    print(f"\n{key}: " + ", ".join(f"{n} {v}" for v, n in counts.items()))


if __name__ == "__main__":
  main()
