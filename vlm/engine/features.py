"""Image features: encoded once for each picture, and kept for the next request that shows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import torch

from vlm.engine.request import Run, Sequence
from vlm.families.base import ImageInputs


class FeatureCache:
    """Features by the key of their picture, within `max_bytes`; what was used longest ago goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def __len__(self) -> int:
        return len(self._features)

    def get(self, key: bytes) -> torch.Tensor | None:
        if key not in self._features:
            return None
        self._features.move_to_end(key)
        return self._features[key]

    def put(self, key: bytes, features: torch.Tensor) -> torch.Tensor:
        """Keep features of a picture that is not known yet, if they fit at all. The tensor to go on with."""
        assert key not in self._features, "a picture that is known was encoded again"
        if features.nbytes > self.max_bytes:
            return features
        if features.untyped_storage().nbytes() > features.nbytes:
            features = features.clone()  # a view would keep the features of its whole batch alive
        while self.num_bytes + features.nbytes > self.max_bytes:
            _, oldest = self._features.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        self._features[key] = features
        self.num_bytes += features.nbytes
        return features

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the features of these pictures, where they are known."""
        for key in keys:
            if (features := self._features.pop(key, None)) is not None:
                self.num_bytes -= features.nbytes


class ImageEncoder:
    """Gives sequences the features that a step needs.

    `encoded` counts the pictures that ran, `hits` those that did not have to: known ones, and the same twice in a step.
    """

    def __init__(
        self, encode: Callable[[SequenceOf[ImageInputs]], list[torch.Tensor | Exception]], cache: FeatureCache
    ) -> None:
        self.cache = cache
        self.encoded = 0
        self.hits = 0
        self._encode = encode

    def __call__(self, runs: SequenceOf[Run]) -> dict[int, Exception]:
        """Put the features of the images whose tokens run into their sequences; why there are none, by request id."""
        missing = _missing(runs)
        # All look-ups come before the first `put`, which could evict what the scheduler took for known.
        wanted: OrderedDict[object, list[tuple[Sequence, int]]] = OrderedDict()
        for sequence, image in missing:
            key = sequence.request.key_of(image)
            if key is not None and (features := self.cache.get(key)) is not None:
                sequence.features[image] = features
            else:
                alike = (sequence.id, image) if key is None else key
                wanted.setdefault(alike, []).append((sequence, image))
        self.encoded += len(wanted)
        self.hits += len(missing) - len(wanted)
        first = [group[0] for group in wanted.values()]
        encoded = self._encode([sequence.request.images[image] for sequence, image in first])
        failed: dict[int, Exception] = {}
        for group, result in zip(wanted.values(), encoded, strict=True):
            if isinstance(result, Exception):
                failed |= {sequence.id: failed.get(sequence.id, result) for sequence, _ in group}
                continue
            sequence, image = group[0]
            key = sequence.request.key_of(image)
            features = result if key is None else self.cache.put(key, result)
            for sequence, image in group:
                sequence.features[image] = features
        return failed


def _missing(runs: SequenceOf[Run]) -> list[tuple[Sequence, int]]:
    return [
        (run.sequence, piece.image)
        for run in runs
        for piece in run.sequence.image_rows.pieces(run.start, run.stop)
        if piece.image not in run.sequence.features
    ]
