"""Prompts of different length in one batch: padding is never stored.

python examples/batch.py [MODEL]
"""

import sys

import kvbits

PROMPTS = ("The capital of France is", "Water is made of hydrogen and oxygen. " * 30 + "Ice is frozen")


def main(name: str = "smollm2") -> None:
    model, tokenizer = kvbits.load_model(name), kvbits.load_tokenizer(name)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)  # with its attention_mask

    cache = kvbits.cache_for(model, "default")
    output = model.generate(**batch, cache=cache, max_new_tokens=5, do_sample=False)
    answers = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"...{prompt[-25:]!r} -> {answer!r}")
    print(f"{cache.nbytes.total / 1e6:.1f} MB for {int(batch.attention_mask.sum())} tokens and no padding")


if __name__ == "__main__":
    main(*sys.argv[1:])
