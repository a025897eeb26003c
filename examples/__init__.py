"""Runnable demonstrations: `python -m examples.train_gpt`."""
