"""Will it fit, how far does it reach, what should I take? Answered before anything is loaded.

One file an idea: ``shapes`` (what of a model bears on memory), ``names`` (a model by its name), ``models`` (from
Transformers configs), ``gguf``, ``presets``, ``memory`` (real bytes), ``paper`` (the papers' accounting), ``peak``
(reading a prompt), ``devices`` (memory by name), ``split`` (several devices), ``setting`` (what
is planned), ``fit`` (what each device holds, and how far it reaches), ``quality`` (what was measured), ``plan`` (all of
it together), ``picture`` and ``page``.
"""
