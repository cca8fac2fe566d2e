"""The shape of the project: which layer imports which, what a wheel holds, what an import costs."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "kernels": "vlm.kernels",
    "attention": "vlm.attention",
    "vision": "vlm.vision",
    "text": "vlm.text",
    "vlm": "vlm",
}
ALLOWED = {
    "kernels": {"kernels"},
    "attention": {"attention", "kernels"},
    "vision": {"vision", "attention", "kernels"},
    "text": {"text", "attention", "kernels"},
    "vlm": {"vlm", "vision", "text", "attention", "kernels"},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The name under which a file of the repository is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [FOLDERS[folder], *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> list[str]:
    package = module_name(path).split(".")
    return package if path.name == "__init__.py" else package[:-1]


def imported_modules(source: str, package: list[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def layer(module: str) -> str | None:
    """The layer that a module of ours belongs to, or None for a module of somebody else's."""
    parts = module.split(".")
    if parts[0] != "vlm":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED and parts[1] != "vlm" else "vlm"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imported_modules(path.read_text(), package_of(path))
        if layer(module) not in {None, *ALLOWED[folder]}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_walk_sees_a_wrong_arrow() -> None:
    """The walk itself works: relative, nested and from-package imports are all seen."""
    source = "def f():\n    from vlm.text import llama\n    from . import siglip\n    import vlm.api\n"
    found = list(imported_modules(source, ["vlm", "vision"]))
    assert found == ["vlm.text.llama", "vlm.vision.siglip", "vlm.api"]
    assert [layer(m) for m in found] == ["text", "vision", "vlm"]


def test_kernels_init_has_no_imports() -> None:
    """transformers may execute it under the bare name `kernels`."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def test_every_package_is_listed() -> None:
    """package-dir mappings have no auto-discovery: a forgotten package would be missing from the wheel only."""
    on_disk = {module_name(path) for folder in FOLDERS for path in python_files(folder) if path.name == "__init__.py"}
    assert on_disk == set(PROJECT["tool"]["setuptools"]["packages"])
    without_init = {
        str(path.parent.relative_to(ROOT))
        for folder in FOLDERS
        for path in python_files(folder)
        if not (path.parent / "__init__.py").exists()
    }
    assert not without_init


@pytest.mark.slow
def test_wheel_holds_one_top_level_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)], check=True, capture_output=True
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"vlm"}
    for needed in (
        "vlm/py.typed",
        "vlm/kernels/__init__.py",
        "vlm/vision/qwen2_5_vl.py",
        "vlm/assets/embedded/model.safetensors",
    ):
        assert needed in names


def best_of(runs: int, command: list[str], cwd: Path) -> float:
    """Fewest seconds of processor time: what the command costs, however busy the machine is otherwise."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    seconds = []
    for _ in range(runs):
        before = used()
        subprocess.run(command, check=True, capture_output=True, cwd=cwd)
        seconds.append(used() - before)
    return min(seconds)


def test_import_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, time; t = time.process_time(); import vlm; t = time.process_time() - t\n"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint(t)"
    )
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(times) < 0.3


def test_help_is_light(tmp_path: Path) -> None:
    code = (
        "import sys; from vlm.cli import main; sys.argv = ['vlm', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'triton'} & set(sys.modules)\nassert not heavy, heavy"
    )
    assert best_of(5, [sys.executable, "-c", code], tmp_path) < 0.5


def test_public_names_resolve() -> None:
    import vlm

    assert len(set(vlm.__all__)) == len(vlm.__all__)
    for name in vlm.__all__:
        assert getattr(vlm, name) is not None
    assert set(vlm.__all__) <= set(dir(vlm))


MACHINE_READERS = {
    "attention/platform.py",  # the platform probe
    "vlm/engine/memory.py",  # how much memory is free, asked of the device that the platform named
    "vlm/cli/env.py",  # prints what the machine is
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_the_probe_asks_the_machine(folder: str) -> None:
    """A value that is passed down can be faked; a global that is asked cannot."""
    wrong = []
    for path in python_files(folder):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.startswith("torch.cuda.") and name not in MACHINE_READERS:
                    wrong.append(f"{name}:{node.lineno} {text}")
                if text in {"os.environ", "os.getenv"} and folder != "vlm":
                    wrong.append(f"{name}:{node.lineno} {text}")
    assert not wrong, "\n".join(wrong)
