"""What a reader sees first: the scheme to take, how it stands to each condition of the rule, and what else there is."""

from __future__ import annotations

from kvbits.report import words
from kvbits.report.choose import Choice, Rule
from kvbits.report.markup import Safe, tag
from kvbits.report.snippet import snippet
from kvbits.report.standing import Standing

Tile = tuple[str, str, str, str]
"""A value, what it is, its limit, and ``good``, ``bad``, ``warn`` (not measured) or nothing."""


def hero(choice: Choice, rule: Rule) -> Safe:
    """The block at the top of a model."""
    shown = choice.take or choice.closest
    said = [tag("p", text, class_="caveat") for text in caveats(choice)]
    return tag(
        "section",
        tag("div", *(_take(choice.take, choice) if choice.take else _none(choice)), class_="take"),
        tag("ul", *map(_tile, conditions(shown, choice, rule)), class_="tiles") if shown else None,
        *said,
        _others(choice),
        tag("p", stated(rule), class_="rule"),
        class_="hero" if choice.take else "hero none",
    )


def conditions(one: Standing, choice: Choice, rule: Rule) -> list[Tile]:
    """The rule, condition by condition, on one scheme."""
    context = words.whole(words.real(one.speed_row, "context"))
    at = f" at {context} tokens" if one.speed_row else ""
    lost = f"at most {100 * rule.max_lost:g} points below exact"
    exact = lost if one.found_exact is None else f"exact finds {words.percent(one.found_exact, 0)}"
    found = [
        (words.small(one.kl), "KL to the exact cache", f"at most {rule.max_kl:g} nats", "KL"),
        (words.percent(one.top1), "same likeliest token", f"at least {words.percent(rule.min_top1, 0)}", "token"),
        (words.times(one.speed), f"decode speed{at}", f"at least {rule.min_speed:g}× exact", "speed"),
        (words.percent(one.found, 0), "retrieval", exact, "retrieval"),
        (str(len(one.lost)) if one.compared else words.NONE, "tasks lost", f"p < {rule.significance:g}", "tasks"),
    ]
    tiles = [(words.decimal(one.bits), "bits per element", _smaller(one, choice), "")]
    for value, what, limit, name in found:
        mark = "warn" if value == words.NONE else "bad" if name in one.failed else "good"
        tiles.append(("not measured" if mark == "warn" else value, what, limit, mark))
    return tiles


def caveats(choice: Choice) -> list[str]:
    """What a reader must know before taking the scheme."""
    missing = f"Not measured: {words.listed(choice.missing)}. The rule does not count what was not measured."
    return [*choice.caveats, *([missing] if choice.missing else [])]


def others(choice: Choice) -> list[tuple[str, Standing]]:
    """The schemes to take where something else matters more, if they are better there than the one shown in full."""
    shown = choice.take or choice.closest
    found: list[tuple[str, Standing]] = []
    if choice.closest is not None and choice.closest is not shown:
        found.append(("Closest to exact", choice.closest))
    if choice.smallest is not None and shown is not None and (choice.smallest.bits or 0) < (shown.bits or 0):
        found.append(("Least memory", choice.smallest))
    return found


def stated(rule: Rule) -> str:
    """The rule in a sentence."""
    return (
        f"The rule: the fewest bits among schemes with {'; '.join(rule.conditions)}. What was measured with a warning "
        f"comes last. Closest to exact: the lowest KL. Least memory: the fewest bits with a KL of at most "
        f"{rule.loose_kl:g} and the same likeliest token at least {words.percent(rule.loose_top1, 0)} of the time."
    )


def _take(one: Standing, choice: Choice) -> list[Safe | None]:
    code = snippet(one.scheme)
    size = "name long" if len(one.scheme) > 24 else "name"
    return [
        tag("p", "Take", class_="label"),
        tag("p", tag("code", one.scheme), class_=size),
        tag("p", _lead(one, choice), class_="lead"),
        tag("pre", tag("code", code), class_="copy") if code else None,
    ]


def _none(choice: Choice) -> list[Safe]:
    return [tag("p", "No recommendation", class_="label"), tag("p", choice.why, class_="why")]


def _lead(one: Standing, choice: Choice) -> str:
    """The same in one sentence."""
    times = ratio(one, choice)
    bits = f"{words.decimal(one.bits)} bits per element"
    parts = [f"{times:.1f} times smaller than the exact cache" if times else bits]
    if one.top1 is not None:
        parts.append(f"the same next token {words.percent(one.top1)} of the time")
    if one.speed is not None:
        context = words.whole(words.real(one.speed_row, "context"))
        parts.append(f"decoding {words.times(one.speed)} as fast at {context} tokens")
    text = words.listed(parts)
    return f"{text[0].upper()}{text[1:]}."


def ratio(one: Standing, choice: Choice) -> float | None:
    """How many times smaller than the exact cache, in bits or, where those of the exact cache are unknown, in bytes."""
    exact = choice.exact
    pairs = (
        (exact and exact.bits, one.bits),
        (exact and words.real(exact.speed_row, "kv_bytes"), words.real(one.speed_row, "kv_bytes")),
    )
    return next((there / here for there, here in pairs if there and here), None)


def _smaller(one: Standing, choice: Choice) -> str:
    exact = choice.exact
    return f"the exact cache has {exact.bits:g}" if exact and exact.bits else "K and V, everything stored"


def _tile(tile: Tile) -> Safe:
    value, what, limit, mark = tile
    spans = [tag("span", text, class_=name) for text, name in ((value, "value"), (what, "what"), (limit, "limit"))]
    return tag("li", *spans, class_=mark or None)


def _others(choice: Choice) -> Safe | None:
    found = []
    for what, one in others(choice):
        figures = f" {words.decimal(one.bits)} bits, KL {words.small(one.kl)}, same token {words.percent(one.top1)}"
        parts = (
            tag("span", f"{what}: ", class_="what"),
            tag("code", one.scheme),
            tag("span", figures, class_="figures"),
        )
        found.append(tag("li", *parts))
    return tag("ul", *found, class_="others") if found else None
