"""The machine as one frozen value: what device, what it can do, which optional packages import.

Detected once (`Platform.detect`) and passed down; nothing below this module asks torch for a device. `Platform.fake`
builds any machine without having it. Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vlm.attention.errors import VLMError

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "rocm", "xpu", "mps", "cpu")
OLDEST_TORCH = "2.11.0"  # pyproject's minimum: what a fake machine has unless it says otherwise
BUNDLED = ("torch", "triton")  # packages that the installation brings, so a fake machine has them too

# Shared memory that one block can opt in to, in bytes, by compute capability (CUDA C++ Programming Guide, technical
# specifications).
SHARED_MEMORY: dict[tuple[int, int], int] = {
    (7, 0): 98304,
    (7, 2): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (11, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
ROCM_SHARED_MEMORY = 65536
XPU_SHARED_MEMORY = 65536  # what every Intel GPU since Xe-HPG gives a work-group; a detected one says its own
SMALLEST_SHARED_MEMORY = 49152  # what every CUDA device gives a block without opting in

# An import name, and the names under which the package index knows it. The first that is installed gives the version.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "flash_attn": ("flash-attn",),
    "flash_attn.cute": ("flash-attn-4",),
    "flash_attn_interface": ("flash-attn-3", "flash_attn_3"),
    "fa3_fwd_interface": ("fa3-fwd",),
}
# An attribute that shows the import brought the real thing: flash-attn-4 alone leaves `flash_attn` an empty namespace
# package.
PROOF = dict.fromkeys(DISTRIBUTIONS, "flash_attn_varlen_func")


@dataclass(frozen=True)
class Probe:
    """The outcome of importing a package: its version ("" when it does not say), or why it failed ("OSError: ...")."""

    version: str | None
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


def _installed_version(import_name: str) -> str:
    for distribution in DISTRIBUTIONS.get(import_name, (import_name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(import_name), "__version__", ""))


def _import(import_name: str) -> Probe:
    """Really import it. What is found but does not load (no libcudart, a wrong ABI) is absent, with its reason."""
    try:
        module = importlib.import_module(import_name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Probe(None, f"{type(error).__name__}: {first_line}")
    proof = PROOF.get(import_name)
    if proof is not None and not hasattr(module, proof):
        return Probe(None, f"ImportError: {import_name} has no {proof}")
    return Probe(_installed_version(import_name), None)


class Providers:
    """Optional packages by import name. Each is imported at most once, when it is first asked for.

    Args:
        importer: what asking does. The default imports; a fake answers from a table.
    """

    def __init__(self, importer: Callable[[str], Probe] = _import) -> None:
        self._importer = importer
        self._probes: dict[str, Probe] = {}

    def probe(self, import_name: str) -> Probe:
        if import_name not in self._probes:
            self._probes[import_name] = self._importer(import_name)
        return self._probes[import_name]

    @property
    def asked(self) -> tuple[str, ...]:
        """Names that have been asked for so far, in order."""
        return tuple(self._probes)


def fake_providers(importable: Mapping[str, str], broken: Mapping[str, str]) -> Providers:
    """Providers that answer from tables: import name -> version, and import name -> error text."""

    def answer(import_name: str) -> Probe:
        if import_name in broken:
            return Probe(None, broken[import_name])
        if import_name in importable:
            return Probe(importable[import_name], None)
        if import_name in BUNDLED:
            return Probe("", None)
        return Probe(None, f"ModuleNotFoundError: No module named {import_name!r}")

    return Providers(answer)


def has_bf16(kind: str, capability: tuple[int, int] | None, arch: str) -> bool:
    """Whether a GPU computes bfloat16: NVIDIA from 8.0, AMD gfx9, gfx11 and gfx12, Intel, Apple."""
    if kind == "cuda":
        return capability is not None and capability >= (8, 0)
    if kind == "rocm":
        return arch.startswith("gfx9") or arch[3:5] in {"11", "12"}
    return kind in {"xpu", "mps"}


def shared_memory(kind: str, capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory (LDS) that one block may use, from the table; 0 where the notion does not apply."""
    if kind == "rocm":
        return ROCM_SHARED_MEMORY
    if kind == "xpu":
        return XPU_SHARED_MEMORY
    if kind == "cuda" and capability is not None:
        return SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY)
    return 0


