"""The engine runs steps and moves bytes; ``policy/`` decides what it should do."""
