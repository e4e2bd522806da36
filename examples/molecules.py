# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Molecules as SMILES: the share of samples that are valid, and the effect of orders, classes and rewards.

    python examples/molecules.py train --data qm9.csv --output_dir outputs/qm9
    python examples/molecules.py evaluate --data qm9.csv --num_samples 1000
    python examples/molecules.py picture --output molecules.png

The data are one SMILES per line, below a header if the first line is `smiles`. A token is an atom, a bond, a bracket of a branch or a
number of a ring. Short molecules are padded with a token of their own, so that the network chooses the length. The class of a
molecule is its number of rings. rdkit reads and draws the molecules. docs/source/en/molecules.md has the results.
"""

import argparse
from pathlib import Path


CHECKPOINT = str(Path(__file__).resolve().parent / "checkpoints" / "molecules")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["train", "evaluate", "guide", "reward", "picture"], help="What to do.")
parser.add_argument("--data", help="train, evaluate: text file of SMILES; .xz is read, too.")
parser.add_argument("--checkpoint", default=CHECKPOINT, help="Folder of the checkpoint to sample from.")
parser.add_argument("--seed", type=int, default=0, help="Seed of weights, masks and samples.")
parser.add_argument("--num_samples", type=int, default=1000, help="Number of samples of each row of a table.")
parser.add_argument("--samplers", nargs="+", help="evaluate: rows of the table. Defaults to all of them.")
parser.add_argument("--output", default="molecules.png", help="picture: file to write.")
parser.add_argument("--output_dir", default="outputs/qm9", help="train: folder of the run.")
parser.add_argument("--transition", default="absorbing", help="train: absorbing, uniform or absorbing_uniform.")
parser.add_argument("--resume_from_checkpoint", help="train: checkpoint folder to resume from, or `latest`.")
parser.add_argument("--max_train_steps", type=int, default=16_000, help="train: number of steps.")
parser.add_argument("--train_batch_size", type=int, default=64, help="train: number of molecules of a step.")
parser.add_argument("--learning_rate", type=float, default=1.5e-3, help="train: peak learning rate.")
parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"], help="train: dtype of the products.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import lzma
import re

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d3pm_hf import D3PMPipeline, D3PMScheduler, D3PMTextPipeline, create_text_model
from d3pm_hf.data import Rows
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script


TOKEN = r"\[[^\]]+\]|Br|Cl|%\d\d|."  # an atom in brackets, one of two letters, a ring of two digits, or one character
PAD, MASK = "<pad>", "_"
MAX_RINGS = 5  # the last class has molecules with as many rings, or more
NUM_TEST = 5000
NUM_REWARD_STEPS = 50
# Shares of the training molecules of QM9 by their number of rings.
RING_SHARES = (0.1060, 0.4009, 0.3127, 0.1470, 0.0308, 0.0026)


def read_molecules(path: str | None) -> list[str]:
    """The lines of a file, shuffled, the header left out."""
    if path is None:
        raise ValueError("there is no data: pass --data, a file with one SMILES per line")
    with lzma.open(path, "rt") if path.endswith(".xz") else open(path) as file:
        lines = [line.strip() for line in file if line.strip()]
    lines = lines[1:] if lines[0].lower() == "smiles" else lines
    return [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]


def split_tokens(molecule: str) -> list[str]:
    return re.findall(TOKEN, molecule)


def count_rings(molecule: str) -> int:
    """The number of rings: each has a number that stands twice."""
    return sum(token.isdigit() or token.startswith("%") for token in split_tokens(molecule)) // 2


def create_tokenizer(molecules: list[str]) -> PreTrainedTokenizerFast:
    """One token for each that the molecules have, then the padding and the mask."""
    tokens = sorted({token for molecule in molecules for token in split_tokens(molecule)})
    vocabulary = {token: i for i, token in enumerate([*tokens, PAD, MASK])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=MASK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, mask_token=MASK, unk_token=MASK)


def encode(tokenizer: PreTrainedTokenizerFast, molecules: list[str], length: int) -> np.ndarray:
    """Tokens `[n, length]`."""
    return np.array(tokenizer(molecules, padding="max_length", max_length=length)["input_ids"], dtype=np.uint8)


def create_pipeline(tokenizer: PreTrainedTokenizerFast, length: int, transition: str) -> D3PMTextPipeline:
    reads_timestep = transition != "absorbing"  # a network without timesteps gives exact likelihoods by order
    text_model = create_text_model(
        "tiny",
        len(tokenizer),
        MAX_RINGS + 1,
        hidden_size=192,
        num_hidden_layers=5,
        num_attention_heads=8,
        intermediate_size=768,
        position_bias_init="offset",
        timestep_conditioning=reads_timestep,
    )
    scheduler = D3PMScheduler(len(tokenizer), transition=transition)
    return D3PMTextPipeline(text_model, scheduler, tokenizer, sequence_length=length, num_class_labels=MAX_RINGS + 1)


def train_network(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    molecules = read_molecules(options.data)
    tokenizer = create_tokenizer(molecules)
    length = max(len(split_tokens(molecule)) for molecule in molecules)
    tokens = encode(tokenizer, molecules, length)
    rings = np.array([min(count_rings(molecule), MAX_RINGS) for molecule in molecules])
    parts = [
        Rows(tokens[part], len(tokenizer), labels=rings[part])
        for part in (slice(2 * NUM_TEST, None), slice(NUM_TEST, 2 * NUM_TEST))
    ]
    settings = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=options.resume_from_checkpoint is None,
        resume_from_checkpoint=options.resume_from_checkpoint,
        seed=options.seed,
        max_train_steps=options.max_train_steps,
        train_batch_size=options.train_batch_size,
        condition_dropout=0.15,  # guidance needs the model without a class, too
        learning_rate=options.learning_rate,
        lr_scheduler="cosine",
        lr_warmup_steps=min(200, options.max_train_steps // 10),
        ema_max_decay=0.998,
        mixed_precision=options.mixed_precision,
        logging_steps=50,
        checkpointing_steps=500,
        checkpoints_total_limit=2,
        validation_steps=4000,
        max_eval_samples=512,
        num_eval_timesteps=20,
        num_samples=0,
    )
    pipeline = create_pipeline(tokenizer, length, options.transition)
    train(settings, pipeline, *parts, {"dataset_name": Path(options.data).name})


# The arguments of the pipeline, by the name of a row; a number is the temperature. Not every process has each sampler.
LEFT_TO_RIGHT = {"sampler": "confidence", "sampler_kwargs": {"measure": "left_to_right"}}
MARGIN = {"sampler": "confidence", "sampler_kwargs": {"measure": "margin"}}
SAMPLERS = {
    "first_hitting": {"sampler": "first_hitting"},
    "left_to_right": LEFT_TO_RIGHT,
    "confidence": {"sampler": "confidence"},
    "margin": MARGIN,
    "first_hitting, 0.7": {"sampler": "first_hitting", "temperature": 0.7},
    "left_to_right, 0.7": {**LEFT_TO_RIGHT, "temperature": 0.7},
    "margin, 0.7": {**MARGIN, "temperature": 0.7},
    "margin, 0.6": {**MARGIN, "temperature": 0.6},
    "first_hitting, 0.5": {"sampler": "first_hitting", "temperature": 0.5},
    "left_to_right, 0.5": {**LEFT_TO_RIGHT, "temperature": 0.5},
    "margin, 0.5": {**MARGIN, "temperature": 0.5},
    "remasking, 100 steps": {"sampler": "remasking", "sampler_kwargs": {"eta": 0.2}, "num_inference_steps": 100},
    "ancestral, 10 steps": {"sampler": "ancestral", "num_inference_steps": 10},
    "ancestral, 20 steps": {"sampler": "ancestral", "num_inference_steps": 20},
    "ancestral, 100 steps": {"sampler": "ancestral", "num_inference_steps": 100},
}


def read_chemically(molecule: str):
    """The molecule that rdkit reads, or `None` if the text is not valid."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    return Chem.MolFromSmiles(molecule) if molecule else None


