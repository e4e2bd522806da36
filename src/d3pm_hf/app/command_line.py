# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Serves a page to play with checkpoints and processes: `python -m d3pm_hf.app [CHECKPOINT ...]`.

Without a checkpoint it offers those in `examples/checkpoints/` and those that `make demo` left in `outputs/`.
"""

import argparse
import importlib
import os
import tempfile
from pathlib import Path

from .limits import Limits


def create_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3pm_hf.app", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoints", nargs="*", metavar="CHECKPOINT", help="Folder of a checkpoint, or its id on the Hub."
    )
    parser.add_argument(
        "--host", help="Address to listen at. Defaults to this machine alone; 0.0.0.0 is all networks."
    )
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="MODULE",
        help="Module to import first, with the classes of networks and samplers of your own; may be repeated.",
    )
    parser.add_argument("--port", type=int, help="Port to listen at. Defaults to the first free one from 7860 on.")
    parser.add_argument("--device", help="Device of the networks. Defaults to a GPU if there is one.")
    parser.add_argument("--max_requests", type=int, default=2, help="Number of requests that are computed at once.")
    for name, what in (
        ("max_characters", "characters of a text"),
        ("max_steps", "inference steps"),
        ("max_samples", "samples of a request"),
        ("max_particles", "particles of a sample"),
        ("max_pixels", "pixels of a picture that is uploaded"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=getattr(Limits, name),
            help=f"Largest number of {what}. Defaults to %(default)s.",
        )
    parser.add_argument(
        "--max_seconds",
        type=float,
        default=Limits.max_seconds,
        help="Seconds after which a request is ended. Defaults to %(default)s.",
    )
    return parser


def import_gradio():
    """Gradio, without what it would send about its use."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ImportError(
            'the page needs Gradio: install it with `pip install "d3pm-hf[app]"`, or run `make app`'
        ) from error
    return gradio


def main(arguments: list[str] | None = None) -> None:
    parser = create_parser()
    options = parser.parse_args(arguments)
    import_gradio()
    # After the arguments, so that --help and wrong ones are answered without torch.
    from PIL import Image

    for name in options.import_module:
        try:
            importlib.import_module(name)
        except ImportError as error:
            parser.error(f"--import_module {name} cannot be imported ({error}): add its folder to PYTHONPATH")
    from .checkpoints import find_checkpoints, load_checkpoints, most_convincing_first
    from .guard import Uploads
    from .page import create_page, serve

    names = ("max_characters", "max_steps", "max_samples", "max_particles", "max_pixels", "max_seconds")
    limits = Limits(**{name: getattr(options, name) for name in names})
    sources = options.checkpoints or find_checkpoints(Path.cwd())
    if not sources:
        print(
            "There is no checkpoint in examples/checkpoints or outputs: `make demo` trains two. The page shows processes alone."
        )
    checkpoints = load_checkpoints(sources, options.device)
    if not options.checkpoints:
        checkpoints = most_convincing_first(checkpoints)
    for checkpoint in checkpoints.values():
        print(f"{checkpoint.name}: {checkpoint.description}", flush=True)
    Image.MAX_IMAGE_PIXELS = 4 * limits.max_pixels  # Pillow then refuses a file of few bytes and many more pixels
    with tempfile.TemporaryDirectory(prefix="d3pm-app-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # before the page is made: its pictures are there too
        blocks = create_page(checkpoints, limits)
        serve(blocks, checkpoints, Uploads(Path(folder)), options.host, options.port, options.max_requests)
