"""Reading config.json with errors that say which field is wrong."""

from __future__ import annotations

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


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of config.json. Raises CheckpointError where it is missing or no object."""
    value = config.get(name)
    if not isinstance(value, Mapping):
        wrong = "missing" if value is None else "no object"
        raise CheckpointError(f"config.json: {name!r} is {wrong}; is this the model's own config.json?")
    return value
