"""What generation carries from one token to the next: a state of fixed size, or keys and values, by layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ckda.models.config import ComplexKDAConfig
from ckda.models.mixers import ATTENTION

__all__ = ["ModelCache", "RecurrentLayer"]


class RecurrentLayer(CacheLayerMixin):
    """The cache of one recurrent mixer: its :class:`ckda.layers.LayerCache`, whatever tensors that holds, batch first."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.carried: Any = None
        self.num_seen = 0

    def run(self, mixer: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """x [B, T, d] -> [B, T, d], from what is carried; and carry on. attention_mask [B, T] is 0 at padding."""
        if self.carried is not None and x.shape[1] == 1:
            mask = None if attention_mask is None else attention_mask.squeeze(1)
            y, self.carried = mixer.step(x.squeeze(1), self.carried, attention_mask=mask)
            y = y.unsqueeze(1)
        else:
            y, self.carried = mixer.prefill(x, self.carried, attention_mask=attention_mask)
        self.num_seen += x.shape[1]
        self.is_initialized = True
        return y

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.carried = pytree.tree_map_only(Tensor, change, self.carried)

    @property
    def batch_size(self) -> int:
        """B, or -1 before the first token."""
        return -1 if self.carried is None else int(pytree.tree_leaves(self.carried)[0].shape[0])

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the state comes with the first token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a recurrent layer has no keys and values to update; see RecurrentLayer.run")

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        raise NotImplementedError("a recurrent state is small and stays on its device")

    def reset(self) -> None:
        self.carried, self.num_seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("a recurrent state cannot be turned back: it keeps no earlier one")


class ModelCache(Cache):
    """One layer cache a block, as the configuration's mixers need it.

    Example:
        >>> config = ComplexKDAConfig(num_hidden_layers=4, hybrid="gated-attention")
        >>> [type(layer).__name__ for layer in ModelCache(config).layers]
        ['RecurrentLayer', 'RecurrentLayer', 'RecurrentLayer', 'DynamicLayer']
    """

    def __init__(self, config: ComplexKDAConfig):
        layers: list[Any] = []
        for mixer in config.mixers():
            if mixer not in ATTENTION:
                layers.append(RecurrentLayer())
            elif ATTENTION[mixer].windowed:
                layers.append(DynamicSlidingWindowLayer(sliding_window=config.sliding_window))
            else:
                layers.append(DynamicLayer())
        super().__init__(layers=layers)

    def num_bytes(self) -> int:
        """What the cache weighs: constant in the number of tokens but for attention without a window."""
        total = 0
        layers: list[Any] = self.layers
        for layer in layers:
            held = layer.carried if isinstance(layer, RecurrentLayer) else (layer.keys, layer.values)
            total += sum(x.nbytes for x in pytree.tree_leaves(held) if isinstance(x, torch.Tensor))
        return total
