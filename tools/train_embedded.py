"""Trains the embedded model from nothing on one GPU, on pictures that are drawn while it trains.

    python tools/train_embedded.py --steps 8000 --fonts FOLDER... --out FOLDER

Worker processes make chunks of picture specifications with their conversations; the GPU draws them; the model has
SmolVLM's architecture. The result depends on the faces, the seed and the number of steps alone (up to the rounding of
the GPU). With --minutes the number of steps is fixed from the rate at the beginning, and printed.

Writes a checkpoint folder with its scores on held-out pictures (scores.json); the log goes to the standard output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parent))

from embedded import heldout, pool
from embedded.fonts import default_folders, find_faces

BEGIN = time.time()


def say(*what: object) -> None:
    print(f"[{time.time() - BEGIN:6.1f}]", *what, flush=True)


def scratch() -> Path:
    """A folder for chunks: in shared memory where that has room for some gigabytes."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 8 * 2**30
    return (shared if roomy else Path(tempfile.gettempdir())) / "embedded_chunks"


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = p.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=8000)
    length.add_argument("--minutes", type=float, help="from the start of this program to the last step")
    p.add_argument("--batch", type=int, default=1024, help="pictures a step")
    p.add_argument("--lr", type=float, default=2.5e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    p.add_argument("--slots", type=int, default=128, help="chunks held on the GPU")
    p.add_argument("--first", type=int, default=24, help="chunks before the first step")
    p.add_argument("--every", type=int, default=8, help="steps between two new chunks")
    p.add_argument("--heldout", type=int, default=2000, help="questions a task at the end")
    p.add_argument("--fonts", nargs="+", default=None, help="folders of .ttf files")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--scratch", type=Path, default=scratch())
    p.add_argument("--init", type=Path, help="folder of a checkpoint to go on from, without the auxiliary loss")
    p.add_argument("--mixture", choices=sorted(pool.MIXTURES), default="first", help="what is shown and asked")
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    return p.parse_args()


def worker(index: int, args: argparse.Namespace, fonts: list[str], consumed: Any, stop: Any) -> None:
    """Makes chunks until told to stop, then its share of the held-out questions."""
    ahead = args.first + 24
    try:
        mixture = pool.MIXTURES[args.mixture]
        pool.work(index, args.workers, str(args.scratch), fonts, args.seed, consumed, stop, ahead, mixture)
        faces = find_faces(fonts)
        for task in heldout.TASKS[index :: args.workers]:
            heldout.write(task, args.heldout, faces, args.scratch)
    except BaseException:
        stop.value = pool.FAILED
        raise


def train(args: argparse.Namespace, consumed: Any, stop: Any) -> None:
    import torch
    from embedded import scoring
    from embedded.export import load_weights, write_folder
    from embedded.model import Config, Model, parameters_of
    from embedded.ring import Ring
    from embedded.tokenizer import Codec
    from embedded.training import Plan, Trainer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    codec = Codec()
    config = Config(vocab=codec.size)
    model = Model(config, codec.image).to(device)
    if args.init:
        load_weights(model, args.init)
    say(f"GPU {gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}, {parameters_of(model):,} parameters")
    write_folder(args.out, codec, config)
    steps, end = (args.steps, 0.0) if args.minutes is None else (None, BEGIN + 60 * args.minutes)
    plan = Plan(steps, end, args.batch, args.lr, args.seed, args.first, args.every, args.eager, args.out)
    if args.init:
        plan = replace(plan, patches=0.0)
    ring = Ring(args.scratch, args.slots, stop, device)
    done = Trainer(model, plan, ring, consumed, stop, device, say).run()
    trained = round(time.time() - BEGIN)
    stop.value = stop.value or 1
    facts = {"gpu": gpu, "torch": torch.__version__, "seconds": trained, "steps": done, "batch": args.batch}
    facts |= {"seed": args.seed, "parameters": parameters_of(model), "questions": args.heldout}
    scores = scoring.evaluate(model, codec, args.scratch, stop, device, say)
    (args.out / "scores.json").write_text(json.dumps(facts | {"scores": scores}, indent=1) + "\n")
    say(json.dumps(facts))


def main() -> None:
    args = parse()
    fonts = args.fonts or default_folders()
    shutil.rmtree(args.scratch, ignore_errors=True)
    args.scratch.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")  # before torch starts its threads
    consumed, stop = context.Value("i", 0), context.Value("i", 0)
    workers = [
        context.Process(target=worker, args=(i, args, fonts, consumed, stop), daemon=True) for i in range(args.workers)
    ]
    for process in workers:
        process.start()
    say(f"{len(workers)} workers, {len(find_faces(fonts))} faces")
    try:
        train(args, consumed, stop)
    finally:
        stop.value = stop.value or 1
        for process in workers:
            process.terminate()
        shutil.rmtree(args.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
