"""Policies whose KV heads select pages by embeddings, most of them trained (``scripts/train_forecast.py``)."""
