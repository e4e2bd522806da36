# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sudoku by masked diffusion: one network, and several orders in which it fills in the cells.

    python examples/sudoku.py solve "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    python examples/sudoku.py evaluate
    python examples/sudoku.py likelihood
    python examples/sudoku.py picture --output sudoku.png
    python examples/sudoku.py train --output_dir outputs/sudoku

A grid is a text of 81 digits, and a puzzle a text with gaps: `.` is the mask token of the tokenizer. The network sees the three
states of each candidate (this digit, another digit, empty) and is trained on random masks of full grids with an absorbing
process. docs/source/en/sudoku.md shows the results.
"""

import argparse
from pathlib import Path


CHECKPOINT = str(Path(__file__).resolve().parent / "checkpoints" / "sudoku")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["solve", "evaluate", "likelihood", "picture", "train"], help="What to do.")
parser.add_argument("puzzle", nargs="?", help="81 characters, row by row: digits, and `.` or 0 for an empty cell.")
parser.add_argument("--checkpoint", default=CHECKPOINT, help="Folder of the checkpoint to solve with.")
parser.add_argument("--seed", type=int, default=0, help="Seed of samples, puzzles, weights, grids and masks.")
parser.add_argument("--num_samples", type=int, default=8, help="solve: number of random samples; 0 draws none.")
parser.add_argument(
    "--num_puzzles", type=int, default=200, help="evaluate, likelihood: number of puzzles per number of clues."
)
parser.add_argument(
    "--num_clues", type=int, nargs="+", default=[34, 30, 26, 0], help="evaluate, likelihood: 0 for minimal ones."
)
parser.add_argument(
    "--orders", nargs="+", default=["margin", "random", "reading"], help="evaluate, likelihood: orders of the cells."
)
parser.add_argument(
    "--output", default="sudoku.gif", help="picture: file that moves (.gif) or has four panels (.png)."
)
parser.add_argument("--output_dir", default="outputs/sudoku", help="train: folder of the run and of the checkpoint.")
parser.add_argument("--resume_from_checkpoint", help="train: checkpoint folder to resume from, or `latest`.")
parser.add_argument("--max_train_steps", type=int, default=7000, help="train: number of steps.")
parser.add_argument("--train_batch_size", type=int, default=16, help="train: number of grids of a step.")
parser.add_argument("--num_grids", type=int, default=100_000, help="train: number of full grids.")
parser.add_argument("--learning_rate", type=float, default=2e-3, help="train: peak learning rate.")
parser.add_argument("--logit_mean", type=float, default=0.5, help="train: mean of the log-odds of the share of masks.")
parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="train: dtype of the products.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import math
import random

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image, ImageDraw, ImageFont

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    character_tokenizer,
    evaluate_likelihood,
)
from d3pm_hf.data import Rows
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script


NUM_CELLS, NUM_DIGITS, EMPTY = 81, 9, 9
ALL = (1 << 9) - 1  # the set of all digits, one bit for each
UNITS = [  # of 9 cells each: rows, columns, boxes
    *([9 * i + j for j in range(9)] for i in range(9)),
    *([9 * j + i for j in range(9)] for i in range(9)),
    *([9 * (3 * (i // 3) + j // 3) + 3 * (i % 3) + j % 3 for j in range(9)] for i in range(9)),
]
PLACES = [(cell // 9, cell % 9, 3 * (cell // 27) + cell % 9 // 3) for cell in range(81)]  # row, column, box


def find_solutions(cells: list[int], limit: int = 2, rng: random.Random | None = None) -> list[list[int]]:
    """Up to `limit` solutions of a puzzle, by backtracking over the cell with the fewest candidates.

    Args:
        cells (`list[int]`): The 81 states: 0 to 8 for the digits 1 to 9, and 9 for an empty cell.
        limit (`int`, defaults to 2): Number of solutions after which the search ends.
        rng (`random.Random`, *optional*): Order in which the digits are tried. Defaults to ascending.
    """
    cells = list(cells)
    rows, columns, boxes = [ALL] * 9, [ALL] * 9, [ALL] * 9  # the digits that each unit still needs
    for cell, digit in enumerate(cells):
        if digit != EMPTY:
            (row, column, box), bit = PLACES[cell], 1 << digit
            if not rows[row] & columns[column] & boxes[box] & bit:
                return []
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
    empty = [cell for cell in range(NUM_CELLS) if cells[cell] == EMPTY]
    solutions: list[list[int]] = []

    def search() -> None:
        best, fewest, chosen = 0, 10, -1
        for place, cell in enumerate(empty):
            row, column, box = PLACES[cell]
            candidates = rows[row] & columns[column] & boxes[box]
            count = candidates.bit_count()
            if count < fewest:
                best, fewest, chosen = candidates, count, place
                if count <= 1:
                    break
        if chosen < 0:
            solutions.append(cells.copy())
            return
        if not fewest:
            return
        cell = empty[chosen]
        empty[chosen] = empty[-1]
        empty.pop()
        digits = [digit for digit in range(9) if best >> digit & 1]
        if rng is not None:
            rng.shuffle(digits)
        row, column, box = PLACES[cell]
        for digit in digits:
            bit = 1 << digit
            cells[cell] = digit
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
            search()
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
            if len(solutions) >= limit:
                break
        cells[cell] = EMPTY
        empty.append(cell)
        empty[chosen], empty[-1] = empty[-1], empty[chosen]

    search()
    return solutions


def random_grid(rng: random.Random) -> list[int]:
    """A full grid: the first solution of an empty grid whose digits are tried in random order."""
    return find_solutions([EMPTY] * NUM_CELLS, 1, rng)[0]


def random_grids(count: int, seed: int) -> np.ndarray:
    """Full grids `[count, 81]` of the states 0 to 8."""
    rng = random.Random(seed)
    return np.array([random_grid(rng) for _ in range(count)], dtype=np.uint8)


def random_puzzle(grid: list[int], num_clues: int, rng: random.Random) -> list[int]:
    """Removes digits of a full grid in random order while the solution stays unique and more than `num_clues` are left.

    With `num_clues=0` the puzzle is minimal: without any of its clues it has several solutions.
    """
    puzzle, order = list(grid), rng.sample(range(NUM_CELLS), NUM_CELLS)
    left = NUM_CELLS
    for cell in order:
        if left == num_clues:
            break
        digit, puzzle[cell] = puzzle[cell], EMPTY
        if len(find_solutions(puzzle)) > 1:
            puzzle[cell] = digit
        else:
            left -= 1
    return puzzle


def relations() -> torch.Tensor:
    """The units that two cells share, `[4, 81, 81]`: the cell itself, and else the row, the column and the box."""
    row, column, box = torch.tensor(PLACES).T[:, :, None]
    same = torch.stack([row == row.mT, column == column.mT, box == box.mT])
    itself = torch.eye(NUM_CELLS, dtype=torch.bool)
    return torch.cat([itself[None], same & ~itself]).float()


class DigitLinear(torch.nn.Module):
    """A linear map of the candidates `[..., 9, C]` that treats all digits alike: y_d = A x_d + B mean(x)."""

    def __init__(self, width: int, out_width: int):
        super().__init__()
        self.each = torch.nn.Linear(width, out_width)
        self.pooled = torch.nn.Linear(width, out_width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.each(x) + self.pooled(x.mean(-2, keepdim=True))


class Layer(torch.nn.Module):
    """A transformer layer over 81 cells of 9 candidates `[B, 81, 9, C]`, with a bias per head and relation of two cells."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = DigitLinear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = DigitLinear(width, 2 * width), torch.nn.Linear(2 * width, width)
        # Heads start by looking along rows, along columns, into boxes, and everywhere.
        bias = torch.zeros(num_heads, 4)
        bias[:3, 1:] = 5 * torch.eye(3)
        self.relation_bias = torch.nn.Parameter(bias)

    def forward(self, h: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        batch, cells, digits, width = h.shape
        size = width // self.num_heads
        qkv = self.qkv(self.norm_1(h)).view(batch, cells, digits, 3, self.num_heads, size)
        q, k, v = qkv.permute(3, 0, 4, 1, 2, 5).flatten(-2)  # [B, H, 81, 9 c] each
        bias = torch.einsum("hr,rij->hij", self.relation_bias, relation)[None]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        mixed = mixed.view(batch, self.num_heads, cells, digits, size).permute(0, 2, 3, 1, 4)
        h = h + self.out(mixed.flatten(-2))
        return h + self.down(self.up(self.norm_2(h)).relu())


class SudokuDenoiser(Denoiser, ModelMixin, ConfigMixin):
    """Predicts the digits of a grid from a grid with masks: transformer layers that are repeated.

    The network has a vector for each of the 729 candidates (a cell and a digit). It knows which cells share a row, a column or a
    box, and neither positions nor digits: permuting the digits, the bands, the rows of a band, or the columns in the same ways,
    permutes the output. In training each cell is scored after a random number of repetitions, more than half of the cells after
    all of them, so that the first repetitions learn to predict as well.
    """

    reads_timestep, grid_columns = False, 9

    @register_to_config
    def __init__(self, width: int = 48, num_heads: int = 4, num_layers: int = 2, num_repeats: int = 8):
        super().__init__()
        self.num_classes, self.num_repeats = NUM_DIGITS + 1, num_repeats
        self.embedding = torch.nn.Embedding(3, width)  # empty, another digit, this digit
        self.norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm_out, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 1)
        self.register_buffer("relation", relations(), persistent=False)

    def forward(self, x_t: torch.Tensor, timestep=None) -> torch.Tensor:
        digits = torch.arange(NUM_DIGITS, device=x_t.device)
        state = (x_t != EMPTY).long()[..., None] + (x_t[..., None] == digits)  # [B, 81, 9]
        given = self.embedding(state)  # [B, 81, 9, C]
        h, outputs = torch.zeros_like(given), []
        for _ in range(self.num_repeats):
            h = self.norm(h) + given
            for layer in self.layers:
                h = layer(h, self.relation)
            outputs.append(h)
        if self.training:
            scored = (2 * self.num_repeats * torch.rand(x_t.shape, device=x_t.device)).long()
            scored = scored.clamp(max=self.num_repeats - 1)  # [B, 81]
            h = torch.stack(outputs).gather(0, scored[None, :, :, None, None].expand(1, *h.shape))[0]
        logits = self.head(self.norm_out(h)).squeeze(-1)  # [B, 81, 9]
        return torch.nn.functional.pad(logits, (0, 1), value=-1e4)  # the mask is never data


