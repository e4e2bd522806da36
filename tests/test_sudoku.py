# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`examples/sudoku.py`: its generator, its network, and the checkpoint that comes with it."""

import random
import re
from pathlib import Path

import pytest
import sudoku
import torch
from PIL import Image
from safetensors.torch import load_file

from d3pm_hf import D3PMPipeline, evaluate_likelihood


SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


@pytest.fixture(scope="module")
def pipeline():
    return sudoku.load_pipeline(sudoku.CHECKPOINT)


def test_the_solver_counts_solutions():
    assert [sudoku.write_puzzle(cells) for cells in sudoku.find_solutions(sudoku.read_puzzle(PUZZLE))] == [SOLUTION]
    # The digits 3 and 5 of two rows and columns of one band can be exchanged.
    cells = sudoku.read_puzzle(SOLUTION)
    places = next(
        (a, b, a + 9 * step, b + 9 * step)
        for a in range(81)
        for b in range(a + 1, a // 9 * 9 + 9)
        for step in (1, 2)
        if a // 9 % 3 + step < 3 and cells[a] == cells[b + 9 * step] and cells[b] == cells[a + 9 * step]
    )
    for place in places:
        cells[place] = sudoku.EMPTY
    solutions = sudoku.find_solutions(cells, limit=10)
    assert len(solutions) == 2 and sudoku.read_puzzle(SOLUTION) in solutions
    assert sudoku.find_solutions(sudoku.read_puzzle("55" + 79 * ".")) == []
    # The last cell of the first row has no candidate.
    assert sudoku.find_solutions(sudoku.read_puzzle("12345678." + 8 * "." + "9" + 63 * ".")) == []


def test_the_generator_makes_valid_puzzles_with_one_solution():
    rng = random.Random(0)
    grids = [sudoku.random_grid(rng) for _ in range(20)]
    assert len({tuple(grid) for grid in grids}) == 20
    for grid in grids:
        assert all(sorted(grid[cell] for cell in unit) == list(range(9)) for unit in sudoku.UNITS)
    assert len({tuple(sorted(unit)) for unit in sudoku.UNITS}) == 27
    for num_clues in (34, 30, 0):
        puzzles, solutions = sudoku.random_puzzles(2, num_clues, seed=5)
        for puzzle, solution in zip(puzzles, solutions):
            assert sudoku.find_solutions(puzzle) == [solution]
            assert not num_clues or 81 - puzzle.count(sudoku.EMPTY) == num_clues
            assert all(a in (b, sudoku.EMPTY) for a, b in zip(puzzle, solution))
    for cell in range(81):  # the last puzzle is minimal
        if puzzle[cell] != sudoku.EMPTY:
            assert len(sudoku.find_solutions(puzzle[:cell] + [sudoku.EMPTY] + puzzle[cell + 1 :])) == 2


def test_the_network_treats_digits_and_units_alike():
    """Permuting digits, bands, rows of a band, or columns in the same ways, permutes the output."""
    torch.manual_seed(0)
    network = sudoku.SudokuDenoiser(width=8, num_heads=4, num_repeats=2).double().eval()
    x = torch.tensor([sudoku.read_puzzle(PUZZLE)])
    logits = network(x)
    digits = torch.cat([torch.randperm(9), torch.tensor([9])])
    torch.testing.assert_close(network(digits[x])[..., digits], logits)
    order = [1, 0, 2, 6, 7, 8, 3, 5, 4]
    cells = torch.arange(81).view(9, 9)[order][:, order[::-1]].flatten()
    torch.testing.assert_close(network(x[:, cells]), logits[:, cells])
    cells = torch.arange(81).view(9, 9)[[3, 1, 2, 0, 4, 5, 6, 7, 8]].flatten()  # rows of two bands: another puzzle
    assert not torch.allclose(network(x[:, cells]), logits[:, cells])


def test_training_scores_cells_after_several_repetitions():
    torch.manual_seed(0)
    network = sudoku.SudokuDenoiser(width=8, num_heads=4, num_repeats=3).train()
    x = torch.tensor(4 * [sudoku.read_puzzle(PUZZLE)])
    with torch.no_grad():
        mixed = network(x)
        shares = []
        for repeats in (1, 2, 3):
            network.eval().num_repeats = repeats
            shares.append((network(x) - mixed).abs().amax(-1) < 1e-5)
    assert torch.stack(shares).any(0).all() and shares[2].float().mean() > 0.5 and shares[0].any() and shares[1].any()


def test_the_checkpoint_is_small_and_loads_after_the_import(pipeline):
    folder = Path(sudoku.CHECKPOINT)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 4e6
    weights = load_file(folder / "text_model" / "diffusion_pytorch_model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) < 1_000_000
    assert isinstance(D3PMPipeline.from_pretrained(folder).denoiser, sudoku.SudokuDenoiser)


def test_the_checkpoint_solves_easy_puzzles_by_margin_order(pipeline):
    answer, order = sudoku.fill_in(pipeline, sudoku.read_puzzle(PUZZLE))
    assert sudoku.write_puzzle(answer) == SOLUTION
    assert sorted(order) == [cell for cell in range(81) if PUZZLE[cell] == "."]
    puzzles, grids = sudoku.random_puzzles(3, 40, seed=7)
    assert sudoku.solved(pipeline, puzzles, grids, "margin") == [True] * 3


def test_reading_order_fills_cells_from_the_left(pipeline):
    puzzle = SOLUTION[:40] + "...." + SOLUTION[44:77] + "...."
    calls = []
    handle = pipeline.text_model.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0][0].tolist()))
    output = pipeline(puzzle, num_inference_steps=100, temperature=0.0, **sudoku.ORDERS["reading"])
    handle.remove()
    assert output.texts == [SOLUTION]
    assert [seen.index(sudoku.EMPTY) for seen in calls] == [40, 41, 42, 43, 77, 78, 79, 80]


