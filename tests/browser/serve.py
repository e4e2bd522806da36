# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Serves the page with a sampler of its own, which takes its time and writes a line for each of its steps.

python serve.py STEPS_FILE [arguments of d3pm_hf.app]
"""

import sys
import time
from pathlib import Path

from d3pm_hf import register_sampler
from d3pm_hf.app.command_line import main
from d3pm_hf.samplers import ancestral


STEP_SECONDS = 0.1
steps_file = Path(sys.argv[1])


@register_sampler("slow")
def slow(scheduler, denoiser, x_t, timesteps, **options):
    def predict(x_t, timestep, **condition):
        time.sleep(STEP_SECONDS)
        with steps_file.open("a") as file:
            file.write(f"{int(timestep)}\n")
        return denoiser(x_t, timestep, **condition)

    return ancestral(scheduler, predict, x_t, timesteps, **options)


if __name__ == "__main__":
    main(sys.argv[2:])
