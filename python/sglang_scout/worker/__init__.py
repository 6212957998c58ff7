"""The CPU attention process: shared memory, the process itself and its client. Starts quickly: nothing is imported."""
