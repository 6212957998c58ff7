"""Differences between the supported releases of SGLang: one module each, with the same names."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from sglang_scout.core.supported import ADAPTERS, check_version

VERSION = version("sglang")
check_version(VERSION)
adapter: Any = import_module(f"sglang_scout.plugin.{ADAPTERS[VERSION]}")
"""Module for the installed release."""
