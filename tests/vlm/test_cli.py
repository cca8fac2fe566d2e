"""The commands end to end on a small random checkpoint: streams, files and exit statuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm.cli import run

Command = Callable[..., "Result"]


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def vlm(tiny: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run a command line in this process, on the CPU, with the small checkpoint as the default model."""
    monkeypatch.setenv("VLM_MODEL", str(tiny("smolvlm")))
    capsys.readouterr()

    def call(*args: object) -> Result:
        status = run([str(a) for a in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(status, out, err)

    yield call
    import logging

    logger = logging.getLogger("vlm")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def album(tmp_path: Path, picture: Any) -> Path:
    folder = tmp_path / "album"
    (folder / "sub").mkdir(parents=True)
    picture(60, 84).save(folder / "a.png")
    picture(90, 40).save(folder / "b.jpg")
    picture(48, 48).save(folder / "sub" / "c.webp")
    return folder


QUICK = ("--max-tokens", 4, "--device", "cpu")


def test_several_pictures_give_lines(vlm: Command, album: Path) -> None:
    got = vlm("caption", album, *QUICK)
    assert got.status == 0
    lines = [line.split("\t") for line in got.out.splitlines()]
    assert [line[0] for line in lines] == [str(album / n) for n in ("a.png", "b.jpg", "sub/c.webp")]
    assert "weights loaded" in got.err
    assert "KV cache" in got.err
    assert "captioned 3 of 3" in got.err


def test_one_picture_gives_its_caption_alone(vlm: Command, album: Path) -> None:
    got = vlm("caption", album / "a.png", *QUICK, "--quiet", "--prefix", "<<", "--suffix", ">>")
    assert got.status == 0
    assert got.out.startswith("<<")
    assert got.out.endswith(">>\n")
    assert got.err == ""


def test_json_records(vlm: Command, album: Path) -> None:
    got = vlm("caption", album, *QUICK, "--json", "--limit", 2)
    records = [json.loads(line) for line in got.out.splitlines()]
    assert [(r["width"], r["height"]) for r in records] == [(60, 84), (90, 40)]
    assert {r["finish_reason"] for r in records} <= {"stop", "length"}
    assert all(r["error"] is None and r["prompt_tokens"] > r["image_tokens"] > 0 for r in records)


def test_a_bad_picture_is_one_line_and_status_1(vlm: Command, album: Path) -> None:
    (album / "bad.png").write_text("no picture")
    got = vlm("caption", album, *QUICK, "--json")
    assert got.status == 1
    errors = [line for line in got.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "bad.png" in errors[0]
    assert "captioned 3 of 4" in got.err
    assert "1 failed" in got.err
    records = {Path(r["path"]).name: r for r in map(json.loads, got.out.splitlines())}
    assert len(records) == 4
    assert records["bad.png"]["error"]["type"] == "ImageDecodeError"


def test_a_missing_picture_among_others(vlm: Command, album: Path) -> None:
    got = vlm("caption", album / "a.png", album / "gone.png", *QUICK, "--quiet")
    assert got.status == 1
    assert got.err == f"error: {album / 'gone.png'} does not exist\n"


def test_only_bad_pictures_is_status_2(vlm: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    got = vlm("caption", tmp_path / "bad.png", *QUICK)
    assert got.status == 2
    assert got.out == ""


def test_on_error_raise_stops(vlm: Command, album: Path) -> None:
    (album / "aa.png").write_text("no picture")
    got = vlm("caption", album, *QUICK, "--on-error", "raise")
    assert got.status == 1
    assert len(got.out.splitlines()) == 1
    assert "aa.png" in got.err


def test_captions_into_a_file(vlm: Command, album: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "captions.jsonl"
    assert vlm("caption", album, *QUICK, "--output", target).status == 0
    assert len(target.read_text().splitlines()) == 3
    again = vlm("caption", album, *QUICK, "--output", target)
    assert again.status == 2
    assert "weights" not in again.err  # found before the model loads
    assert "--overwrite" in again.err
    assert vlm("caption", album, *QUICK, "--output", target, "--overwrite", "--limit", 1).status == 0
    assert len(target.read_text().splitlines()) == 1


def test_output_that_cannot_be_written_keeps_the_count(
    vlm: Command, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm.cli.sinks import Sidecars

    put, calls = Sidecars.put, iter(range(9))
    full = OSError(28, "No space left on device", "b.txt")

    def fill(self: Sidecars, *args: Any) -> None:
        if next(calls) == 1:
            raise full
        put(self, *args)

    monkeypatch.setattr(Sidecars, "put", fill)
    got = vlm("caption", album, *QUICK, "--output", tmp_path / "out")
    assert got.status == 1
    assert "error: [Errno 28] No space left on device: 'b.txt'" in got.err
    assert "captioned 1 of 3" in got.err
    got = vlm("caption", album, *QUICK, "--output", tmp_path / "none", "--limit", 1)
    assert got.status == 0


def test_captions_beside_the_pictures(vlm: Command, album: Path) -> None:
    assert vlm("caption", album, *QUICK, "--output", album).status == 0
    assert sorted(str(p.relative_to(album)) for p in album.rglob("*.txt")) == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_collision_is_found_before_the_model_loads(vlm: Command, album: Path, tmp_path: Path) -> None:
    (album / "a.jpeg").write_bytes((album / "a.png").read_bytes())
    got = vlm("caption", album, *QUICK, "--output", tmp_path / "out")
    assert got.status == 2
    assert "would both be captioned" in got.err
    assert "weights" not in got.err
    assert vlm("caption", album, *QUICK, "--quiet").status == 0


def test_a_dry_run_loads_nothing(vlm: Command, album: Path, tmp_path: Path) -> None:
    got = vlm("caption", album, "--output", tmp_path / "out", "--dry-run")
    assert got.status == 0
    assert got.out.splitlines()[2] == f"{album / 'sub' / 'c.webp'}\t{tmp_path / 'out' / 'sub' / 'c.txt'}"
    assert got.err == ""
    assert not (tmp_path / "out").exists()


def test_a_list_with_prompts_of_their_own(vlm: Command, album: Path) -> None:
    (album / "list.jsonl").write_text('{"path": "a.png"}\n{"path": "a.png", "prompt": "How many circles are there?"}\n')
    got = vlm("caption", album / "list.jsonl", *QUICK, "--json")
    default, own = map(json.loads, got.out.splitlines())
    assert own["prompt_tokens"] > default["prompt_tokens"]
    assert "prompt" not in default
    assert own["prompt"] == "How many circles are there?"


def test_a_prompt_from_a_file(vlm: Command, album: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("How many circles are there?\n")
    long = vlm("caption", album / "a.png", *QUICK, "--json", "--prompt-file", tmp_path / "prompt.txt")
    same = vlm("caption", album / "a.png", *QUICK, "--json", "--prompt", "How many circles are there?")
    assert json.loads(long.out)["prompt_tokens"] == json.loads(same.out)["prompt_tokens"]
    assert vlm("caption", album, "--prompt", "x", "--prompt-file", tmp_path / "prompt.txt").status == 2
    assert vlm("caption", album, "--prompt-file", tmp_path / "none.txt").status == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["caption", "missing.png"], "missing.png does not exist"),
        (["caption", "ALBUM", "--temperature", "-1"], "temperature=-1.0"),
        (["caption", "ALBUM", "--format", "parquet"], "--format parquet"),
        (["caption", "ALBUM", "--on-error", "ignore"], "--on-error ignore"),
        (["caption", "ALBUM", "--attention", "flashy"], "flashy"),
        (["caption", "ALBUM", "--attention", "vision=sdpa,text=flashy"], "flashy"),
        (["caption", "ALBUM", "--dtype", "int3"], "int3"),
        (["caption", "ALBUM", "--model", "/no/such/folder"], "/no/such/folder"),
        (["caption", "EMPTY"], "no pictures in"),
        (["caption", "ALBUM", "--resume"], "--resume"),
        (["caption"], "paths"),
        (["paint"], "paint"),
        (["chat", "hello", "--image", "missing.png"], "missing.png does not exist"),
        (["chat", "hello", "--image", ""], "an empty path"),
        (["chat", "hello", "--image", "ALBUM"], "is a folder"),
        (["caption", "missing.png", "other.png"], "missing.png does not exist, nor does the other one"),
        (["caption", "1.png", "2.png", "3.png"], "1.png does not exist, nor do the other 2"),
        (["caption", "ALBUM", "--output", ""], "--output is empty"),
        (["caption", "ALBUM", "--prompt", " "], "--prompt is empty"),
        (["caption", "ALBUM", "--prompt-file", ""], "--prompt-file '' is empty"),
        (["caption", "ALBUM", ""], "an empty path"),
        (["caption", "ALBUM", "--attention", ""], "--attention ''"),
        (["caption", "ALBUM", "--attention", "vision=sdpa,text="], "--attention 'text='"),
        (["caption", "ALBUM", "--attention", "vision=sdpa,vision=sdpa"], "--attention names two backends for vision"),
        (["chat", "hello", "--attention", "audio=sdpa"], "--attention has no role 'audio'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    vlm: Command, album: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    got = vlm(*[{"ALBUM": album, "EMPTY": tmp_path / "empty"}.get(a, a) for a in args])
    assert got.status == 2
    assert message in got.err
    assert got.out == ""
    assert "weights" not in got.err  # found before the model loads


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--debug", "caption", "missing.png"]) == 2  # the same status as without
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "PromptError: missing.png does not exist" in err


def test_a_question_is_answered(vlm: Command, album: Path) -> None:
    got = vlm("chat", "What is this?", "--image", album / "a.png", "--image", album / "b.jpg", *QUICK, "--quiet")
    assert got.status == 0
    assert got.out.endswith("\n")
    assert got.err == ""


def test_a_conversation_from_stdin(vlm: Command, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f"/image {album / 'a.png'}",
        "What is this?",
        "Why?",
        "/image nowhere.png",
        f"/image {album / 'text.jpg'}",
        f'/image "{album / "b.jpg"}"',
        "And this?",
        "/image",
        "/dance",
        "/clear",
        "Hello?",
        "/quit",
        "never",
    ]
    (album / "text.jpg").write_text("no picture")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    got = vlm("chat", *QUICK, "--quiet")
    assert got.status == 0
    assert len(got.out.splitlines()) >= 4
    errors = got.err.splitlines()
    # A picture that cannot be read is told at once, and the question after it is answered.
    assert [e.split(":")[0] for e in errors] == ["error"] * 4
    for error, part in zip(errors, ("nowhere.png", "text.jpg", "/image is followed by", "/dance"), strict=True):
        assert part in error


def test_the_end_of_input_ends_a_conversation(vlm: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello?\n"))
    assert vlm("chat", *QUICK, "--quiet").status == 0


def test_models_lists_every_family(vlm: Command) -> None:
    from vlm.families import FAMILIES

    rows = json.loads(vlm("models", "--json").out)
    assert [r["model_type"] for r in rows] == list(FAMILIES)
    by_type = {r["model_type"]: r for r in rows}
    assert by_type["qwen2_5_vl"]["upstream_fa"] is True
    assert by_type["smolvlm"]["upstream_fa"] is False
    assert all(r["upstream_fa_reason"] for r in rows)
    text = vlm("models").out
    assert all(name in text for name in FAMILIES)


def test_env_says_what_there_is(vlm: Command) -> None:
    import torch

    facts = json.loads(vlm("env", "--json").out)
    assert facts["packages"]["torch"] == torch.__version__ or facts["packages"]["torch"] in torch.__version__
    assert "cpu" in facts["devices"]
    assert facts["host"]["cpu_threads"] >= 1
    assert "flash_attn" in facts["providers"]
    assert "VLM_MODEL" in facts["environment"]
    assert "torch" in vlm("env").out


def test_version(vlm: Command) -> None:
    import vlm as package

    got = vlm("--version")
    assert got.status == 0
    assert got.out == f"vlm {package.__version__}\n"


def start(tiny: Any, *args: object, **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "VLM_MODEL": str(tiny("smolvlm")), "OMP_NUM_THREADS": "1"}
    # A process in the background of a shell script inherits that Ctrl-C is ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from vlm.cli import main; main()"
    command = [sys.executable, "-P", "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def many_pictures(folder: Path, picture: Any, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        picture(48, 48).save(folder / f"{i:04}.png")
    return folder


def test_ctrl_c_ends_with_130_and_keeps_what_is_done(tiny: Any, tmp_path: Path, picture: Any) -> None:
    album, target = many_pictures(tmp_path / "many", picture, 300), tmp_path / "out.jsonl"
    with start(tiny, "caption", album, "--device", "cpu", "--max-tokens", 200, "--output", target) as process:
        end = time.monotonic() + 300  # on a busy machine
        while not (target.exists() and target.read_text().count("\n") > 3):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert all(json.loads(line)["path"] for line in target.read_text().splitlines())


def test_a_reader_that_leaves_is_no_error(tiny: Any, tmp_path: Path, picture: Any) -> None:
    album = many_pictures(tmp_path / "many", picture, 60)
    long = ("--prefix", "x" * 2000)  # more in all than a pipe holds
    with start(tiny, "caption", album, "--device", "cpu", "--max-tokens", 4, "--quiet", *long) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert err == ""


def test_an_error_of_our_own_is_one_line_too(vlm: Command, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sys.modules["vlm.cli.caption"], "load_vlm", fail)
    got = vlm("caption", album, *QUICK)
    assert got.status == 2
    assert got.err == "error: ZeroDivisionError: a bug (vlm --debug shows where)\n"


def test_waiting_threads_do_not_spin() -> None:
    """Set before torch loads OpenMP, and only where nothing is set."""
    code = """if True:
        import os, sys, vlm.cli
        sys.argv = ["vlm", "--version"]
        try:
            vlm.cli.main()
        except SystemExit:
            print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
    """
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environ = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | given
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == f"{expected} False"
