# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Discrete diffusion from data to samples in one flat script: an absorbing model of characters.

    python examples/minimal.py                    # or: accelerate launch examples/minimal.py

The data are the English prose inside Python, so nothing is downloaded. 400 steps take about a minute on one core of a CPU. A
network that has learned nothing has a bound of 4.75 bits per character; expect 3.69 ± 0.02 after 200 steps and 3.49 ± 0.03 after
400. The samples then have the letters and the word lengths of English, and few of its words. `examples/train.py` has the rest:
resuming, averaged weights, a log, checkpoints and a model card.
"""

import argparse
from itertools import chain, repeat


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--max_train_steps", type=int, default=400, help="Number of updates of the weights.")
parser.add_argument("--train_batch_size", type=int, default=32, help="Batch size per process.")
parser.add_argument("--learning_rate", type=float, default=2.5e-3, help="Peak learning rate, reached after 50 steps.")
parser.add_argument("--sequence_length", type=int, default=64, help="Number of characters of an example.")
parser.add_argument("--num_inference_steps", type=int, default=32, help="Number of reverse steps for the samples.")
parser.add_argument("--output_dir", help="Folder for the trained pipeline. It is not saved by default.")
parser.add_argument("--seed", type=int, default=0, help="Seed for the weights, the data and the noise.")
args = parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from d3pm_hf import (
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    d3pm_loss,
    evaluate_bound,
)
from d3pm_hf.data import python_prose


EVAL_STEPS, NUM_EVAL_EXAMPLES = 200, 100
PROMPT = "the value of the [MASK][MASK][MASK][MASK][MASK][MASK][MASK][MASK] is returned"

accelerator = Accelerator()
torch.manual_seed(args.seed)
generator = torch.Generator().manual_seed(args.seed + accelerator.process_index)  # timesteps and noise

# 1. Data: x_0 is a tensor of tokens 0 .. 26, the letters and the space.
train_dataset, eval_dataset = python_prose(args.sequence_length)
train_loader = DataLoader(train_dataset, batch_size=args.train_batch_size, shuffle=True, drop_last=True)
eval_indices = [i * len(eval_dataset) // NUM_EVAL_EXAMPLES for i in range(NUM_EVAL_EXAMPLES)]
eval_data = torch.stack([eval_dataset[i] for i in eval_indices]).to(accelerator.device)

# 2. Forward process: token 27 is [MASK]. Each character is masked at one of T = 1000 timesteps, all equally likely.
scheduler = D3PMScheduler(num_classes=28, num_train_timesteps=1000, transition="absorbing")

# 3. Network: a T5 encoder. It needs no timestep: the share of masks in x_t tells it.
network = create_text_model(
    "tiny",
    vocab_size=28,
    backbone="t5",
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=512,
    timestep_conditioning=False,
)
pipeline = D3PMTextPipeline(network, scheduler, character_tokenizer(), sequence_length=args.sequence_length)
denoiser = pipeline.denoiser  # (x_t, timesteps) to logits of x_0, [B, N, K]
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=args.learning_rate)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 50, 1) * (1 - step / args.max_train_steps)
)
model, optimizer, train_loader = accelerator.prepare(denoiser, optimizer, train_loader)

# 4. Training: corrupt x_0 to a random timestep, and compare the reverse step of the network with the true posterior.
denoiser.train()
progress = tqdm(range(1, args.max_train_steps + 1), disable=not accelerator.is_main_process)
for step, x_0 in zip(progress, chain.from_iterable(repeat(train_loader))):
    timesteps = torch.randint(0, len(scheduler), (len(x_0),), generator=generator).to(x_0.device)  # [B]
    x_t = scheduler.add_noise(x_0, timesteps, generator)  # [B, N]
    logits = model(x_t, timesteps)  # [B, N, K]
    loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, hybrid_coeff=0.01).loss.mean()  # L_lambda, eq. 5
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    lr_scheduler.step()

    # The bound on held-out text (eq. 1), from 20 of the 1000 terms of each example.
    if step % EVAL_STEPS == 0 or step == args.max_train_steps:
        options = {"num_eval_timesteps": 20, "progress_bar": False, "accelerator": accelerator}
        bound = evaluate_bound(scheduler, denoiser, eval_data.split(50), **options)
        accelerator.print(f"step {step}: {bound}")

# 5. Sampling: the pipeline draws x_T from the prior, all masks, and steps back to x_0; or it fills in the gaps of a prompt.
if accelerator.is_main_process:
    denoiser.eval()
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": args.num_inference_steps, "generator": torch.Generator().manual_seed(args.seed)}
    samples = pipeline(batch_size=4, **options).texts + pipeline(PROMPT, **options).texts
    print(*map(repr, samples), sep="\n")
    if args.output_dir is not None:
        pipeline.save_pretrained(args.output_dir)
