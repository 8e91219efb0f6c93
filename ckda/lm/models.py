"""Models by name or from disk, and their tokenizers."""

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ckda.lm import checkpoint
from ckda.lm.parallel import World
from ckda.lm.prepare import end_token, load_tokenizer
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ladder
from ckda.record import read_json

__all__ = ["TINY", "config_of", "export", "load_model", "text_tokenizer", "unfinished"]

#: a size for smoke runs, beside those of the ladder: it trains in seconds on a CPU
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_heads": 2,
    "head_dim": 16,
}


#: what a saved configuration says of its file, its tokenizer and its saving, not of the model
_OF_A_FILE = (
    "transformers_version",
    "auto_map",
    "architectures",
    "dtype",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
)


def config_of(name: str, **changes: Any) -> ComplexKDAConfig:
    """A configuration by name: "SIZE:ARM" of the ladder ("tiny" is one more size), or a JSON file (or its folder).

    Example:
        >>> config_of("47M:ckda").hidden_size, config_of("tiny:kda").mixers()
        (384, ['kda', 'kda', 'kda', 'kda'])
    """
    path = Path(name)
    path = next((p for p in (path / "config.json", path / "model" / "config.json") if p.is_file()), path)
    if (path / "checkpoint.json").is_file():
        return _configuration(name, checkpoint.read_manifest(path, verify=False)["config"] | changes)
    if path.suffix == ".json":
        if not path.is_file():
            raise ValueError(f"the model {name} is not there")
        return _configuration(name, read_json(path) | changes)
    size, colon, arm = name.partition(":")
    sizes = ("tiny", *ladder.CONFIGS)
    if colon and size not in sizes:
        raise ValueError(f"there is no size {size!r} for a model; there are {', '.join(sizes)}")
    if colon and arm not in ladder.ARMS:
        raise ValueError(f"there is no model {name}; there are {', '.join(f'{size}:{a}' for a in ladder.ARMS)}")
    if not colon:
        raise ValueError(
            f"the model is {name!r}; it may be SIZE:ARM with a size of {', '.join(sizes)} and an arm of "
            f"{', '.join(ladder.ARMS)}, or a JSON configuration"
        )
    if size == "tiny":
        return ComplexKDAConfig(**TINY | ladder.ARMS[arm] | changes)
    return ladder.build(size, arm, **changes)


def _configuration(name: str, values: dict[str, Any]) -> ComplexKDAConfig:
    """A configuration from its JSON; what is wrong with it is a ValueError that names the file."""
    try:
        return ComplexKDAConfig(**{key: value for key, value in values.items() if key not in _OF_A_FILE})
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{name}: {error.__cause__ or error}") from error


def export(folder: Path, config: ComplexKDAConfig, weights: dict[str, Any], tokenizer: Any = None) -> Path:
    """Write a model folder as transformers reads it, with its tokenizer; the folder gets its name when it is whole.

    The tokenizer's end token ends generation, starts an empty prompt and pads batches.
    """
    from transformers import PreTrainedTokenizerFast

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if config.tie_word_embeddings:
        weights = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    config = copy.deepcopy(config)
    if tokenizer is not None:
        end = end_token(tokenizer)
        config.eos_token_id = config.bos_token_id = config.pad_token_id = tokenizer.token_to_id(end)
        marks = {"eos_token": end, "bos_token": end, "pad_token": end, "padding_side": "left"}
        length = config.max_position_embeddings
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **marks).save_pretrained(temporary)
    with torch.device("meta"):
        shell = ComplexKDAForCausalLM(config)
    with _no_bars():
        shell.save_pretrained(temporary, state_dict=weights)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    return folder


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' progress bars of files that take no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal LM from a model folder, a training run (its model, or its newest checkpoint), or one checkpoint.

    `changes` are of the configuration, as `backend`.
    """
    path = Path(path)
    place = next((p for p in (path, path / "model") if (p / "config.json").is_file()), None)
    if place is not None:
        from transformers import AutoModelForCausalLM

        config = read_json(place / "config.json")
        if isinstance(config, dict) and config.get("model_type") == "kimi_linear_signed":
            import ckda.compat.kimi  # noqa: F401  it registers the Auto classes

        try:
            with _no_bars():
                whole: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **changes)
        except (SafetensorError, StrictDataclassError) as error:
            raise ValueError(f"{place} cannot be read: {error.__cause__ or error}") from error
        return whole.to(device).eval()
    alone = World(0, 1, torch.device("cpu"))
    found: Path | None = path
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest(path / "checkpoints", alone)
    if found is None or not (found / "checkpoint.json").is_file():
        raise ValueError(f"{path} is neither a model folder, nor a training run, nor a checkpoint")
    manifest = checkpoint.read_manifest(found)
    model = ComplexKDAForCausalLM(_configuration(str(found), manifest["config"] | changes))
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    checkpoint.load(found, tensors, alone, verify=False)
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):  # these stay in float32, as in a model folder
            p.data = p.data.to(dtype)
    moved: Any = model
    return moved.to(device).eval()


def unfinished(path: str | Path) -> str | None:
    """A sentence where a training run is not finished and its newest checkpoint stands in for the model; else None."""
    path = Path(path)
    if (path / "config.json").is_file() or (path / "model").is_dir() or not (path / "training.json").is_file():
        return None
    done, steps = checkpoint.steps_of(path / "checkpoints"), read_json(path / "training.json")["recipe"]["steps"]
    if not done:
        raise ValueError(f"{path} is a training run without a checkpoint yet: nothing of it can be loaded")
    return f"{path} is not finished: this is its checkpoint of update {done[-1]} of {steps}"


def text_tokenizer(path: str | Path, given: str | None = None) -> Any:
    """The tokenizer beside a model (in its folder, its run or its checkpoint's run), or the one given."""
    if given is not None:
        return load_tokenizer(given)
    path = Path(path)
    for place in (path, path / "model", path.parent.parent):
        if (place / "tokenizer.json").is_file():
            return load_tokenizer(str(place / "tokenizer.json"))
    raise ValueError(f"there is no tokenizer.json at {path}: name one with --tokenizer")
