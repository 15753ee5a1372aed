"""The text that the language model's flags name: to train on, and held out."""

import argparse

import corpus
import lm_data
import numpy as np
import processes


def load(
  flags: argparse.Namespace, devices: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Reads the text.

  Returns:
    Windows to train on, windows held out, and the number of words.
  """
  try:
    text = corpus.load_tokens(flags.corpus)
  except (OSError, ValueError) as error:
    raise SystemExit(f"--corpus: {error}") from error
  ids, vocab = text.ids, len(text.vocab)
  processes.require_same("The text", ids)
  if flags.vocab is not None and flags.vocab < vocab:
    ids, vocab = lm_data.cap_vocabulary(ids, flags.vocab), flags.vocab
  windows, held_out = lm_data.split(ids)
  needed = devices * flags.batch_tokens // lm_data.LENGTH
  if len(windows) < needed or len(held_out) < devices:
    raise SystemExit(
      f"--corpus must hold a batch for {devices} devices and some text beside,"
      f" got {len(ids):,} tokens: give more text or a smaller --batch-tokens"
    )
  print(
    f"{len(ids):,} tokens, {vocab:,} distinct; {devices} devices,"
    f" {devices * flags.batch_tokens:,} tokens a step"
  )
  held_out = lm_data.sample_held_out(held_out, flags.eval_tokens, devices)
  return windows, held_out, vocab
