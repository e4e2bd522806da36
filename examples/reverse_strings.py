# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sequence to sequence in one short script: a diffusion model that reads "abcd>" and writes "dcba".

    python examples/reverse_strings.py

The prompt is known: it is not noised and not scored (`labels` of -100), and the network sees it at every step of sampling. The
answer is as long as the string, which has 4 to 12 letters; the rest of its 13 positions is the end of text, so that the model
decides how long the answer is. 2000 steps take about four minutes on one core of a CPU; expect an exact match of 99.4% of the
held-out strings with seed 0, and 100.0% with seed 1.
"""

import argparse
import random
import string
import tempfile


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--max_train_steps", type=int, default=2000, help="Number of updates of the weights.")
parser.add_argument("--train_batch_size", type=int, default=64, help="Number of strings in a step.")
parser.add_argument("--learning_rate", type=float, default=1e-3, help="Peak learning rate.")
parser.add_argument("--num_inference_steps", type=int, default=16, help="Number of reverse steps for the answers.")
parser.add_argument("--num_train_strings", type=int, default=100_000, help="Number of strings to train on.")
parser.add_argument("--num_test_strings", type=int, default=500, help="Number of strings to reverse at the end.")
parser.add_argument("--output_dir", help="Folder for the trained pipeline. It is not kept by default.")
parser.add_argument("--seed", type=int, default=0, help="Seed for the strings, the weights and the noise.")
args = parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import torch

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model
from d3pm_hf.training import D3PMTrainingArguments, train


NUM_NEW = 13  # twelve letters, and an end of text at least

torch.set_num_threads(1)  # the tensors are small: threads would wait for each other longer than they work

# 1. Data: strings of random letters, and the tokens of "abcd>dcba....", of which those up to ">" are not scored.
tokenizer = character_tokenizer(string.ascii_lowercase + ">.")
tokenizer.eos_token = "."


def draw_strings(count, rng):
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 12))) for _ in range(count)]


rng = random.Random(args.seed)
held_out = draw_strings(args.num_test_strings, rng)
strings = sorted(set(draw_strings(args.num_train_strings, rng)) - set(held_out))
rows = tokenizer([f"{one}>{one[::-1]:.<{NUM_NEW}}" for one in strings]).input_ids
examples = [
    {"input_ids": row, "labels": [-100] * (len(one) + 1) + row[len(one) + 1 :]} for one, row in zip(strings, rows)
]

# 2. An absorbing process, and a BERT of three layers.
torch.manual_seed(args.seed)
scheduler = D3PMScheduler(len(tokenizer), num_train_timesteps=32, mask_token_id=tokenizer.mask_token_id)
network = create_text_model(
    "tiny",
    len(tokenizer),
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=32,
    timestep_conditioning=False,
)
pipeline = D3PMTextPipeline(network, scheduler, tokenizer, sequence_length=26)

# 3. Training.
with tempfile.TemporaryDirectory() as folder:
    arguments = D3PMTrainingArguments(
        output_dir=args.output_dir or folder,
        max_train_steps=args.max_train_steps,
        train_batch_size=args.train_batch_size,
        learning_rate=args.learning_rate,
        hybrid_coeff=1.0,  # the cross-entropy weighs all timesteps alike
        lr_scheduler="linear",
        lr_warmup_steps=100,
        ema_max_decay=0.99,
        validation_steps=0,
        num_samples=0,
        seed=args.seed,
    )
    pipeline = train(arguments, pipeline, examples)

# 4. The answers to strings that were not trained on.
pipeline.set_progress_bar_config(disable=True)
options = {"num_inference_steps": args.num_inference_steps, "generator": torch.Generator().manual_seed(args.seed)}
answers = pipeline([f"{one}>" for one in held_out], max_new_tokens=NUM_NEW, return_full_text=False, **options).texts
correct = sum(answer == one[::-1] for answer, one in zip(answers, held_out))
for one, answer in list(zip(held_out, answers))[:5]:
    print(f"{one}>{answer}")
print(f"exact match: {correct / len(held_out):.1%} of {len(held_out)} held-out strings")
