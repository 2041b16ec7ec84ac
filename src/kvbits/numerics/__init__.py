"""Pure functions on tensors. Nothing here knows of codecs, caches or models."""
