"""How answers to the tasks of LongBench are graded, from 0 to 1 (Bai et al., arXiv 2308.14508, table 2).

Each function takes a sample and what the model has answered, as ``process_results`` of lm-evaluation-harness does.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def classification(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 over the number of classes that are named, if the right one is among them.

    A class whose name is a part of the right one's is not counted: it is named with it.
    """
    named = [name for name in doc["all_classes"] if name in results[0]]
    grades = []
    for truth in doc["answers"]:
        others = [name for name in named if name == truth or name not in truth]
        grades.append(1 / len(others) if truth in others else 0.0)
    return {"classification_score": max(grades)}


def answer_f1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """F1 of the words that answer and truth have in common, but articles and punctuation; the best of all truths."""
    return {"qa_f1_score": max(_f1(_words(results[0]), _words(truth)) for truth in doc["answers"])}


def rouge_l(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """ROUGE-L: F1 of the longest common subsequence of words; the best of all truths."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    grades = [scorer.score(truth, results[0])["rougeL"].fmeasure for truth in doc["answers"]]
    return {"rouge_score": float(max(grades))}


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _f1(found: list[str], wanted: list[str]) -> float:
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted)) if same else 0.0
