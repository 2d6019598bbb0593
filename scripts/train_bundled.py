"""Train the bundled pairs: ``tiny-teacher`` and ``tiny-student``, and the encoders of that name.

The teacher learns the text of ``bundled_corpus``; the student begins as some of the teacher's
layers and learns the teacher's logits on such text. Run it with ``make bundled``; it prints its
evaluation, on texts that were held out, and writes ``circuitkd/bundled/README.md`` (for the
encoders ``README-mlm.md``).
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bundled_corpus import (
    HELD_OUT_SHARE,
    N_POSITIONS,
    Batch,
    Corpus,
    build_tokenizer,
    is_held_out,
    token_id,
)
from bundled_masked import MaskedCorpus, masked_ids, masked_student_of, new_teacher
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from circuitkd.tasks import Task, TextPrompt, load_task, task_names

BUNDLED = Path(__file__).resolve().parent.parent / "circuitkd" / "bundled"
STUDENT_LAYERS = (0, 2)

Figures = Mapping[str, float]


# --- training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    batch: int = 128
    rate: float = 1e-3
    warmup: int = 50
    text_weight: float = 0.2  # of the mean over all positions, next to the answer's 1

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to a hundredth."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def token_loss(
    logits: Float[Tensor, "doc pos token"],
    batch: Batch,
    teacher: Float[Tensor, "doc pos token"] | None,
) -> Float[Tensor, "doc pos"]:
    """Per position: cross-entropy with the text, or the divergence from the teacher."""
    if teacher is not None:
        log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.label, reduction="none")


def train(
    model: PreTrainedModel, corpus: Corpus, schedule: Schedule, teacher: PreTrainedModel | None
) -> None:
    """Train ``model`` in place, on the text or (with a teacher) on the teacher's logits."""
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
    start = time.time()
    for step in range(schedule.steps):
        optimiser.param_groups[0]["lr"] = schedule.rate_at(step)
        batch = corpus.batch(schedule.batch)
        given = {"position_ids": batch.positions}
        if batch.real is not None:
            given["attention_mask"] = batch.real
        goal = None
        if teacher is not None:
            with torch.no_grad():
                goal = teacher(batch.ids, **given).logits
        logits = model(batch.ids, **given).logits
        loss = token_loss(logits, batch, goal)
        answer = loss[batch.answer].mean()
        text = loss[batch.target].mean()
        optimiser.zero_grad()
        (answer + schedule.text_weight * text).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == schedule.steps - 1:
            print(
                f"  step {step:5d}  answer {answer.item():.3f}  text {text.item():.3f}  "
                f"{time.time() - start:.0f} s",
                flush=True,
            )


