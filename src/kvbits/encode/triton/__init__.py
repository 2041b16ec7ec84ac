"""Encoding of blocks in Triton: what is compiled (``shape``, ``kernel``), and the call (``encode``)."""
