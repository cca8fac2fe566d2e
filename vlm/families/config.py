"""Reading config.json with errors that say which field is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vlm.errors import CheckpointError, UnsupportedModelError


@contextmanager
def reading(part: str) -> Iterator[None]:
    """Turn what a config reader of the vision and text stacks raises into the errors that users meet.

    KeyError is a missing field, ValueError and TypeError a wrong one, NotImplementedError one that is right but not
    served.
    """
    try:
        yield
    except KeyError as error:
        raise CheckpointError(
            f"config.json: {part} lacks the field {error.args[0]!r}; is this the model's own config.json?"
        ) from error
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"config.json: {part} asks for {error}, which this version does not serve"
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {part} is not valid: {error}") from error


# Every number that a reader of the vision and text stacks takes from config.json, by what it may be.
# fmt: off
_COUNTS = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings", "depth",
    "num_heads", "out_hidden_size", "image_size", "patch_size", "temporal_patch_size", "spatial_merge_size",
    "window_size", "scale_factor",
))
_INDICES = frozenset((
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    "image_token_index", "video_token_index", "sliding_window", "max_window_layers",
))
_FACTORS = frozenset((
    "rms_norm_eps", "layer_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor",
))
# fmt: on
_CHANNELS = frozenset(("in_channels", "num_channels"))  # pictures are RGB
_LISTS = frozenset(("fullatt_block_indexes", "mrope_section"))
_NESTED = frozenset(("rope_parameters", "rope_scaling"))
_MOST = 2**31 - 1


def checked(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The entries of an object of config.json that are not null, once their numbers are known to make sense.

    Args:
        where: the path of `part`, as "text_config." or "" for the top.

    Raises:
        CheckpointError: a number of the wrong type or out of range; names the file, the entry and the value.
    """
    set_ones = {name: value for name, value in part.items() if value is not None}
    for name, value in set_ones.items():
        if name in _NESTED and isinstance(value, Mapping):
            checked(value, f"{where}{name}.")
        elif wrong := _wrong(name, value):
            raise CheckpointError(f"config.json: {where}{name} is {value!r}, but must be {wrong}")
    return set_ones


def _wrong(name: str, value: Any) -> str:
    """What the value would have to be, or "" where it is that."""
    if name in _LISTS:
        if isinstance(value, (list, tuple)) and not any(_wrong_whole(one, 0) for one in value):
            return ""
        return f"a list of whole numbers from 0 to {_MOST}"
    if name in _CHANNELS:
        return "" if value == 3 else "3"
    if name in _COUNTS:
        return _wrong_whole(value, 1)
    if name in _INDICES:
        return _wrong_whole(value, 0)
    if name in _FACTORS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and 0 < value < math.inf else "a number above 0"
    return ""


def _wrong_whole(value: Any, low: int) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole and low <= value <= _MOST else f"a whole number from {low} to {_MOST}"


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A nested object of config.json, `checked`. Raises CheckpointError where it is missing or no object, too."""
    value = config.get(name)
    if not isinstance(value, Mapping):
        wrong = "missing" if value is None else "no object"
        raise CheckpointError(f"config.json: {name!r} is {wrong}; is this the model's own config.json?")
    return checked(value, f"{name}.")


def require_same(settings: Mapping[str, tuple[int, str, int]]) -> None:
    """What preprocessor_config.json and config.json both say must agree, or every picture would fail.

    Args:
        settings: entry of preprocessor_config.json -> (its value, the entry of config.json, that one's value). A value
            is the default where the file leaves the entry out.
    """
    for name, (ours, other, theirs) in settings.items():
        if ours != theirs:
            raise CheckpointError(
                f"preprocessor_config.json: {name} is {ours}, but config.json: {other} is {theirs}; "
                "the two files do not belong together (an entry that is missing counts as its default)"
            )
