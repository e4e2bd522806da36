# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A padded row with a generator of its own draws what it draws alone."""

import families
import pytest
import torch

from d3pm_hf import D3PMScheduler
from d3pm_hf.numerics import ShortRow, uniforms
from d3pm_hf.samplers import ancestral, particle_filter


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
# An autoregressive process has one length alone.
NAMES = [name for name in families.NAMES if name not in families.BY_POSITION]
LENGTHS, WIDTH = (3, 8, 5), 8


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def short_rows(times=1):
    """The generators of a batch of padded rows, with `times` entries for each."""
    rows = [seeded(i) if n == WIDTH else ShortRow(seeded(i), n) for i, n in enumerate(LENGTHS)]
    return [row for row in rows for _ in range(times)]


def assert_rows(padded, alone):
    """`padded` holds the rows `alone(i, length, generator)`, in front of whatever is padding."""
    for i, length in enumerate(LENGTHS):
        assert torch.equal(padded[i, :length], alone(i, length, seeded(i))[0])


def logits_of(num_classes):
    return torch.randn(len(LENGTHS), WIDTH, num_classes, generator=seeded(9))


def test_uniforms_of_short_rows():
    drawn = uniforms((3, WIDTH, 2), short_rows())
    assert_rows(drawn, lambda i, length, generator: uniforms((1, length, 2), generator))
    assert (drawn[0, 3:] == 0).all() and (drawn[2, 5:] == 0).all() and (drawn[1] > 0).all()
    # Numbers of the samples as a whole have no padding.
    assert torch.equal(uniforms((3,), short_rows()), torch.cat([uniforms((1,), seeded(i)) for i in range(3)]))
    with pytest.raises(ValueError, match="a ShortRow has the length 9, and the rows 8: make it at most that"):
        uniforms((1, 8), [ShortRow(seeded(0), 9)])
    with pytest.raises(ValueError, match="length is 0: it must be an integer of at least 1"):
        ShortRow(seeded(0), 0)
    with pytest.raises(ValueError, match="generator is 3: it must be a `torch.Generator`"):
        ShortRow(3, 4)


@pytest.mark.parametrize("name", NAMES)
def test_noise_and_steps(name):
    family = families.build(name)
    scheduler, x_0 = family.scheduler(), family.data((3, WIDTH))
    for t in (2, torch.tensor([1, 4, 2])):
        noised = scheduler.add_noise(x_0, t, short_rows())
        assert_rows(
            noised,
            lambda i, n, g, t=t: scheduler.add_noise(x_0[i : i + 1, :n], t if isinstance(t, int) else t[i : i + 1], g),
        )
    assert_rows(scheduler.sample_prior((3, WIDTH), short_rows()), lambda i, n, g: scheduler.sample_prior((1, n), g))
    x_t, logits = family.corrupt(x_0, 4), logits_of(family.num_classes)
    for options in ({}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.9}):

        def step(rows, n, generator, options=options):
            output = scheduler.step(
                logits[rows, :n], 3, x_t[rows, :n], previous_timestep=1, generator=generator, **options
            )
            return output.prev_sample

        assert_rows(step(slice(None), WIDTH, short_rows()), lambda i, n, g, step=step: step(slice(i, i + 1), n, g))


@pytest.mark.parametrize("name", ["gaussian", "band_diagonal", "rate", "uniform"])
def test_more_elements_than_states_once_padded(name):
    """Where a family draws the noise of long rows in another way than that of short ones."""
    family, lengths = families.build(name, num_classes=70), (20, 90)
    scheduler, x_0 = family.scheduler(), family.data((2, 90))
    noised = scheduler.add_noise(x_0, torch.tensor([1, 2]), [ShortRow(seeded(0), 20), seeded(1)])
    for i, length in enumerate(lengths):
        alone = scheduler.add_noise(x_0[i : i + 1, :length], torch.tensor([1 + i]), seeded(i))
        assert torch.equal(noised[i, :length], alone[0])


def test_what_is_revealed_does_not_depend_on_the_batch():
    """A process that keeps no state: what it shows of known data is the same in every batch."""
    matrix = torch.tensor([[0, 0.5, 0.25, 0.25], [0.5, 0, 0.25, 0.25], [0.5, 0.5, 0, 0], [1, 0, 0, 0]])
    scheduler = D3PMScheduler(4, 1, transition="matrix", transition_matrices=matrix)
    x_0 = torch.randint(4, (3, WIDTH), generator=seeded(0))
    shown = scheduler.reveal(x_0, 0)
    assert (matrix[x_0, shown] > 0).all()
    assert_rows(shown, lambda i, n, g: scheduler.reveal(x_0[i : i + 1, :n], 0))


@pytest.mark.parametrize("sampler", [ancestral, particle_filter])
@pytest.mark.parametrize("name", NAMES)
def test_whole_walks(name, sampler):
    """All random numbers of a sampler, those of the particles too."""
    family = families.build(name)
    scheduler, logits = family.scheduler(), logits_of(family.num_classes)
    num_particles = 3 if sampler is particle_filter else 1
    options = {"num_particles": num_particles} if sampler is particle_filter else {}
    known = family.data((3, WIDTH))
    is_known = torch.arange(WIDTH).expand(3, -1) == 1

    def walk(rows, n, generator):
        x_t = scheduler.sample_prior((len(generator), n), generator)
        table = logits[rows, :n].repeat_interleave(num_particles, 0)

        def denoiser(x_t, timestep):
            return table + torch.nn.functional.one_hot(x_t, family.num_classes) + 0.1 * timestep.cos()

        about = (x[rows, :n].repeat_interleave(num_particles, 0) for x in (known, is_known))
        known_rows, is_known_rows = about
        return sampler(
            scheduler,
            denoiser,
            x_t,
            [5, 3, 1, 0],
            known=known_rows,
            is_known=is_known_rows,
            generator=generator,
            **options,
        )

    batch = walk(slice(None), WIDTH, short_rows(num_particles))
    assert_rows(batch, lambda i, n, g: walk(slice(i, i + 1), n, [g] * num_particles))
