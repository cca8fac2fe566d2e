"""What the families ask of the attention factory, and what they get, on machines that are not there."""

import pytest

from vlm.attention.factory import select
from vlm.attention.platform import Platform
from vlm.attention.spec import Preference
from vlm.families import get_family
from vlm.loading.folder import ModelFolder


def decisions(model_type, vlm_tiny_checkpoints, platform, preferences=None):
    family = get_family(model_type)
    config = family.parse(ModelFolder(vlm_tiny_checkpoints(model_type)).config)
    groups = family.layer_groups(config, "bfloat16")
    chosen = (preferences or {}).get
    return {n: select(g.spec, platform, chosen(g.stack) or Preference(), g.upstream_fa) for n, g in groups.items()}


def hopper() -> Platform:
    return Platform.fake("cuda", (9, 0), importable={"flash_attn": "2.8.3", "fa3_fwd_interface": "0.0.3"})


# The vision heads of the tiny checkpoint are 20 wide, which the package does not serve: here they are 80, as in the
# real model.
@pytest.fixture
def real_heads(monkeypatch):
    from vlm.vision.qwen2_5_vl import Qwen25VisionConfig

    monkeypatch.setattr(Qwen25VisionConfig, "head_dim", property(lambda self: 80))


@pytest.mark.usefixtures("real_heads")
def test_qwen_is_upgraded_where_whole_frames_attend_and_not_in_windows(vlm_tiny_checkpoints):
    chosen = decisions("qwen2_5_vl", vlm_tiny_checkpoints, hopper())
    assert (chosen["vision.full"].backend, chosen["vision.full"].source) == ("flash_attn", "upgrade")
    assert chosen["vision.window"].source == "default"
    assert chosen["vision.window"].backend != "flash_attn"
    assert any("windows of at most 64 tokens" in r.reason for r in chosen["vision.window"].rejected)
    assert chosen["text"].source == "default"


@pytest.mark.usefixtures("real_heads")
def test_a_configured_backend_wins_over_the_upgrade(vlm_tiny_checkpoints):
    preferences = {"vision": Preference("sdpa", "argument attention=")}
    chosen = decisions("qwen2_5_vl", vlm_tiny_checkpoints, hopper(), preferences)
    assert {(d.backend, d.source) for n, d in chosen.items() if n != "text"} == {("sdpa", "explicit")}


@pytest.mark.parametrize("model_type", ["smolvlm", "idefics3"])
def test_families_that_do_not_opt_in_never_have_the_package_imported(model_type, vlm_tiny_checkpoints):
    platform = hopper()
    chosen = decisions(model_type, vlm_tiny_checkpoints, platform)
    assert {d.source for d in chosen.values()} == {"default"}
    assert not {"flash_attn", "fa3_fwd_interface", "flash_attn_interface"} & set(platform.providers.asked)