@dataclass(frozen=True)
class Platform:
    """A machine, as the attention factory sees it.

    Attributes:
        kind: one of cuda, rocm, xpu, mps, cpu. capability: CUDA compute capability. arch: "gfx942" on ROCm, else "".
        shared_memory: bytes that one block may use. bf16: the device computes bfloat16. name: what the device calls
            itself.
        processors: SMs or compute units, 0 if unknown; decoding splits its keys until all of them have work.
        device: what torch calls it ("cuda:0"). torch_version: as installed. providers: the optional packages.
    """

    kind: str
    capability: tuple[int, int] | None = None
    arch: str = ""
    shared_memory: int = 0
    bf16: bool = False
    providers: Providers = field(default_factory=Providers, compare=False)
    name: str = ""
    device: str = "cpu"
    torch_version: str = OLDEST_TORCH
    processors: int = 0

    @classmethod
    def detect(cls, device: str = "auto") -> Platform:
        """The machine that torch sees. "auto" takes CUDA or ROCm, then XPU, MPS, the CPU; "cuda:1" picks a device.

        `device="cpu"` touches no accelerator. Raises VLMError where the device that was asked for is not there.
        """
        import torch

        kind, _, index = device.partition(":")
        if kind == "auto":
            kind = next(k for k in ("cuda", "xpu", "mps", "cpu") if _available(k))
        kind = "cuda" if kind == "rocm" else kind
        if kind not in KINDS or (index and not index.isdigit()):
            raise VLMError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:INDEX, xpu or mps")
        if not _available(kind, int(index or 0)):
            raise VLMError(
                f"device {device!r} was asked for, but torch {torch.__version__} sees none. "
                "Use device='cpu', or install a torch build for that device"
            )
        found = {"cuda": _detect_cuda, "xpu": _detect_xpu, "mps": _detect_mps, "cpu": _detect_cpu}[kind](
            int(index or 0)
        )
        return replace(found, torch_version=str(torch.__version__))

    @classmethod
    def fake(
        cls,
        kind: str = "cuda",
        capability: tuple[int, int] | None = None,
        *,
        arch: str = "",
        importable: Mapping[str, str] | None = None,
        broken: Mapping[str, str] | None = None,
        bf16: bool | None = None,
        shared_memory_bytes: int | None = None,
        name: str = "",
        torch_version: str | None = None,
    ) -> Platform:
        """Any machine, without having it: `importable` maps import names to versions, `broken` to errors."""
        if kind not in KINDS:
            raise VLMError(f"unknown platform {kind!r}: use one of {', '.join(KINDS)}")
        if kind == "cuda" and capability is None:
            capability = (8, 0)
        if kind == "rocm" and not arch:
            arch = "gfx942"
        importable = dict(importable or {})
        return cls(
            kind=kind,
            capability=capability if kind == "cuda" else None,
            arch=arch if kind == "rocm" else "",
            shared_memory=shared_memory(kind, capability) if shared_memory_bytes is None else shared_memory_bytes,
            bf16=has_bf16(kind, capability, arch) if bf16 is None else bf16,
            providers=fake_providers(importable, dict(broken or {})),
            name=name or f"fake {kind}",
            device="cuda" if kind in {"cuda", "rocm"} else kind,
            torch_version=torch_version or importable.get("torch") or OLDEST_TORCH,
        )

    def describe(self) -> str:
        """The platform in a few words: "cuda 8.0", "rocm gfx942", "cpu"."""
        detail = f"{self.capability[0]}.{self.capability[1]}" if self.capability else self.arch
        return f"{self.kind} {detail}".strip()


def _available(kind: str, index: int = 0) -> bool:
    import torch

    if kind == "cuda":
        return torch.cuda.is_available() and index < torch.cuda.device_count()
    if kind == "xpu":
        return hasattr(torch, "xpu") and torch.xpu.is_available() and index < torch.xpu.device_count()
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" and index == 0


def _detect_cuda(index: int) -> Platform:
    import torch

    properties = torch.cuda.get_device_properties(index)
    device, processors = f"cuda:{index}", int(properties.multi_processor_count)
    if torch.version.hip:
        arch = str(properties.gcnArchName).partition(":")[0]
        memory = shared_memory("rocm", None)
        bf16 = has_bf16("rocm", None, arch)
        return Platform("rocm", None, arch, memory, bf16, name=properties.name, device=device, processors=processors)
    capability = (properties.major, properties.minor)
    memory = int(getattr(properties, "shared_memory_per_block_optin", 0)) or shared_memory("cuda", capability)
    bf16 = capability >= (8, 0)
    return Platform("cuda", capability, "", memory, bf16, name=properties.name, device=device, processors=processors)


def _detect_xpu(index: int) -> Platform:
    import torch

    properties = torch.xpu.get_device_properties(index)
    memory = int(getattr(properties, "local_mem_size", 0)) or XPU_SHARED_MEMORY
    processors = int(getattr(properties, "gpu_subslice_count", 0))
    return Platform("xpu", None, "", memory, True, name=properties.name, device=f"xpu:{index}", processors=processors)


def _detect_mps(index: int) -> Platform:
    import torch

    bf16 = bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return Platform("mps", bf16=bf16, name="Apple GPU", device="mps")


def _detect_cpu(index: int) -> Platform:
    import platform as host

    import torch

    return Platform("cpu", bf16=_cpu_bf16(torch), name=host.processor() or host.machine(), device="cpu")


def _cpu_bf16(module: torch) -> bool:  # type: ignore[valid-type]
    """Whether torch reports bfloat16 instructions (AVX512_BF16, AMX_BF16, Arm BF16): bf16 is emulated without."""
    cpu = module.cpu  # type: ignore[attr-defined]
    if hasattr(cpu, "get_capabilities"):
        return any("bf16" in name and value is True for name, value in cpu.get_capabilities().items())
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(cpu, name)() for name in checks if hasattr(cpu, name))


DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


def canonical_dtype(name: str) -> str:
    """A compute dtype by its short or long name, "torch." or not -> the name torch gives it. Raises VLMError."""
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise VLMError(f"unknown dtype {name!r}: use auto, float32 (fp32), float16 (fp16) or bfloat16 (bf16)")
    return found


def resolve_dtype(requested: str, checkpoint_dtype: str, platform: Platform) -> tuple[str, str | None]:
    """The dtype to compute in, and a sentence for the user when the device cannot do what was asked.

    "auto" is float32 on the CPU and the checkpoint's dtype elsewhere. bfloat16 on a device without it becomes float16
    on a GPU and float32 on a CPU. Raises VLMError for an unknown name.
    """
    if requested == "auto" and platform.kind == "cpu":
        return "float32", None
    wanted = canonical_dtype(checkpoint_dtype if requested == "auto" else requested)
    if wanted != "bfloat16" or platform.bf16:
        return wanted, None
    instead = "float32" if platform.kind == "cpu" else "float16"
    whose = "the checkpoint is in bfloat16" if requested == "auto" else "bfloat16 was asked for"
    return (
        instead,
        f"{whose}, which {platform.name or 'this device'} ({platform.describe()}) does not compute: using {instead}",
    )
