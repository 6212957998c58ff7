"""The launcher for scripts; the module is part of the package, where ``sglang-scout profile`` uses it."""

from sglang_scout.cli.pd_cluster import (
    HOST,
    PDCluster,
    cpu_environment,
    flags,
)

__all__ = [
    "HOST",
    "PDCluster",
    "cpu_environment",
    "flags",
]
