"""The cache of one layer: tokens come exact, are packed in blocks, and are handed on as a view.

===============  ======================================================
module           what is in it
===============  ======================================================
``held``         ``Layer``: what a layer holds, to be looked at, counted, selected and handed on
``cache``        ``LayerCache``: how it grows and is cropped
``packing``      exact tokens on their way into blocks
``first_fit``    what is fitted from the first tokens that are packed
``frozen``       ``FrozenLayerCache``: the same at a fixed capacity, for one graph
``ring``         ``RingLayer``: exact tokens at a fixed capacity
===============  ======================================================
"""

from kvbits.layer.cache import LayerCache
from kvbits.layer.held import Layer

__all__ = ["Layer", "LayerCache"]
