"""What only a CUDA device can show: the decisions there, and the embedded model's answers on every backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vlm import VLM
from vlm.attention.spec import Decision
from vlm.errors import AttentionBackendError
from vlm.testing import tiny_checkpoint

pytestmark = pytest.mark.gpu

PICTURES = Path(__file__).resolve().parents[2] / "examples" / "pictures"
# Heads of 80 in the vision stack, as in the published model; 32 in the text stack.
WIDE: dict[str, Any] = {
    "vision_config": {"hidden_size": 160, "out_hidden_size": 128},
    "text_config": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    },
}


def decisions(folder: Path, **settings: Any) -> dict[str, Decision]:
    with VLM(folder, device="cuda", dtype="bfloat16", max_model_len=512, kv_cache_gib=0.1, **settings) as model:
        return {decision.group: decision for decision in model.attention_report()}


def need_upstream() -> None:
    from vlm.attention.platform import Platform

    names = ("fa3_fwd_interface", "flash_attn_interface", "flash_attn.cute", "flash_attn")
    platform = Platform.detect("cuda")
    if not any(platform.providers.probe(name).ok for name in names):
        pytest.skip("no upstream FlashAttention package imports here")


def test_qwen_takes_the_upgrade_and_keeps_what_is_configured(tmp_path: Path) -> None:
    need_upstream()
    folder = tiny_checkpoint("qwen2_5_vl", tmp_path, **WIDE)
    found = decisions(folder)
    assert (found["vision.full"].backend, found["vision.full"].source) == ("flash_attn", "upgrade")
    assert found["vision.window"].backend != "flash_attn"
    assert found["text"].source == "default"
    kept = decisions(folder, attention={"vision": "sdpa"})
    assert {(d.backend, d.source) for group, d in kept.items() if group.startswith("vision")} == {("sdpa", "explicit")}
    assert kept["text"] == found["text"]


def test_the_embedded_model_does_not() -> None:
    from vlm.loading.folder import EMBEDDED

    found = decisions(EMBEDDED)
    assert "flash_attn" not in {d.backend for d in found.values()}
    assert {d.source for d in found.values()} == {"default"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "attention",
    ["auto", "sdpa", "torch_varlen", "triton", {"vision": "flash_attn"}, {"vision": "torch_efficient"}],
    ids=str,
)
def test_every_backend_captions_right(attention: str | Mapping[str, str], dtype: str) -> None:
    from vlm.loading.folder import EMBEDDED

    known = json.loads((PICTURES / "answers.json").read_text())["pictures"]
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "max_model_len": 512, "kv_cache_gib": 0.1}
    try:
        model = VLM(EMBEDDED, attention=attention, **settings)
    except AttentionBackendError as error:
        reason = error.rejected[0].reason
        assert reason.startswith("import:") or (reason.startswith("dtype:") and dtype != "bfloat16")
        pytest.skip(reason)
    with model:
        outputs = list(model.caption_many([PICTURES / name for name in known]))
    assert [o.text for o in outputs] == [answers["caption"] for answers in known.values()]
