# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A pretrained language model of antibodies as a diffusion model: its bound, infilled loops, and further training.

    python examples/antibodies.py --folder antibodies
    python examples/antibodies.py --folder antibodies --use_peft --only LoRA  # trains a LoRA, and nothing else
    python examples/antibodies.py --folder antibodies --num_chains 500        # writes data for benchmarks/likelihood_orders.py

Downloads two wheels by `pip download`: antiberty 0.1.3 (96 MB, MIT), which holds a `BertForMaskedLM` of antibody sequences with
26 million parameters; and olga 1.3.0 (0.8 MB, GPL-3.0), which holds a model of the recombination of human heavy chains and draws
sequences from it for the training. All figures are written to FOLDER/figures.json. docs/source/en/antibodies.md shows them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", default="antibodies", help="Folder of the downloads, the data and the figures.")
parser.add_argument("--num_terms", type=int, default=100, help="Number of terms of a bound per sequence.")
parser.add_argument("--num_samples", type=int, default=16, help="Number of samples of each loop.")
parser.add_argument("--num_inference_steps", type=int, default=20, help="Number of steps of a sample.")
parser.add_argument("--max_train_steps", type=int, default=700, help="Number of training steps; 0 trains nothing.")
parser.add_argument("--train_batch_size", type=int, default=8, help="Number of sequences of a step.")
parser.add_argument(
    "--mixed_precision",
    default="bf16",
    choices=("no", "bf16"),
    help="Precision of the training; no on a CPU without bfloat16.",
)
parser.add_argument("--num_sequences", type=int, default=3000, help="Number of sequences for training.")
parser.add_argument("--use_peft", action="store_true", help="Whether to train a LoRA of the network as well.")
parser.add_argument("--lora_r", type=int, default=8, help="Rank of the LoRA.")
parser.add_argument("--lora_alpha", type=int, default=16, help="Scale of the LoRA.")
parser.add_argument("--lora_target_modules", nargs="+", default=["all-linear"], help="Layers that get a LoRA.")
parser.add_argument("--lora_learning_rate", type=float, default=2e-3, help="Peak learning rate of the LoRA.")
parser.add_argument(
    "--only", nargs="+", default=None, help="Names of the trainings to run, such as LoRA. Defaults to all."
)
parser.add_argument(
    "--num_chains",
    type=int,
    default=0,
    help="Number of recombined heavy chains to write to FOLDER/chains.txt, one per line, with tabs around CDR 3, and the pipeline to "
    "FOLDER/antiberty-absorbing. Nothing is measured then.",
)
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForMaskedLM, set_seed

from d3pm_hf import D3PMTextPipeline, evaluate_bound
from d3pm_hf.data import DataCollatorForD3PM, tokenize
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script


# Variable domains of three approved antibodies, and their loops (CDR 1, 2 and 3 of each chain by Kabat).
ANTIBODIES = {
    ("trastuzumab", "heavy"): (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
        ("DTYIH", "RIYPTNGYTRYADSVKG", "WGGDGFYAMDY"),
    ),
    ("trastuzumab", "light"): (
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
        ("RASQDVNTAVA", "SASFLYS", "QQHYTTPPT"),
    ),
    ("adalimumab", "heavy"): (
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
        ("DYAMH", "AITWNSGHIDYADSVEG", "VSYLSTASSLDY"),
    ),
    ("adalimumab", "light"): (
        "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
        ("RASQGIRNYLA", "AASTLQS", "QRYNRAPYT"),
    ),
    ("rituximab", "heavy"): (
        "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
        ("SYNMH", "AIYPGNGDTSYNQKFKG", "STYYGGDWYFNV"),
    ),
    ("rituximab", "light"): (
        "QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQWTSNPPTFGGGTKLEIK",
        ("RASSSVSYIH", "ATSNLAS", "QQWTSNPPT"),
    ),
}
NUM_TYPES = 20  # of residues
NUM_TEST = 32  # sequences that the trained networks are measured on


def main():
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = prepare_model(folder)
    pipeline = D3PMTextPipeline.from_masked_lm(model, use_safetensors=False)
    if arguments.num_chains:
        pipeline.save_pretrained(folder / "antiberty-absorbing")
        chains = recombine(folder, arguments.num_chains, seed=0)
        (folder / "chains.txt").write_text("".join("\t".join(map(" ".join, chain)) + "\n" for chain in chains))
        return
    pipeline.set_progress_bar_config(disable=True)
    figures = {"bounds": measure_bounds(pipeline, arguments.num_terms)}
    write(folder, figures)
    figures["loops"] = infill_loops(pipeline, arguments.num_samples, arguments.num_inference_steps)
    write(folder, figures)
    if arguments.max_train_steps:
        figures["training"] = compare_training(folder, model, arguments)
        write(folder, figures)


