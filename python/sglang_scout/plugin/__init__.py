"""The only floor that imports SGLang: flags, hooks, pools, attention backend, status."""
