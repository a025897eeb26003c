"""The only place that holds the version: setuptools and `flce_ops.__version__` read it."""

__version__ = "0.1.0"
