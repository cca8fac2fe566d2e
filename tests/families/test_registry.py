"""The table of families, without importing what they need."""

import subprocess
import sys

import pytest

from vlm.errors import UnsupportedModelError
from vlm.families import FAMILIES, get_family


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_says_what_it_is_made_of(model_type):
    family = get_family(model_type)
    assert family.name in FAMILIES
    assert family.vision_stack
    assert family.text_stack
    assert isinstance(family.upstream_fa, bool)
    assert family.upstream_fa_reason


def test_only_qwen_opts_into_the_upgrade():
    assert {name: get_family(name).upstream_fa for name in FAMILIES} == {
        "qwen2_5_vl": True,
        "smolvlm": False,
        "idefics3": False,
    }


@pytest.mark.parametrize(
    ("typo", "near"), [("qwen2_5vl", "qwen2_5_vl"), ("smol_vlm", "smolvlm"), ("idefics2", "idefics3")]
)
def test_an_unknown_model_type_names_the_nearest(typo, near):
    with pytest.raises(UnsupportedModelError, match=f"did you mean {near}"):
        get_family(typo)


def test_an_unrelated_model_type_lists_what_is_supported():
    with pytest.raises(UnsupportedModelError, match="Supported are idefics3, qwen2_5_vl, smolvlm"):
        get_family("bert")


def test_listing_the_families_imports_neither_torch_nor_transformers():
    code = "import sys, vlm.families; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
