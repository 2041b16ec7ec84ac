"""A conversation on one cache: each answer reads only what is new.

python examples/chat.py [MODEL]
"""

import sys

import kvbits

USER = ("Name one planet.", "Is it larger than Earth?")


def main(name: str = "smollm2") -> None:
    model, tokenizer = kvbits.load_model(name), kvbits.load_tokenizer(name)
    cache, messages = kvbits.cache_for(model, "default"), []
    for text in USER:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        known = cache.get_seq_length()
        output = model.generate(**prompt, cache=cache, max_new_tokens=20, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {text}\nmodel: {answer}  ({known} of {prompt['input_ids'].shape[1]} tokens were in the cache)")


if __name__ == "__main__":
    main(*sys.argv[1:])
