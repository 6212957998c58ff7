"""Exceptions of sglang-scout. A message states what was wrong, its value, and what is accepted."""

from __future__ import annotations


class ScoutError(Exception):
    """Base of all exceptions that sglang-scout raises on purpose."""


class ConfigError(ScoutError, ValueError):
    """A flag or a configuration value is wrong: names the flag, the value and the fix."""


class ArenaError(ScoutError, ValueError):
    """The shared arena cannot be created or mapped: wrong sizes, too little memory, a foreign file."""


class WorkerError(ScoutError, RuntimeError):
    """The CPU attention process could not be started, or a ticket was used against its contract."""
