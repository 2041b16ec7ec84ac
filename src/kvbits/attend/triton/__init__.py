"""Attention over packed blocks in Triton: what is compiled (``shape``, ``tuning``, ``kernel``), and ``decode``."""
