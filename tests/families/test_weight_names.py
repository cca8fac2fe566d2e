"""The weight maps: they cover the modules exactly, and exactly what transformers writes."""

import json
import struct

import pytest
import torch

from vlm.families import FAMILIES, get_family
from vlm.loading.folder import ModelFolder


def stored_shapes(folder) -> dict[str, list[int]]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


@pytest.fixture(params=FAMILIES)
def case(request, vlm_tiny_checkpoints):
    folder = ModelFolder(vlm_tiny_checkpoints(request.param))
    family = get_family(folder.model_type)
    return folder, family, family.parse(folder.config)


def test_every_parameter_has_its_sources_and_every_source_its_parameter(case):
    _, family, config = case
    groups = family.layer_groups(config, "float32")
    with torch.device("meta"):
        model = family.build(config, dict.fromkeys(groups, None))
    assert {name for name, _ in model.named_parameters()} == family.weight_map(config).keys()


def test_the_sources_are_exactly_what_transformers_writes(case):
    folder, family, config = case
    sources = [source for names in family.weight_map(config).values() for source in names]
    assert len(sources) == len(set(sources))
    assert set(sources) == {family.canonical_name(name) for name in stored_shapes(folder.path)}


@pytest.mark.parametrize(
    ("model_type", "name", "canonical"),
    [
        ("qwen2_5_vl", "visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("qwen2_5_vl", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "language_model.model.norm.weight", "model.norm.weight"),
        ("qwen2_5_vl", "language_model.lm_head.weight", "lm_head.weight"),
        ("qwen2_5_vl", "lm_head.weight", "lm_head.weight"),
        ("qwen2_5_vl", "model.rotary_emb.inv_freq", None),
        ("smolvlm", "model.text_model.norm.weight", "model.text_model.norm.weight"),
        ("smolvlm", "text_model.norm.weight", "model.text_model.norm.weight"),
        ("smolvlm", "connector.modality_projection.proj.weight", "model.connector.modality_projection.proj.weight"),
        ("idefics3", "model.vision_model.embeddings.position_ids", None),
        ("idefics3", "something.else", "something.else"),
    ],
)
def test_known_exports_lead_to_one_name(model_type, name, canonical):
    assert get_family(model_type).canonical_name(name) == canonical


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tied_head_is_no_parameter_of_its_own(model_type, vlm_tiny_checkpoints):
    config = dict(ModelFolder(vlm_tiny_checkpoints(model_type)).config)
    family = get_family(model_type)
    for tied in (True, False):
        text = {**config["text_config"], "tie_word_embeddings": False}
        parsed = family.parse({**config, "text_config": text, "tie_word_embeddings": tied})
        assert ("text.lm_head.weight" in family.weight_map(parsed)) is not tied