def canonical(molecules: list[str]) -> list[str | None]:
    """The canonical SMILES of each molecule, or `None` for texts that are not valid."""
    from rdkit import Chem

    found = map(read_chemically, molecules)
    return [None if molecule is None else Chem.MolToSmiles(molecule) for molecule in found]


def draw(
    pipeline: D3PMTextPipeline, count: int, seed: int, batch_size: int = 250, rings: int | None = None, **arguments
) -> list[str]:
    """`count` molecules with this number of rings, which is drawn for each from `RING_SHARES` if it is `None`."""
    texts, generator, rng = [], torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    pipeline.set_progress_bar_config(disable=True)
    while len(texts) < count:
        size = min(batch_size, count - len(texts))
        classes = rng.choice(len(RING_SHARES), size, p=RING_SHARES).tolist() if rings is None else [rings] * size
        output = pipeline(class_labels=classes, generator=generator, output_type="latent", **arguments)
        texts += pipeline.tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    return texts


def share(count: int, total: int) -> str:
    """A share in percent with its standard error, which is not 0 if all or none are counted."""
    expected = (count + 1) / (total + 2)
    return f"{100 * count / max(total, 1):6.1f} ± {100 * (expected * (1 - expected) / max(total, 1)) ** 0.5:.1f} %"


