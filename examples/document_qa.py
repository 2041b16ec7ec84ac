"""Ask several questions about one long document that is read once: its packed cache is a file.

python examples/document_qa.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import kvbits

DOCUMENT = "The harbour of Eldby has three piers. The north pier is for fishing boats, the south one for ferries. " * 12
QUESTIONS = ("Which boats use the north pier?", "How many piers has the harbour?")


def main(name: str = "smollm2") -> None:
    model, tokenizer = kvbits.load_model(name), kvbits.load_tokenizer(name)
    document = tokenizer(DOCUMENT, return_tensors="pt")
    cache = kvbits.cache_for(model, "default")
    model(**document, cache=cache, logits_to_keep=1)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.safetensors"
        kvbits.save(cache, file)  # tomorrow, and in another process, the next lines are enough
        print(f"{document.input_ids.shape[1]} tokens in a file of {file.stat().st_size / 1e6:.1f} MB")
        for question in QUESTIONS:
            cache = kvbits.load(file, model)
            prompt = tokenizer(f"{DOCUMENT}\nQuestion: {question}\nAnswer:", return_tensors="pt")
            output = model.generate(**prompt, cache=cache, max_new_tokens=8, do_sample=False)
            print(question, "->", tokenizer.decode(output[0, prompt.input_ids.shape[1] :]).strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
