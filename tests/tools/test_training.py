"""Schedule, optimiser, export and the scoring command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eval_embedded
import pytest
import torch
from embedded import export, heldout, scoring, training
from embedded.fonts import Face
from embedded.model import Config, Model
from embedded.optim import Optimiser, orthogonalise
from embedded.tokenizer import Codec
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("steps", [training.SHORTEST, 7000])
def test_the_schedule_begins_the_same_for_every_length(steps: int) -> None:
    """A run that is given minutes does not know its length yet."""
    for step in range(training.MEASURED[1]):
        assert training.learning_rate(step, None, 2e-3) == training.learning_rate(step, steps, 2e-3)
        assert training.patch_weight(step, None, 0.3) == training.patch_weight(step, steps, 0.3) == 0.3
    assert training.learning_rate(steps, steps, 2e-3) == 0
    assert training.patch_weight(int(0.8 * steps), steps, 0.3) == 0


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def small() -> tuple[Codec, Config]:
    codec = Codec()
    return codec, Config(
        vocab=codec.size, vision_width=64, vision_layers=1, vision_mlp=64, text_width=64, text_layers=1, text_mlp=64
    )


def test_the_optimiser_lowers_the_loss_of_a_batch() -> None:
    torch.manual_seed(0)
    codec, config = small()
    model = Model(config, codec.image)
    ids = torch.tensor([codec.prompt("Read the text.", 1) + codec.spell("ab") + [codec.end]] * 2)
    said = torch.zeros_like(ids, dtype=torch.bool)
    said[:, -3:] = True
    pixels, labels = torch.rand(2, 3, 192, 192), torch.ones(2, 256, 3, dtype=torch.long)
    optimiser, seen = Optimiser(model), []
    for _ in range(6):
        loss, patches = model.losses(*model.see(pixels), ids, said, labels)
        seen.append(loss.item())
        (loss + patches).backward()
        optimiser.step(5e-3)
    assert seen[-1] < 0.7 * seen[0]


def test_shards_merge_to_the_weights(tmp_path: Path) -> None:
    codec, config = small()
    model = Model(config, codec.image)
    export.save_weights(model, tmp_path, shards=3)
    export.merge_shards(tmp_path, tmp_path)
    merged = load_file(tmp_path / "model.safetensors")
    want = export.state_dict(model)
    assert merged.keys() == want.keys()
    assert all(torch.equal(merged[k], want[k]) for k in want)
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".part"]


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_go_back_into_a_model(shards: int, tmp_path: Path) -> None:
    codec, config = small()
    model, other = Model(config, codec.image), Model(config, codec.image)
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors and no shards"):
        export.load_weights(other, tmp_path)
    export.save_weights(model, tmp_path, shards)
    export.load_weights(other, tmp_path)
    want, got = export.state_dict(model), export.state_dict(other)
    assert all(torch.equal(got[k], want[k]) for k in want)
    save_file({"model.other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not a checkpoint of this model: model\.other"):
        export.load_weights(other, tmp_path)


def test_the_shipped_checkpoint_is_small_and_whole(assets: Path) -> None:
    path = assets / "model.safetensors"
    assert path.stat().st_size <= 24_000_000
    codec = Codec()
    model = Model(Config(vocab=codec.size), codec.image)
    want = {k: tuple(v.shape) for k, v in model.state_dict().items() if k.startswith("model.")}
    with safe_open(path, framework="pt") as file:
        slices = {k: file.get_slice(k) for k in file.keys()}  # noqa: SIM118 - no dictionary
    assert {k: tuple(s.get_shape()) for k, s in slices.items()} == want
    assert {s.get_dtype() for s in slices.values()} == {"BF16"}


def test_the_shipped_folder_is_what_export_writes(assets: Path, tmp_path: Path) -> None:
    codec = Codec()
    export.write_folder(tmp_path, codec, Config(vocab=codec.size))
    written = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert written == {name: (assets / name).read_text() for name in written}
    assert {p.name for p in assets.iterdir()} == {*written, "model.safetensors", "README.md"}


class Oracle:
    """A model that errs on every n-th question."""

    def __init__(self, items: list[heldout.Item], every: int) -> None:
        self.right = [item.answer for item in items]
        self.every = every

    def chat_many(self, conversations: Any, params: Any, on_error: str) -> Any:
        for i, messages in enumerate(conversations):
            assert messages[0]["content"][-1]["type"] == "text"
            yield SimpleNamespace(text="?" if i % self.every == 0 else self.right[i])


@pytest.mark.parametrize(("every", "met"), [(50, False), (200, True)])
def test_a_missed_target_is_told(every: int, met: bool, face: Face, capsys: pytest.CaptureFixture[str]) -> None:
    items = list(heldout.items("colour", 200, [face]))
    oracle: Any = Oracle(items, every)
    assert eval_embedded.score(oracle, "colour", 200, [face], show=1) is met
    out = capsys.readouterr().out
    assert f"{100 - 100 / every:.2f}" in out
    assert "'?', right is" in out


def test_scores_are_split_by_font_size() -> None:
    tags = [{"size": "12 px"}, {"size": "24 px"}, {"size": "12 px"}]
    assert scoring.tally("word", [True, True, False], tags) == {"exact": 66.67, "12 px": [50.0, 2], "24 px": [100.0, 1]}
    assert scoring.tally("caption", [True, False], tags[:2]) == {"exact": 50.0}
