"""Time, memory and error of linear + cross-entropy, of this package and of others: `python -m benchmarks`."""
