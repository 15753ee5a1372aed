"""The language model by `--trace` and `--checkpoint`, stopped and gone on."""

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from examples.studies.common import cluster
from examples.studies.lm import __main__ as program
from examples.studies.lm import corpus
from examples.studies.lm import data
from zenjax.planner import traces

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")
# What a trace holds are local gradients: pmean compiles in less time.
_DEVICES, _NEGATIVES, _VOCAB = 2, 8, 2000
_FLAGS = (
  "--batch-tokens",
  "64",
  "--width",
  "16",
  "--eval-tokens",
  "64",
  "--sync",
  "pmean",
)


@pytest.fixture
def text(tmp_path):
  rng = np.random.default_rng(0)
  words = np.append(np.arange(_VOCAB), rng.integers(0, _VOCAB, 90_000))
  path = tmp_path / "text"
  path.write_text(" ".join(f"w{word}" for word in words))
  return path


def _looked_up(text, step):
  """Of every device in a step of a run from the start: the rows by table."""
  ids = corpus.load_tokens(text).ids
  batches = data.batches(
    data.split(ids)[0],
    devices=_DEVICES,
    batch_tokens=64,
    negatives=_NEGATIVES,
    vocab=_VOCAB,
    seed=0,
    first_step=step,
  )
  batch = next(batches)
  negatives = batch.negatives.reshape(_DEVICES, _NEGATIVES)
  inputs = [np.unique(window[:-1]) for window in batch.windows]
  targets = [
    np.unique(np.append(window[1:], drawn))
    for window, drawn in zip(batch.windows, negatives)
  ]
  return inputs, targets


def test_a_resumed_run_records_the_steps_that_it_takes(
  text, tmp_path, capsys, monkeypatch
):
  pytest.importorskip("orbax.checkpoint")
  mesh = Mesh(np.array(jax.devices()[:_DEVICES]), ("data",))
  monkeypatch.setattr(cluster, "make_mesh", lambda count: mesh)

  def run(steps, trace, *more):
    directories = {"--checkpoint": "saved", "--trace": trace}
    paths = [x for k, v in directories.items() for x in (k, tmp_path / v)]
    flags = ["--corpus", text, "--steps", steps, "--negatives", _NEGATIVES]
    return program.main([*map(str, [*flags, *paths]), *_FLAGS, *more])

  assert run(2, "first") == 0
  before = {p.name: p.read_bytes() for p in (tmp_path / "first").iterdir()}
  # What is there is another run's: it is neither added to nor replaced.
  with pytest.raises(SystemExit) as refused:
    run(4, "first", "--resume")
  assert refused.value.code == 2
  assert "must be new or empty" in capsys.readouterr().err
  now = {p.name: p.read_bytes() for p in (tmp_path / "first").iterdir()}
  assert now == before

  assert run(4, "second", "--resume") == 0
  assert "trace of 2 steps" in capsys.readouterr().out
  for name, start in (("first", 0), ("second", 2)):
    trace = traces.read(tmp_path / name)
    assert (trace.steps, trace.header.devices) == (2, _DEVICES)
    for step in range(2):
      expected = _looked_up(text, start + step)
      for sets, rows in zip(trace.sets.values(), expected, strict=True):
        for got, want in zip(sets[step], rows, strict=True):
          np.testing.assert_array_equal(got, want)
