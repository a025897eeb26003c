"""The metadata is in pyproject.toml; this file lets tools that call setup.py find it."""

from setuptools import setup

setup()
