"""What the commands print where streams lack characters, are closed or full, or are no longer read."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from vlm.cli import streams
from vlm.cli.inputs import Item
from vlm.cli.sinks import JsonLines, Sidecars, make_sink
from vlm.cli.streams import error_line, escaped, open_closed_streams, say, visible, write, write_json
from vlm.errors import VLMError
from vlm.outputs import Output

VLM = f"{shlex.quote(sys.executable)} -P -c 'from vlm.cli import main; main()'"
EXPLAIN = f"{VLM} explain --platform cpu"  # a command that needs no torch
ODD = "\udcff\x1b[31m.png"  # a byte that is no UTF-8, and an escape sequence


def item(name: str) -> Item:
    return Item(Path(name), name, Path(name).with_suffix(""))


def test_what_stdout_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    write("ü 中 \udcff")
    assert raw.getvalue() == b"\\xfc \\u4e2d \\udcff\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_valid_whatever_the_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    # What Python opens under LC_ALL=C lets bytes through that are no text.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="surrogateescape"))
    for name in ("ü.png", ODD):
        make_sink(None, None, True, True).put(item(name), Output(index=0, text="中"), "中")
    names = [json.loads(line.decode(encoding))["path"] for line in raw.getvalue().splitlines()]
    assert names == ["ü.png", ODD]
    assert ("ü".encode() in raw.getvalue()) == (encoding == "utf-8")
    write_json({"x": ODD})
    assert json.loads(raw.getvalue().splitlines()[-1]) == {"x": ODD}


def test_odd_names_in_a_file_of_records(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "out.jsonl")
    sink.open()
    for name in (ODD, "ü.png"):
        sink.put(item(name), Output(index=0), "中 \udcfe")
    sink.close()
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["path"] for line in lines] == [ODD, "ü.png"]
    Sidecars(tmp_path).put(item("a.png"), Output(index=0), "中 \udcfe")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "中 \\udcfe\n"


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible("a\x1b[31m\x9b\x7f\tü") == "a\\x1b[31m\\x9b\\x7f\\tü"
    assert visible("a\tb\x00\n", keep="\n\t") == "a\tb\\x00\n"
    assert escaped("back\\slash\n") == "back\\\\slash\\n"
    make_sink(None, None, False, several=True).put(item("\x1b.png"), Output(index=0), "red\x1b[31m\x9b\nline")
    make_sink(None, None, False, several=False).put(item("a.png"), Output(index=0), "red\x1b[31m\nline")
    say("error: \x1b[31m\nsecond line")
    got = capsys.readouterr()
    assert got.out == "\\x1b.png\tred\\x1b[31m\\x9b line\nred\\x1b[31m\nline\n"
    assert got.err == "error: \\x1b[31m\nsecond line\n"


def test_an_error_has_its_input_once() -> None:
    assert error_line(VLMError("a.png: broken"), "a.png") == "error: a.png: broken"
    assert error_line(KeyError("x"), "a.png") == "error: a.png: KeyError: 'x'"


def test_an_odd_name_on_a_command_line(tmp_path: Path) -> None:
    """End to end, as a name that is no text takes other ways than str does."""
    (tmp_path / ODD).touch()
    (tmp_path / "tab\t.png").touch()
    command = f"{VLM} caption {shlex.quote(str(tmp_path))} --output {shlex.quote(str(tmp_path))}/out --dry-run"
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True, check=True)
    names = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert names == [f"{tmp_path}/tab\\t.png", f"{tmp_path}/\\udcff\\x1b[31m.png"]


@pytest.mark.parametrize(
    ("command", "status", "err"),
    [
        (f"{EXPLAIN} | true", 141, ""),
        (f"{EXPLAIN} --json | true", 141, ""),
        (f"{VLM} --version | true", 141, ""),
        (f"{VLM} --help | true", 141, ""),
        (f"{EXPLAIN} >&-", 2, "error: stdout is closed"),
        (f"{EXPLAIN} 2>&-", 0, ""),
        (f"{EXPLAIN} <&-", 0, ""),
        (f"{EXPLAIN} >/dev/full", 2, "error: [Errno 28] No space left on device: 'stdout'\n"),
        (f"{VLM} caption . >&-", 2, "error: stdout is closed"),
        (f"{VLM} chat hello >&-", 2, "error: stdout is closed"),
    ],
)
def test_streams_that_are_not_there(tmp_path: Path, command: str, status: int, err: str) -> None:
    (tmp_path / "a.png").touch()
    # The status of the first part of a pipe, whose reader is gone before it writes.
    script = command.replace("| true", "| exec <&-; exit ${PIPESTATUS[0]}")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith(err)
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(err)


def test_closed_streams_read_and_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    assert sys.stdin.read() == ""
    assert not sys.stdin.isatty()
    sys.stderr.write("nowhere")
    for opened in (sys.stdin, sys.stderr, streams._KEPT.pop()):
        opened.close()
    with pytest.raises(VLMError, match="stdout is closed"):
        write("x")


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    sink = JsonLines(Path("/dev/full"))
    sink.check([item("a.png")], overwrite=True)
    sink.open()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        sink.put(item("a.png"), Output(index=0), "x")
    sink.close()


def test_a_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    read, out = os.pipe()
    os.close(read)
    with os.fdopen(out, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(typer.Exit) as end:
            write("x")
        monkeypatch.undo()
    assert end.value.exit_code == 141
