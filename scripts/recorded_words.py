"""Words of the recorded results: titles, and why a number cannot be reproduced."""

TITLES = {
    "gpt2-numerals": "GPT-2 on numerals: influences, circuit, leave-one-out, other circuits",
    "distilgpt2-numerals": "DistilGPT2 on numerals: influences, circuit, leave-one-out",
    "lan-number-words": "GPT-2 on number words: MLPs, circuit, circuits of the other tasks",
    "lan-months": "GPT-2 on months: its circuit found again",
    "robustness": "GPT-2 against DistilGPT2 on numerals: mean drop, severity, slope",
    "ioi": "GPT-2 and DistilGPT2 on IOI: zero ablation, head roles, alignment",
    "bert-numerals": "BERT against DistilBERT on numerals, with heads really ablated",
    "llama-numerals": "Llama 3.1 8B against Minitron 4B on numerals, with heads really ablated",
    "number-words-pair": "GPT-2 against DistilGPT2 on number words: alignment",
    "qa": "GPT-2 against DistilGPT2 on questions: alignment",
    "mlp-outputs": "GPT-2 against DistilGPT2: cosines of MLP outputs",
    "arithmetic": "The published formulas on the published raw values; needs no weights",
}

# Each continues the sentence "not reproducible, because ...".
POSITION = (
    "the published code zeroes a token position, not a head: index h of the sequence axis of the "
    "attention output"
)
ANOMALY = (
    "the teacher's clean metric in this notebook ({here:+.3f} logits) contradicts {other}; the "
    "cause is unknown"
)
FAILS = (
    "DistilGPT2 fails IOI (clean metric -0.231 logits), so percentages of its metric mean nothing"
)
PADDED = "the published patterns are averaged over a BOS and padded rows of the published prompts"
RENUMBERED = (
    "all 101 published prompts were renumbered to 1, 2, 3, 4, which makes them one question"
)
RANK_ONE = (
    "the published MLP similarity averages over prompts and positions first, which leaves one "
    "direction; the other two of its three are arbitrary"
)
SLICE = (
    "the published lists mix runs: the student's MLP list is the teacher's, and heads were kept at "
    "two decimals; the alignment script zeroes a slice after the heads are mixed"
)
LAST_PAD = (
    "the published code reads the answer at the last padded position, so its metric is noise; "
    "circuitkd ships no question set to measure it on"
)
ONE_PROMPT = "all values come from one prompt that ends in a space, where the model has no answer"
FLOORED = "the record floors it at 0, so its size is unknown"
