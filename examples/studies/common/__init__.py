"""Trains a study: its loop, flags, checkpoints, Ctrl-C, files and plots."""
