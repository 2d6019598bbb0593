"""Words of the recorded results: titles, and why a number cannot be reproduced."""

TITLES = {
    "gpt2-numerals": "GPT-2 on numerals: ablations, circuit, other circuits",
    "distilgpt2-numerals": "DistilGPT2 on numerals: ablations, circuit",
    "lan-number-words": "GPT-2 on number words: MLPs, circuit, other circuits",
    "lan-months": "GPT-2 on months: its circuit found again",
    "robustness": "GPT-2 and DistilGPT2 on numerals: drops, severity, slope",
    "ioi": "GPT-2 and DistilGPT2 on IOI: zero ablation, alignment",
    "bert-numerals": "BERT and DistilBERT on numerals, heads ablated",
    "llama-numerals": "Llama 3.1 8B and Minitron 4B on numerals, heads ablated",
    "number-words-pair": "GPT-2 and DistilGPT2 on number words: alignment",
    "qa": "GPT-2 and DistilGPT2 on questions: alignment",
    "mlp-outputs": "GPT-2 and DistilGPT2: cosines of MLP outputs",
    "arithmetic": "Published formulas on published raw values; no weights",
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
