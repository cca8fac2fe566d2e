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
    "line",
    [
        "{",
        "[1]",
        "{}",
        '""',
        '{"path": 3}',
        '{"path": " "}',
        '{"path": "a", "url": "b"}',
        '{"path": "a", "prompt": 1}',
        '{"path": "a", "prompt": ""}',
        '{"path": "a", "Prompt": "hi"}',
        '{"path": "a", "promt": "hi"}',
        '{"filename": "a"}',
    ],
)
def test_a_bad_line_is_named(tree: Path, line: str) -> None:
    listing = tree / "list.jsonl"
    listing.write_text('{"path": "a.png"}\n' + line + "\n")
    with pytest.raises(PromptError, match=r"list\.jsonl, line 2"):
        gather([str(listing)], recursive=True, limit=None)


def test_other_columns_of_a_list_are_left_alone(tree: Path) -> None:
    listing = tree / "list.jsonl"
    listing.write_text('{"path": "a.png", "image_id": 3, "prompt_id": 1, "images": 2, "width": 9, "prompt": null}\n')
    assert names(gather([str(listing)], recursive=True, limit=None)) == ["a.png"]


def test_a_byte_order_mark_is_no_part_of_a_list(tree: Path) -> None:
    for name, line in (("list.txt", "a.png"), ("list.jsonl", '{"path": "a.png"}')):
        (tree / name).write_text(line, encoding="utf-8-sig")
        assert names(gather([str(tree / name)], recursive=True, limit=None)) == ["a.png"]


def test_a_list_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "list.txt")
    with pytest.raises(PromptError, match="is a pipe or a device"):
        gather([str(tmp_path / "list.txt")], recursive=True, limit=None)


def test_a_tilde_is_the_home_folder_only_where_it_stands_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("~tilde.png", "~"):
        Path(name).touch()
    Path("list.txt").write_text("~tilde.png\n~no-such-user/x.png\n~/x.png\n")
    got = [str(i.source) for i in gather(["~", "~/y.png", "*.png", "list.txt"], recursive=True, limit=None)]
    assert got == ["~", "/home/me/y.png", "~tilde.png", "~no-such-user/x.png", "/home/me/x.png"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "an empty path"),
        ("-", "does not stand for stdin"),
        ("file:///a.png", "pass the path itself"),
        ("S3://bucket/a.png", "only http and https"),
    ],
)
def test_what_is_no_path_is_refused_with_a_hint(path: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        gather([path], recursive=True, limit=None)


def test_urls_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("file:///b.png\nDATA:image/png;base64,xx\n")
    items = gather(["HTTP://example.org/a.png", str(tmp_path / "list.txt")], recursive=True, limit=None)
    assert [i.source for i in items] == ["HTTP://example.org/a.png", "file:///b.png", "DATA:image/png;base64,xx"]
    assert [str(i.relative) for i in items] == ["a", "b", "data"]


def test_a_file_that_is_called_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data:x.png").touch()
    assert [i.source for i in gather(["data:x.png"], recursive=True, limit=None)] == [Path("data:x.png")]


@pytest.mark.parametrize("path", ["/", ".", "https://example.org/."])
def test_what_has_no_name_of_its_own_in_a_list(tmp_path: Path, path: str) -> None:
    (tmp_path / "list.txt").write_text(path)
    assert str(gather([str(tmp_path / "list.txt")], recursive=True, limit=None)[0].relative) == "picture"


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
    assert isinstance(make_sink("x.jsonl", None, False, True), JsonLines)
    assert isinstance(make_sink("x.JSONL", None, False, True), JsonLines)
    assert isinstance(make_sink("x.out", "jsonl", False, True), JsonLines)
    assert isinstance(make_sink("x", None, False, True), Sidecars)
    assert isinstance(make_sink("x.jsonl/", None, False, True), Sidecars)
    assert isinstance(make_sink("x.jsonl", "txt", False, True), Sidecars)


@pytest.mark.parametrize(
    ("output", "format", "as_json"),
    [
        ("x", "parquet", False),
        (None, "txt", False),
        ("x.csv", None, False),
        ("x.jsonl", None, True),
        ("", None, False),
        ("x/", "jsonl", False),
    ],
)
def test_options_that_do_not_go_together(output: str | None, format: str | None, as_json: bool) -> None:
    with pytest.raises(PromptError, match=r"--(format|json|output)"):
        make_sink(output, format, as_json, True)


def test_a_record_has_the_documented_fields() -> None:
    got = record(item("p/a.png"), done(), "a cat")
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
    own = record(Item(Path("a.png"), "a.png", Path("a"), "How many?"), done(), "two")
    assert own == {**got, "path": "a.png", "prompt": "How many?", "caption": "two"}


def test_the_record_of_a_failure_says_what_failed() -> None:
    output = Output(index=0, finish_reason="error", error=ImageDecodeError("bad.png: no picture"))
    got = record(item("bad.png"), output, "")
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


def test_a_sidecar_and_a_folder_cannot_have_one_name(tmp_path: Path) -> None:
    items = [item("a.png"), Item(Path("A.txt/b.png"), "A.txt/b.png", Path("A.txt/b"))]
    for order in (items, items[::-1]):
        with pytest.raises(PromptError, match=r"the caption of a\.png would be the file .*a\.txt, which has to be"):
            Sidecars(tmp_path).check(order, overwrite=True)
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(PromptError, match="is a folder"):
        Sidecars(tmp_path).check(items[:1], overwrite=True)
    (tmp_path / "sub").touch()
    with pytest.raises(PromptError, match="sub is a file"):
        Sidecars(tmp_path).check([Item(Path("c.png"), "c.png", Path("sub/c"))], overwrite=False)


def test_a_picture_with_two_prompts_needs_records(tmp_path: Path) -> None:
    items = [Item(Path("a.png"), "a.png", Path("a"), prompt) for prompt in (None, "How many?")]
    with pytest.raises(PromptError, match=r"a\.png has several prompts.*use --format jsonl"):
        Sidecars(tmp_path).check(items, overwrite=True)


def test_a_sidecar_of_the_longest_name(tmp_path: Path) -> None:
    name = "n" * 251 + ".png"
    Sidecars(tmp_path).put(item(name), done(), "x")
    assert [p.name for p in tmp_path.iterdir()] == ["n" * 251 + ".txt"]


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
    def refuse(dir: Path) -> None:  # root may write anywhere
        assert dir == tmp_path
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for sink in (Sidecars(tmp_path / "out"), JsonLines(tmp_path / "new" / "out.jsonl")):
        with pytest.raises(PromptError, match=r"not writable \(Read-only file system\)"):
            sink.check([item("a.png")], overwrite=False)


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(PromptError, match="is a file"):
        Sidecars(tmp_path / "x").check([item("a.png")], overwrite=False)
    with pytest.raises(PromptError, match="is a file"):
        JsonLines(tmp_path / "x" / "y.jsonl").check([item("a.png")], overwrite=False)
