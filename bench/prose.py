"""Does it matter what is read? Schemes of every width on prose, legal and technical text, and mathematical reasoning.

KVQuant and its successors publish perplexities of encyclopaedia and web text. Here the same schemes read several kinds
of text, each beside the exact cache on that text, so that the kinds can be compared by their divergence.

A model that solves problems would be asked for answers (``kvbits eval --tasks gsm8k``). One that solves next to none of
them, as small ones do, tells nothing by its score; its divergence over worked solutions still does.

    python bench/prose.py --calibration DIR --text prose=wiki.txt --text legal=GPL-3+MPL-2.0 --text maths=gsm8k.jsonl
"""

from __future__ import annotations

from common import write
from texts import OnTexts

SCHEMES = ("int8", "default", "int4", "nuq3-1%", "lm3,centred", "small", "kivi2", "int2")
"""Of 8, 4, 3 and 2 bits; those of one width from the best to the plainest."""


def main() -> None:
    parser = OnTexts.parser((__doc__ or "").splitlines()[0])
    parser.set_defaults(out="prose")
    options = parser.parse_args()
    texts = OnTexts.of(options)
    rows = texts.rows(SCHEMES)
    print(write(options.out, rows, **texts.setting))
    for row in rows:
        print(f"{row['text']:10} {row['scheme']:12} ppl {row['ppl']:.2f} KL {row['kl_mean']:.5f} top {row['top1']:.3f}")


if __name__ == "__main__":
    main()