def evaluate(options: argparse.Namespace) -> None:
    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    known = set(canonical(read_molecules(options.data)[2 * NUM_TEST :]))
    print(f"{'sampler':>24} {'samples':>8} {'valid':>14} {'unique of valid':>16} {'novel of unique':>16} {'calls':>6}")
    for name in options.samplers or SAMPLERS:
        if name not in SAMPLERS:
            raise ValueError(f"--samplers has {name!r}: choose among {', '.join(SAMPLERS)}")
        calls = []
        handle = pipeline.text_model.register_forward_pre_hook(lambda *_: calls.append(1))
        try:
            found = canonical(draw(pipeline, options.num_samples, options.seed, **SAMPLERS[name]))
        except ValueError as error:  # a sampler of masks, and a process without
            print(f"{name:>24} {error}")
            continue
        finally:
            handle.remove()
        valid = [molecule for molecule in found if molecule is not None]
        unique = set(valid)
        row = share(len(valid), len(found)), share(len(unique), len(valid)), share(len(unique - known), len(unique))
        batches = -(-options.num_samples // 250)
        print(
            f"{name:>24} {len(found):8} {row[0]:>14} {row[1]:>16} {row[2]:>16} {len(calls) / batches:6.0f}", flush=True
        )


def guide(options: argparse.Namespace) -> None:
    """Prints the number of rings of samples, by the number that is asked for and the guidance scale.

    Rings are counted as SMILES counts them: bonds less atoms, and one for each fragment. rdkit's own count is higher for a cage.
    """
    from rdkit import Chem

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    print(f"{'rings asked for':>16} {'scale':>6} {'valid':>14} {'mean of rings':>14} {'as asked':>14}")
    for scale in (1.0, 2.0):
        for rings in range(MAX_RINGS):
            texts = draw(
                pipeline,
                options.num_samples,
                options.seed,
                rings=rings,
                guidance_scale=scale,
                **SAMPLERS["left_to_right"],
            )
            valid = [molecule for molecule in map(read_chemically, texts) if molecule is not None]
            counts = [
                molecule.GetNumBonds() - molecule.GetNumAtoms() + len(Chem.GetMolFrags(molecule)) for molecule in valid
            ]
            found = share(sum(count == rings for count in counts), len(counts))
            print(
                f"{rings:16} {scale:6.1f} {share(len(valid), len(texts)):>14} {np.mean(counts):14.2f} {found:>14}",
                flush=True,
            )


def drug_likeness(texts: list[str]) -> torch.Tensor:
    """QED of each molecule, `[n]`, between 0 and 1; 0 for a text that is not valid."""
    from rdkit.Chem import QED

    found = map(read_chemically, texts)
    return torch.tensor([0.0 if molecule is None else QED.qed(molecule) for molecule in found])


def steer(options: argparse.Namespace) -> None:
    """Prints QED with a reward: particles beside the best of as many samples, at equal calls of the network."""
    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    count = options.num_samples

    def reward(x_0: torch.Tensor) -> torch.Tensor:
        return drug_likeness(pipeline.tokenizer.batch_decode(x_0, skip_special_tokens=True))

    print(f"{'':>24} {'mean QED':>9} {'valid':>14} {'unique':>14}")

    def report(name: str, texts: list[str]) -> None:
        valid = [molecule for molecule in canonical(texts) if molecule is not None]
        scores = share(len(valid), len(texts)), share(len(set(valid)), len(texts))
        print(f"{name:>24} {drug_likeness(texts).mean():9.3f} {scores[0]:>14} {scores[1]:>14}", flush=True)

    arguments = {"sampler": "ancestral", "num_inference_steps": NUM_REWARD_STEPS}
    report("one sample", draw(pipeline, count, options.seed, **arguments))
    for number in (4, 16):
        texts = draw(pipeline, count * number, options.seed, **arguments)
        best = drug_likeness(texts).view(count, number).argmax(1)
        report(f"best of {number}", [texts[number * i + int(best[i])] for i in range(count)])
        for scale in (10.0, 30.0):
            texts = draw(
                pipeline,
                count,
                options.seed,
                250 // number,
                num_particles=number,
                reward_fn=reward,
                reward_scale=scale,
                num_inference_steps=NUM_REWARD_STEPS,
            )
            report(f"{number} particles, scale {scale:.0f}", texts)


def make_picture(options: argparse.Namespace) -> None:
    """The first 16 valid samples, unselected otherwise."""
    from rdkit.Chem import Draw

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    texts = [text for text in draw(pipeline, 64, options.seed, **SAMPLERS["left_to_right"]) if read_chemically(text)]
    picture = Draw.MolsToGridImage(
        [read_chemically(text) for text in texts[:16]], molsPerRow=8, subImgSize=(160, 140), legends=texts[:16]
    )
    picture.convert("P", colors=64).save(options.output, optimize=True)
    print(f"{options.output}: the first 16 of {len(texts)} valid molecules of 64 samples")


COMMANDS = {"train": train_network, "evaluate": evaluate, "guide": guide, "reward": steer, "picture": make_picture}


def main():
    options = parser.parse_args()
    COMMANDS[options.command](options)


if __name__ == "__main__":
    run_script(main)
