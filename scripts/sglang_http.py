"""HTTP requests for scripts; the module is part of the package, where ``sglang-scout profile`` uses it."""

from sglang_scout.cli.sglang_http import (
    Generation,
    RequestFailed,
    generate_payload,
    http_json,
    parse_generation,
    sse_events,
)

__all__ = [
    "Generation",
    "RequestFailed",
    "generate_payload",
    "http_json",
    "parse_generation",
    "sse_events",
]
