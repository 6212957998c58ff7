"""KV offload for SGLang decode workers, loaded through SGLang's plugin entry point."""

__version__ = "0.1.0"
