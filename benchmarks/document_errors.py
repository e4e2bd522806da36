# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Standard error of the bound of one text by calls of the network: `evaluate_documents`, `evaluate_bound` and LLaDA's estimator.

    python benchmarks/document_errors.py examples/checkpoints/text8-absorbing text8-prefix.test.txt

LLaDA's estimator (arXiv 2502.09992) draws a number l of masks from 1 .. N, and l places: N / l times the nats of the masks. All three
estimate the bound of infinitely many steps. Variances are averages over the texts.
"""

import argparse
from pathlib import Path

import torch
from likelihood_orders import load_rows

from d3pm_hf import D3PMPipeline, evaluate_bound, evaluate_documents
from d3pm_hf.likelihood import block_timesteps


@torch.no_grad()
def llada_variance(pipeline, rows: torch.Tensor, num_calls: int) -> float:
    """Variance of one call of LLaDA's estimator, in nats squared."""
    scheduler, network, length = pipeline.scheduler, pipeline.denoiser.eval(), rows.shape[1]
    times = torch.tensor(block_timesteps(scheduler, length)).flip(0)  # of 1 .. N masks
    generator, variances = torch.Generator().manual_seed(0), []
    for x_0 in rows:
        count = torch.randint(1, length + 1, (num_calls, 1), generator=generator)
        is_masked = torch.rand(num_calls, length, generator=generator).argsort(1).argsort(1) < count
        nats = []
        for mask, number in zip(is_masked.split(64), count.split(64)):
            logits = network(x_0.masked_fill(mask, scheduler.mask_token_id), times[number.squeeze(1) - 1])
            log_p = scheduler.transition.forbid(logits).log_softmax(-1)
            log_p = log_p.gather(-1, x_0.expand_as(mask)[..., None]).squeeze(-1)
            nats.append(-(log_p * mask).sum(1).double() * length / number.squeeze(1))
        variances.append(torch.cat(nats).var())
    return torch.stack(variances).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Folder of the checkpoint, or its id on the Hub.")
    parser.add_argument("text_file", type=Path, help="Text to measure on.")
    parser.add_argument("--num_examples", type=int, default=12, help="Number of texts.")
    parser.add_argument(
        "--num_estimates", type=int, default=32, help="Number of estimates per text, of 16 calls each."
    )
    options = parser.parse_args()
    pipeline, terms = D3PMPipeline.from_pretrained(options.checkpoint), 16
    rows = load_rows(pipeline, options.text_file.read_text(encoding="utf-8")[:1_000_000], options.num_examples)
    goal = llada_variance(pipeline, rows, options.num_estimates * terms) / 128
    print(f"LLaDA's estimator: standard error {goal**0.5:.2f} nats at 128 calls")
    bounds = evaluate_documents(
        pipeline, rows, num_estimates=options.num_estimates, num_eval_timesteps=terms, progress_bar=False
    )
    variances = {"evaluate_documents": (bounds.standard_errors**2).mean().item() * options.num_estimates}
    bound = evaluate_bound(
        *(pipeline.scheduler, pipeline.denoiser, rows.repeat_interleave(options.num_estimates, 0).split(64)),
        continuous_time=True,
        num_eval_timesteps=terms,
        progress_bar=False,
    )
    variances["evaluate_bound"] = bound.nats_per_example.view(options.num_examples, -1).var(1).mean().item()
    for name, variance in variances.items():
        print(
            f"{name}: standard error {variance**0.5:.2f} nats at {terms} calls; {terms * variance / goal:.0f} calls for LLaDA's 128"
        )


if __name__ == "__main__":
    main()
