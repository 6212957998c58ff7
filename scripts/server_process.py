"""Server processes for scripts; the module is part of the package, where ``sglang-scout profile`` uses it."""

from sglang_scout.cli.server_process import (
    CLUSTER_VARIABLE,
    ServerFailed,
    ServerProcess,
    children_of,
    free_ports,
    process_title,
    processes_of,
    stop_all,
)

__all__ = [
    "CLUSTER_VARIABLE",
    "ServerFailed",
    "ServerProcess",
    "children_of",
    "free_ports",
    "process_title",
    "processes_of",
    "stop_all",
]