SudokuDenoiser.__module__ = "sudoku"  # checkpoints name the class by it, also if this file is run as a script


def create_pipeline() -> D3PMTextPipeline:
    """An untrained network, the absorbing process and a tokenizer of digits."""
    scheduler = D3PMScheduler(NUM_DIGITS + 1, num_train_timesteps=1000, transition="absorbing")
    tokenizer = character_tokenizer("123456789", mask_token=".")
    return D3PMTextPipeline(SudokuDenoiser(), scheduler, tokenizer, sequence_length=NUM_CELLS)


def train_network(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    grids = random_grids(options.num_grids, seed=2 * options.seed + 1)
    settings = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=options.resume_from_checkpoint is None,
        resume_from_checkpoint=options.resume_from_checkpoint,
        seed=options.seed,
        max_train_steps=options.max_train_steps,
        train_batch_size=options.train_batch_size,
        loss="hybrid",  # the terms of the bound are small beside the cross-entropy of all masks
        hybrid_coeff=1.0,
        auxiliary="denoising",
        timestep_sampling="logit_normal",
        logit_mean=options.logit_mean,
        logit_std=0.6,
        learning_rate=options.learning_rate,
        lr_scheduler="cosine",
        lr_warmup_steps=min(100, options.max_train_steps // 10),
        adam_beta2=0.98,
        adam_weight_decay=0.01,
        ema_max_decay=0.99,
        mixed_precision=options.mixed_precision,
        logging_steps=20,
        checkpointing_steps=100,
        checkpoints_total_limit=2,
        validation_steps=0,
        num_samples=0,
    )
    train(settings, create_pipeline(), Rows(grids, NUM_DIGITS))


# At temperature 0 a cell gets its most likely digit. In 100 steps of the process no step reveals two of 81 cells.
ORDERS = {
    "margin": {"sampler": "confidence", "sampler_kwargs": {"measure": "margin"}},
    "random": {"sampler": "first_hitting"},
    "reading": {"sampler": "confidence", "sampler_kwargs": {"measure": "left_to_right"}},
}
NUM_STEPS = 100


def load_pipeline(folder: str) -> D3PMTextPipeline:
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_puzzle(text: str) -> list[int]:
    """The 81 states of a puzzle: 0 to 8 for the digits 1 to 9, and 9 for an empty cell."""
    characters = "".join(text.split()).replace("0", ".")
    wrong = sorted(set(characters) - set("123456789."))
    if wrong:
        raise ValueError(f"the puzzle has the character {wrong[0]!r}: write digits, and '.' or 0 for an empty cell")
    if len(characters) != NUM_CELLS:
        raise ValueError(f"the puzzle has {len(characters)} cells: write 81 characters, row by row")
    return ["123456789.".index(character) for character in characters]


def write_puzzle(cells: list[int]) -> str:
    return "".join("123456789."[state] for state in cells)


def find_contradiction(cells: list[int]) -> str | None:
    """The first digit that stands twice in a row, a column or a box, in words, or `None`."""
    for number, unit in enumerate(UNITS):
        digits = [cells[cell] for cell in unit if cells[cell] != EMPTY]
        for digit in digits:
            if digits.count(digit) > 1:
                return f"{digit + 1} stands twice in {('row', 'column', 'box')[number // 9]} {number % 9 + 1}"
    return None


def fill_in(pipeline: D3PMTextPipeline, cells: list[int]) -> tuple[list[int], list[int]]:
    """The answer by margin order at temperature 0, and the cells in the order in which they were filled."""
    order: list[int] = []
    state = list(cells)

    def note(pipeline, step, timestep, values):
        after = values["latents"][0].tolist()
        order.extend(cell for cell in range(NUM_CELLS) if after[cell] != EMPTY and state[cell] == EMPTY)
        state[:] = after
        return values

    # A callback sees all steps, so there are as few as reveal one cell each: a divisor of 1000, for steps of equal length.
    num_steps = next(number for number in range(max(1, cells.count(EMPTY)), 101) if 1000 % number == 0)
    output = pipeline(
        write_puzzle(cells),
        num_inference_steps=num_steps,
        temperature=0.0,
        callback_on_step_end=note,
        **ORDERS["margin"],
    )
    return read_puzzle(output.texts[0]), order


def draw_solutions(pipeline: D3PMTextPipeline, cells: list[int], count: int, seed: int) -> list[list[int]]:
    """Samples of the solution at temperature 1, by margin order."""
    output = pipeline(
        write_puzzle(cells),
        num_return_sequences=count,
        num_inference_steps=NUM_STEPS,
        generator=torch.Generator().manual_seed(seed),
        **ORDERS["margin"],
    )
    return [read_puzzle(text) for text in output.texts]


def show(values: list[str], width: int = 1) -> str:
    """The 81 values as a grid with lines between the boxes."""
    lines = []
    for row in range(9):
        if row in (3, 6):
            lines.append("+".join(["-" * (3 * width + 4)] * 3)[1:-1])
        parts = [" ".join(f"{value:>{width}}" for value in values[9 * row + i : 9 * row + i + 3]) for i in (0, 3, 6)]
        lines.append(" | ".join(parts))
    return "\n".join(lines)


def describe_answer(pipeline: D3PMTextPipeline, cells: list[int], num_samples: int = 8, seed: int = 0) -> str:
    """The answer to a puzzle as text: the grid, the order of its cells, and whether it is a solution, or one of several."""
    if wrong := find_contradiction(cells):
        return f"The puzzle has no solution: {wrong}."
    answer, order = fill_in(pipeline, cells)
    numbers = {cell: str(i) for i, cell in enumerate(order, 1)}
    parts = [show(list(write_puzzle(answer))), "The order in which the cells were filled:"]
    parts.append(show([numbers.get(cell, ".") for cell in range(NUM_CELLS)], 2))
    if wrong := find_contradiction(answer):
        parts.append(
            f"The answer is a contradiction: {wrong}. The puzzle has no solution, or the network has not found it."
        )
    else:
        parts.append("The answer is a solution: each row, column and box has all digits.")
    if num_samples:
        samples = draw_solutions(pipeline, cells, num_samples, seed)
        valid = [write_puzzle(sample) for sample in samples if not find_contradiction(sample)]
        found = sorted(set(valid), key=valid.index)
        parts.append(f"Random samples that are solutions: {len(valid)} of {num_samples}, {len(found)} different.")
        if len(found) > 1:
            parts += ["The puzzle has several solutions, among them:", "\n".join(found)]
    return "\n\n".join(parts)


def solve(options: argparse.Namespace) -> None:
    if options.puzzle is None:
        raise ValueError("there is no puzzle to solve: write its 81 characters after the command")
    cells = read_puzzle(options.puzzle)
    print(describe_answer(load_pipeline(options.checkpoint), cells, options.num_samples, options.seed))


def random_puzzles(count: int, num_clues: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Puzzles with unique solutions, and these solutions. The seeds of training are odd, and these are even."""
    rng = random.Random(1000 * (2 * seed + 2) + 2 * num_clues)
    puzzles, grids = [], []
    while len(puzzles) < count:
        grid = random_grid(rng)
        puzzle = random_puzzle(grid, num_clues, rng)
        if not num_clues or NUM_CELLS - puzzle.count(EMPTY) == num_clues:
            puzzles.append(puzzle)
            grids.append(grid)
    return puzzles, grids


def solved(pipeline: D3PMTextPipeline, puzzles, grids, order: str, seed: int = 0, batch_size: int = 8) -> list[bool]:
    """Whether each puzzle is solved at temperature 0, with one cell per call of the network."""
    # Puzzles with as many empty cells need the same calls.
    places = sorted(range(len(puzzles)), key=lambda i: puzzles[i].count(EMPTY))
    results = [False] * len(puzzles)
    for start in range(0, len(puzzles), batch_size):
        part = places[start : start + batch_size]
        generators = [torch.Generator().manual_seed(1000 * seed + i) for i in part]
        output = pipeline(
            [write_puzzle(puzzles[i]) for i in part],
            num_inference_steps=NUM_STEPS,
            temperature=0.0,
            generator=generators,
            **ORDERS[order],
        )
        for i, text in zip(part, output.texts):
            results[i] = text == write_puzzle(grids[i])
    return results


def check_orders(orders: list[str]) -> None:
    for order in orders:
        if order not in ORDERS:
            raise ValueError(f"--orders has {order!r}: choose among {', '.join(ORDERS)}")


def evaluate(options: argparse.Namespace) -> None:
    check_orders(options.orders)
    pipeline = load_pipeline(options.checkpoint)
    print(f"{'clues':>10} {'puzzles':>8}" + "".join(f"{order:>18}" for order in options.orders))
    for num_clues in options.num_clues:
        puzzles, grids = random_puzzles(options.num_puzzles, num_clues, options.seed)
        mean = sum(NUM_CELLS - puzzle.count(EMPTY) for puzzle in puzzles) / len(puzzles)
        print(f"{num_clues or f'minimal {mean:.1f}':>10} {len(puzzles):8}", end="", flush=True)
        for order in options.orders:
            results = solved(pipeline, puzzles, grids, order, options.seed)
            share, expected = sum(results) / len(results), (sum(results) + 1) / (len(results) + 2)
            error = math.sqrt(expected * (1 - expected) / len(results))  # not 0 if all puzzles are solved
            print(f"{100 * share:10.1f} ± {100 * error:.1f} %", end="", flush=True)
        print(flush=True)


LIKELIHOOD_ORDERS = {"margin": "margin", "random": "random", "reading": "left_to_right"}


def measure_likelihoods(options: argparse.Namespace) -> None:
    """Prints the mean of -log p(solution | puzzle), of the sampler of each order at temperature 1."""
    check_orders(options.orders)
    pipeline = load_pipeline(options.checkpoint)
    print("nats of the solution given the puzzle" + "".join(f"{order:>16}" for order in options.orders))
    for num_clues in options.num_clues:
        puzzles, grids = map(torch.tensor, random_puzzles(options.num_puzzles, num_clues, options.seed))
        batches = [
            {"x_0": grid, "loss_mask": puzzle == EMPTY} for puzzle, grid in zip(puzzles.split(8), grids.split(8))
        ]
        print(f"{f'{num_clues} clues' if num_clues else 'minimal':>20}, {len(puzzles):6} puzzles", end="", flush=True)
        for order in options.orders:
            result = evaluate_likelihood(pipeline, batches, order=LIKELIHOOD_ORDERS[order], progress_bar=False)
            nats = result.nats_per_example
            print(f"{nats.mean():8.3f} ± {nats.std() / len(nats) ** 0.5:.3f}", end="", flush=True)
        print(flush=True)


SIDE, MARGIN = 34, 8  # pixels of a cell, and around a grid
COLORS = [
    (68, 1, 84),
    (33, 145, 140),
    (253, 231, 37),
]  # of the first cell that is filled, of the middle, and of the last


def draw_grid(cells: list[int], order: list[int], num_shown: int, total: int) -> Image.Image:
    """The puzzle with the first `num_shown` cells of `order`, colored and numbered by the step that filled them."""
    size = 9 * SIDE + 2 * MARGIN
    picture = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(picture)
    large, small = ImageFont.load_default(20), ImageFont.load_default(9)
    steps = {cell: i for i, cell in enumerate(order[:num_shown])}
    for cell, state in enumerate(cells):
        left, top = MARGIN + SIDE * (cell % 9), MARGIN + SIDE * (cell // 9)
        ink = "black"
        if cell in steps:
            share = steps[cell] / max(total - 1, 1)
            first, last = COLORS[:2] if share < 0.5 else COLORS[1:]
            color = tuple(round(a + (2 * share % 1 if share < 1 else 1) * (b - a)) for a, b in zip(first, last))
            draw.rectangle((left, top, left + SIDE, top + SIDE), fill=color)
            ink = "white" if share < 0.6 else "black"
            draw.text((left + 3, top + 2), str(steps[cell] + 1), ink, small)
        elif state != EMPTY and cell not in order:
            draw.rectangle((left, top, left + SIDE, top + SIDE), fill=(232, 232, 232))
        if cell in steps or (state != EMPTY and cell not in order):
            draw.text((left + SIDE / 2, top + SIDE / 2 + 1), str(state + 1), ink, large, anchor="mm")
    for i in range(10):
        place, width = MARGIN + SIDE * i, 3 if i % 3 == 0 else 1
        draw.line((MARGIN, place, size - MARGIN, place), "black", width)
        draw.line((place, MARGIN, place, size - MARGIN), "black", width)
    return picture


def draw_picture(pipeline: D3PMTextPipeline, cells: list[int], path: str) -> None:
    answer, order = fill_in(pipeline, cells)
    total = len(order)
    if path.endswith(".gif"):
        frames = [draw_grid(answer, order, shown, total) for shown in range(total + 1)]
        palette = frames[-1].quantize(64)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        durations = [1500] + [200] * (total - 1) + [4000]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations[: total + 1], loop=0)
        return
    panels = [draw_grid(answer, order, round(total * i / 3), total) for i in range(4)]
    width, height = panels[0].size
    picture = Image.new("RGB", (4 * width, height), "white")
    for i, panel in enumerate(panels):
        picture.paste(panel, (i * width, 0))
    picture.quantize(128).save(path, optimize=True)


def make_picture(options: argparse.Namespace) -> None:
    if Path(options.output).suffix not in (".gif", ".png"):
        raise ValueError(f"--output is {options.output!r}: write a file that ends in .gif or .png")
    cells = read_puzzle(options.puzzle) if options.puzzle else random_puzzles(1, 0, seed=1)[0][0]
    if wrong := find_contradiction(cells):
        raise ValueError(f"the puzzle has no solution: {wrong}; pass another one")
    draw_picture(load_pipeline(options.checkpoint), cells, options.output)
    print(f"{options.output}: {write_puzzle(cells)}")


def main():
    options = parser.parse_args()
    commands = {
        "solve": solve,
        "evaluate": evaluate,
        "likelihood": measure_likelihoods,
        "picture": make_picture,
        "train": train_network,
    }
    commands[options.command](options)


if __name__ == "__main__":
    run_script(main)
