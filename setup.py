"""Build hook of spare_megatron; metadata and tool settings are in pyproject.toml."""

from setuptools import setup

setup()
