"""The only floor that knows SGLang: flags, hooks, pools, attention backend, status."""
