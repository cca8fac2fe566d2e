"""The machine as a value: detection, fakes, probes of packages, the dtype that a device computes in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlm.attention.errors import VLMError
from vlm.attention.platform import SHARED_MEMORY, Platform, Probe, Providers, has_bf16, resolve_dtype

A100 = Platform.fake("cuda", (8, 0), name="A100")
T4 = Platform.fake("cuda", (7, 5), name="T4")
CPU = Platform.fake("cpu", name="cpu")


def package(folder: Path, name: str, body: str) -> str:
    (folder / f"{name}.py").write_text(body)
    return name


def test_a_package_is_imported_once_and_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = package(
        tmp_path,
        "vlm_probe_counts",
        f"with open({str(tmp_path / 'log')!r}, 'a') as f:\n    f.write('x')\n__version__ = '1.2'",
    )
    providers = Providers()
    assert providers.asked == ()
    assert not (tmp_path / "log").exists()
    assert providers.probe(name) == Probe("1.2", None)
    sys.modules.pop(name)
    assert providers.probe(name).ok
    assert (tmp_path / "log").read_text() == "x"
    assert providers.asked == (name,)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "raise OSError('libcudart.so.12: cannot open shared object file\\nmore')",
            "OSError: libcudart.so.12: cannot open shared object file",
        ),
        ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x"),
        ("import vlm_no_such_module", "ModuleNotFoundError: No module named 'vlm_no_such_module'"),
    ],
)
def test_a_package_that_is_found_but_fails_to_import_is_absent_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Providers().probe(package(tmp_path, "vlm_probe_broken", body)) == Probe(None, reason)


def test_an_empty_namespace_is_not_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 alone brings flash_attn/cute, so that `import flash_attn` succeeds and has nothing."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    outer = sys.modules.pop("flash_attn", None)
    probe = Providers().probe("flash_attn")
    del sys.modules["flash_attn"]
    if outer is not None:
        sys.modules["flash_attn"] = outer
    assert probe == Probe(None, "ImportError: flash_attn has no flash_attn_varlen_func")


def test_a_fake_imports_nothing() -> None:
    before = set(sys.modules)
    platform = Platform.fake(
        "cuda", (9, 0), importable={"flash_attn": "2.8.3"}, broken={"fa3_fwd_interface": "OSError: no"}
    )
    assert platform.providers.probe("flash_attn") == Probe("2.8.3", None)
    assert platform.providers.probe("fa3_fwd_interface") == Probe(None, "OSError: no")
    assert platform.providers.probe("flash_attn.cute").error == "ModuleNotFoundError: No module named 'flash_attn.cute'"
    assert platform.providers.probe("triton").ok
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), 98304),
        ((7, 5), 65536),
        ((8, 0), 166912),
        ((8, 6), 101376),
        ((8, 9), 101376),
        ((9, 0), 232448),
        ((10, 0), 232448),
        ((12, 0), 101376),
    ],
)
def test_shared_memory_by_capability(capability: tuple[int, int], expected: int) -> None:
    assert Platform.fake("cuda", capability).shared_memory == expected == SHARED_MEMORY[capability]


def test_shared_memory_of_others() -> None:
    assert Platform.fake("rocm", arch="gfx942").shared_memory == 65536
    assert Platform.fake("cuda", (13, 0)).shared_memory == 49152
    assert Platform.fake("cpu").shared_memory == 0


@pytest.mark.parametrize(
    ("kind", "capability", "arch", "expected"),
    [
        ("cuda", (7, 5), "", False),
        ("cuda", (8, 0), "", True),
        ("rocm", None, "gfx90a", True),
        ("rocm", None, "gfx942", True),
        ("rocm", None, "gfx1030", False),
        ("rocm", None, "gfx1100", True),
        ("xpu", None, "", True),
        ("cpu", None, "", False),
    ],
)
def test_bf16(kind: str, capability: tuple[int, int] | None, arch: str, expected: bool) -> None:
    assert has_bf16(kind, capability, arch) is expected


def test_describe() -> None:
    assert [
        Platform.fake("cuda", (8, 9)).describe(),
        Platform.fake("rocm", arch="gfx1100").describe(),
        CPU.describe(),
    ] == [
        "cuda 8.9",
        "rocm gfx1100",
        "cpu",
    ]


def test_detecting_the_cpu_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def touched(*args: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "device_count", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    platform = Platform.detect("cpu")
    assert (platform.kind, platform.device, platform.capability) == ("cpu", "cpu", None)
    assert platform.torch_version == torch.__version__
    assert platform.providers.asked == ()


def test_auto_is_the_accelerator_where_there_is_one() -> None:
    import torch

    expected = "cuda" if torch.cuda.is_available() and not torch.version.hip else None
    kind = Platform.detect("auto").kind
    assert kind == expected if expected else kind in {"rocm", "xpu", "mps", "cpu"}


@pytest.mark.gpu
def test_detecting_a_cuda_device() -> None:
    import torch

    platform = Platform.detect("cuda")
    assert platform.capability == torch.cuda.get_device_capability(0)
    assert platform.device == "cuda:0"
    if platform.capability in SHARED_MEMORY:
        assert platform.shared_memory == SHARED_MEMORY[platform.capability]


def test_a_device_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(VLMError, match=r"device 'cuda:1' was asked for, but torch .* sees none\. Use device='cpu'"):
        Platform.detect("cuda:1")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(VLMError, match="unknown device"):
        Platform.detect(device)


@pytest.mark.parametrize(
    ("requested", "checkpoint", "platform", "dtype", "warns"),
    [
        ("auto", "bfloat16", CPU, "float32", False),
        ("auto", "bfloat16", A100, "bfloat16", False),
        ("auto", "float32", A100, "float32", False),
        ("auto", "bfloat16", T4, "float16", True),
        ("auto", "float16", T4, "float16", False),
        ("bf16", "float32", T4, "float16", True),
        ("bfloat16", "float32", CPU, "float32", True),
        ("bfloat16", "float32", Platform.fake("cpu", bf16=True), "bfloat16", False),
        ("bfloat16", "float32", Platform.fake("rocm", arch="gfx1030"), "float16", True),
        ("torch.float16", "float32", CPU, "float16", False),
        ("fp32", "bfloat16", A100, "float32", False),
    ],
)
def test_dtype(requested: str, checkpoint: str, platform: Platform, dtype: str, warns: bool) -> None:
    got, warning = resolve_dtype(requested, checkpoint, platform)
    assert got == dtype
    if warns:
        assert warning is not None
        assert f"using {dtype}" in warning
        assert platform.describe() in warning
    else:
        assert warning is None


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(VLMError, match="unknown dtype 'int7'"):
        resolve_dtype("int7", "float32", A100)
