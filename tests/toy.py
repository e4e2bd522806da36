# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A data set that can be enumerated, and the network that knows it: for tests of what samplers draw."""

import itertools

import reference as ref
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from d3pm_hf import Denoiser


def joint(family, length, seed=0):
    """Probabilities `[K] * length` of sequences of strongly dependent tokens; none holds the mask."""
    probs = torch.rand([family.num_classes] * length, generator=torch.Generator().manual_seed(seed)).double() ** 4
    if family.mask is not None:
        for axis in range(length):
            probs.index_fill_(axis, torch.tensor([family.mask]), 0)
    return probs / probs.sum()


def leave_one_out(family, probs, n):
    """log q(x_0^i | x_n without i) for every x_n and position i: `[K ** N, N, K]`."""
    length = probs.ndim
    rows = ref.stretch(family.matrices, 0, n)  # [P, K, K]
    states = torch.tensor(list(itertools.product(range(family.num_classes), repeat=length)))  # [K ** N, N]
    result = []
    for i in range(length):
        terms = probs.expand(len(states), *probs.shape)
        for j in range(length):
            if j != i:
                likelihood = rows[j % len(rows)].T[states[:, j]]  # [K ** N, K], q(x_n^j | x_0^j = .)
                shape = [len(states)] + [1] * length
                shape[1 + j] = family.num_classes
                terms = terms * likelihood.reshape(shape)
        others = [1 + j for j in range(length) if j != i]
        result.append(terms.sum(others) if others else terms)
    return torch.stack(result, 1).log()


class ExactDenoiser(PreTrainedModel):
    """A text model that looks its answer up: leave-one-out logits for every state and timestep."""

    config_class = PreTrainedConfig

    def __init__(self, family, probs):
        super().__init__(PreTrainedConfig(vocab_size=family.num_classes, timestep_conditioning=True))
        tables = [leave_one_out(family, probs, n) for n in range(1, len(family.matrices) + 1)]
        self.table = torch.nn.Parameter(torch.stack(tables).float(), requires_grad=False)  # [T, K ** N, N, K]
        self.powers = family.num_classes ** torch.arange(probs.ndim - 1, -1, -1)

    def forward(self, input_ids, timestep, return_dict=True):
        # Where the other positions are impossible, so is everything; any answer will do.
        logits = self.table[timestep, (input_ids * self.powers).sum(-1)]
        return (logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0),)


def noisy_law(family, probs, n):
    """q(x_n), `[K ** N]`."""
    return probs.flatten() @ ref.toy_likelihood(family.matrices, probs.ndim, 0, n).prod(-1)


class ExactFunction:
    """The exact denoiser in float64: the leave-one-out posteriors of all states, or q(x_0 | x_t)."""

    def __init__(self, family, probs, x0_posterior="leave_one_out"):
        self.tables = {}
        states = ref.states(family.num_classes, probs.ndim)
        for n in range(1, len(family.matrices) + 1):
            logits = leave_one_out(family, probs, n)  # [K ** N, N, K]
            if x0_posterior == "denoising":
                logits = logits + ref.likelihood(family.matrices, states, 0, n).log()
            # Where x_t is impossible, so is everything; any answer will do.
            self.tables[n] = logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0)
        self.num_classes = family.num_classes

    def __call__(self, x_t, timestep):
        return self.tables[int(timestep) + 1][indices(x_t, self.num_classes)]


class ClassDenoiser(Denoiser):
    """The exact denoiser of p(x | c) for each class c, and of p(x) = sum_c p(c) p(x | c) for "no class"."""

    def __init__(self, family, probs, class_probs):
        super().__init__()
        mixture = torch.einsum("c,c...->...", class_probs, probs)
        self.experts = torch.nn.ModuleList(ExactDenoiser(family, p) for p in (*probs, mixture))
        self.num_classes, self.num_class_labels, self.null_class = family.num_classes, len(probs), len(probs)
        self.num_calls = self.num_rows = 0

    def forward(self, x_t, timestep, class_labels):
        self.num_calls, self.num_rows = self.num_calls + 1, self.num_rows + len(x_t)
        outputs = torch.stack([expert(x_t, timestep)[0] for expert in self.experts])  # [C + 1, B, N, K]
        return outputs[class_labels, torch.arange(len(x_t))]


def step_law(scheduler, denoiser, timesteps, length, start=None, **condition):
    """Exact probabilities `[K ** N]` of what steps of the scheduler draw from the prior (or `start`) over `timesteps`.

    `denoiser` gives what `scheduler.posterior_logits` takes, as it does in a sampler.
    """
    states = ref.states(scheduler.config.num_classes, length)  # [K ** N, N]
    law = scheduler.transition.log_prior.double().exp()[states].prod(-1) if start is None else start
    condition = {name: value.expand(len(states)) for name, value in condition.items()}
    for t, s in zip(timesteps, [*timesteps[1:], -1]):
        reached = law > 1e-300  # the others may have no posterior
        rows = {name: value[reached] for name, value in condition.items()}
        output = denoiser(states[reached], torch.tensor(t), **rows).double()
        log_p = scheduler.posterior_logits(output, t, states[reached], s)  # [n, N, K]
        between = torch.stack([log_p[:, i, states[:, i]] for i in range(length)]).sum(0).exp()  # [x_t, x_s]
        law = law[reached] @ between
    return law


def ancestral_law(family, denoiser, timesteps):
    """Exact probabilities `[K ** N]` of the samples that ancestral sampling draws from the prior over `timesteps`."""
    _, states_count, length, num_classes = denoiser.table.shape
    states = ref.states(num_classes, length)  # [K ** N, N]
    prior = family.scheduler().transition.log_prior.double().exp()
    law = prior[states].prod(-1)  # [K ** N]
    for t, s in zip(timesteps, [*timesteps[1:], -1]):
        logits = denoiser(states, torch.full((states_count,), t))[0].double()
        rows = ref.reverse(family.matrices, logits, states, s + 1, t + 1)  # [K ** N, N, K]
        between = torch.stack([rows[:, i, states[:, i]] for i in range(length)]).prod(0)  # [x_t, x_s]
        law = law[law > 0] @ between[law > 0]  # the others have no posterior
    return law


def indices(samples, num_classes):
    """The index of each sample `[n, N]` among all states, `[n]`."""
    return (samples * num_classes ** torch.arange(samples.shape[1] - 1, -1, -1)).sum(-1)
