"""Layers. :class:`ComplexKDA` is the paper's; KDA and the two half-extensions are the same layer with other ranges."""

from ckda.layers.baselines import GRU, AttentionBlock
from ckda.layers.complex_kda import RANGES, ComplexKDA, LayerCache
from ckda.layers.delta_product import DeltaProduct
from ckda.layers.parts import HeadNorm, ShortConvolution

__all__ = [
    "GRU",
    "RANGES",
    "AttentionBlock",
    "ComplexKDA",
    "DeltaProduct",
    "HeadNorm",
    "LayerCache",
    "ShortConvolution",
]