def write(folder: Path, figures: dict) -> None:
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def download(folder: Path, requirement: str) -> Path:
    """Downloads a wheel by pip and unpacks it, unless that was done before. Returns the folder of its contents."""
    target = folder / requirement.replace("==", "-")
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = [*folder.glob(requirement.replace("==", "-") + "-*.whl")]
        if run.returncode or not wheels:
            reason = run.stderr.strip().splitlines()[-1:] or ["no wheel"]
            raise OSError(f"{requirement} cannot be downloaded ({reason[0]}): check that pip reaches its index")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(target)
    return target


def prepare_model(folder: Path) -> Path:
    """A folder with the network and the tokenizer of AntiBERTy as transformers reads them: residues separated by spaces."""
    source, model = download(folder, "antiberty==0.1.3") / "antiberty" / "trained_models", folder / "antiberty"
    model.mkdir(exist_ok=True)
    for path in (source / "AntiBERTy_md_smooth" / "config.json", source / "AntiBERTy_md_smooth" / "pytorch_model.bin"):
        shutil.copy(path, model)
    shutil.copy(source / "vocab.txt", model)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def encode(pipeline: D3PMTextPipeline, sequence: str) -> dict:
    """A batch of one sequence; the special tokens around it are known."""
    x_0 = torch.tensor([pipeline.tokenizer(" ".join(sequence)).input_ids])  # [1, N]
    return {"x_0": x_0, "loss_mask": ~torch.isin(x_0, torch.tensor(pipeline.scheduler.never_data))}


def measure_bounds(pipeline: D3PMTextPipeline, num_terms: int) -> dict[str, float]:
    """The bound of each chain without any training, in nats per residue, and that of all of them."""
    batches = [encode(pipeline, sequence) for sequence, _ in ANTIBODIES.values()]
    bound = evaluate_bound(
        pipeline.scheduler, pipeline.denoiser, batches, num_eval_timesteps=num_terms, progress_bar=False
    )
    nats = bound.nats_per_example / bound.elements_per_example
    figures = {f"{name}, {chain}": round(value, 3) for (name, chain), value in zip(ANTIBODIES, nats.tolist())}
    figures["all"], figures["standard error"] = round(bound.total, 3), round(bound.standard_error, 3)
    figures["uniform"] = round(float(np.log(NUM_TYPES)), 3)
    for name, value in figures.items():
        print(f"{name:24} {value:.3f} nats per residue")
    return figures


def infill_loops(pipeline: D3PMTextPipeline, num_samples: int, num_inference_steps: int) -> dict[str, dict]:
    """Samples of each loop given all other residues of its chain, and the share of the residues that are the true ones."""
    figures = {}
    for index, ((name, chain), (sequence, loops)) in enumerate(ANTIBODIES.items()):
        for number, loop in enumerate(loops, 1):
            start = sequence.index(loop)
            residues = list(sequence)
            residues[start : start + len(loop)] = ["[MASK]"] * len(loop)
            output = pipeline(
                " ".join(residues),
                num_return_sequences=num_samples,
                num_inference_steps=num_inference_steps,
                generator=torch.Generator().manual_seed(10 * index + number),
            )
            filled = [text.replace(" ", "")[start : start + len(loop)] for text in output.texts]
            right = np.array([[a == b for a, b in zip(one, loop)] for one in filled])  # [samples, residues]
            title = f"{name}, {chain} {number}"
            figures[title] = {"loop": loop, "recovered": round(float(right.mean()), 3), "samples": filled}
            print(f"{title:24} {loop:18} {100 * right.mean():3.0f} % recovered: {' '.join(filled[:4])}")
    return figures


