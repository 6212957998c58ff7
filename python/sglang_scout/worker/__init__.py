"""The CPU attention process: shared memory, control messages, the process itself and its client.

Nothing is imported here: ``python -m sglang_scout.worker.main`` must start quickly, without torch.
"""
