# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Converts a checkpoint of MDLM, SEDD, UDLM or Duo: `python -m d3pm_hf.convert kuleshov-group/mdlm-owt FOLDER`.

Reads safetensors and config.json, runs no code of the repository, and writes a pipeline with its process, its tokenizer and a
card, which `D3PMPipeline.from_pretrained(FOLDER)` loads.
"""

import argparse
from pathlib import Path

from ..utils.names import PARAMETERIZATIONS
from ..utils.scripts import run_script


def create_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3pm_hf.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="Id of the checkpoint on the Hub, or a folder.")
    parser.add_argument("output_dir", type=Path, help="Folder for the pipeline. It must be empty, or not be there.")
    parser.add_argument(
        "--tokenizer",
        help="Id or folder of the tokenizer. Defaults to that of the checkpoint, or else to the one with which the authors "
        "trained: gpt2 for vocabularies of 50257 and 50258, bert-base-uncased for 30522.",
    )
    parser.add_argument(
        "--num_train_timesteps", type=int, default=1000, help="Number of timesteps. Defaults to %(default)s."
    )
    parser.add_argument(
        "--parameterization",
        choices=PARAMETERIZATIONS,
        help="What the network puts out, if config.json does not tell: subs (MDLM), score (SEDD) or mean (UDLM, Duo).",
    )
    parser.add_argument("--revision", help="Branch, tag or commit of the checkpoint.")
    parser.add_argument("--cache_dir", help="Folder for downloads.")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = create_parser().parse_args(arguments)
    if options.output_dir.exists() and (not options.output_dir.is_dir() or any(options.output_dir.iterdir())):
        raise OSError(f"{options.output_dir} is not an empty folder: choose another one, nothing is saved over")
    # After the arguments, so that --help and wrong ones are answered without torch.
    from .conversion import convert_checkpoint

    print(f"Reading {options.checkpoint} ...")
    hub = {name: value for name in ("revision", "cache_dir") if (value := getattr(options, name)) is not None}
    pipeline = convert_checkpoint(
        options.checkpoint,
        options.tokenizer,
        num_train_timesteps=options.num_train_timesteps,
        parameterization=options.parameterization,
        **hub,
    )
    num_parameters = sum(parameter.numel() for parameter in pipeline.text_model.parameters())
    config = pipeline.scheduler.config
    print(f"{num_parameters:,} parameters; a process of {config.num_classes} states, {config.transition}. Writing ...")
    pipeline.save_pretrained(options.output_dir)
    print(f"The pipeline and its card are in {options.output_dir}.")
    print(f"next    python -m d3pm_hf.app {options.output_dir}")


if __name__ == "__main__":
    run_script(main)
