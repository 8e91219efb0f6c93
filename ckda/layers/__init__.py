"""Layers. :class:`ComplexKDA` is the paper's; KDA and the two half-extensions are the same layer with other ranges."""

from ckda.layers.baselines import GRU, AttentionBlock, SoftmaxAttention
from ckda.layers.complex_kda import RANGES, ComplexKDA, LayerCache
from ckda.layers.convolution import ShortConvolution
from ckda.layers.delta_product import ComplexProduct, DeltaProduct
from ckda.layers.gated_delta import GatedDeltaNet, SeparateGates
from ckda.layers.gated_norm import HeadNorm
from ckda.layers.mixers import MIXERS, Mixer, build_mixer
from ckda.layers.sign_factor import SignFactor
from ckda.layers.state_space import RWKV7, Mamba2, Mamba3

__all__ = [
    "GRU",
    "MIXERS",
    "RANGES",
    "RWKV7",
    "AttentionBlock",
    "ComplexKDA",
    "ComplexProduct",
    "DeltaProduct",
    "GatedDeltaNet",
    "HeadNorm",
    "LayerCache",
    "Mamba2",
    "Mamba3",
    "Mixer",
    "SeparateGates",
    "ShortConvolution",
    "SignFactor",
    "SoftmaxAttention",
    "build_mixer",
]
