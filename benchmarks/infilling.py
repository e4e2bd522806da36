# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Scores how samplers paint the lower half of held-out digits, given the upper half.

    python examples/reproduce/run.py digits-gaussian_classes
    python benchmarks/infilling.py outputs/reproduce/digits-gaussian_classes-0

The score of samples x, x' for the truth y is E|x - y| - E|x - x'| / 2, the mean over the painted pixels (levels 0 to 16): the
continuous ranked probability score, which in expectation is lowest for the true conditional distribution.
"""

import argparse

import torch

from d3pm_hf import D3PMPipeline
from d3pm_hf.data import digits


SAMPLERS = {"ancestral": {"sampler": "ancestral"}}
SAMPLERS |= {
    path: {"sampler": "particle_filter", "sampler_kwargs": {"known_path": path}} for path in ("noised", "clamped")
}


def score(samples: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The score of each image, `[M]`, for samples `[M, n, pixels]` and truth `[M, pixels]`."""
    samples, num_samples = samples.float(), samples.shape[1]
    error = (samples - truth[:, None]).abs().mean((1, 2))
    between = (samples[:, :, None] - samples[:, None]).abs().mean(-1).sum((1, 2)) / (num_samples * (num_samples - 1))
    return error - between / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Folder of a model of scikit-learn's digits.")
    parser.add_argument("--num_images", type=int, default=48, help="Number of images of the test set.")
    parser.add_argument("--num_samples", type=int, default=4, help="Number of samples per image.")
    parser.add_argument("--num_inference_steps", type=int, default=20, help="Number of steps.")
    parser.add_argument("--num_particles", type=int, nargs="+", default=[1, 4, 16], help="Numbers of particles.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipeline, test = D3PMPipeline.from_pretrained(args.checkpoint), digits()[1]
    pipeline.set_progress_bar_config(disable=True)
    images = torch.stack([test[i] for i in range(args.num_images)])  # [M, 1, 8, 8]
    is_known = torch.zeros_like(images, dtype=torch.bool)
    is_known[..., :4, :] = True
    options = {"num_per_input": args.num_samples, "num_inference_steps": args.num_inference_steps}
    for name, sampler in SAMPLERS.items():
        for num_particles in args.num_particles if name != "ancestral" else [1]:
            generator = torch.Generator().manual_seed(0)
            options |= {"num_particles": num_particles, "generator": generator, **sampler}
            drawn = pipeline.sample_states(
                len(images), images.shape[1:], images, is_known, **{"sampler_kwargs": None, **options}
            )
            painted = drawn.unflatten(0, (-1, args.num_samples))[..., 4:, :].flatten(2)
            scores = score(painted, images[..., 4:, :].flatten(1))
            error = scores.std() / len(scores) ** 0.5
            print(f"{name:10} {num_particles:3} particles: {scores.mean():.3f} ± {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
