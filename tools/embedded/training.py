"""The training loop: schedule, steps, log lines and regular saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import render
from .export import save_weights
from .model import Model
from .optim import Optimiser
from .ring import Ring
from .scenes import SIDE

WARM_UP = 200  # steps
MEASURED = (200, 400)  # steps between which the rate is measured, for a run that is given minutes
SHORTEST = 1000  # steps of such a run at least: the schedule up to MEASURED[1] is then that of any longer run
PAIRS_EVERY = 5  # one step in five is about pairs of pictures
LAST_CHUNK = 600  # steps before the end, from which on the workers make the held-out questions
SAVE_EVERY = 1000


@dataclass(frozen=True)
class Plan:
    """What a run is given. ``steps`` is None for one that ends ``end_time`` (in time.time()'s seconds); ``patches`` is
    the weight of the auxiliary loss at the start."""

    steps: int | None
    end_time: float
    batch: int
    lr: float
    seed: int
    first: int
    every: int
    eager: bool
    out: Path
    patches: float = 0.3


def learning_rate(step: int, steps: int | None, peak: float) -> float:
    """Warm-up, level to 40 %, then a straight line to 0. ``steps`` None: before 40 % of SHORTEST steps or more."""
    if steps is None:
        return peak * min(1.0, (step + 1) / WARM_UP)
    return peak * min(1.0, (step + 1) / min(WARM_UP, steps / 4), (steps - step) / (0.6 * steps))


def patch_weight(step: int, steps: int | None, initial: float) -> float:
    """Weight of the auxiliary loss: from half-way down to 0 at 70 %."""
    return initial if steps is None else initial * min(1.0, max(0.0, (0.7 - step / steps) / 0.2))


class Report:
    """Sums losses on the device; one log line now and then."""

    def __init__(self, batch: int, ring: Ring, device: str, say: Callable[..., None]) -> None:
        self.batch, self.ring, self.say = batch, ring, say
        self.totals, self.counts = torch.zeros(2, 2, device=device), [0, 0]
        self.mark = time.time()

    def add(self, per: int, loss: Tensor, patches: Tensor) -> None:
        self.totals[per - 1] += torch.stack([loss.detach(), patches.detach()])
        self.counts[per - 1] += 1

    def line(self, step: int) -> None:
        values, n = self.totals.tolist(), self.counts
        ones, twos = max(1, n[0]), max(1, n[1])
        rate = sum(n) * self.batch / (time.time() - self.mark)
        self.say(
            f"step {step + 1}: loss {values[0][0] / ones:.4f}, pairs {values[1][0] / twos:.4f}, "
            f"patches {values[0][1] / ones:.4f}, {rate:,.0f} pictures/s, chunks {self.ring.filled}, "
            f"waited {self.ring.waited:.1f} s"
        )
        self.totals.zero_()
        self.counts, self.mark = [0, 0], time.time()


class Trainer:
    """Trains ``model`` in place; ``consumed`` and ``stop`` are shared with the workers."""

    def __init__(
        self, model: Model, plan: Plan, ring: Ring, consumed: Any, stop: Any, device: str, say: Callable[..., None]
    ) -> None:
        def optimise(f: Callable) -> Callable:
            return f if plan.eager else torch.compile(f, dynamic=False)

        self.model, self.plan, self.ring, self.device, self.say = model, plan, ring, device, say
        self.consumed, self.stop = consumed, stop
        self.optimiser = Optimiser(model)
        self.renderer = render.Renderer(device, optimise)
        self.see, self.losses = optimise(model.see), optimise(model.losses)
        self.generator = torch.Generator(device).manual_seed(plan.seed)

    @torch.no_grad()
    def batch(self, per: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pixels, ids, whether each is said, patch labels."""
        n, kw = self.plan.batch, {"device": self.device, "generator": self.generator}
        sample = self.ring.sample(n // per, per, self.generator)
        vary = torch.rand(n, 8, **kw)  # type: ignore[call-overload]
        noise = torch.randn(n, 3, SIDE, SIDE, **kw)  # type: ignore[call-overload]
        pixels = self.renderer.draw(sample.records, sample.offsets, self.ring.strips, vary, noise)
        labels = self.renderer.label(sample.records, sample.edges, sample.classes)
        return pixels, (sample.rows & 0x7FFF).long(), sample.rows < 0, labels

    def both_losses(self, per: int) -> tuple[Tensor, Tensor]:
        """Losses of the answers and of the patches, of a new batch."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            pixels, ids, said, labels = self.batch(per)
            return self.losses(*self.see(pixels), ids, said, labels)

    def prepare(self) -> None:
        """Compiles on an empty ring while the workers make the first chunks, then takes those."""
        for per in () if self.plan.eager else (1, 2):
            torch.stack(self.both_losses(per)).sum().backward()
            self.model.zero_grad()
            self.say("compiled for", per)
        for _ in range(self.plan.first):
            self.take()
        self.generator.manual_seed(self.plan.seed)
        self.say("first chunks on the device")

    def take(self) -> None:
        self.ring.take()
        self.consumed.value = self.ring.filled

    def fix_steps(self, step: int, begin: float) -> int:
        """Number of steps that ends in time, from the rate since ``begin``."""
        low, high = MEASURED
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.time() - begin) / (high - low)
        steps = max(SHORTEST, step + int((self.plan.end_time - time.time()) / seconds) // 100 * 100)
        self.say(f"{seconds * 1000:.1f} ms a step: --steps {steps}")
        return steps

    def run(self) -> int:
        """All steps; returns their number. Weights lie in ``plan.out`` at the end and every SAVE_EVERY steps."""
        self.prepare()
        report = Report(self.plan.batch, self.ring, self.device, self.say)
        steps, step, begin = self.plan.steps, 0, time.time()
        while steps is None or step < steps:
            if steps is None and step == MEASURED[0]:
                begin = time.time()  # the line of the step before has waited for the device
            if steps is None and step == MEASURED[1]:
                steps = self.fix_steps(step, begin)
            self.feed(step, steps)
            self.step(step, steps, report)
            if step in (0, 4, 9, 19) or step % 100 == 99 or step + 1 == steps:
                report.line(step)
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                save_weights(self.model, self.plan.out, shards=2)
            step += 1
        save_weights(self.model, self.plan.out, shards=2)
        self.say("trained")
        return step

    def feed(self, step: int, steps: int | None) -> None:
        """A new chunk every few steps; near the end the workers are told to go over to the held-out questions."""
        last = None if steps is None else max(steps - LAST_CHUNK, steps * 3 // 4)
        if step and step % self.plan.every == 0 and (last is None or step < last - 50):
            self.take()
        if step == last:
            self.stop.value = self.stop.value or 1

    def step(self, step: int, steps: int | None, report: Report) -> None:
        per = 2 if step % PAIRS_EVERY == PAIRS_EVERY - 1 else 1
        loss, patches = self.both_losses(per)
        (loss + patch_weight(step, steps, self.plan.patches) * patches).backward()
        self.optimiser.step(learning_rate(step, steps, self.plan.lr))
        report.add(per, loss, patches)
