"""Policies: four small choices (digest, predictor, missing pages, residency) that decide and never move bytes."""