def test_several_solutions_are_shown(pipeline):
    cells = sudoku.read_puzzle(SOLUTION)
    cells = [sudoku.EMPTY if state in (0, 1) else state for state in cells]  # 1 and 2 can be exchanged
    solutions = {sudoku.write_puzzle(found) for found in sudoku.find_solutions(cells, limit=100)}
    text = sudoku.describe_answer(pipeline, cells, num_samples=8)
    shown = set(re.findall("[1-9]{81}", text))
    assert "The puzzle has several solutions" in text and 2 <= len(shown) and shown <= solutions


def test_a_contradiction_is_reported(pipeline):
    twice = sudoku.describe_answer(pipeline, sudoku.read_puzzle("55" + 79 * "."))
    assert twice == "The puzzle has no solution: 5 stands twice in row 1."
    # The clues agree with each other, and the empty cell at the end of row 1 has no candidate.
    cells = sudoku.read_puzzle(SOLUTION)
    cells[8], cells[17] = sudoku.EMPTY, 1  # 2 in row 2, where the column of row 1 needs it
    cells[[9 * 1 + j for j in range(9)][2]] = sudoku.EMPTY
    assert sudoku.find_contradiction(cells) is None and not sudoku.find_solutions(cells)
    text = sudoku.describe_answer(pipeline, cells, num_samples=0)
    assert "The answer is a contradiction: " in text and "or the network has not found it." in text


def test_likelihoods_are_those_of_the_solutions(pipeline, capsys):
    arguments = "likelihood --num_puzzles 3 --num_clues 76 --orders margin reading --seed 4".split()
    sudoku.measure_likelihoods(sudoku.parser.parse_args(arguments))
    printed = re.findall(r"([\d.]+) ± ", capsys.readouterr().out)
    puzzles, grids = sudoku.random_puzzles(3, 76, seed=4)
    for number, order in zip(printed, ("margin", "left_to_right")):
        batch = {"x_0": torch.tensor(grids), "loss_mask": torch.tensor(puzzles) == sudoku.EMPTY}
        assert batch["loss_mask"].sum() == 15
        nats = evaluate_likelihood(pipeline, [batch], order=order, progress_bar=False).nats_per_example
        assert float(number) == pytest.approx(nats.mean().item(), abs=6e-4)


@pytest.mark.parametrize(
    "puzzle, message",
    [
        (PUZZLE[:80], "the puzzle has 80 cells: write 81 characters, row by row"),
        (PUZZLE[:80] + "a", "the puzzle has the character 'a': write digits, and '.' or 0 for an empty cell"),
        ("", "the puzzle has 0 cells: write 81 characters, row by row"),
    ],
)
def test_bad_input_gets_one_sentence(puzzle, message):
    with pytest.raises(ValueError) as error:
        sudoku.read_puzzle(puzzle)
    assert str(error.value) == message


def test_zeros_and_lines_are_read():
    lines = "\n".join(PUZZLE[i : i + 9] for i in range(0, 81, 9)).replace(".", "0")
    assert sudoku.write_puzzle(sudoku.read_puzzle(lines)) == PUZZLE


def test_pictures(pipeline, tmp_path):
    puzzle = sudoku.read_puzzle(SOLUTION[:78] + "...")
    for name, frames in (("a.gif", 4), ("a.png", 1)):
        sudoku.draw_picture(pipeline, puzzle, str(tmp_path / name))
        with Image.open(tmp_path / name) as picture:
            assert getattr(picture, "n_frames", 1) == frames
