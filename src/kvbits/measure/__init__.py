"""How good, how small and how fast each scheme is on a model and a text of the user's own.

One file an idea: ``caches`` (kvbits schemes and their peers under one name each), ``text`` (what is read), ``quality``
(perplexity and divergence), ``retrieval`` (planted facts), ``tasks`` (through lm-evaluation-harness: ``harness``,
``task_data``), ``packed`` (whether anything was quantized), ``pairs`` (paired tests), ``bench``
(speed and memory side by side: ``speed`` on ``runner``, ``peak``, ``room``, ``weights``, ``breakeven``),
``results`` (the file that all of them write), ``setting`` (what is recorded beside figures), ``report`` (pictures).
"""
