"""Tokenizers of four kinds, built by hand so that a test can know every token.

They differ where real ones do: whether " 5" is one token, whether a BOS is added, whether case and
space survive, and what happens to an unknown word. Each knows the words it is given as whole
tokens and falls back to smaller pieces (or to its unknown token) elsewhere.
"""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from circuitkd.tasks import Task

PAIRS = tuple(f"{number:02d}" for number in range(100))


def words_of(*tasks: Task) -> tuple[str, ...]:
    """Every word and number of the tasks' lists and templates, each once."""
    found: dict[str, None] = {}
    for task in tasks:
        for variant in (None, *task.variants):
            plain = task.with_variant(variant)
            for words in plain.word_lists.values():
                found.update(dict.fromkeys(words.words))
            for template in plain.templates:
                fixed = re.sub(r"\{[^}]*\}", " ", template.text)
                found.update(dict.fromkeys(re.findall(r"[A-Za-z]+", fixed)))
    return tuple(word for word in found if word.isascii())


def byte_level(
    words: Sequence[str], *, adds_bos: bool = False, only_after_space: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """GPT-2's kind: " Mary" and " 5" are one token, a year is " 17" and "32"; no BOS by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Capitals first: what begins with one cannot be taken apart by a merge inside another word.
    alone = sorted((word for word in words if word[0].isalpha()), key=str.islower)
    merges = _chains([*(f"Ġ{word}" for word in (*words, *only_after_space)), *PAIRS, *alone])
    vocab = _numbered(["<|endoftext|>", *alphabet, *(a + b for a, b in merges)])
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = _begin_with(core, "<|endoftext|>")
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=end, eos_token=end, unk_token=end
    )


def llama_like(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Llama's kind: " 5" is " " and "5", 12 is "1" and "2"; bytes for the rest; begins with <s>."""
    letters = [chr(code) for code in range(33, 127)]
    merges = _chains([f"▁{word}" for word in words if not word[0].isdigit()])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    vocab = _numbered([*tokens, *(a + b for a, b in merges)])
    core = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.post_processor = _begin_with(core, "<s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_level(words: Iterable[str], *, unknown: bool = True) -> PreTrainedTokenizerFast:
    """Whole words, digits in pairs, punctuation; no BOS at all; <unk> for everything else."""
    tokens = ["<unk>"] if unknown else []
    core = Tokenizer(models.WordLevel(_numbered([*tokens, *words, *PAIRS, *".,"]), "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(_regex(r"\d\d"), "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>" if unknown else None)


def word_piece(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, "17" and "##32", [CLS] and [SEP] around, [UNK] for the unknown."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,", *(w.lower() for w in words)]
    vocab = _numbered([*tokens, *PAIRS, *(f"##{pair}" for pair in PAIRS)])
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    )


def _chains(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges that build every word letter by letter, those of earlier words first."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    return list(merges)


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def _begin_with(core: Tokenizer, token: str) -> processors.TemplateProcessing:
    number = core.token_to_id(token)
    assert number is not None
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def _regex(pattern: str):
    from tokenizers import Regex

    return Regex(pattern)
