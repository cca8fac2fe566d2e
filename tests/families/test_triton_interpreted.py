"""Whole models on our Triton kernels without a GPU give the tokens that they give on sdpa.

Triton reads TRITON_INTERPRET when it is imported: the first test starts a process in which the others run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlm.attention.platform import Platform
from vlm.attention.spec import Preference
from vlm.families import get_family
from vlm.loading.folder import EMBEDDED, ModelFolder
from vlm.loading.model import load_model
from vlm.testing import tiny_checkpoint
from vlm.testing.greedy import greedy
from vlm.testing.parity import ParityChecker, relative_error
from vlm.testing.reference import reference_pixels

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that the first test starts")
TEXT = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
CHANGES = {  # heads of widths that the kernels serve: 80 or 64 in the vision stack, 32 in the text stack
    "qwen2_5_vl": {
        "vision_config": {"hidden_size": 160, "out_hidden_size": 128},
        "text_config": TEXT | {"rope_parameters": MROPE},
    },
    "smolvlm": {"vision_config": {"hidden_size": 128}, "text_config": TEXT},
}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the process that this is")
def test_models_in_the_interpreter():
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compare(path: Path, sizes: list[tuple[int, int]], max_tokens: int) -> None:
    folder = ModelFolder(path)
    config = get_family(folder.model_type).parse(folder.config)
    # Ours on the CPU, that is on sdpa.
    checker = ParityChecker(path, process=reference_pixels(path, folder.model_type, config))
    machine = Platform.fake("cuda", (8, 0))
    preferences = {stack: Preference("triton", "this test") for stack in ("vision", "text")}
    ours = load_model(folder, machine, dtype="float32", device="cpu", preferences=preferences, progress=False)
    assert {decision.backend for decision in ours.decisions} == {"triton"}
    images = checker.images(sizes)
    with torch.inference_mode():
        for got, want in zip(ours.model.encode_images(images), checker.ours.model.encode_images(images), strict=True):
            assert relative_error(got, want) <= 1e-5
    prompts = [checker.prompt("What is this? ", image, " Say it.") for image in images]
    assert greedy(ours, prompts, max_tokens) == greedy(checker.ours, prompts, max_tokens)


@interpreted
@pytest.mark.parametrize("model_type", CHANGES)
def test_tokens_are_those_of_sdpa(model_type, tmp_path):
    compare(tiny_checkpoint(model_type, tmp_path, **CHANGES[model_type]), [(90, 60)], max_tokens=6)


@interpreted
def test_the_embedded_model_says_the_same():
    compare(EMBEDDED, [(120, 90)], max_tokens=8)
