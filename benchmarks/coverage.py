# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How often the 95 % interval of a bound covers it, and how often the standard error times 1.96 would: the table of docs/source/en/likelihood.md.

    python benchmarks/coverage.py

For each process a large population of examples is scored once, each with its own timesteps and noise, by the network that knows the
law of the data. Sets of examples are drawn from it again and again: the bound of the whole population is what their intervals should
cover. Takes half a minute on one core.
"""

import numpy as np
import torch

from d3pm_hf import D3PMScheduler, prior_loss
from d3pm_hf.likelihood.bound import ratio_estimate, skewed_interval
from d3pm_hf.likelihood.measure import row_generators
from d3pm_hf.likelihood.terms import per_example, sampled_terms, stratify


PROCESSES = {
    "uniform": {"transition": "uniform", "beta_schedule": "cosine"},
    "absorbing": {"transition": "absorbing"},
    "gaussian": {"transition": "gaussian", "beta_schedule": "linear", "beta_start": 1e-3, "beta_end": 0.5},
}
NUM_CLASSES, NUM_TIMESTEPS, POPULATION, TRIALS = 28, 100, 10_000, 4_000
LENGTHS, TERMS, EXAMPLES = (1, 8, 64), (2, 5), (20, 100, 300)


def population(process: str, length: int, num_terms: int, count: int = POPULATION) -> tuple[np.ndarray, np.ndarray]:
    """The nats and the elements of `count` examples, `[count]` each."""
    scheduler = D3PMScheduler(NUM_CLASSES, NUM_TIMESTEPS, **PROCESSES[process])
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(NUM_CLASSES - 1, generator=generator) ** 3  # the last state is the mask
    x_0 = torch.multinomial(law, count * length, True, generator=generator).view(count, length)
    logits = torch.cat([law / law.sum(), torch.zeros(1)]).log()
    counts = torch.ones_like(x_0, dtype=torch.bool)
    generators = row_generators(0, torch.arange(count), {})
    nats = per_example(prior_loss(scheduler, x_0), counts)
    strata = stratify(NUM_TIMESTEPS, num_terms)

    def model(x_t, timesteps):
        return logits.expand(*x_t.shape, -1)

    for _, size, term in sampled_terms(scheduler, model, x_0, counts, range(NUM_TIMESTEPS), strata, generators):
        nats += size * term
    return nats.numpy(), counts.sum(-1).double().numpy()


def coverage(nats: np.ndarray, elements: np.ndarray, num_examples: int, trials: int = TRIALS) -> tuple[float, float]:
    """How often +-1.96 standard errors, and how often the interval, covers the bound of the population."""
    bound = nats.sum() / elements.sum()
    chosen = np.random.default_rng(0).integers(len(nats), size=(trials, num_examples))
    estimate, error, skewness = ratio_estimate(nats[chosen], elements[chosen])
    low, high = skewed_interval(estimate, error, skewness, num_examples, 0.95)
    return np.mean(abs(estimate - bound) < 1.96 * error), np.mean((low < bound) & (bound < high))


def main():
    head = ["process", "elements per example", "terms", *(f"{n} examples" for n in EXAMPLES)]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for process in PROCESSES:
        for length in LENGTHS:
            for num_terms in TERMS:
                examples = population(process, length, num_terms)
                cells = ["{1:.2f} ({0:.2f})".format(*coverage(*examples, n)) for n in EXAMPLES]
                print(f"| {process} | {length} | {num_terms} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
