"""Peak memory of reading a prompt and stepping into the next block, with one cache and nothing beside it.

On a CPU a peak is of a whole process, so each is measured in a process of its own, which loads the model and lets its
peak begin at what it then holds. On CUDA torch counts for itself, and it is measured in this process.

Run as a module, this file is that process: it reads one :class:`PeakJob` as JSON and prints a peak.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvbits.files import Calibration, load_calibration
from kvbits.hf.attach import enable
from kvbits.hf.loading import load_model
from kvbits.measure.memory import Peak, peak_memory
from kvbits.measure.runner import Prompts, Reading, Runner
from kvbits.measure.weights import quantize

STEPS = 2
"""Decode steps before the one that packs."""


@dataclass(frozen=True)
class PeakJob:
    """What a process of its own has to do.

    Attributes:
        model, dtype: as for :func:`kvbits.load_model`.
        weights: see :mod:`kvbits.measure.weights`.
        scheme: see :mod:`kvbits.measure.caches`.
        calibration: a folder, or None.
        tokens: of the text.
        batch, context, chunk: as in :class:`kvbits.measure.runner.Reading`.
        threads: of torch.
    """

    model: str
    dtype: str
    weights: str
    scheme: str
    calibration: str | None
    tokens: list[int]
    batch: int
    context: int
    chunk: int | None
    threads: int


def peak_of(job: PeakJob) -> Peak:
    """Run an job in a process of its own. Where that process fails, there are no bytes, and ``what`` says why."""
    command, given = [sys.executable, "-m", __name__], json.dumps(dataclasses.asdict(job))
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Peak(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode == -signal.SIGKILL:
        return Peak("the process that was to measure it was killed, as a rule for want of memory")
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return Peak(f"the process that was to measure it failed: {last[:300]}")


def peak_here(
    model: PreTrainedModel, scheme: str, reading: Reading, calibration: str | Path | Calibration | None = None
) -> Peak:
    """The same in this process, with a model that is there."""
    with torch.no_grad(), peak_memory(model.device) as peak:
        runner = Runner(model, scheme, reading, calibration)
        runner.prefill()
        for _ in range(STEPS):
            runner.step()
        runner.flush()
    return peak


def run(job: PeakJob) -> Peak:
    """Load the model as the job says, and measure."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    model = load_model(job.model, dtype=getattr(torch, job.dtype))
    calibration = None if job.calibration is None else load_calibration(job.calibration)
    if calibration is not None:
        enable(model, calibration=calibration)  # before the weights are others than those it was made for
    quantize(model, job.weights)
    reading = Reading(Prompts(torch.tensor(job.tokens)), job.batch, job.context, job.chunk)
    return peak_here(model, job.scheme, reading, calibration)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(run(PeakJob(**json.load(sys.stdin))))))
