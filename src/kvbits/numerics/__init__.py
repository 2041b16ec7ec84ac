"""Floor 0: pure functions on tensors. Nothing here knows of codecs, caches or models."""
