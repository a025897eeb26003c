"""Time, memory and error of linear + cross-entropy, ours and everybody else's: `python -m benchmarks`."""
