"""Text from a prompt, token by token."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["choose_token", "stream"]


def choose_token(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token from logits [V]: the largest at temperature 0, else drawn from what `top_k` and `top_p` leave.

    Example:
        >>> choose_token(torch.tensor([0.0, 3.0, 1.0]), 0.0, 0, 1.0, torch.Generator())
        1
    """
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = (logits.float() / temperature).sort(descending=True)
    if top_k:
        values, tokens = values[:top_k], tokens[:top_k]
    chances = values.softmax(-1)
    kept = chances.cumsum(-1) - chances < top_p
    chances = (chances * kept).cpu()
    return int(tokens[int(torch.multinomial(chances, 1, generator=generator))])


@torch.no_grad()
def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[str]:
    """The continuation of `prompt`, in pieces as they become whole characters; ends at the token `end`."""
    device = model.get_output_embeddings().weight.device
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        ids = [0 if end is None else end]
    generator = torch.Generator().manual_seed(seed)
    result = model(input_ids=torch.tensor([ids], device=device), use_cache=True, logits_to_keep=1)
    made: list[int] = []
    said = ""
    for _ in range(max_new):
        token = choose_token(result.logits[0, -1], temperature, top_k, top_p, generator)
        if token == end:
            break
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("�") and len(text) > len(said):
            yield text[len(said) :]
            said = text
        step = torch.tensor([[token]], device=device)
        result = model(input_ids=step, past_key_values=result.past_key_values, use_cache=True)
    text = tokenizer.decode(made)
    if len(text) > len(said):
        yield text[len(said) :]
