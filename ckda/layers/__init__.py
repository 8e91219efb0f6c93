"""Layers. :class:`ComplexKDA` is the paper's; KDA and the two half-extensions are the same layer with other ranges."""

from ckda.layers.complex_kda import RANGES, ComplexKDA, LayerCache
from ckda.layers.parts import HeadNorm, ShortConvolution

__all__ = ["RANGES", "ComplexKDA", "HeadNorm", "LayerCache", "ShortConvolution"]
