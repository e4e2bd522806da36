# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tokenizers of word pieces, as in the paper's LM1B runs: sentencepiece unigram models, loaded or trained.

The mask token comes after all pieces, at K - 1, which is the default mask of absorbing processes.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_int, check_path, check_type, describe


MASK_TOKENS = ("[MASK]", "<mask>", "<d3pm_mask>")
# Two characters that no text contains (Unicode noncharacters), see `mark_ends`.
END_MARKS = ("\ufdd0", "\ufdd1")


def train_piece_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """Trains a unigram tokenizer of `vocab_size` pieces, including `</s>` and `<unk>`, followed by `[MASK]`.

    Args:
        texts (`Iterable[str]`): Sentences or documents. A few megabytes suffice for thousands of pieces.
        vocab_size (`int`, defaults to 8192): Number of pieces without the mask.
    """
    check_int("vocab_size", vocab_size, 3)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ValueError(f"texts is {describe(texts)}: it must be an iterable of strings")
    tokenizer = Tokenizer(models.Unigram())
    use_metaspace(tokenizer)
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size + len(END_MARKS),
        special_tokens=list(special.values()),
        unk_token=special["unk_token"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(mark_ends(check_texts(texts, vocab_size)), trainer)
    learned = [piece for piece in json.loads(tokenizer.to_str())["model"]["vocab"] if piece[0] not in END_MARKS]
    if len(learned) != vocab_size:
        raise ValueError(
            f"the texts give {len(learned)} pieces, and vocab_size is {vocab_size}: pass more text, or another vocab_size"
        )
    pieces = settle_pieces(learned, len(special))
    tokenizer.model = models.Unigram(pieces, unk_id=list(special.values()).index(special["unk_token"]))
    return append_mask(tokenizer, **special)


def check_texts(texts: Iterable[str], vocab_size: int):
    """Yields the texts; after the last one, checks that `vocab_size` has room for all their characters."""
    characters: set[str] = set()
    for text in texts:
        check_type("one of texts", text, str, "a string")
        characters.update(text)
        yield text
    if not characters:
        raise ValueError("texts are empty: pass text to train the tokenizer on")
    least = len(characters | {" "}) + 2  # one piece per character and for the space, and </s> and <unk>
    if vocab_size < least:
        raise ValueError(
            f"vocab_size is {vocab_size}, and the texts have {len(characters)} different characters: pass at least {least}"
        )


def mark_ends(texts: Iterable[str]):
    """Yields each text twice, with another mark at the ends of its words.

    A candidate of the trainer is a string that at least two different characters follow, and the end of a word is not one of
    them. Without marks "that" is no candidate in a text without longer words that begin with it, and is cut into "tha" and "t".
    """
    for text in texts:
        for mark in END_MARKS:
            yield text.replace(" ", f"{mark} ") + mark


def settle_pieces(pieces: list, num_special: int) -> list[tuple[str, float]]:
    """Returns pieces and scores that are the same whenever the same texts are trained on.

    The trainer sums in a different order each time, which changes the last digits of a score. It also adds characters
    without a piece in any order, each 0.0001 above the one before, starting from the lowest score. Without this function,
    several processes or a resumed run would number the pieces differently.
    """
    special, learned = pieces[:num_special], pieces[num_special:]
    lowest = min(score for _, score in learned)
    highest_added = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in learned)
    scores = {
        piece: round(lowest if len(piece) == 1 and score < highest_added else score, 4) for piece, score in learned
    }
    return [(piece, score) for piece, score in special] + sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def load_sentencepiece(path: str | Path) -> PreTrainedTokenizerFast:
    """Loads a sentencepiece unigram model (`.model`) as a tokenizer, with its token ids, followed by a mask token.

    The mask token is `[MASK]`, or `<mask>` if `[MASK]` is a piece of the model, as in the paper's LM1B runs. The package
    protobuf must be installed.

    Args:
        path (`str`): File written by sentencepiece.
    """
    from transformers.utils import is_protobuf_available

    if not is_protobuf_available():
        raise ImportError("reading a sentencepiece model needs the package protobuf: pip install 'd3pm-hf[training]'")
    from google.protobuf.message import DecodeError
    from transformers.convert_slow_tokenizer import import_protobuf

    check_path("path", path)
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"path is {path}, which is not a file: pass the `.model` file that sentencepiece wrote"
        )
    content = Path(path).read_bytes()
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(f"{path} is not a sentencepiece model: pass a file that sentencepiece has written") from error
    trained = proto.trainer_spec
    if not proto.pieces or trained.model_type != trained.UNIGRAM:
        raise ValueError(f"{path} is not a unigram model: train sentencepiece with --model_type=unigram")
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, trained.unk_id, trained.byte_fallback))
    # Single spaces, and none at both ends of the text, as in sentencepiece.
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace(Regex(r"\A | \z"), ""),
    ]
    if proto.normalizer_spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    use_metaspace(tokenizer)
    numbers = {"eos_token": trained.eos_id, "unk_token": trained.unk_id, "pad_token": trained.pad_id}
    return append_mask(tokenizer, **{name: pieces[number][0] for name, number in numbers.items() if number >= 0})


def use_metaspace(tokenizer: Tokenizer) -> None:
    """Makes spaces part of the piece that follows, and puts one before the text."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()


def append_mask(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer for transformers and adds a mask token after all of its pieces.

    The mask includes the space before it, as those of ALBERT and RoBERTa do: a piece that fills it in begins with its own.
    """
    mask_token = next(token for token in MASK_TOKENS if tokenizer.token_to_id(token) is None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=AddedToken(mask_token, lstrip=True, special=True),
        clean_up_tokenization_spaces=False,
        **special,
    )
