"""Which pictures a command line means, and where their captions go: all settled before a model loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vlm.cli.inputs import Item, gather
from vlm.cli.sinks import JsonLines, Sidecars, Stdout, make_sink, record
from vlm.errors import ImageDecodeError, PromptError
from vlm.outputs import Metrics, Output, Usage


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ["b.JPG", "a.png", "notes.md", ".hidden.png", "sub/c.webp", "sub/deep/d.jpeg", ".git/e.png"]:
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "pictures"


def names(items: list[Item]) -> list[str]:
    return [os.path.basename(item.name) for item in items]


def test_a_folder_gives_its_pictures_in_order(tree: Path) -> None:
    items = gather([str(tree)], recursive=True, limit=None)
    assert names(items) == ["a.png", "b.JPG", "c.webp", "d.jpeg"]
    assert [str(i.relative) for i in items] == ["a", "b", "sub/c", "sub/deep/d"]
    assert names(gather([str(tree)], recursive=False, limit=None)) == ["a.png", "b.JPG"]


def test_limit_takes_the_first(tree: Path) -> None:
    assert names(gather([str(tree)], recursive=True, limit=2)) == ["a.png", "b.JPG"]


def test_a_picture_that_is_meant_twice_is_taken_once(tree: Path) -> None:
    paths = [str(tree / "a.png"), str(tree), str(tree / "sub" / ".." / "b.JPG")]
    assert names(gather(paths, recursive=False, limit=None)) == ["a.png", "b.JPG"]


def test_a_pattern_that_the_shell_left_alone(tree: Path) -> None:
    assert names(gather([str(tree / "**" / "*.web*")], recursive=True, limit=None)) == ["c.webp"]
    with pytest.raises(PromptError, match="nothing matches"):
        gather([str(tree / "*.xyz")], recursive=True, limit=None)


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "odd[1].png"
    path.touch()
    assert [i.source for i in gather([str(path)], recursive=True, limit=None)] == [path]


def test_text_lists_count_from_their_own_folder(tree: Path) -> None:
    listing = tree / "list.txt"
    listing.write_text("a.png\n\n  sub/c.webp  \nhttps://example.org/x/y.png?z=1\n/absolute/p.png\n")
    items = gather([str(listing)], recursive=True, limit=None)
    assert [i.source for i in items[:2]] == [tree / "a.png", tree / "sub" / "c.webp"]
    assert items[2].source == "https://example.org/x/y.png?z=1"
    assert [str(i.relative) for i in items] == ["a", "sub/c", "y", "p"]


def test_json_lists_may_have_a_prompt_of_their_own(tree: Path) -> None:
    listing = tree / "list.jsonl"
    lines = [{"path": "a.png", "prompt": "How many?"}, {"url": "http://example.org/u.png", "id": 3}, "b.JPG"]
    listing.write_text("\n".join(json.dumps(x) for x in lines))
    items = gather([str(listing)], recursive=True, limit=None)
    assert [i.prompt for i in items] == ["How many?", None, None]
    assert names(items) == ["a.png", "u.png", "b.JPG"]


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"path": 3}', '{"path": "a", "url": "b"}', '{"path": "a", "prompt": 1}']
)
def test_a_bad_line_is_named(tree: Path, line: str) -> None:
    listing = tree / "list.jsonl"
    listing.write_text('{"path": "a.png"}\n' + line + "\n")
    with pytest.raises(PromptError, match=r"list\.jsonl, line 2"):
        gather([str(listing)], recursive=True, limit=None)


@pytest.mark.parametrize("name", ["x.parquet", "x.tar"])
def test_formats_of_later_versions_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PromptError, match="not read by this version"):
        gather([str(tmp_path / name)], recursive=True, limit=None)


def item(name: str) -> Item:
    return Item(Path(name), name, Path(name).with_suffix(""))


def done(index: int = 0, **changes: object) -> Output:
    values = {
        "text": "a cat",
        "usage": Usage(10, 4, 3),
        "source_sizes": ((640, 480),),
        "image_sizes": ((192, 192),),
        "metrics": Metrics(0.1, 0.25),
    }
    return Output(index=index, **values | changes)  # type: ignore[arg-type]


def test_the_sink_follows_from_the_options(tmp_path: Path) -> None:
    assert isinstance(make_sink(None, None, False, True), Stdout)
    assert isinstance(make_sink(tmp_path / "x.jsonl", None, False, True), JsonLines)
    assert isinstance(make_sink(tmp_path / "x.out", "jsonl", False, True), JsonLines)
    assert isinstance(make_sink(tmp_path / "x", None, False, True), Sidecars)
    assert isinstance(make_sink(tmp_path / "x.jsonl", "txt", False, True), Sidecars)


@pytest.mark.parametrize(
    ("output", "format", "as_json"),
    [("x", "parquet", False), (None, "txt", False), ("x.csv", None, False), ("x.jsonl", None, True)],
)
def test_options_that_do_not_go_together(output: str | None, format: str | None, as_json: bool) -> None:
    with pytest.raises(PromptError, match=r"--(format|json|output)"):
        make_sink(Path(output) if output else None, format, as_json, True)


def test_a_record_has_the_documented_fields() -> None:
    got = json.loads(record(item("p/a.png"), done(), "a cat"))
    assert got == {
        "path": "p/a.png",
        "caption": "a cat",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "image_tokens": 4,
        "completion_tokens": 3,
        "width": 640,
        "height": 480,
        "seconds": 0.25,
        "error": None,
    }


def test_the_record_of_a_failure_says_what_failed() -> None:
    output = Output(index=0, finish_reason="error", error=ImageDecodeError("bad.png: no picture"))
    got = json.loads(record(item("bad.png"), output, ""))
    assert got["error"] == {"type": "ImageDecodeError", "message": "bad.png: no picture"}
    assert (got["width"], got["height"], got["caption"]) == (None, None, "")


def test_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    sink = make_sink(None, None, False, several=True)
    sink.put(item("a\tb\nc.png"), done(), "two\nlines\tand a tab")
    assert capsys.readouterr().out == "a\\tb\\nc.png\ttwo lines and a tab\n"


def test_one_picture_prints_its_caption_alone(capsys: pytest.CaptureFixture[str]) -> None:
    make_sink(None, None, False, several=False).put(item("a.png"), done(), "two\nlines")
    assert capsys.readouterr().out == "two\nlines\n"


def test_sidecars_keep_subfolders(tmp_path: Path) -> None:
    sink = Sidecars(tmp_path / "out")
    items = [item("a.png"), Item(Path("p/sub/c.v2.png"), "p/sub/c.v2.png", Path("sub/c.v2"))]
    sink.check(items, overwrite=False)
    sink.open()
    for i in items:
        sink.put(i, done(), f"caption of {i.name}")
    files = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*"))
    assert files == ["a.txt", "sub/c.v2.txt"]
    assert (tmp_path / "out" / "a.txt").read_text() == "caption of a.png\n"


@pytest.mark.parametrize("other", ["a.jpg", "A.jpg"])
def test_two_pictures_never_share_a_sidecar(tmp_path: Path, other: str) -> None:
    with pytest.raises(PromptError, match=rf"a\.png and {other} would both be captioned in"):
        Sidecars(tmp_path).check([item("a.png"), item("b.png"), item(other)], overwrite=True)


def test_sidecars_that_exist_are_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    sink = Sidecars(tmp_path)
    with pytest.raises(PromptError, match="--overwrite"):
        sink.check([item("a.png")], overwrite=False)
    sink.check([item("a.png")], overwrite=True)
    sink.put(item("a.png"), done(), "new")
    assert (tmp_path / "a.txt").read_text() == "new\n"


def test_a_failed_picture_leaves_no_sidecar(tmp_path: Path) -> None:
    Sidecars(tmp_path).put(item("a.png"), Output(index=0, error=ValueError("x")), "")
    assert list(tmp_path.iterdir()) == []


def test_a_jsonl_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(PromptError, match="exists already"):
        JsonLines(path).check([item("a.png")], overwrite=False)
    sink = JsonLines(path)
    sink.check([item("a.png")], overwrite=True)
    sink.open()
    sink.put(item("a.png"), done(), "x")
    sink.close()
    assert json.loads(path.read_text())["caption"] == "x"


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "out.jsonl")
    sink.check([item("a.png")], overwrite=False)
    (tmp_path / "out.jsonl").write_text("theirs")
    with pytest.raises(FileExistsError):
        sink.open()


def test_a_folder_that_takes_no_files_is_found_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(PromptError, match="not writable"):
        Sidecars(tmp_path / "out").check([item("a.png")], overwrite=False)


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(PromptError, match="is a file"):
        Sidecars(tmp_path / "x").check([item("a.png")], overwrite=False)
    with pytest.raises(PromptError, match="is a file"):
        JsonLines(tmp_path / "x" / "y.jsonl").check([item("a.png")], overwrite=False)
