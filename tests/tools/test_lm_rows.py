"""The language model by `--grads rows`: the same, resumed and compared."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from examples.studies.common import cluster
from examples.studies.common import trainer as training
from examples.studies.lm import __main__ as program
from examples.studies.lm import data
from examples.studies.lm import flags as lm_flags
from examples.studies.lm import model
from examples.studies.lm import study
import zenjax

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")

_DEVICES, _NEGATIVES, _VOCAB, _WIDTH = 2, 8, 2000, 16
# All tests take one rate of an optimizer: it is in a step that is kept.
_RATES = {"adagrad": 0.03, "adam": 0.01}
_made = {}


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
  for name in "_compiled_step", "_compiled_evaluation":
    monkeypatch.setattr(training, name, _kept(name, getattr(training, name)))


def _kept(name, make):
  """The same step is compiled once, to save time: models here are alike."""

  def make_once(graph, *args):
    # Optimizers are functions, new each time; states tell them apart.
    parts = [x for x in args if not isinstance(x, optax.GradientTransformation)]
    return _made.setdefault((name, str(parts)), make(graph, *args))

  return make_once


def _mesh():
  return Mesh(np.array(jax.devices()[:_DEVICES]), ("data",))


def _trainer(sync, grads, optimizer):
  sizes, rate = (_VOCAB, _WIDTH), _RATES[optimizer]
  return study.make_trainer(
    *sizes, optimizer, rate, _mesh(), 0, sync=sync, grads=grads
  )


def _batches(steps):
  rng = np.random.default_rng(0)
  for _ in range(steps):
    yield data.Batch(
      rng.integers(0, _VOCAB, (_DEVICES, data.LENGTH + 1), np.int32),
      rng.integers(0, _VOCAB, _DEVICES * _NEGATIVES, np.int32),
    )


def test_both_tables_are_only_looked_up():
  made = model.LanguageModel(_VOCAB, _WIDTH, rngs=nnx.Rngs(0))
  graph, params = nnx.split(made, nnx.Param)

  def loss(params, windows, negatives):
    return model.sampled_loss(nnx.merge(graph, params), windows, negatives)

  batch = next(_batches(1))
  found = zenjax.rows.explain_tables(
    loss, params, batch.windows, batch.negatives
  )
  rows = {use.name: use.look_ups for use in found.uses if use.rows}
  assert rows == {
    "embed.embedding": batch.size,
    "softmax.embedding": batch.size + batch.negatives.size,
  }, f"\n{found}"


@pytest.mark.more
def test_rows_train_as_arrays_do():
  """Adagrad leaves rows without a gradient alone, so both are the same."""
  ends = []
  for way in ("pmean", "dense"), ("zen", "rows"):
    trainer = _trainer(*way, "adagrad")
    losses = [trainer.step(batch) for batch in _batches(4)]
    ends.append((losses, jax.tree.leaves(jax.device_get(trainer.params))))
  (dense, params), (rows, same) = ends
  np.testing.assert_allclose(rows, dense, rtol=2e-6)
  # Adagrad's first step has the length of the rate whatever the gradient is:
  # an entry that is all rounding may go another way.
  for one, other in zip(params, same, strict=True):
    assert np.mean(~np.isclose(one, other, rtol=0, atol=1e-5)) < 1e-4


def test_every_word_of_a_text_counts_once():
  """The last window is padded, and with it one of two devices."""
  length = data.LENGTH + 1
  text = np.random.default_rng(0).integers(0, _VOCAB, length + 9, np.int32)
  windows, held_out = data.split(text)
  assert windows.shape == (2, length) and not len(held_out)
  np.testing.assert_array_equal(windows[windows != data.PADDING], text)
  trainer = _trainer("zen", "rows", "adagrad")
  made = model.LanguageModel(_VOCAB, _WIDTH, rngs=nnx.Rngs(0))
  # 64 words of one window and 8 of the other, each with its own past.
  one, other = (made(jnp.asarray(w[None])) for w in (windows[0], text[length:]))
  states = jnp.concatenate([one[0, :-1], other[0, :-1]])
  logits = states @ made.softmax.embedding[...].T
  targets = np.concatenate([windows[0, 1:], text[length + 1 :]])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  assert len(losses) == data.LENGTH + 8
  found = np.log(study.perplexity(trainer, windows))
  np.testing.assert_allclose(found, losses.mean(), rtol=1e-5)


def test_lazy_adam_moves_the_rows_of_a_step_alone():
  trainer = _trainer("zen", "rows", "adam")
  first, second = _batches(2)
  trainer.step(first)
  before = np.asarray(trainer.params["embed"]["embedding"][...])
  trainer.step(second)
  moved = np.asarray(trainer.params["embed"]["embedding"][...]) != before
  found = np.flatnonzero(moved.any(axis=1))
  np.testing.assert_array_equal(found, np.unique(second.windows[:, :-1]))


@pytest.mark.parametrize(
  "flags, match",
  [
    ("--sync pmean --grads rows", "--grads rows goes with --sync zen or"),
    ("--optimizer adam --lr -1", "--lr must be positive, got -1.0"),
  ],
)
def test_flags_are_checked(capsys, flags, match):
  with pytest.raises(SystemExit) as caught:
    lm_flags.parse("", flags.split())
  assert caught.value.code == 2
  assert match in capsys.readouterr().err


def test_every_optimizer_has_its_rate():
  parse = lm_flags.parse
  for name, rate in _RATES.items():
    assert parse("", [f"--optimizer={name}"]).lr == rate
    assert parse("", [f"--optimizer={name}", "--lr=0.5"]).lr == 0.5


@pytest.fixture
def text(tmp_path):
  rng = np.random.default_rng(0)
  words = np.append(np.arange(_VOCAB), rng.integers(0, _VOCAB, 90_000))
  path = tmp_path / "text"
  path.write_text(" ".join(f"w{word}" for word in words))
  return path


@pytest.fixture
def run(text, monkeypatch):
  """Runs the program on a small text; returns exit code and last trainer."""
  made, init = [], training.Trainer.__init__

  def record(trainer, *args, **kwargs):
    init(trainer, *args, **kwargs)
    made.append(trainer)

  monkeypatch.setattr(training.Trainer, "__init__", record)
  monkeypatch.setattr(cluster, "make_mesh", lambda count: _mesh())
  small = [f"--corpus={text}", f"--width={_WIDTH}", f"--negatives={_NEGATIVES}"]
  small += ["--batch-tokens=64", "--eval-tokens=64", "--grads=rows"]
  return lambda *flags: (program.main([*small, *flags]), made[-1])


def test_a_resumed_run_is_the_same(run, tmp_path):
  pytest.importorskip("orbax.checkpoint")
  saved = f"--checkpoint={tmp_path / 'saved'}"
  code, whole = run("--steps=4")
  assert code == 0
  assert whole.params["embed"]["embedding"][...].shape == (_VOCAB, _WIDTH)
  assert run("--steps=2", saved)[0] == 0
  for other in "--grads=dense", "--optimizer=adam":
    name = other.split("=")[0]
    with pytest.raises(SystemExit, match=f"{name} must be what the checkpoint"):
      run("--steps=4", saved, "--resume", "--lr=0.03", other)
  code, resumed = run("--steps=4", saved, "--resume")
  assert code == 0
  for one, other in zip(
    jax.tree.leaves((whole.params, whole.opt_state)),
    jax.tree.leaves((resumed.params, resumed.opt_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
  "optimizer, verdict",
  [
    ("adagrad", "Largest difference of losses over 3 steps"),
    ("adam", "the optimizer moves only rows that a step touches"),
  ],
)
def test_compares_rows_with_dense_gradients(
  run, tmp_path, capsys, optimizer, verdict
):
  plot = tmp_path / "runs.png"
  flags = "--sync=compare", f"--optimizer={optimizer}", f"--plot={plot}"
  assert run("--steps=3", *flags)[0] == 0
  assert plot.stat().st_size > 10_000
  out = capsys.readouterr().out
  assert re.search(r"^ +zen, rows +pmean +ratio$", out, re.MULTILINE), out
  assert re.search(r"^steps a second +\S+ +\S+$", out, re.MULTILINE), out
  assert verdict in out
  found = re.findall(r"^held-out perplexity +(\S+) +(\S+)$", out, re.MULTILINE)
  zen, pmean = map(float, found[0])
  assert abs(zen / pmean - 1) < (0.05 if optimizer == "adam" else 1e-5)
