"""Starts SGLang servers and routers for tests, benchmarks and the demo; not part of the package."""