def recombine(folder: Path, count: int, seed: int) -> list[tuple[str, str, str]]:
    """Heavy chains of the human repertoire before any selection and mutation, drawn from OLGA's model of V(D)J recombination.

    The gene segments, their trimming and the inserted nucleotides are drawn with the probabilities of the model. The V segment
    stands before the CDR3 that OLGA returns, and the J segment behind it. OLGA's CDR3 is Kabat's with three residues before it and
    one after it. Each chain is given as what stands before Kabat's, this loop, and what stands after it.
    """
    source = download(folder, "olga==1.3.0")
    sys.path.insert(0, str(source))
    from olga.load_model import GenerativeModelVDJ, GenomicDataVDJ
    from olga.sequence_generation import SequenceGenerationVDJ
    from olga.utils import nt2aa

    parts = source / "olga" / "default_models" / "human_B_heavy"
    genes, model = GenomicDataVDJ(), GenerativeModelVDJ()
    genes.load_igor_genomic_data(
        *(str(parts / name) for name in ("model_params.txt", "V_gene_CDR3_anchors.csv", "J_gene_CDR3_anchors.csv"))
    )
    model.load_and_process_igor_model(str(parts / "model_marginals.txt"))
    generator = SequenceGenerationVDJ(model, genes)
    np.random.seed(seed)
    chains: dict[str, tuple[str, str, str]] = {}  # in order, each once
    while len(chains) < count:
        nucleotides, _, v, j = generator.gen_rnd_prod_CDR3()
        (_, v_end, v_gene), (_, j_start, j_gene) = genes.genV[v], genes.genJ[j]
        before = v_gene[: len(v_gene) - len(v_end)]
        whole = before + nucleotides + j_gene[len(j_start) :]
        sequence, start = nt2aa(whole[: len(whole) // 3 * 3]), len(before) // 3 + 3
        end = start + max(len(nucleotides) // 3 - 4, 0)
        if set(sequence) <= set("ACDEFGHIKLMNPQRSTVWY"):  # no stop codon
            chains[sequence] = sequence[:start], sequence[start:end], sequence[end:]
    return list(chains.values())


def compare_training(folder: Path, model: Path, arguments: argparse.Namespace) -> dict[str, dict]:
    """Bounds on recombinations that were not trained on: as downloaded, trained further, and the same network from scratch."""
    sequences = map("".join, recombine(folder, arguments.num_sequences + NUM_TEST, seed=0))
    pipeline = D3PMTextPipeline.from_masked_lm(model, use_safetensors=False)
    data = Dataset.from_dict({"text": [" ".join(sequence) for sequence in sequences]})
    data = tokenize(data, pipeline.tokenizer, max_length=pipeline.config.sequence_length)
    test, rest = data.select(range(NUM_TEST)), data.select(range(NUM_TEST, len(data)))
    figures = {"as downloaded": evaluate(pipeline, test)}
    print(f"as downloaded: {figures['as downloaded']}")
    rates = {"trained further": 1e-4, "from scratch": 5e-4}
    if arguments.use_peft:
        rates["LoRA"] = arguments.lora_learning_rate
    for name, learning_rate in rates.items():
        if arguments.only is not None and name not in arguments.only:
            continue
        set_seed(0)
        network = model
        if name == "from scratch":
            network = AutoModelForMaskedLM.from_config(pipeline.text_model.config, trust_remote_code=False)
        options = {"use_safetensors": False} if network is model else {"tokenizer": pipeline.tokenizer}
        settings = D3PMTrainingArguments(
            output_dir=str(folder / name.replace(" ", "-")),
            overwrite_output_dir=True,
            max_train_steps=arguments.max_train_steps,
            train_batch_size=arguments.train_batch_size,
            learning_rate=learning_rate,
            lr_warmup_steps=min(50, arguments.max_train_steps // 10),
            lr_scheduler="cosine",
            mixed_precision=arguments.mixed_precision,
            use_ema=False,
            logging_steps=10,
            validation_steps=0,
            num_samples=0,
        )
        start, further = time.process_time(), D3PMTextPipeline.from_masked_lm(network, **options)
        if name == "LoRA":
            add_lora(further, arguments)
        trained = train(settings, further, rest)
        minutes = (time.process_time() - start) / 60
        figures[name] = {**evaluate(trained, test), "core minutes": round(minutes, 1)}
        print(f"{name}: {figures[name]}")
    return figures


def add_lora(pipeline: D3PMTextPipeline, arguments: argparse.Namespace) -> None:
    """Adds a LoRA to the network, whose other weights are then not trained."""
    from peft import LoraConfig

    targets = arguments.lora_target_modules
    targets = targets[0] if len(targets) == 1 else targets  # "all-linear" is no list
    lora = LoraConfig(r=arguments.lora_r, lora_alpha=arguments.lora_alpha, target_modules=targets)
    pipeline.text_model.add_adapter(lora)


def evaluate(pipeline: D3PMTextPipeline, data: Dataset, batch_size: int = 16) -> dict[str, float]:
    """The bound on a data set with 20 terms per sequence, in nats per residue, and its standard error."""
    collator, special = DataCollatorForD3PM(pipeline.tokenizer), torch.tensor(pipeline.scheduler.never_data)
    batches = []
    for start in range(0, len(data), batch_size):
        batch = collator([data[i] for i in range(start, min(start + batch_size, len(data)))])
        batches.append({**batch, "loss_mask": batch["loss_mask"] & ~torch.isin(batch["x_0"], special)})
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, num_eval_timesteps=20, progress_bar=False)
    return {"nats": round(bound.total, 3), "standard error": round(bound.standard_error, 3)}


if __name__ == "__main__":
    run_script(main)
