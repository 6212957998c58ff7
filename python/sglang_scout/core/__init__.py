"""Floor 0: configuration, errors, recall profile, step log. Needs neither torch nor SGLang."""
