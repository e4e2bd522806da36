# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Time and peak memory of reading a text with emoji, as characters for training and as word pieces for evaluation.

    python benchmarks/bench_data.py                  # 200 MB
    python benchmarks/bench_data.py --megabytes 1000
    PYTHONPATH=another/version/src python benchmarks/bench_data.py   # the same of another version

Each reading is a process of its own, with an empty cache. Its peak is that of the resident memory beyond what the imports took, with the
pages of the file of tokens that are mapped, which the system takes back when it needs them; the anonymous part is sampled beside it.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace


WORDS = "the of and a in to it was that his he with as is on for at by not from or which but an her all this so were"
EMOJI = "\U0001f600 \U0001f680 \u2764\ufe0f \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467"
READERS = ("characters", "word pieces")


def write_text(path: Path, num_bytes: int) -> None:
    """Sentences of random words, one of ten of which is an emoji; blocks of about a megabyte are repeated in another order."""
    chosen = random.Random(0)
    words = WORDS.split() + ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(2000)]
    words += EMOJI.split() * (len(words) // 45)
    sentences = [" ".join(chosen.choices(words, k=15)).capitalize() + ".\n" for _ in range(10_000)]
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            chosen.shuffle(sentences)
            file.write("".join(sentences))


def train_tokenizer(path: Path, folder: Path) -> None:
    from d3pm_hf.data import train_piece_tokenizer

    with open(path, encoding="utf-8") as file:
        sample = file.read(2_000_000)
    train_piece_tokenizer(sample.splitlines(keepends=True), 2000).save_pretrained(folder)


def memory(name: str) -> float:
    """Gigabytes of this process: `VmRSS`, its peak `VmHWM`, or `RssAnon`, what is no page of a file."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1e6


def read(reader: str, path: Path, tokenizer: Path) -> None:
    """Reads the text in this process, and prints what it took."""
    from transformers import AutoTokenizer

    from d3pm_hf.data import load_text
    from d3pm_hf.evaluation.splits import load_evaluation_data

    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    pipeline = SimpleNamespace(task="text-generation", tokenizer=loaded)
    pipeline.config = SimpleNamespace(sequence_length=256)
    done, peak = threading.Event(), 0.0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, memory("RssAnon"))

    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what there is now
    before, anonymous = memory("VmRSS"), memory("RssAnon")
    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    if reader == "characters":
        tokens = load_text(path)[0].tokens
    else:
        tokens = load_evaluation_data(pipeline, "text", "all", str(path)).tokens
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    thread.join()
    sizes = [tokens.nbytes / 1e9, memory("VmHWM") - before, peak - anonymous]
    cells = [reader, *(f"{size:.2f} GB" for size in sizes), f"{seconds:.0f} s", f"{cpu:.0f} s"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="Size of the text.")
    parser.add_argument("--only", choices=READERS, help="Reader to measure. Defaults to all of them.")
    parser.add_argument("--read", nargs=3, metavar=("READER", "TEXT", "TOKENIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read[0], *map(Path, options.read[1:]))
        return
    print("| read as | tokens | peak | peak, anonymous | seconds | processor seconds |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer = Path(folder, "text.txt"), Path(folder, "tokenizer")
        write_text(path, options.megabytes * 1_000_000)
        train_tokenizer(path, tokenizer)
        for reader in READERS if options.only is None else [options.only]:
            environment = {**os.environ, "HF_DATASETS_CACHE": str(Path(folder, reader)), "TOKENIZERS_PARALLELISM": "0"}
            command = [sys.executable, __file__, "--read", reader, str(path), str(tokenizer)]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
