"""The engine moves bytes and keeps time; what it should do is decided by ``policy/``."""
