"""The one-layer model of the state-tracking experiments (app:exp_state_tracking)."""

from torch import Tensor, nn

__all__ = ["Tracker"]


class Tracker(nn.Module):
    """Embedding, one mixer with a residual around it, LayerNorm, a two-layer GELU readout to the group's elements.

    Args:
        mixer: [B, T, width] -> [B, T, width].
        num_tokens: the group's order and one for the begin token. num_classes: the group's order.

    Example:
        >>> import torch
        >>> from ckda import ComplexKDA
        >>> model = Tracker(ComplexKDA(48, 12, 16, conv_size=0, activate=()), num_tokens=7, num_classes=6)
        >>> model(torch.zeros(2, 9, dtype=torch.long)).shape
        torch.Size([2, 9, 6])
    """

    def __init__(self, mixer: nn.Module, num_tokens: int, num_classes: int, width: int = 48, inner: int = 192):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.mixer = mixer
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Sequential(nn.Linear(width, inner), nn.GELU())
        self.classifier = nn.Linear(inner, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, num_classes]."""
        x = self.embedding(tokens)
        return self.decode(x + self.mixer(x))

    def decode(self, x: Tensor) -> Tensor:
        """From the residual stream [..., width] to logits."""
        return self.classifier(self.readout(self.norm(x)))

    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        """Muon takes every matrix but the embedding and the classifier; AdamW takes the rest."""
        return parameter.dim() == 2 and not name.startswith(("embedding", "classifier"))
