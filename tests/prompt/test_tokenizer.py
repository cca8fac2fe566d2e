"""Ids and text against transformers' tokenizer; streamed text against whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm.errors import CheckpointError
from vlm.prompt.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folder(vlm_tiny_checkpoints: Callable[[str], Path]) -> Path:
    return vlm_tiny_checkpoints("smolvlm")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé日🙂\n ")), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_ids_equal_the_reference(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    reference = _cached(folder, AutoTokenizer.from_pretrained)
    text += "<image> x<end_of_utterance>"
    ids = tokenizer.encode(text)
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


_made: dict[Path, object] = {}


def _cached(folder, load):  # type: ignore[no-untyped-def]
    if folder not in _made:
        _made[folder] = load(folder)
    return _made[folder]


def test_plain_text_makes_no_special_token(tokenizer: Tokenizer) -> None:
    text = "say <image> and <end_of_utterance>"
    assert not tokenizer.special_ids.isdisjoint(tokenizer.encode(text))
    plain = tokenizer.encode_plain(text)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == text
    assert not tokenizer.special_ids.isdisjoint(tokenizer.encode(text))  # the twin leaves the tokenizer as it was


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 430), max_size=60), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Any ids: broken UTF-8, special ids, ids beyond the vocabulary."""
    decoder, shown, at = tokenizer.stream_decoder(), "", 0
    for cut in [*cuts, len(ids)]:
        shown += decoder.push(ids[at : at + cut])
        assert tokenizer.decode(ids).startswith(shown)
        at += cut
    assert shown + decoder.flush() == tokenizer.decode(ids)
    assert decoder.flush() == ""


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_characters_come_whole_and_at_once(tokenizer: Tokenizer, text: str) -> None:
    decoder, shown = tokenizer.stream_decoder(), ""
    ids = tokenizer.encode_plain(text)
    for n, token in enumerate(ids, 1):
        shown += decoder.push([token])
        whole = tokenizer.decode(ids[:n])
        if not whole.endswith("\ufffd"):
            assert shown == whole  # nothing is held back that could be shown
    assert shown + decoder.flush() == text


def test_a_long_stream_decodes_only_a_window(tokenizer: Tokenizer) -> None:
    """Bytes that never become a character would otherwise be decoded again and again."""
    decoder = tokenizer.stream_decoder()
    lone = tokenizer.encode_plain("é")[0]
    text = "".join(decoder.push([lone]) for _ in range(500))
    assert len(decoder._ids) < 40
    assert text + decoder.flush() == tokenizer.decode([lone] * 500)


def test_sentencepiece_style_tokenizers_keep_their_spaces(tmp_path: Path) -> None:
    """They drop the space before the first token of a text, so a window must not begin with the token alone."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    words = ["the quick brown fox", "jumps over the lazy dog", "how many circles are there"]
    backend.train_from_iterator(
        words * 5, trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>")
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "the quick brown fox jumps over the lazy dog " * 6
    ids = tokenizer.encode(text.strip())
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == text.strip()


def test_tokens_that_a_config_calls_special_are(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = token["content"] != "<image>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    image = load_tokenizer(folder).token_id("<image>")
    assert image not in load_tokenizer(tmp_path).special_ids
    for name, config in (
        ("tokenizer_config.json", {"image_token": "<image>"}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<image>"}}),
        ("tokenizer_config.json", {"additional_special_tokens": [{"content": "<image>"}]}),
        ("config.json", {"image_token_id": image}),
    ):
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        (tmp_path / name).write_text(json.dumps(config))
        loaded = load_tokenizer(tmp_path)
        assert loaded.special_tokens["<image>"] == image
        assert image not in loaded.encode_plain("<image>")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_folder_in_the_place_of_a_file_is_not_passed_over(name: str, folder: Path, tmp_path: Path) -> None:
    if name != "tokenizer.json":
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: "):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    letters = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abb") == [3, 2]
