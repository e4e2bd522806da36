# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The paper's Figure 1: discrete diffusion on a quantized swiss roll.

Each dot of the roll is a pair of categorical variables, its two coordinates. Three processes corrupt them: uniform (a
coordinate jumps anywhere), discretized Gaussian (it jumps to somewhere near) and absorbing (it turns into [MASK]). For
each process a small network learns to undo the corruption, and one picture, outputs/swiss_roll.png, shows it all.

    python examples/swiss_roll.py

takes one to three minutes on a CPU. The bounds it prints should come out near 4.2 bits per dimension for uniform, 4.3
for Gaussian and 4.2 for absorbing, where the entropy of the data, which no model can beat, is 4.18.
"""

import argparse
import math
from pathlib import Path


K = 50  # levels of each coordinate
T = 200  # corruption steps
BATCH_SIZE = 384
NUM_DOTS = 2000  # in each panel of the picture

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output_dir", type=Path, default=Path("outputs"), help="Folder for the picture.")
parser.add_argument("--max_train_steps", type=int, default=2000, help="Number of training steps for each process.")
parser.add_argument("--num_inference_steps", type=int, default=T, help=f"Number of reverse steps, 1 to {T}.")
parser.add_argument("--seed", type=int, default=0, help="Seed for the data, the weights and the noise.")
args = parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound


# ---------------------------------------------------------------------------------------------------------------------
# The data: a spiral with a little noise, rounded to a K x K grid. There is no end of it, so nothing is overfitted.

ANGLES = (1.5 * math.pi, 4.5 * math.pi)


def spiral(angle):
    """The center line of the roll, in levels 0 .. K-1."""
    radius = 0.46 * (K - 1) * angle / ANGLES[1]
    return (K - 1) / 2 + torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def swiss_roll(num_samples, generator):
    angle = ANGLES[0] + (ANGLES[1] - ANGLES[0]) * torch.rand(num_samples, generator=generator)
    points = spiral(angle) + 0.5 * torch.randn(num_samples, 2, generator=generator)
    return points.round().long().clamp(0, K - 1)  # [B, 2]


# ---------------------------------------------------------------------------------------------------------------------
# The network: from x_t and t to logits of x_0, separately for each coordinate. It sees levels and time as waves of
# several lengths, which lets it tell apart neighbors and still know that they are neighbors.


class Denoiser(nn.Module):
    def __init__(self, num_classes, num_waves=16, hidden_size=256):
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("frequencies", math.pi / 2 * torch.logspace(0, 5, num_waves, base=2))
        self.layers = nn.Sequential(
            nn.Linear(3 * 2 * num_waves, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, 2 * num_classes),
        )

    def forward(self, x_t, timesteps):
        inputs = torch.cat([x_t / self.num_classes, timesteps[:, None] / T], dim=-1)  # [B, 3]
        phases = inputs[..., None] * self.frequencies
        waves = torch.cat([phases.sin(), phases.cos()], dim=-1)  # [B, 3, 2 * num_waves]
        return self.layers(waves.flatten(1)).view(-1, 2, self.num_classes)  # [B, 2, K]


# ---------------------------------------------------------------------------------------------------------------------
# The forward processes. Each must have forgotten the data after T steps, for the reverse begins with pure noise.

schedulers = {
    "Uniform": D3PMScheduler(K, T, transition="uniform", beta_schedule="cosine"),
    # The paper's 1e-4 to 0.02 in 1000 steps, scaled to T: the same noise in all.
    "Discretized Gaussian": D3PMScheduler(
        K, T, transition="gaussian", beta_schedule="linear", beta_start=0.1 / T, beta_end=20 / T
    ),
    # One class more, the mask. It comes after the levels, and the scheduler knows that data never hold it.
    "Absorbing": D3PMScheduler(K + 1, T, transition="absorbing", beta_schedule="reciprocal", mask_token_id=K),
}
# How many corruption steps to draw each process at: there is most to see where it changes most.
columns = {
    "Uniform": [0, 50, 100, 150, T],
    "Discretized Gaussian": [0, 5, 12, 30, T],
    "Absorbing": [0, 50, 100, 150, T],
}

torch.set_num_threads(1)  # the tensors are small: threads would wait for each other longer than they work
generator = torch.Generator().manual_seed(args.seed)
data = swiss_roll(NUM_DOTS, generator)
test_data = swiss_roll(NUM_DOTS, generator)
forward, reverse, bounds = {}, {}, {}

for name, scheduler in schedulers.items():
    torch.manual_seed(args.seed)
    model = Denoiser(scheduler.config.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_train_steps)

    # Training: corrupt data to a random timestep, and compare the network's reverse step with the true one. The
    # average over timesteps is the variational bound, divided by T.
    progress = tqdm(range(args.max_train_steps), desc=f"{name:>20}", ncols=100)
    for step in progress:
        x_0 = swiss_roll(BATCH_SIZE, generator)
        timesteps = torch.randint(0, T, (BATCH_SIZE,), generator=generator)
        x_t = scheduler.add_noise(x_0, timesteps, generator=generator)  # [B, 2]
        logits = model(x_t, timesteps)  # [B, 2, K]
        loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps).loss.mean()

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")

    # Sampling: begin with pure noise and take the steps back that the network proposes. On the way, keep x_t under the
    # number of corruption steps it has behind it: for the timestep t = 0, 1, ... these are t + 1.
    scheduler.set_timesteps(args.num_inference_steps)
    path = {}
    x_t = scheduler.sample_prior((NUM_DOTS, 2), generator=generator)
    with torch.no_grad():
        for t in scheduler.timesteps:
            path[t.item() + 1] = x_t
            logits = model(x_t, t.expand(NUM_DOTS))
            x_t = scheduler.step(logits, t, x_t, generator=generator).prev_sample
    path[0] = x_t

    # For the picture: the same times of both processes (or the nearest ones, if the reverse took fewer steps).
    reverse[name] = [path[min(path, key=lambda visited: abs(visited - n))] for n in columns[name]]
    forward[name] = [scheduler.add_noise(data, n - 1, generator=generator) if n else data for n in columns[name]]

    # How many bits does it take, at most, to tell someone who has the model about a dot it has not seen? A quarter of
    # the bound's T terms, drawn afresh for each dot, give the same answer on average.
    bounds[name] = evaluate_bound(
        scheduler, model, test_data.split(BATCH_SIZE), num_eval_timesteps=T // 4, progress_bar=False
    )

# As many as this, if one knew the distribution itself.
cells = swiss_roll(4_000_000, generator) @ torch.tensor([K, 1])
frequencies = torch.bincount(cells, minlength=K * K) / len(cells)
entropy = torch.special.entr(frequencies).sum().item() / (2 * math.log(2))  # bits per dimension


# ---------------------------------------------------------------------------------------------------------------------
# The picture. For each process the corruption of data (above, from left to right) and the learned way back (below,
# from right to left), at the same times. A dot has one color everywhere: its place along the roll when it is data.

MASK_BAND = (K + 1, K + 8)  # a coordinate that is masked is drawn in this margin, scattered for all dots to be seen


def place_along_roll(points):
    angles = torch.linspace(*ANGLES, 500)
    return torch.cdist(points.float(), spiral(angles)).argmin(dim=-1)


def draw_dots(ax, x_t, colors, with_mask):
    noise = torch.rand(x_t.shape, generator=torch.Generator().manual_seed(0))
    points = torch.where(x_t == K, MASK_BAND[0] + 0.7 + noise * (MASK_BAND[1] - MASK_BAND[0] - 1.4), x_t)
    limits = (-1, MASK_BAND[1] if with_mask else K)
    if with_mask:
        ax.axvspan(*MASK_BAND, color="0.93", linewidth=0, zorder=0)
        ax.axhspan(*MASK_BAND, color="0.93", linewidth=0, zorder=0)
    ax.scatter(*points.T, c=colors, cmap="turbo", vmin=-25, vmax=525, s=4, linewidths=0, alpha=0.8)
    ax.set(xlim=limits, ylim=limits, aspect="equal")


def draw_matrix(ax, matrix, label):
    ax.imshow(matrix, cmap="Greys", norm=LogNorm(1e-4, 1, clip=True), interpolation="nearest")
    ax.yaxis.set_label_position("right")
    ax.set_ylabel(label, fontsize=11)


figure = Figure(figsize=(11, 12.4))  # not pyplot, which looks for a display
for block, (name, scheduler) in zip(figure.subfigures(3, 1), schedulers.items()):
    axes = block.subplots(2, 6)
    block.subplots_adjust(left=0.045, right=0.955, bottom=0.03, top=0.84, wspace=0.07, hspace=0.07)
    for row, states in enumerate([forward[name], reverse[name]]):
        colors = place_along_roll(states[0])
        for ax, x_t in zip(axes[row], states):
            draw_dots(ax, x_t, colors, with_mask=name == "Absorbing")
    if name == "Absorbing":
        for ax in axes[:, 0]:
            ax.text(K / 2, sum(MASK_BAND) / 2, "[MASK]", fontsize=7.5, color="0.5", ha="center", va="center")
    for ax, n in zip(axes[0], columns[name]):
        ax.set_title(f"$x_{{{n}}}$" if n else "data $x_0$", fontsize=12)
    axes[0, 0].set_ylabel("forward $q$   $\\longrightarrow$", fontsize=11)
    axes[1, 0].set_ylabel("$\\longleftarrow$   learned $p_\\theta$", fontsize=11)

    n = columns[name][2]
    axes[0, 5].set_title("transition matrix", fontsize=11)
    draw_matrix(axes[0, 5], scheduler.transition.matrix(n - 1, n), f"one step, $Q_{{{n}}}$")
    draw_matrix(axes[1, 5], scheduler.transition.matrix(0, n), f"all steps, $\\overline{{Q}}_{{{n}}}$")

    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_color("0.75")
    block.text(0.045, 0.935, name, fontsize=16, weight="bold", va="center")
    facts = f"bound {bounds[name].bits_per_dim:.2f} bits/dim   (entropy of the data: {entropy:.2f})"
    block.text(0.955, 0.935, facts, fontsize=11, color="0.35", va="center", ha="right")

args.output_dir.mkdir(parents=True, exist_ok=True)
picture = args.output_dir / "swiss_roll.png"
figure.savefig(picture, dpi=120)

print(f"\nentropy of the data:  {entropy:.3f} bits/dim")
for name, bound in bounds.items():
    print(f"{name:>20}: {bound.bits_per_dim:.3f} ± {bound.bits_per_dim_standard_error:.3f} bits/dim (upper bound)")
print(f"the picture is {picture}")