def new_model(vocabulary: int, layers: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=N_POSITIONS,
        n_embd=128,
        n_layer=layers,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def student_of(teacher: GPT2LMHeadModel, layers: Sequence[int] = STUDENT_LAYERS) -> GPT2LMHeadModel:
    """A model of the teacher's embeddings, final norm and these ``layers``."""
    student = new_model(teacher.config.vocab_size, len(layers))
    source, target = teacher.transformer, student.transformer
    for name in ("wte", "wpe", "ln_f"):
        getattr(target, name).load_state_dict(getattr(source, name).state_dict())
    for place, layer in enumerate(layers):
        target.h[place].load_state_dict(source.h[layer].state_dict())
    return student


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """An ordinary HF directory; weights as float16, loaded as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    weights = {
        name: value.detach().half().contiguous()
        for name, value in model.state_dict().items()
        if name not in (model._tied_weights_keys or ())  # to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    # The class's name in every version of transformers, not only in the newest.
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(settings, indent=2) + "\n")


# --- evaluation --------------------------------------------------------------------------------


def held_out_prompts(task: Task, n: int, seed: int) -> list[TextPrompt]:
    """``n`` prompts of a task (or of a variant, already applied) that training never saw."""
    rng = np.random.default_rng(seed)
    found: dict[str, TextPrompt] = {}
    for _ in range(200 * n):
        prompt = task.draw(rng)
        if is_held_out(prompt.clean.text):
            found.setdefault(prompt.clean.text, prompt)
        if len(found) == n:
            break
    return list(found.values())


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[TextPrompt]
) -> Figures:
    """Counts of prompts answered right.

    ``top1``: the most likely token is the answer (or one of the right endings); ``pair``: the
    answer is likelier than the distractor (right endings likelier than wrong ones).
    """
    top1 = pair = 0
    for prompt in prompts:
        ids, place = tokenizer(prompt.clean.text)["input_ids"], -1
        if tokenizer.mask_token is not None:
            ids, place = masked_ids(tokenizer, prompt.clean.text)
        p = model(torch.tensor([ids])).logits[0, place].softmax(-1)
        right, wrong = (
            [token_id(tokenizer, word) for word in words]
            for words in (
                prompt.valid or (prompt.correct,),
                prompt.invalid or (prompt.incorrect,),
            )
        )
        top1 += int(p.argmax()) in right
        pair += bool(p[right].sum() > p[wrong].sum())
    return {"n": len(prompts), "top1": top1, "pair": pair}


def wilson(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927)."""
    p, width = successes / n, z * z / n
    centre = (p + width / 2) / (1 + width)
    half = z / (1 + width) * math.sqrt(p * (1 - p) / n + width / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate_all(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    tasks: Mapping[str, Task],
    n: int,
    seed: int,
) -> list[tuple[str, str, dict[str, Figures]]]:
    """(task, variant or "", model -> figures) for every task and variant."""
    table = []
    for name, task in tasks.items():
        for variant in (None, *task.variants):
            prompts = held_out_prompts(task.with_variant(variant), n, seed)
            figures = {key: evaluate(model, tokenizer, prompts) for key, model in models.items()}
            table.append((name, variant or "", figures))
            line = "  ".join(
                f"{key} top-1 {one['top1'] / one['n']:.3f} pair {one['pair'] / one['n']:.3f}"
                for key, one in figures.items()
            )
            print(f"  {name:13s} {variant or '':17s} {line}", flush=True)
    return table


# --- the whole ---------------------------------------------------------------------------------

README = """\
# The bundled {title}

{about}

`make bundled` trains them again ({minutes:.0f} minutes when these were made, {threads} thread(s),
seed {seed}; {teacher} steps for the teacher, {student} for the student) and writes this file. What
they are trained on is described in `scripts/bundled_corpus.py`. Weights are stored as float16 and
load as float32.

## How well they do the tasks

Prompts that training never saw (their CRC-32 is divisible by {share}, such texts are left out of
training), at most {n} for each line. *Top-1*: the most likely of all {vocabulary} tokens is the
answer. *Pair*: the answer is likelier than the distractor. For `greater_than`: the most likely
token is a right ending; right endings together are likelier than wrong ones. In brackets: 95 %
Wilson intervals. The variants are out of distribution: each changes one thing that training kept
fixed.

| task | variant | n | teacher top-1 | student top-1 | teacher pair | student pair |
|---|---|---|---|---|---|---|
{rows}
"""

DECODERS = """\
`tiny-teacher` (GPT-2 architecture, 4 layers of 8 heads, d_model 128) and `tiny-student` (2 layers
of 8 heads; it began as the teacher's embeddings, final norm and layers {layers} and learnt the
teacher's logits). Their tokenizer is word-level, over the words of the shipped tasks: anything else
is `[UNK]`. They know nothing but these tasks; they are there so that everything works offline and
in seconds."""

ENCODERS = """\
`tiny-teacher-mlm` (BERT architecture, 4 layers of 4 heads, d_model 128) and `tiny-student-mlm`
(DistilBERT architecture, 2 layers of 4 heads; it began as the teacher's embeddings, head and layers
{layers} and learnt the teacher's logits). They read a task's text with a mask at the answer,
`[CLS] text [MASK] . [SEP]`. Their tokenizer is word-level, over the words of the shipped tasks."""


@dataclass(frozen=True)
class Pair:
    """What differs between the two pairs."""

    title: str
    about: str
    suffix: str
    file: str
    masked: bool
    corpus: type[Corpus]
    teacher: Callable[[int, int], PreTrainedModel]
    student: Callable[..., PreTrainedModel]
    load: type[AutoModelForCausalLM] | type[AutoModelForMaskedLM]


PAIRS = {
    "decoders": Pair(
        "pair",
        DECODERS,
        "",
        "README.md",
        False,
        Corpus,
        new_model,
        student_of,
        AutoModelForCausalLM,
    ),
    "encoders": Pair(
        "encoders",
        ENCODERS,
        "-mlm",
        "README-mlm.md",
        True,
        MaskedCorpus,
        new_teacher,
        masked_student_of,
        AutoModelForMaskedLM,
    ),
}


def cell(figures: Figures, key: str) -> str:
    low, high = wilson(figures[key], figures["n"])
    return f"{100 * figures[key] / figures['n']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def table_row(task: str, variant: str, figures: Mapping[str, Figures]) -> str:
    cells = [cell(figures[model], key) for key in ("top1", "pair") for model in figures]
    name = f"`{task}`" if not variant else ""
    n = int(next(iter(figures.values()))["n"])
    return " | ".join([f"| {name}", variant, str(n), *cells]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled teachers and students.")
    parser.add_argument("--pair", choices=list(PAIRS), action="append", help="by default all")
    parser.add_argument("--out", type=Path, default=BUNDLED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--teacher-steps", type=int, default=1800)
    parser.add_argument("--student-steps", type=int, default=1500)
    parser.add_argument("--n", type=int, default=500, help="prompts per task and variant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.pair or PAIRS:
        train_pair(PAIRS[name], options)


def train_pair(pair: Pair, options: argparse.Namespace) -> None:
    """Train, save and evaluate a teacher and its student."""
    torch.manual_seed(options.seed)
    start = time.time()
    folders = {name: f"tiny-{name}{pair.suffix}" for name in ("teacher", "student")}
    tasks = {name: load_task(name) for name in task_names()}
    tokenizer = build_tokenizer(tasks, masked=pair.masked)
    teacher = pair.teacher(len(tokenizer), 4)
    print(f"{folders['teacher']}: {teacher.num_parameters():,} parameters, {len(tokenizer)} words")
    schedule = Schedule(options.teacher_steps)
    train(teacher, pair.corpus(tasks, tokenizer, options.seed), schedule, None)
    save(teacher, tokenizer, options.out / folders["teacher"])
    student = pair.student(teacher, STUDENT_LAYERS)
    print(f"{folders['student']}: {student.num_parameters():,} parameters")
    corpus = pair.corpus(tasks, tokenizer, options.seed + 1)
    train(student, corpus, Schedule(options.student_steps), teacher)
    save(student, tokenizer, options.out / folders["student"])

    minutes = (time.time() - start) / 60
    print(f"Trained in {minutes:.1f} minutes. Held-out prompts, weights as saved:")
    # What is evaluated is what was written, rounding included.
    models = {
        name: pair.load.from_pretrained(options.out / folder).eval()
        for name, folder in folders.items()
    }
    table = evaluate_all(models, tokenizer, tasks, options.n, options.seed + 2)
    text = README.format(
        title=pair.title,
        about=pair.about.format(layers=" and ".join(map(str, STUDENT_LAYERS))),
        minutes=minutes,
        threads=options.threads,
        seed=options.seed,
        teacher=options.teacher_steps,
        student=options.student_steps,
        share=HELD_OUT_SHARE,
        n=options.n,
        vocabulary=len(tokenizer),
        rows="\n".join(table_row(*line) for line in table),
    )
    (options.out / pair.file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
