"""Every public transformation of optax, as one may write it for a model.

`python tests/helpers/optax_table.py` prints what each does on row gradients.
"""

import functools
import inspect
import pathlib
import sys

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


OPTAX = {
  "acprop": lambda: contrib.acprop(0.1),
  "adabelief": lambda: optax.adabelief(0.1),
  "adadelta": lambda: optax.adadelta(0.1),
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
  "adagrad": lambda: optax.adagrad(0.1),
  "adam": lambda: optax.adam(_schedule),
  "adamax": lambda: optax.adamax(0.1),
  "adamaxw": lambda: optax.adamaxw(0.1),
  "adamw": lambda: optax.adamw(0.1),
  "adan": lambda: optax.adan(0.1),
  "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
  "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
  "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
  "ademamix": lambda: contrib.ademamix(0.1),
  "adopt": lambda: contrib.adopt(0.1),
  "amsgrad": lambda: optax.amsgrad(0.1),
  "apply_every": lambda: optax.apply_every(2),
  "apply_if_finite": lambda: optax.apply_if_finite(
    optax.chain(_clip(), optax.adam(0.1)), 5
  ),
  "centralize": optax.centralize,
  "chain": lambda: optax.chain(_clip(), optax.sgd(0.1, 0.9, True)),
  "clip": lambda: optax.clip(0.5),
  "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
  "clip_by_global_norm": lambda: optax.clip_by_global_norm(5.0),
  "cocob": contrib.cocob,
  "conditionally_mask": lambda: optax.conditionally_mask(
    optax.adam(0.1), _every_other
  ),
  "conditionally_transform": lambda: optax.conditionally_transform(
    optax.adam(0.1), _every_other
  ),
  "dadapt_adamw": contrib.dadapt_adamw,
  "ema": lambda: optax.ema(0.9),
  "flatten": lambda: optax.flatten(optax.adam(0.1)),
  "freeze": lambda: optax.freeze(_SOME),
  "fromage": lambda: optax.fromage(0.1),
  "galore": lambda: contrib.galore(0.1, rank=2),
  "identity": optax.identity,
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
    learning_rate=_schedule
  ),
  "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
    optax.sgd
  )(learning_rate=0.1),
  "keep_params_nonnegative": optax.keep_params_nonnegative,
  "lamb": lambda: optax.lamb(0.1),
  "lars": lambda: optax.lars(0.1),
  "lbfgs": optax.lbfgs,
  "lion": lambda: optax.lion(0.1),
  "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
  "madgrad": lambda: contrib.madgrad(0.1),
  "masked": lambda: optax.masked(optax.adam(0.1), _SOME),
  "measure_with_ema": lambda: optax.measure_with_ema(
    optax.tree.norm, decay=0.9
  ),
  "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
  "momo": lambda: contrib.momo(0.1),
  "momo_adam": lambda: contrib.momo_adam(0.1),
  "multi_transform": lambda: optax.multi_transform(
    {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, _LABELS
  ),
  "muon": lambda: contrib.muon(0.1),
  "nadam": lambda: optax.nadam(0.1),
  "nadamw": lambda: optax.nadamw(0.1),
  "named_chain": lambda: optax.named_chain(
    ("clip", _clip()), ("rms", optax.rmsprop(0.1))
  ),
  "noisy_sgd": lambda: optax.noisy_sgd(0.1),
  "normalize": contrib.normalize,
  "normalize_by_update_norm": optax.normalize_by_update_norm,
  "novograd": lambda: optax.novograd(0.1),
  "optimistic_adam": lambda: optax.optimistic_adam(0.1, 0.1),
  "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
  "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
  "partition": lambda: optax.partition(
    {"x": optax.chain(_clip(), optax.adagrad(0.1)), "y": optax.sgd(0.1)},
    _LABELS,
  ),
  "polyak_sgd": optax.polyak_sgd,
  "prodigy": contrib.prodigy,
  "radam": lambda: optax.radam(0.1),
  "reduce_on_plateau": lambda: contrib.reduce_on_plateau(patience=1),
  "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
  "rowwise_adagrad": lambda: zenjax.rows.rowwise_adagrad(0.1),  # our own
  "rprop": lambda: optax.rprop(0.1),
  "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
  "scale": lambda: optax.scale(-0.5),
  "scale_by_acprop": contrib.scale_by_acprop,
  "scale_by_adadelta": optax.scale_by_adadelta,
  "scale_by_adam": optax.scale_by_adam,
  "scale_by_adamax": optax.scale_by_adamax,
  "scale_by_adan": optax.scale_by_adan,
  "scale_by_ademamix": contrib.scale_by_ademamix,
  "scale_by_adopt": contrib.scale_by_adopt,
  "scale_by_amsgrad": optax.scale_by_amsgrad,
  "scale_by_backtracking_linesearch": lambda: (
    optax.scale_by_backtracking_linesearch(3)
  ),
  "scale_by_belief": optax.scale_by_belief,
  "scale_by_cocob": contrib.scale_by_cocob,
  "scale_by_distance_over_gradients": optax.scale_by_distance_over_gradients,
  "scale_by_galore": lambda: contrib.scale_by_galore(rank=2),
  "scale_by_lbfgs": optax.scale_by_lbfgs,
  "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
  "scale_by_lion": optax.scale_by_lion,
  "scale_by_madgrad": lambda: contrib.scale_by_madgrad(0.1),
  "scale_by_muon": contrib.scale_by_muon,
  "scale_by_novograd": optax.scale_by_novograd,
  "scale_by_optimistic_gradient": optax.scale_by_optimistic_gradient,
  "scale_by_param_block_norm": optax.scale_by_param_block_norm,
  "scale_by_param_block_rms": optax.scale_by_param_block_rms,
  "scale_by_polyak": optax.scale_by_polyak,
  "scale_by_radam": optax.scale_by_radam,
  "scale_by_rms": optax.scale_by_rms,
  "scale_by_rprop": lambda: optax.scale_by_rprop(0.1),
  "scale_by_rss": optax.scale_by_rss,
  "scale_by_schedule": lambda: optax.scale_by_schedule(_schedule),
  "scale_by_sign": optax.scale_by_sign,
  "scale_by_simplified_ademamix": contrib.scale_by_simplified_ademamix,
  "scale_by_sm3": optax.scale_by_sm3,
  "scale_by_stddev": optax.scale_by_stddev,
  "scale_by_trust_ratio": optax.scale_by_trust_ratio,
  "scale_by_yogi": optax.scale_by_yogi,
  "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(3),
  "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
  "schedule_free_adamw": contrib.schedule_free_adamw,
  "schedule_free_sgd": contrib.schedule_free_sgd,
  "selective_transform": lambda: optax.selective_transform(
    optax.adam(0.1), freeze_mask=_SOME
  ),
  "set_to_zero": optax.set_to_zero,
  "sgd": lambda: optax.sgd(0.1, 0.9, nesterov=True),
  "sign_sgd": lambda: optax.sign_sgd(0.1),
  "signum": lambda: optax.signum(0.1),
  "simplified_ademamix": lambda: contrib.simplified_ademamix(0.1),
  "sm3": lambda: optax.sm3(0.1),
  "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
  "sophia": lambda: contrib.sophia(0.1),
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
  "yogi": lambda: optax.yogi(0.1),
  "zero_nans": optax.zero_nans,
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


def public_names() -> set[str]:
  """Names in optax that make a transformation, by what they return."""
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
  return set(found.values())


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
